"""Exact expectations over a grammar: bits and bytes of a story, by summing over its structure.

    E[bits]  = sum over choice points of P(reached) H(choice)
    E[bytes] = sum over texts of P(reached) len + sum over references of P(reached) E[len(slot's form) | reached]

Only *control* slots (those a switch or a sum reads) decide what follows, so the state of the walk is a distribution
over their keys, and for each the marginal distribution of every slot. Marginals suffice because length is linear.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import fsum

from glissando.data.stories.grammar import (
    Bind,
    Choice,
    Copy,
    Item,
    Ref,
    Seq,
    Swap,
    Switch,
    Text,
    Total,
    children,
    every_node,
)

Marginal = dict[Item, float]


@cache
def drawn(node: Choice) -> tuple[str, str, tuple[Item, ...]] | None:
    """(slot, form, items) where every alternative of a choice does no more than say an item and keep it in the slot."""
    found: set[tuple[str, str]] = set()
    items: list[Item] = []
    for nodes in node.alternatives:
        bind, ref = nodes if len(nodes) == 2 else (None, None)
        if not (isinstance(bind, Bind) and isinstance(ref, Ref) and bind.slot == ref.slot):
            return None
        found.add((ref.slot, ref.form))
        items.append(bind.item)
    return (*found.pop(), tuple(items)) if len(found) == 1 else None


@dataclass(frozen=True)
class World:
    """Probability of being here with these control keys, and what each slot then holds."""

    probability: float
    keys: tuple[tuple[str, str], ...]  # control slots, sorted
    slots: dict[str, Marginal]

    def key(self, slot: str) -> str:
        return dict(self.keys)[slot]

    def scaled(self, factor: float) -> World:
        return World(self.probability * factor, self.keys, self.slots)


@dataclass
class Expectation:
    """Walks a grammar and sums. `run` once, then read `bits`, `bytes` and the final worlds."""

    root: Seq
    worlds: list[World] = field(default_factory=list)
    bits: float = 0.0
    bytes: float = 0.0
    _bits: list[float] = field(default_factory=list)
    _bytes: list[float] = field(default_factory=list)
    _control: set[str] = field(default_factory=set)
    _writes: dict[int, bool] = field(default_factory=dict)
    _means: dict[tuple[int, str], tuple[Marginal, float]] = field(default_factory=dict)

    def run(self) -> Expectation:
        for node in every_node(self.root):
            if isinstance(node, Switch):
                self._control.add(node.slot)
            elif isinstance(node, Total):
                self._control |= {node.slot, node.first, node.second}
        self.worlds = self._sequence(self.root, [World(1.0, (), {})])
        self.bits, self.bytes = fsum(self._bits), fsum(self._bytes)
        return self

    def probability(self, slot: str, key: str) -> float:
        """P(the control slot ends with this key)."""
        return fsum(world.probability for world in self.worlds if world.key(slot) == key)

    def _sequence(self, seq: Seq, worlds: list[World]) -> list[World]:
        for node in seq:
            mass = fsum(world.probability for world in worlds)
            if isinstance(node, Text):
                self._bytes.append(mass * len(node.text))
            elif isinstance(node, Ref):
                self._bytes.extend(w.probability * self._mean(w.slots[node.slot], node.form) for w in worlds)
            elif isinstance(node, Choice):
                self._bits.extend(mass * p * b for p, b in zip(node.probabilities, node.bits, strict=True))
                draw = drawn(node)
                if draw and draw[0] not in self._control:
                    worlds = self._draw(node, *draw, mass, worlds)
                    continue
                ends = [
                    self._sequence(alternative, [world.scaled(p) for world in worlds])
                    for alternative, p in zip(node.alternatives, node.probabilities, strict=True)
                ]
                if self._assigns(node):
                    worlds = _merged([world for end in ends for world in end])
            elif isinstance(node, Switch):
                worlds = self._switch(node, worlds)
            else:
                worlds = _merged([self._assigned(node, world) for world in worlds])
        return worlds

    def _draw(
        self, node: Choice, slot: str, form: str, items: tuple[Item, ...], mass: float, worlds: list[World]
    ) -> list[World]:
        """What the general case gives for a draw into a slot that controls nothing, at once."""
        marginal: Marginal = {}
        for item, p in zip(items, node.probabilities, strict=True):
            marginal[item] = marginal.get(item, 0.0) + p
        self._bytes.append(mass * self._mean(marginal, form))
        return [World(w.probability, w.keys, {**w.slots, slot: marginal}) for w in worlds]

    def _mean(self, marginal: Marginal, form: str) -> float:
        """E[length of this form of a slot], remembered with the marginal, whose identity is the key."""
        key = (id(marginal), form)
        if key not in self._means:
            mean = fsum(p * len(item.forms[form]) for item, p in marginal.items())
            self._means[key] = marginal, mean
        return self._means[key][1]

    def _switch(self, node: Switch, worlds: list[World]) -> list[World]:
        ends: list[World] = []
        for key, branch in node.branches.items():
            here = [world for world in worlds if world.key(node.slot) == key]
            if here:
                ends.extend(self._sequence(branch, here))
        return _merged(ends)

    def _assigns(self, node: Choice) -> bool:
        """Whether any slot can change inside `node`; if none, the worlds after it are those before it."""
        if id(node) not in self._writes:
            inside = every_node(tuple(n for child in children(node) for n in child))
            self._writes[id(node)] = any(isinstance(n, Bind | Copy | Swap | Total) for n in inside)
        return self._writes[id(node)]

    def _assigned(self, node: Bind | Copy | Swap | Total, world: World) -> World:
        if isinstance(node, Bind):
            return self._with(world, {node.slot: ({node.item: 1.0}, node.item.key)})
        if isinstance(node, Copy):
            return self._with(world, {node.slot: self._held(world, node.source)})
        if isinstance(node, Swap):
            first, second = self._held(world, node.first), self._held(world, node.second)
            return self._with(world, {node.first: second, node.second: first})
        item = node.of(Item(world.key(node.first)), Item(world.key(node.second)))
        return self._with(world, {node.slot: ({item: 1.0}, item.key)})

    def _held(self, world: World, slot: str) -> tuple[Marginal, str]:
        return world.slots[slot], world.key(slot) if slot in self._control else ""

    def _with(self, world: World, new: dict[str, tuple[Marginal, str]]) -> World:
        slots = {**world.slots, **{slot: marginal for slot, (marginal, _) in new.items()}}
        changed = {slot: key for slot, (_, key) in new.items() if slot in self._control}
        keys = tuple(sorted({**dict(world.keys), **changed}.items())) if changed else world.keys
        return World(world.probability, keys, slots)


def _merged(worlds: list[World]) -> list[World]:
    """Worlds of equal keys become one, each slot's marginal their mixture."""
    groups: dict[tuple[tuple[str, str], ...], list[World]] = {}
    for world in worlds:
        groups.setdefault(world.keys, []).append(world)
    return [group[0] if len(group) == 1 else _mixture(group) for group in groups.values()]


def _mixture(group: list[World]) -> World:
    total = fsum(world.probability for world in group)
    slots: dict[str, Marginal] = {}
    for slot, first in group[0].slots.items():
        if not all(slot in world.slots for world in group):
            continue  # set on some paths only: the check has shown that nothing later reads it
        if all(world.slots[slot] is first for world in group):
            slots[slot] = first
            continue
        mixed: Marginal = {}
        for world in group:
            for item, p in world.slots[slot].items():
                mixed[item] = mixed.get(item, 0.0) + p * world.probability / total
        slots[slot] = mixed
    return World(total, group[0].keys, slots)
