"""State as an explicit value: a tree (tuples, named tuples) whose leaves are batch-first tensors or None.

Every function here returns a new tree and never changes the one it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

#: A tree of tensors; each mixer names its own leaves in a NamedTuple.
State = Any


@runtime_checkable
class Slotted(Protocol):
    """A state that grows: slots of which row b has filled the first filled[b]; those behind them are never read."""

    @property
    def filled(self) -> Tensor:
        """(B,) int64"""

    @property
    def capacity(self) -> int:
        """Slots of every row."""

    def with_capacity(self, capacity: int) -> State:
        """The same values with the first `capacity` slots and no more, in memory of their own."""


def leaves(state: State) -> Iterator[Tensor]:
    """The tensors of `state`, depth first."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for child in state:
            yield from leaves(child)


def leaf_names(state: State, prefix: str = "") -> Iterator[str]:
    """A name for each of `leaves`: position, depth.0.mixer.keys, ..."""
    if isinstance(state, Tensor):
        yield prefix
    elif state is not None:
        for name, child in zip(getattr(state, "_fields", range(len(state))), state, strict=True):
            yield from leaf_names(child, f"{prefix}.{name}".lstrip("."))


def map_state(f: Callable[..., Tensor], state: State, *others: State) -> State:
    """f applied leaf by leaf to trees of the same shape; None stays None.

    Raises TypeError on anything that is neither a tensor, None nor a tuple.
    """
    if state is None:
        return None
    if isinstance(state, Tensor):
        return f(state, *others)
    if isinstance(state, tuple):
        children = [map_state(f, *group) for group in zip(state, *others, strict=True)]
        return type(state)(*children) if hasattr(state, "_fields") else tuple(children)
    raise TypeError(f"a state must be a tree of tuples and tensors; found {type(state).__name__}")


def state_bytes(state: State) -> int:
    """Bytes held by all tensors of `state`."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))


def select_rows(state: State, rows: Tensor) -> State:
    """The rows `rows` (int64) of a batched state, in that order."""
    return map_state(lambda leaf: leaf.index_select(0, rows), state)


def join_rows(*states: State) -> State:
    """The rows of several states of one model, one below the other, however much each has read.

    A leaf with fewer slots than another's gets zeros behind its own: spare slots, which no mixer reads.
    """

    def joined(*leaves: Tensor) -> Tensor:
        most = [max(axis) for axis in zip(*(leaf.shape[1:] for leaf in leaves), strict=True)]
        spare = [[n for m, s in zip(most[::-1], leaf.shape[:0:-1], strict=True) for n in (0, m - s)] for leaf in leaves]
        return torch.cat([F.pad(leaf, more) if any(more) else leaf for leaf, more in zip(leaves, spare, strict=True)])

    return map_state(joined, *states)


def fit_room(state: State, spare: bool = False) -> State:
    """The same values without slots that no row has filled: what a row got beside longer ones.

    spare  up to as many slots as are filled stay, and more is cut to the next doubling of 64: the state grows on
    """
    if hasattr(state, "with_capacity"):  # Slotted, whose own check is slow
        filled = max(state.filled.tolist(), default=0)
        # the least of 64, 128, 256, ... that is not below what is filled
        needed = 64 << (max(filled - 1, 0) // 64).bit_length() if spare else filled
        return state.with_capacity(needed) if state.capacity > (max(needed, 2 * filled) if spare else needed) else state
    if isinstance(state, tuple):
        children = [fit_room(child, spare) for child in state]
        return type(state)(*children) if hasattr(state, "_fields") else tuple(children)
    return state


def detach(state: State) -> State:
    """The same values, cut from the graph: truncated backpropagation through time."""
    return map_state(Tensor.detach, state)


def zeros_position(batch_size: int, device: torch.device | None) -> Tensor:
    """(B,) int64: how many tokens each row has seen."""
    return torch.zeros(batch_size, dtype=torch.int64, device=device)


def join_states(states: Sequence[State]) -> State:
    """The rows of all states; a single state is large behind a long prompt, and is not copied."""
    return states[0] if len(states) == 1 else join_rows(*states)


def rows_of(state: State, rows: Tensor) -> State:
    """The chosen rows of a state; all of them are not copied."""
    return state if len(rows) == len(state.position) else select_rows(state, rows)
