"""Prompt lookup: tokens that followed the same tokens earlier in the text are read ahead, several in one call.

Nothing is drawn otherwise than without: the logits after each token are those of the model, a draft token is kept where
the draw is that token, and what was read beyond is rewound. So the text is the same; only the number of calls differs.

The idea: Saxena, "Prompt Lookup Decoding" (2023); rewinding by reading again from a state before: as ReplaySSM.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from glissando.decoding.steps import BlockStep
from glissando.errors import ConfigError
from glissando.sampling import Sampler
from glissando.state import State

#: tokens that must be the same for what followed them to be expected again
_SAME = 3
#: tokens that may be read ahead: a call keeps the logits of all
_MOST = 64
#: tokens that are written in a call where nothing is read ahead
_BETWEEN = 8


class Draft:
    """What may follow a text: the tokens that followed the latest earlier place with the same last three tokens.

    most  largest number of tokens: twice as many are proposed as were right in a row before, whether read or not
    """

    def __init__(self, text: Sequence[int], most: int) -> None:
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._most, self._right = most, 0
        for token in text:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        last = tuple(self._text[-_SAME:])
        at = self._after.get(last)
        if at is not None:
            self._right = self._right + 1 if self._text[at] == token else 0
        if len(last) == _SAME:
            self._after[last] = len(self._text)
        self._text.append(token)

    def propose(self) -> list[int]:
        """Those tokens; behind the end of the text, the same ones again."""
        at, size = self._after.get(tuple(self._text[-_SAME:])), min(2 * self._right, self._most)
        return [] if at is None else list(islice(cycle(self._text[at : at + size]), size))


class LookupStep:
    """A step of one text that reads a draft ahead, and has the logits ready while the text goes as the draft does.

    text  the ids that the step's state has read
    left  how many ids are read at most
    """

    def __init__(self, step: BlockStep, text: Sequence[int], most: int, left: int) -> None:
        self._step, self._draft, self._left = step, Draft(text, most), left
        self._ahead: list[int] = []  # read, and not yet asked for
        self._proposed = 0
        self._logits = torch.empty(0)
        self._control: Tensor | None = None
        self.calls = 0

    def __call__(self, ids: Tensor, control: Tensor | None) -> Tensor:
        """The next token (1,) -> logits (1, V)."""
        token = int(ids)
        self._draft.push(token)
        self._left -= 1
        if self._ahead and self._ahead[0] == token and _same(control, self._control):
            del self._ahead[0]
            return self._logits[:, self._proposed - len(self._ahead)]
        self._settle()
        self.calls += 1
        ahead = self._draft.propose()[: self._left]
        if not ahead:
            return self._step(ids, control)
        self._ahead, self._proposed, self._control = ahead, len(ahead), control
        self._logits = self._step(torch.tensor([[token, *ahead]], device=ids.device), control)
        return self._logits[:, 0]

    def write(
        self, ids: Any, control: Tensor | None, sampler: Sampler, counts: Any, end: int, logits: Any = None
    ) -> Any:
        count = int(counts[0])
        if count == 1 or logits is not None:  # whoever looks at each token may change the control before the next
            after = self(torch.from_numpy(ids), control)
            if logits is not None:
                logits[:, 0] = after.numpy()
            return sampler.draw(after)
        self._settle()
        self._draft.push(int(ids[0]))
        ahead = self._draft.propose()[: min(self._left, count) - 1]
        if ahead:
            logits = self._step(torch.tensor([[int(ids[0]), *ahead]]), control)[0]
            written = sampler.draw_along(logits, ahead)
            if unread := len(logits) - written.shape[1]:
                self._step.rewind(unread)
        else:
            written = self._step.write(ids, control, sampler, counts.clip(max=_BETWEEN), end)
        for token in written[0, :-1].tolist():
            self._draft.push(token)
        self._left -= written.shape[1]
        return written

    def _settle(self) -> None:
        """Rewind to the last token that was asked for."""
        if self._ahead:
            self._step.rewind(len(self._ahead))
            self._ahead = []

    def keep(self, rows: Sequence[int]) -> None:
        """One row stays one row."""

    def settled(self) -> BlockStep:
        """The step itself, behind the last token that was asked for."""
        self._settle()
        return self._step

    @property
    def state(self) -> State:
        return self.settled().state


def _same(control: Tensor | None, before: Tensor | None) -> bool:
    return control is before or (control is not None and before is not None and torch.equal(control, before))


def require_lookup(lookup: int, texts: int) -> None:
    """Raise ConfigError for an impossible number of tokens, or for several texts at once."""
    if not isinstance(lookup, Integral) or isinstance(lookup, bool) or not 0 <= lookup <= _MOST:
        raise ConfigError(
            f"lookup must be a whole number from 0, which reads nothing ahead, to {_MOST}, got {lookup!r}"
        )
    if lookup and texts > 1:
        raise ConfigError(f"lookup reads ahead in one text, and there are {texts}: give them one after the other")
