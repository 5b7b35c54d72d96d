"""States that can go back: `model.rewind(state, n)` is the state before the last n columns of tokens.

A recurrent state does not say what it was. So a state of `init_state(B, rewind=N)` keeps a trail: two earlier states,
the marks, and the columns that were read since the older one. To go back is to read on from a mark. The older mark is
at least N columns old, or at the beginning, so that N columns can be undone; after n were, N - n more, until N columns
were read again. The trail takes the memory of two states and 4 N columns, and copies a state every N columns or more.
Keeping inputs instead of inverting the recurrence is ReplaySSM's idea; the delta rule cannot be inverted in float32
beyond some ten tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.errors import InputError
from glissando.state import State, join_rows, map_state, select_rows


class Trail(NamedTuple):
    """What was read lately: W = 4 N columns, the latest at the end."""

    older: State  # the states at the marks, without trails
    newer: State
    ages: Tensor  # (B, 2) int64: columns read since the older and the newer mark
    ids: Tensor  # (B, W) int64
    mask: Tensor  # (B, W) bool
    dt: Tensor  # (B, W)
    control: Tensor  # (B, W, C)
    given: Tensor  # (B, 2) bool: whether these columns had a dt, and a control

    @property
    def reach(self) -> int:
        """N, the number of columns that can always be undone."""
        return self.ids.shape[1] // 4


def new_trail(state: State, reach: int, controls: int, dtype: torch.dtype) -> Trail:
    """The trail of a state before any token. Raises InputError for an impossible number."""
    reach = _whole("rewind", reach)
    if reach < 1:
        raise InputError(f"rewind must be a number of tokens of at least 1, or 0 for none, got {reach}")
    rows, width = len(state.position), 4 * reach

    def zeros(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=kind, device=state.position.device)

    return Trail(
        map_state(torch.clone, state), map_state(torch.clone, state), ages=zeros(torch.int64, 2),
        ids=zeros(torch.int64, width), mask=~zeros(torch.bool, width), dt=zeros(dtype, width),
        control=zeros(dtype, width, controls), given=zeros(torch.bool, 2),
    )  # fmt: skip


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InputError(f"{name} must be a whole number, an int, got {value!r}") from None


#: the model's forward of some columns behind a state without a trail -> what it returns of them, and the state
Read = Callable[[slice, Any], tuple[list[Tensor], Any]]


def read_with_trail(
    read: Read,
    ids: Tensor,
    trail: Trail,
    state: State,
    mask: Tensor | None,
    dt: Tensor | None,
    control: Tensor | None,
) -> tuple[list[Tensor], State]:
    """`read` over all columns of ids (B, T), in two calls where there are more than can be undone, so that a state
    between them is known; and the state with its trail."""
    bare = state._replace(trail=None)
    if ids.is_floating_point():
        raise InputError("a state that can go back keeps ids, and embeddings were given: use init_state without rewind")
    trail = _restarted_where_signals_change(trail, bare, dt is not None, control is not None)
    outputs, first = [], max(ids.shape[1] - trail.reach, 0)
    if first:
        part, bare = read(slice(0, first), bare)
        outputs.append(part)
        older, newer = (map_state(lambda leaf: leaf.detach().clone(), bare) for _ in range(2))
        trail = trail._replace(older=older, newer=newer, ages=torch.zeros_like(trail.ages))
    last = slice(first, ids.shape[1])
    part, bare = read(last, bare)
    outputs.append(part)
    trail = _moved_on(trail, bare, ids[:, last], mask, dt, control, last)
    return [torch.cat(parts, 1) for parts in zip(*outputs, strict=True)], bare._replace(trail=trail)


def _restarted_where_signals_change(trail: Trail, bare: State, has_dt: bool, has_control: bool) -> Trail:
    """Marks at the present state in rows whose columns so far had other signals: without one its term is absent, which
    no value of it stands for."""
    signals = torch.tensor([has_dt, has_control], device=trail.given.device).expand_as(trail.given)
    other = (trail.given != signals).any(1)
    if not bool(other.any()):
        return trail
    return trail._replace(
        older=_rows_where(other, bare, trail.older),
        newer=_rows_where(other, bare, trail.newer),
        ages=trail.ages.masked_fill(other.unsqueeze(1), 0),
        given=signals.clone(),
    )


def _moved_on(
    trail: Trail,
    bare: State,
    ids: Tensor,
    mask: Tensor | None,
    dt: Tensor | None,
    control: Tensor | None,
    columns: slice,
) -> Trail:
    """The trail behind these columns, N at most; a new mark in rows whose newer one is N columns old or more."""
    width = ids.shape[1]

    def shifted(kept: Tensor, new: Tensor | None) -> Tensor:
        filler = torch.ones_like(kept[:, :width]) if new is None else new.to(kept.dtype)
        return torch.cat([kept[:, width:], filler], 1)

    if control is not None:
        control = (control.unsqueeze(1).expand(-1, width, -1) if control.ndim == 2 else control[:, columns]).detach()
    trail = trail._replace(
        ages=trail.ages + width,
        ids=shifted(trail.ids, ids),
        mask=shifted(trail.mask, None if mask is None else mask[:, columns]),
        dt=shifted(trail.dt, None if dt is None else dt[:, columns].detach()),
        control=shifted(trail.control, control),
    )
    due = trail.ages[:, 1] >= trail.reach
    if not bool(due.any()):
        return trail
    ages = torch.stack([trail.ages[:, 1], torch.zeros_like(trail.ages[:, 1])], 1)
    return trail._replace(
        older=_rows_where(due, trail.newer, trail.older),
        newer=_rows_where(due, bare, trail.newer),
        ages=torch.where(due.unsqueeze(1), ages, trail.ages),
    )


def _rows_where(which: Tensor, yes: State, no: State) -> State:
    """The rows of `yes` where `which` (B,), else of `no`, in memory of their own."""
    rows = torch.arange(len(which), device=which.device)
    return select_rows(map_state(Tensor.detach, join_rows(no, yes)), torch.where(which, rows + len(which), rows))


def rewound(model: Any, state: State, count: int, start: str = "model.init_state(batch_size, rewind={})") -> State:
    """See LanguageModel.rewind; `start` is what errors advise to begin with, with a place for the number."""
    count = _whole("the number of columns to undo", count)
    if count < 0:
        raise InputError(f"the number of columns to undo must not be negative, got {count}")
    trail = state.trail
    if trail is None:
        raise InputError(f"this state cannot go back: start from {start.format(max(32, count))}")
    if count == 0:
        return state
    if any(map(_drops_out, model.modules())):
        raise InputError("going back reads columns again, and dropout would make that another state: call model.eval()")
    furthest, row = (int(value) for value in trail.ages[:, 0].min(0))
    if count > furthest:
        fix = f"start from {start.format(count)}{', or more where it went back before' * (furthest < trail.reach)}"
        if count > (tokens := int(state.position[row])):
            fix = f"it has read {tokens} tokens in all"
        elif count <= trail.reach:
            fix = "it has read no more since it began, went back before, or had other signals (dt, control)"
        raise InputError(f"this state can go back {furthest} columns of tokens, and {count} are to be undone: {fix}")
    if bool((trail.given != trail.given[:1]).any()):
        raise InputError(
            "rows of this state were read with a dt or a control and others without: read on with one of them, or go "
            "back before the rows are joined"
        )
    near = (trail.ages[:, 1] >= count).unsqueeze(1)
    mark = _rows_where(near[:, 0], trail.newer, trail.older)
    back = _read_on(model, trail, mark, torch.where(near, trail.ages[:, 1:], trail.ages[:, :1])[:, 0], count)
    newer = torch.where(near, trail.ages[:, 1:] - count, 0)
    trail = trail._replace(
        newer=_rows_where(near[:, 0], trail.newer, back),  # where it is undone, the state that is returned
        ages=torch.cat([trail.ages[:, :1] - count, newer], 1),
        **{name: getattr(trail, name).roll(count, 1) for name in ("ids", "mask", "dt", "control")},
    )
    return back._replace(trail=trail)


def _drops_out(part: nn.Module) -> bool:
    share = part.p if isinstance(part, nn.Dropout) else getattr(getattr(part, "config", None), "dropout", 0)
    return part.training and share > 0


@torch.no_grad()
def _read_on(model: Any, trail: Trail, mark: State, ages: Tensor, count: int) -> State:
    """The state after the columns that were read since the marks, `ages` (B,) ago, but the last `count`."""
    todo = ages - count
    longest = int(todo.max())
    if not longest:
        return mark
    width = trail.ids.shape[1]
    step = torch.arange(longest, device=ages.device)
    where = (width - ages.unsqueeze(1) + step).clamp_max(width - 1)
    has_dt, has_control = trail.given[0].tolist()
    control = trail.control.gather(1, where.unsqueeze(-1).expand(-1, -1, trail.control.shape[-1]))
    _, state = model.features(
        trail.ids.gather(1, where),
        mark,
        mask=trail.mask.gather(1, where) & (step < todo.unsqueeze(1)),
        dt=trail.dt.gather(1, where) if has_dt else None,
        control=control if has_control else None,
    )
    assert state is not None
    return state
