"""What a step knows of the past: for each channel its last value, how old that is, whether it was ever observed, the
mean, the number and the squared deviations of the values so far.

    n_t = n_{t-1} + o_t,    m_t = m_{t-1} + o_t (v_t - m_{t-1}) / n_t
    c_t, a_t = (v_t, 0) if o_t else (c_{t-1}, a_{t-1} + g_t)
    q_t = q_{t-1} + o_t (v_t - m_{t-1}) (v_t - m_t)

with v the value, o whether it was observed and g the time since the step before. A value that was not observed enters
nowhere: it may be NaN. The recursion is computed for all steps at once; its state is `Past`, so that a history in
pieces is the same history. After GRU-D's inputs: Che et al. 2018, arXiv 1606.01865.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from glissando.backbone import ModelState
from glissando.kernels.precise import widest_float
from glissando.state import map_state

#: k, the number of values whose deviation is that of other series
_USUAL = 2.0


class Past(NamedTuple):
    """What is known of each channel, (B, K) as a state and (B, T, K) after each step; zeros before the first value."""

    value: Tensor  # the last one
    age: Tensor  # time since it was observed
    mean: Tensor  # of all values so far
    number: Tensor  # how many values so far
    square: Tensor  # sum of their squared deviations from that mean

    def put_into(self, state: ModelState) -> ModelState:
        """The state of a model with this in the place of what it knew, each part in the type that it had there."""
        return state._replace(past=map_state(Tensor.to, self, state.past))

    @property
    def ever(self) -> Tensor:
        """bool: whether a value was observed so far."""
        return self.number > 0


def nothing(batch: int, channels: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Past:
    """The state before any step."""
    return Past(*(torch.zeros(batch, channels, device=device, dtype=dtype) for _ in Past._fields))


def history(
    values: Tensor, observed: Tensor, gaps: Tensor, past: Past | None = None, first: Tensor | None = None
) -> Past:
    """What is known after each step.

    Args:
        values: (B, T, K); those that were not observed may be anything.
        observed: (B, T, K) bool.
        gaps: (B, T), the time since the step before; 0 at steps that are padding.
        past: The state (B, K) before the first step; None: nothing is known.
        first: (B, T) bool, True where another series begins, which knows nothing of the one before.

    Returns:
        (B, T, K) each. The last step of each is the state after it.
    """
    dtype, wide = values.dtype, widest_float(values.device)
    before = map_state(lambda part: part.unsqueeze(1).to(wide), past)
    length = values.shape[1]
    place = torch.arange(length, device=values.device).view(1, -1, 1)
    # at the first step of its series, which is where sums and places count from
    begin = None if first is None else torch.where(first.unsqueeze(-1), place, 0).cummax(1).values
    latest = torch.where(observed, place, -1)
    latest = latest if length == 1 else latest.cummax(1).values  # ONNX, which has single steps, lacks cummax
    within = latest >= (0 if begin is None else begin)
    values = torch.where(observed, values, 0).to(wide)

    count, total, square = observed.to(wide).cumsum(1), values.cumsum(1), values.square().cumsum(1)
    elapsed = gaps.to(wide).cumsum(1).unsqueeze(-1)
    if begin is not None:
        index = (begin - 1).clamp_min(0).expand_as(count)  # the step before each step's series begins
        count, total, square = (s - torch.where(begin > 0, s.gather(1, index), 0) for s in (count, total, square))
    seen = latest.clamp_min(0)
    value = values.gather(1, seen)
    age = elapsed - elapsed.expand_as(value).gather(1, seen)
    if before is not None:
        value = torch.where(within, value, before.value)
        age = torch.where(within, age, before.age + elapsed)
        total, count = total + before.mean * before.number, count + before.number
        square = square + before.square + before.number * before.mean.square()
    ever = count > 0
    mean = torch.where(ever, total, 0) / count.clamp_min(1)
    spread = torch.where(count > 1, (square - count * mean.square()).clamp_min(0), 0)
    parts = Past(torch.where(ever, value, 0), torch.where(ever, age, 0), mean, count, spread)
    known: Past = map_state(lambda part: part.to(dtype), parts)
    return known


class Own(NamedTuple):
    """The units (..., K) of each channel's own past, and what is known in them."""

    centre: Tensor
    scale: Tensor
    known: Past


def by_own_past(known: Past, law: Tensor | None) -> Own:
    """What is known in units of the series itself: its mean so far, and its deviation so far as if there had been
    a few more values with the deviation p that other series have about such a mean,

        s^2 = (k p^2 + q) / (k + n - 1),    log p = a + b log max(|m|, f),

    so that one value has a unit. Before it the units are those of all series, about their mean. Of the mean itself
    asinh(m / f) is known.

    Args:
        known: After each step.
        law: (4, K) a, b, f and the mean of all series, see `glissando.series.batches`; None: the units are those of
            all series throughout.
    """
    zero = torch.zeros_like(known.mean)
    if law is None:
        return Own(zero, zero + 1, known)
    level, slope, floor, middle = law.to(zero)
    usual = (level + slope * torch.maximum(known.mean.abs(), floor).log()).exp()
    scale = ((_USUAL * usual.square() + known.square) / (_USUAL - 1 + known.number.clamp_min(1))).sqrt()
    centre, scale = torch.where(known.ever, known.mean, middle), torch.where(known.ever, scale, zero + 1)
    value = torch.where(known.ever, (known.value - centre) / scale, 0)
    return Own(centre, scale, known._replace(value=value, mean=(known.mean / floor).asinh()))
