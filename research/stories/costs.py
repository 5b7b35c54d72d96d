"""A story byte by byte: what each costs whoever knows the grammar, and where facts are mentioned."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import fsum, log2

from glissando.data.stories.grammar import Choice, Item, Ref
from glissando.data.stories.parser import Reader
from glissando.data.stories.stories import grammar


@dataclass(frozen=True)
class Mention:
    """Text that stands for what a slot held."""

    position: int
    slot: str
    form: str
    item: Item


@dataclass
class CostReader(Reader):
    """A parser that keeps what each byte costs and where the slots are mentioned."""

    mentions: list[Mention] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.costs = [0.0] * len(self.text)

    def _reference(self, node: Ref) -> None:
        self.mentions.append(Mention(self.position, node.slot, node.form, self.slots[node.slot]))
        super()._reference(node)

    def _follow(self, node: Choice, chosen: int) -> None:
        """-log2 P(byte | bytes before) along the chosen head: the mass of the heads that still agree."""
        heads, probabilities = self._heads(node), node.probabilities
        alive = list(range(len(heads)))
        before = 1.0
        for offset, byte in enumerate(heads[chosen]):
            alive = [k for k in alive if heads[k][offset] == byte]
            mass = probabilities[chosen] if len(alive) == 1 else fsum(probabilities[k] for k in alive)
            self.costs[self.position + offset] += log2(before / mass)
            before = mass
            if len(alive) == 1:
                break
        super()._follow(node, chosen)


def byte_costs(text: str) -> list[float]:
    """-log2 p(byte | the bytes before it), one for each byte; they sum to `story_bits(text)`."""
    return CostReader(text).read_all(grammar()).costs


def mentions(text: str) -> list[Mention]:
    """Where a story mentions what its slots hold, from left to right."""
    return CostReader(text).read_all(grammar()).mentions
