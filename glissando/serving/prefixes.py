"""What was read before, kept: a prompt that begins as an earlier one did is read from where they part."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from torch import Tensor

from glissando.decoding.steps import BlockStep, Mark

#: the control that tokens were read under, and whose they are
_Reader = tuple[tuple[float, ...] | None, int | None]


class Known(NamedTuple):
    """After `length` tokens of a prompt."""

    length: int
    step: BlockStep  # of one row; never changed
    logits: Tensor | None  # (V,), what follows; None where it is not known


class _Text(NamedTuple):
    step: BlockStep
    logits: Tensor | None
    length: int  # 0 where the step has read beyond the text
    marks: Mapping[int, Mark]
    places: list[bytes]
    size: int


class Prefixes:
    """States by what was read to reach them, and for whom: nobody learns from the time it takes what others sent.

    A text is known at its end, and at the marks before it. Those not used for longest go when they take more than
    `limit` bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._texts: OrderedDict[bytes, _Text] = OrderedDict()  # by the last of their places
        self._places: dict[bytes, tuple[bytes, int]] = {}  # a text and a length in it
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._texts)

    def longest(self, ids: Sequence[int], control: tuple[float, ...] | None, owner: int | None = None) -> Known | None:
        """The state after as many of the first tokens of `ids` as any of the owner's is known for; after all of them
        only where it is known what follows."""
        lengths = sorted(n for n in self._lengths if n <= len(ids))
        for place in reversed(_digests(ids, lengths, (control, owner))):
            if place not in self._places:
                continue
            name, length = self._places[place]
            text = self._texts[name]
            if length < len(ids) or (text.logits is not None and length == text.length):
                self._texts.move_to_end(name)
                if length == text.length:
                    return Known(length, text.step, text.logits)
                return Known(length, text.marks[length].step(text.step), None)
        return None

    def keep(
        self,
        ids: Sequence[int],
        control: tuple[float, ...] | None,
        step: BlockStep,
        logits: Tensor | None,
        owner: int | None = None,
        marks: Mapping[int, Mark] | None = None,
    ) -> None:
        """Remember the state of one row behind `ids`, what follows it, and the marks of earlier ones; all of it must
        not be changed afterwards. Of a step that has read more than `ids` only the marks are remembered."""
        length = len(ids) if step.length(0) == len(ids) else 0
        before = {n: mark for n, mark in (marks or {}).items() if n < len(ids) or not length}
        lengths = sorted({*before, length} - {0})
        places = _digests(ids, lengths, (control, owner))
        size = step.bytes + 256 * (1 + len(places)) + sum(part.nbytes for mark in before.values() for part in mark)
        size += 0 if logits is None else logits.numel() * logits.element_size()
        if not places or size > self.limit:
            return
        name = places[-1]
        if name in self._texts:
            if logits is not None and self._texts[name].logits is None:  # now it is known what follows
                marks = self._drop(name).marks
                self.keep(ids, control, step, logits, owner, {**marks, **before})
            return
        for place, n in zip(places, lengths, strict=True):
            if place not in self._texts:  # the latest text that has a mark there: it goes last
                self._lengths[n] += place not in self._places
                self._places[place] = name, n
        self._texts[name] = _Text(step, logits, length, before, places, size)
        self.bytes += size
        self.shrink(self.limit)

    def shrink(self, limit: int) -> None:
        """Keep no more than `limit` bytes."""
        while self._texts and self.bytes > limit:
            self._drop(next(iter(self._texts)))

    def _drop(self, name: bytes) -> _Text:
        text = self._texts.pop(name)
        self.bytes -= text.size
        for place in text.places:
            if place in self._places and self._places[place][0] == name:
                self._lengths -= Counter([self._places.pop(place)[1]])
        return text


def _digests(ids: Sequence[int], lengths: Sequence[int], reader: _Reader) -> list[bytes]:
    """What stands for the first n tokens and their reader, for each n of `lengths`, which rise."""
    raw, digest, before, digests = np.asarray(ids, np.int32), blake2b(repr(reader).encode(), digest_size=16), 0, []
    for length in lengths:
        digest.update(raw[before:length].tobytes())
        digests.append(digest.digest())
        before = length
    return digests
