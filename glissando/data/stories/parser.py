"""Reading a text back: its derivation and its exact information."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from glissando.data.stories.grammar import Choice, Item, Ref, Seq, Switch, Text, assign
from glissando.errors import DataError


class ParseError(DataError):
    """Text the grammar cannot have produced: where it first departs, and what could have followed."""

    def __init__(self, position: int, expected: list[str], text: str, slots: dict[str, Item]) -> None:
        self.position, self.expected, self.slots = position, expected, slots
        options = " or ".join(repr(option) for option in expected[:6])
        options += " or others" if len(expected) > 6 else ""
        got = repr(text[position : position + 12]) if position < len(text) else "the end of the text"
        before = text[max(0, position - 24) : position]
        super().__init__(f"at byte {position}, after {before!r}: expected {options}, got {got}")


@dataclass
class Reader:
    """A left-to-right parser; every choice is decided by the bytes of the alternatives' heads."""

    text: str
    position: int = 0
    slots: dict[str, Item] = field(default_factory=dict)
    bits: list[float] = field(default_factory=list)

    def read_all(self, root: Seq) -> Self:
        """Raises ParseError unless the whole text is one derivation of `root`."""
        self._sequence(root)
        if self.position != len(self.text):
            raise ParseError(self.position, ["the end of the text"], self.text, self.slots)
        return self

    def _sequence(self, seq: Seq) -> None:
        for node in seq:
            if isinstance(node, Text):
                self._literal(node.text)
            elif isinstance(node, Choice):
                self._choice(node)
            elif isinstance(node, Ref):
                self._reference(node)
            elif isinstance(node, Switch):
                self._sequence(node.branches[self.slots[node.slot].key])
            else:
                assign(node, self.slots)

    def _reference(self, node: Ref) -> None:
        self._literal(self.slots[node.slot].forms[node.form])

    def _literal(self, literal: str) -> None:
        if not self.text.startswith(literal, self.position):
            raise self._departure([literal])
        self.position += len(literal)

    def _choice(self, node: Choice) -> None:
        """The check at load leaves no way to have two heads at one place."""
        heads = self._heads(node)
        chosen = next((k for k, text in enumerate(heads) if self.text.startswith(text, self.position)), None)
        if chosen is None:
            raise self._departure(heads)
        self._follow(node, chosen)

    def _follow(self, node: Choice, chosen: int) -> None:
        self.bits.append(node.bits[chosen])
        self._sequence(node.alternatives[chosen])

    def _heads(self, node: Choice) -> Sequence[str]:
        return node.heads or [head(alternative, self.slots) for alternative in node.alternatives]

    def _departure(self, options: Sequence[str]) -> ParseError:
        agreed = [_agreement(self.text, self.position, option) for option in options]
        most = max(agreed)
        tails = (option[n:] for option, n in zip(options, agreed, strict=True) if n == most)
        expected = sorted({tail[:12] for tail in tails if tail})
        return ParseError(self.position + most, expected, self.text, self.slots)


def head(seq: Seq, slots: dict[str, Item]) -> str:
    """The text of `seq` up to its first choice, given what the slots hold."""
    out: list[str] = []
    _lead(seq, dict(slots), out)
    return "".join(out)


def _lead(seq: Seq, slots: dict[str, Item], out: list[str]) -> bool:
    """Appends the leading text; False once a choice has stopped it."""
    for node in seq:
        if isinstance(node, Text):
            out.append(node.text)
        elif isinstance(node, Ref):
            out.append(slots[node.slot].forms[node.form])
        elif isinstance(node, Choice):
            return False
        elif isinstance(node, Switch):
            if not _lead(node.branches[slots[node.slot].key], slots, out):
                return False
        else:
            assign(node, slots)
    return True


def _agreement(text: str, at: int, option: str) -> int:
    """How many characters of `option` the text has at `at`."""
    n = 0
    while n < len(option) and at + n < len(text) and text[at + n] == option[n]:
        n += 1
    return n
