"""Drawing a text from a grammar."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from math import fsum

from glissando.data.stories.grammar import Bind, Choice, Copy, Item, Ref, Seq, Swap, Switch, Text


@dataclass(frozen=True, slots=True)
class Draw:
    """A text, its information in bits, and what the slots held at its end."""

    text: str
    bits: float
    slots: dict[str, Item]


def draw(root: Seq, uniform: Callable[[], float]) -> Draw:
    """One text; `uniform` yields numbers in [0, 1), one for each choice."""
    slots: dict[str, Item] = {}
    out: list[str] = []
    bits: list[float] = []
    # The checks run in the order of how often each kind of node occurs: this loop is the corpus's speed.
    write = out.append

    def run(seq: Seq) -> None:
        for node in seq:
            kind = type(node)
            if kind is Text:
                write(node.text)  # type: ignore[union-attr]
            elif kind is Choice:
                k = bisect(node.cumulative, uniform())  # type: ignore[union-attr]
                bits.append(node.bits[k])  # type: ignore[union-attr]
                run(node.alternatives[k])  # type: ignore[union-attr]
            elif kind is Ref:
                write(slots[node.slot].forms[node.form])  # type: ignore[union-attr]
            elif kind is Switch:
                run(node.branches[slots[node.slot].key])  # type: ignore[union-attr]
            else:
                assign(node, slots)

    run(root)
    return Draw("".join(out), fsum(bits), slots)


def assign(node: object, slots: dict[str, Item]) -> None:
    """Carries out a node that writes nothing but changes what slots hold."""
    if isinstance(node, Bind):
        slots[node.slot] = node.item
    elif isinstance(node, Copy):
        slots[node.slot] = slots[node.source]
    elif isinstance(node, Swap):
        slots[node.first], slots[node.second] = slots[node.second], slots[node.first]
    else:
        slots[node.slot] = node.of(slots[node.first], slots[node.second])  # type: ignore[attr-defined]
