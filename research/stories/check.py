"""What a grammar must satisfy: every slot is set, and no choice point is ambiguous.

At a choice point each alternative opens with text that holds no further choice, its *head*. If no head is a prefix
of another one, the bytes decide the choice within the heads, and a left-to-right parser is exact. Heads may quote
slots, so the comparison runs over every value that the slots can hold there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from glissando.data.stories.grammar import Bind, Choice, Copy, Item, Node, Ref, Seq, Swap, Switch, Text, Total
from research.stories.exact import drawn

Held = dict[str, frozenset[Item]]  # what each slot may hold at a point
Part = str | tuple[str, str]  # literal text, or (slot, form)


class GrammarError(ValueError):
    """A grammar that is malformed or ambiguous."""


@dataclass(frozen=True)
class Head:
    """Text of an alternative up to its first choice, under the assumption that slots hold certain keys."""

    parts: tuple[Part, ...] = ()
    assumed: dict[str, str] = field(default_factory=dict)
    open: bool = True  # whether later nodes may still add to it


def symbolic_heads(seq: Seq) -> list[Head]:
    """The heads of `seq`, one for each combination of the switches on the way."""
    heads = [Head()]
    local: dict[str, Item | str] = {}  # an item set here, or the slot that held at the start what this one holds now
    for node in seq:
        if isinstance(node, Bind):
            local[node.slot] = node.item
        elif isinstance(node, Copy):
            local[node.slot] = local.get(node.source, node.source)
        elif isinstance(node, Swap):
            first, second = local.get(node.first, node.first), local.get(node.second, node.second)
            local[node.first], local[node.second] = second, first
        elif isinstance(node, Text):
            heads = [_extended(head, node.text) for head in heads]
        elif isinstance(node, Ref):
            source = local.get(node.slot, node.slot)
            part: Part = (source, node.form) if isinstance(source, str) else source.forms[node.form]
            heads = [_extended(head, part) for head in heads]
        elif isinstance(node, Switch) and not local:
            branches = [
                _joined(Head(assumed={node.slot: key}), tail)
                for key, branch in node.branches.items()
                for tail in symbolic_heads(branch)
            ]
            heads = [joined for head in heads for b in branches if b and (joined := _joined(head, b))]
        else:  # a choice ends the head; at a sum, or a switch after a change, we look no further: only stricter
            heads = [Head(head.parts, head.assumed, False) for head in heads]
            break
    return heads


def _extended(head: Head, part: Part) -> Head:
    if not head.open:
        return head
    last = head.parts[-1] if head.parts else None
    if isinstance(part, str) and isinstance(last, str):
        return Head((*head.parts[:-1], last + part), head.assumed)
    return Head((*head.parts, part), head.assumed)


def _joined(head: Head, tail: Head) -> Head | None:
    """`tail` after `head`, or None where they assume different things."""
    if not head.open:
        return head
    if any(head.assumed.get(slot, key) != key for slot, key in tail.assumed.items()):
        return None
    for part in tail.parts:
        head = _extended(head, part)
    return Head(head.parts, {**head.assumed, **tail.assumed}, tail.open)


def find_clash(a: tuple[Part, ...], b: tuple[Part, ...], held: Held) -> str | None:
    """The text at which one head ends inside the other, for some values of the slots; None if never."""
    said = ""
    while a and b:
        if a[0] == b[0]:
            said += a[0] if isinstance(a[0], str) else f"({a[0][0]})"
            a, b = a[1:], b[1:]
        elif isinstance(a[0], str) and isinstance(b[0], str):
            n = min(len(a[0]), len(b[0]))
            if a[0][:n] != b[0][:n]:
                return None
            said += a[0][:n]
            a, b = _cut(a, n), _cut(b, n)
        else:
            slot = a[0][0] if not isinstance(a[0], str) else b[0][0]
            clashes = (find_clash(_filled(a, slot, i), _filled(b, slot, i), held) for i in _agreeing(a, b, held[slot]))
            return next((said + clash for clash in clashes if clash is not None), None)
    return said


def _agreeing(a: tuple[Part, ...], b: tuple[Part, ...], items: frozenset[Item]) -> Iterable[Item]:
    """The items with which the first parts do not differ at once: the others need no further look."""
    if not isinstance(a[0], str) and not isinstance(b[0], str):
        return items
    literal, ref = (a[0], b[0]) if isinstance(a[0], str) else (b[0], a[0])
    assert isinstance(literal, str)
    said = ((item, item.forms[ref[1]]) for item in items)
    return (item for item, text in said if text.startswith(literal) or literal.startswith(text))


def _cut(parts: tuple[Part, ...], n: int) -> tuple[Part, ...]:
    first = parts[0]
    assert isinstance(first, str)
    return (first[n:], *parts[1:]) if len(first) > n else parts[1:]


def _filled(parts: tuple[Part, ...], slot: str, item: Item) -> tuple[Part, ...]:
    filled: list[Part] = []
    for part in parts:
        said = part if isinstance(part, str) or part[0] != slot else item.forms[part[1]]
        if said:
            filled.append(said)
    return tuple(filled)


@dataclass
class Checker:
    """Walks a grammar once; `check` returns proven bounds of the length in bytes."""

    _heads: dict[int, list[list[Head]]] = field(default_factory=dict)
    _literal: set[int] = field(default_factory=set)  # choices whose check does not depend on any slot
    _lengths: dict[tuple[frozenset[Item], str], tuple[int, int]] = field(default_factory=dict)

    def check(self, seq: Seq, held: Held) -> tuple[Held, int, int]:
        """(what slots may hold after `seq`, least bytes, most bytes). Raises GrammarError."""
        low = high = 0
        for node in seq:
            held, least, most = self._node(node, held)
            low, high = low + least, high + most
        return held, low, high

    def _node(self, node: Node, held: Held) -> tuple[Held, int, int]:
        if isinstance(node, Text):
            if not node.text.isascii() or "\n" in node.text[:-1]:
                raise GrammarError(f"text must be ASCII on one line, got {node.text!r}")
            return held, len(node.text), len(node.text)
        if isinstance(node, Ref):
            return held, *self._sizes(node, _need(held, node.slot))
        if isinstance(node, Choice):
            return self._choice(node, held)
        if isinstance(node, Switch):
            return self._switch(node, held)
        return _assigned(node, held), 0, 0

    def _sizes(self, node: Ref, items: frozenset[Item]) -> tuple[int, int]:
        key = (items, node.form)
        if key not in self._lengths:
            sizes = [len(_form(item, node)) for item in items]
            self._lengths[key] = min(sizes), max(sizes)
        return self._lengths[key]

    def _choice(self, node: Choice, held: Held) -> tuple[Held, int, int]:
        if abs(sum(node.probabilities) - 1) > 1e-12:
            raise GrammarError(f"probabilities sum to {sum(node.probabilities)!r}, not to 1")
        self._prefix_free(node, held)
        if draw := drawn(node):  # the same result as below, at once
            slot, form, items = draw
            sizes = [len(item.forms[form]) for item in items]
            return {**held, slot: frozenset(items)}, min(sizes), max(sizes)
        return _merged([self.check(alternative, held) for alternative in node.alternatives])

    def _switch(self, node: Switch, held: Held) -> tuple[Held, int, int]:
        keys = {item.key for item in _need(held, node.slot)}
        if missing := sorted(keys - set(node.branches)):
            raise GrammarError(f"switch on {node.slot!r} has no branch for {missing}; has {sorted(node.branches)}")
        outcomes = []
        for key in sorted(keys):
            narrowed = frozenset(item for item in held[node.slot] if item.key == key)
            outcomes.append(self.check(node.branches[key], {**held, node.slot: narrowed}))
        return _merged(outcomes)

    def _prefix_free(self, node: Choice, held: Held) -> None:
        if id(node) in self._literal:
            return
        heads = self._heads.setdefault(id(node), [symbolic_heads(alt) for alt in node.alternatives])
        flat = [(k, head) for k, alternatives in enumerate(heads) for head in alternatives]
        if all(not head.assumed and all(isinstance(p, str) for p in head.parts) for _, head in flat):
            self._literal.add(id(node))
            # In sorted order a prefix stands right before one of its extensions.
            flat = sorted(flat, key=lambda entry: "".join(p for p in entry[1].parts if isinstance(p, str)))
            pairs = list(pairwise(flat))
        else:
            pairs = [pair for pair in combinations(flat, 2) if not _differ_at_once(pair[0][1], pair[1][1])]
        for (i, a), (j, b) in pairs:
            if i != j and (clash := _clash(a, b, held)) is not None:
                raise GrammarError(
                    f"ambiguous choice: {_shown(a)} and {_shown(b)} both can open with {clash!r}, where one "
                    "of them ends or branches; no alternative's text may be a prefix of another's. "
                    "Put the delimiter or the distinguishing word inside the alternatives."
                )


def _differ_at_once(a: Head, b: Head) -> bool:
    """Whether plain text tells two heads apart: the quick answer for almost every pair."""
    if not (a.parts and b.parts and isinstance(a.parts[0], str) and isinstance(b.parts[0], str)):
        return False
    return not (a.parts[0].startswith(b.parts[0]) or b.parts[0].startswith(a.parts[0]))


def _clash(a: Head, b: Head, held: Held) -> str | None:
    assumed = {**a.assumed, **b.assumed}
    if any(a.assumed.get(slot, key) != b.assumed.get(slot, key) for slot, key in assumed.items()):
        return None
    narrowed = dict(held)
    for slot, key in assumed.items():
        narrowed[slot] = frozenset(item for item in _need(held, slot) if item.key == key)
    for part in (*a.parts, *b.parts):
        if not isinstance(part, str):
            _need(held, part[0])
    return find_clash(a.parts, b.parts, narrowed)


def _shown(head: Head) -> str:
    return repr("".join(p if isinstance(p, str) else f"{{{p[0]}.{p[1]}}}" for p in head.parts)[:60])


def _need(held: Held, slot: str) -> frozenset[Item]:
    if slot not in held:
        raise GrammarError(f"slot {slot!r} is used where some path has not set it; set so far: {sorted(held)}")
    return held[slot]


def _form(item: Item, node: Ref) -> str:
    if node.form not in item.forms:
        raise GrammarError(f"{node.slot!r} may hold {item.key!r}, which has no form {node.form!r}")
    return item.forms[node.form]


def _assigned(node: Node, held: Held) -> Held:
    if isinstance(node, Bind):
        return {**held, node.slot: frozenset([node.item])}
    if isinstance(node, Copy):
        return {**held, node.slot: _need(held, node.source)}
    if isinstance(node, Swap):
        return {**held, node.first: _need(held, node.second), node.second: _need(held, node.first)}
    assert isinstance(node, Total)
    pairs = [(a, b) for a in _need(held, node.first) for b in _need(held, node.second)]
    return {**held, node.slot: frozenset(node.of(a, b) for a, b in pairs)}


def _merged(outcomes: list[tuple[Held, int, int]]) -> tuple[Held, int, int]:
    """What holds whichever way the story went."""
    first = outcomes[0][0]
    common = [slot for slot in first if all(slot in held for held, _, _ in outcomes)]
    merged: Held = {}
    for slot in common:
        same = all(held[slot] is first[slot] for held, _, _ in outcomes)
        merged[slot] = first[slot] if same else frozenset().union(*(held[slot] for held, _, _ in outcomes))
    return merged, min(low for _, low, _ in outcomes), max(high for _, _, high in outcomes)
