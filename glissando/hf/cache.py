"""What `generate` carries from step to step as `past_key_values`: the model's own state."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from glissando.mixers import Memo
from glissando.model import ModelState
from glissando.state import select_rows


@dataclass
class GlissandoCache:
    """A state behind the methods that `generate` calls; a call with it moves it on and gives its old value up.

    state   after what has been read, None before the first call
    memo    what follows from the model's weights alone, see LanguageModel.forward
    length  columns of input_ids read so far, padding included: the same for every row, unlike state.position
    """

    state: ModelState | None = None
    length: int = 0
    memo: Memo = field(default_factory=dict)

    #: not compiled as a whole by `generate`, and what was read cannot be unread
    is_compileable = False
    is_croppable = False

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
        return GlissandoCache(copy.deepcopy(self.state, copied), self.length)

    def reset(self) -> None:
        """As before the first call."""
        self.state, self.length, self.memo = None, 0, {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the memo, whose keys are modules with all their weights."""
        return self.__dict__ | {"memo": {}}

    def crop(self, max_length: int) -> NoReturn:
        """Raises ValueError: a state keeps no past to go back to."""
        raise ValueError(
            f"crop({max_length}): a GlissandoCache holds the state after {self.length} tokens and cannot go back, as "
            "assisted generation does. Generate without an assistant; to try several continuations, keep "
            "copy.deepcopy(cache) from before them."
        )
