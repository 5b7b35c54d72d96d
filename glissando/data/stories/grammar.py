"""The nodes of an unambiguous probabilistic grammar, and the template language they are written in.

A template is text with four kinds of holes:

    {hero}  {hero.he}  {^hero}          what a slot holds, in one of its forms, `^` with a capital
    {toy=toys.a}  {=toys}               draw an item from a pool into a slot (or into none) and write it
    [one|3%two|three]                   a choice; weights fall with the rank unless written as `3%`
    [mood? +=glad|0=calm|-=sad]         no choice: the branch is the key of what the slot holds
    <rule>                              another template
    {!kept=yes}  {here:=there}  {a<>b}  set a key, copy a slot, swap two slots; writes nothing
    {sum#n+m}  {rest#n-m}               the number that follows from two others, zero bits

`{=weather@mood}` draws from the pool `weather+`, `weather0` or `weather-` by the key of `mood`. A line break
and the blanks around it read as one blank, and as nothing beside `[`, `|` and `]`.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import fsum, log2


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """One value of a slot: the key a switch reads, and the forms in which it is written."""

    key: str
    forms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Text:
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class Ref:
    slot: str
    form: str


@dataclass(frozen=True, eq=False, slots=True)
class Bind:
    slot: str
    item: Item


@dataclass(frozen=True, eq=False, slots=True)
class Copy:
    slot: str
    source: str


@dataclass(frozen=True, eq=False, slots=True)
class Swap:
    first: str
    second: str


@dataclass(frozen=True, eq=False, slots=True)
class Total:
    """slot := first + sign * second, as an item of `numbers`."""

    slot: str
    first: str
    sign: int
    second: str
    numbers: Mapping[str, Item]

    def of(self, first: Item, second: Item) -> Item:
        return self.numbers[str(int(first.key) + self.sign * int(second.key))]


@dataclass(frozen=True, eq=False, slots=True)
class Switch:
    slot: str
    branches: Mapping[str, Seq]


@dataclass(eq=False, slots=True)
class Choice:
    """One choice point: alternative i has probability weights[i] / sum(weights)."""

    alternatives: tuple[Seq, ...]
    weights: tuple[float, ...]
    probabilities: tuple[float, ...] = ()
    bits: tuple[float, ...] = ()
    cumulative: tuple[float, ...] = ()
    #: the text that each alternative opens with, where none of it depends on a slot; else None
    heads: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        total = fsum(self.weights)
        self.probabilities = tuple(w / total for w in self.weights)
        self.bits = tuple(-log2(p) for p in self.probabilities)
        # Without the last entry bisect can never step past the last alternative, whatever the rounding.
        self.cumulative = tuple(accumulate(self.probabilities))[:-1]
        heads = [literal_head(nodes) for nodes in self.alternatives]
        self.heads = None if None in heads else tuple(heads)  # type: ignore[arg-type]


def literal_head(nodes: Seq) -> str | None:
    """The text `nodes` open with up to their first choice, None if it depends on a slot."""
    written = ""
    here: dict[str, Item] = {}
    for node in nodes:
        if isinstance(node, Text):
            written += node.text
        elif isinstance(node, Bind):
            here[node.slot] = node.item
        elif isinstance(node, Ref) and node.slot in here:
            written += here[node.slot].forms.get(node.form, "")
        elif isinstance(node, Choice):
            break
        else:
            return None
    return written


Node = Text | Ref | Bind | Copy | Swap | Total | Switch | Choice
Seq = tuple[Node, ...]


@dataclass(frozen=True)
class Pool:
    """Weighted items. Weights fall like a power of the rank, as word frequencies do."""

    name: str
    items: tuple[Item, ...]
    weights: tuple[float, ...]


def zipf_weights(n: int, exponent: float) -> tuple[float, ...]:
    """w_k = k^-exponent for k = 1..n."""
    return tuple(k**-exponent for k in range(1, n + 1))


def with_capitals(forms: Mapping[str, str]) -> dict[str, str]:
    """`forms` and, under `^name`, each with a capital first letter."""
    return {**forms, **{"^" + name: text[:1].upper() + text[1:] for name, text in forms.items()}}


def children(node: Node) -> Iterable[Seq]:
    """The sequences directly under `node`."""
    if isinstance(node, Choice):
        return node.alternatives
    return node.branches.values() if isinstance(node, Switch) else ()


def every_node(seq: Seq) -> Iterator[Node]:
    """Each distinct node reachable from `seq`, once."""
    seen: set[int] = set()
    stack: list[Node] = list(seq)
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for child in children(node):
            stack.extend(child)


# A draw, a silent act, a number, a reference: tried in this order.
_DRAW = re.compile(r"(\^?)(\w*)=(\w+[+-]?)(@\w+)?(?:\.(\w+))?")
_KEY = re.compile(r"!(\w+)=(\S+)")
_COPY = re.compile(r"(\w+):=(\w+)")
_SWAP = re.compile(r"(\w+)<>(\w+)")
_TOTAL = re.compile(r"(\w+)#(\w+)([+-])(\w+)")
_REF = re.compile(r"(\^?)(\w+)(?:\.(\w+))?")
_INLINE_EXPONENT = 0.5
_WEIGHT = re.compile(r"(\d+(?:\.\d+)?)%")
_SWITCH = re.compile(r"(\w+)\?\s*")
_TEXT = re.compile(r"[^\[\]{}<>|]+")
_BREAK = re.compile(r"[ \t]*\n\s*")


@dataclass
class Builder:
    """Templates, which are those of this package, -> nodes. research/stories/check.py proves what they must satisfy."""

    pools: Mapping[str, Pool]
    rules: Mapping[str, str]
    numbers: Mapping[str, Item] = field(default_factory=dict)
    _built: dict[str, Seq] = field(default_factory=dict)
    _keys: dict[str, Item] = field(default_factory=dict)

    def rule(self, name: str) -> Seq:
        """The nodes of rule `name`; each rule is built once and shared."""
        if name not in self._built:
            self._built[name] = self.template(self.rules[name])
        return self._built[name]

    def template(self, source: str) -> Seq:
        source = _BREAK.sub("\n", source.strip())
        source = re.sub(r"\n(?=[|\]])|(?<=[\[|])\n", "", source).replace("\n", " ")
        nodes, end = self._sequence(source, 0)
        assert end == len(source), source[end:]
        return nodes

    def _sequence(self, source: str, at: int) -> tuple[Seq, int]:
        nodes: list[Node] = []
        while at < len(source) and source[at] not in "|]":
            if source[at] == "[":
                node, at = self._bracket(source, at + 1)
                nodes.append(node)
            elif source[at] in "{<":
                # `{a<>b}` holds a `>`, `<rule>` never holds a `}`: each opener looks for its own closer only.
                end = source.index("}" if source[at] == "{" else ">", at)
                inside = source[at + 1 : end]
                nodes.extend(self._hole(inside) if source[at] == "{" else self.rule(inside))
                at = end + 1
            else:
                match = _TEXT.match(source, at)
                assert match is not None, source[at:]
                nodes.append(Text(match.group()))
                at = match.end()
        return tuple(nodes), at

    def _bracket(self, source: str, at: int) -> tuple[Node, int]:
        switch = _SWITCH.match(source, at)
        parts: list[tuple[str, Seq]] = []
        at = switch.end() if switch else at
        while True:
            label, at = self._label(source, at, switch is not None)
            nodes, at = self._sequence(source, at)
            parts.append((label, nodes))
            at += 1
            if source[at - 1] == "]":
                break
        if switch:
            branches = {key: nodes for keys, nodes in parts for key in keys.split(",")}
            return Switch(switch.group(1), branches), at
        zipf = zipf_weights(len(parts), _INLINE_EXPONENT)
        weights = [float(label) if label else w for (label, _), w in zip(parts, zipf, strict=True)]
        return joint_choice([nodes for _, nodes in parts], weights), at

    @staticmethod
    def _label(source: str, at: int, switch: bool) -> tuple[str, int]:
        if switch:
            end = source.index("=", at)
            return source[at:end], end + 1
        weight = _WEIGHT.match(source, at)
        return (weight.group(1), weight.end()) if weight else ("", at)

    def _hole(self, inside: str) -> Seq:
        if match := _DRAW.fullmatch(inside):
            return (self._draw(*match.groups(default="")),)
        if match := _KEY.fullmatch(inside):
            return (Bind(match[1], self._keys.setdefault(match[2], Item(match[2]))),)
        if match := _COPY.fullmatch(inside):
            return (Copy(match[1], match[2]),)
        if match := _SWAP.fullmatch(inside):
            return (Swap(match[1], match[2]),)
        if match := _TOTAL.fullmatch(inside):
            return (Total(match[1], match[2], 1 if match[3] == "+" else -1, match[4], self.numbers),)
        match = _REF.fullmatch(inside)
        assert match is not None, inside
        return (Ref(match[2], match[1] + (match[3] or "")),)

    def _draw(self, capital: str, slot: str, pool: str, by: str, form: str) -> Node:
        if by:
            return Switch(by[1:], {key: (self._pick(slot, pool + key, capital + form),) for key in "+0-"})
        return self._pick(slot, pool, capital + form)

    def _pick(self, slot: str, name: str, form: str) -> Choice:
        pool = self.pools[name]
        if slot:
            alternatives: list[Seq] = [(Bind(slot, item), Ref(slot, form)) for item in pool.items]
        else:
            alternatives = [(Text(item.forms[form]),) for item in pool.items]
        return Choice(tuple(alternatives), pool.weights)


def joint_choice(alternatives: Sequence[Seq], weights: Sequence[float]) -> Choice:
    """One choice point; an alternative that itself opens with a choice is replaced by its products.

    References and blanks before the inner choice do not count as an opening: they distinguish nothing.

    p(alternative, first inner choice) = p(alternative) p(inner), so that the two are decided together and the
    bytes that decide them are compared with those of every other alternative.
    """
    total = fsum(weights)
    flat: list[tuple[Seq, float]] = []
    for nodes, weight in zip(alternatives, weights, strict=True):
        lead = next((k for k, node in enumerate(nodes) if not _undecided(node)), None)
        inner = nodes[lead] if lead is not None else None
        if isinstance(inner, Choice) and lead is not None:
            flat.extend(
                (nodes[:lead] + first + nodes[lead + 1 :], weight / total * p)
                for first, p in zip(inner.alternatives, inner.probabilities, strict=True)
            )
        else:
            flat.append((nodes, weight / total))
    return Choice(tuple(nodes for nodes, _ in flat), tuple(weight for _, weight in flat))


def _undecided(node: Node) -> bool:
    """Whether `node`, at the start of an alternative, leaves the alternatives alike."""
    return isinstance(node, Bind | Copy | Swap | Ref) or (isinstance(node, Text) and not node.text.strip())


# ---------------------------------------------------------------------- texts


def draw(root: Seq, uniform: Callable[[], float]) -> tuple[str, float, dict[str, Item]]:
    """A text, its information in bits, and what the slots hold at its end; `uniform` yields numbers in [0, 1), one for
    each choice."""
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
    return "".join(out), fsum(bits), slots


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
