"""What `generate` carries from step to step as `past_key_values`: the model's own state."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glissando.errors import ConfigError, InputError
from glissando.mixers import Memo
from glissando.model import ModelState
from glissando.rewinding import rewound
from glissando.state import select_rows

if TYPE_CHECKING:
    from glissando.model import LanguageModel

#: columns that a cache can undo at least, where it can undo any and no `rewind` was given
_REACH = 32


@dataclass
class GlissandoCache:
    """A state behind the methods that `generate` calls; a call with it moves it on and gives its old value up.

    state   after what has been read, None before the first call
    memo    what follows from the model's weights alone, see LanguageModel.forward
    length  columns of input_ids read so far, padding included: the same for every row, unlike state.position
    rewind  columns that `crop` can undo, see LanguageModel.init_state; 0: none
    """

    state: ModelState | None = None
    length: int = 0
    memo: Memo = field(default_factory=dict)
    rewind: int = 0
    _model: LanguageModel | None = field(default=None, repr=False)  # the latest that read into it

    #: not compiled as a whole by `generate`, which undoes no column that it does not have to
    is_compileable = False
    is_croppable = False

    def begin(self, model: LanguageModel, rows: int) -> ModelState:
        """The state that the model goes on from."""
        self._model = model
        return model.init_state(rows, rewind=self.rewind) if self.state is None else self.state

    def reserve(self, columns: int) -> None:
        """Before so many `columns` are read ahead. Raises ConfigError where fewer can be undone."""
        if self.state is None and not self.rewind:
            self.rewind = max(_REACH, 2 * columns)
        if self.rewind < columns:
            raise ConfigError(
                f"past_key_values can go back by {self.rewind} tokens, and {columns} are read ahead: start with "
                f"GlissandoCache(rewind={max(_REACH, columns)}), or leave it out"
            )

    def activate_past_recording(self) -> None:
        """`generate` calls it before it reads ahead. Raises ConfigError where what was read cannot be undone."""
        self.reserve(1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns read so far, the same for every layer."""
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row r becomes what row indices[r] was."""
        if self.state is not None:
            self.state = select_rows(self.state, indices.to(self.state.position.device, torch.int64))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam r goes on from beam beam_idx[r]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, the copies side by side."""
        if self.state is not None:
            rows = torch.arange(len(self.state.position), device=self.state.position.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def __deepcopy__(self, copied: dict[int, Any]) -> GlissandoCache:
        """A copy of the state, for texts that share a prefix; what follows from the weights is computed anew."""
        return GlissandoCache(copy.deepcopy(self.state, copied), self.length, rewind=self.rewind, _model=self._model)

    def reset(self) -> None:
        """As before the first call."""
        self.state, self.length, self.memo = None, 0, {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the model and the memo, whose keys are modules with all their weights."""
        return self.__dict__ | {"memo": {}, "_model": None}

    def crop(self, max_length: int) -> None:
        """Undo columns: all but the first `max_length`, or, as transformers 5.1 asks, the last -max_length.

        Raises InputError where the state cannot go back so far.
        """
        count = -max_length if max_length <= 0 else self.length - max_length
        if count <= 0:
            return
        if self.state is None or self._model is None:
            raise InputError(f"crop({max_length}): no model has read with this cache yet")
        self.state = rewound(self._model, self.state, count, start="GlissandoCache(rewind={})")
        self.length -= count
