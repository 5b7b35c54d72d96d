"""What may come after the end of a log: hazards and survival in closed form, and simulated futures.

A series is read up to its last step. Nothing came from there to the end of its observation, and what follows is asked
from that end on. A future is drawn event by event: a wait from the distribution after the last step, a kind given the
wait, further events at the same time; each is read by the model before the next one is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.backbone import ModelState
from glissando.data.windows import by_length
from glissando.errors import ConfigError, NotFiniteError
from glissando.events.batches import Ints, Steps
from glissando.events.log import FIRST, EventLog
from glissando.events.model import EventModel
from glissando.events.task import EventRun, moved
from glissando.progress import track
from glissando.state import select_rows

#: steps that are read, and futures that are drawn, at once; days and weeks in seconds
_AT_ONCE, _ROWS, _PERIODS = 16384, 4096, (86400.0, 604800.0)
#: events of a future at most: a process that excites itself without end has no more
_MOST = 10_000
#: probabilities between 0 and 1 at which the kinds of a first event are computed
_NODES = 16


class Present(NamedTuple):
    """B series that were read up to their last steps.

    series  (B,) of the log
    h       (B, D) features after the last step
    after   (B,) time since the last step, within which nothing came
    phases  (B, 2) of the day and the week at the last step
    facts   static numbers and codes (B, ...), None where there are none
    """

    series: Tensor
    state: ModelState
    h: Tensor
    after: Tensor
    phases: Tensor
    facts: tuple[Tensor | None, Tensor | None]


@torch.no_grad()
def presents(run: EventRun, log: EventLog) -> Iterator[Present]:
    """All series at the end of their observation, in batches of similar length; the steps of two windows are read."""
    model, steps, last = run.model, Steps.of(log, run.encoding, run.model), log.starts[1:] - 1
    begin = np.maximum(log.starts[:-1], last + 1 - 2 * run.data.window)
    device = model.time_scale.device
    for chosen in track(by_length(last - begin + 1, _AT_ONCE), "predicting", unit="batches"):
        place = begin[chosen][:, None] + np.arange(int((last - begin)[chosen].max()) + 1)
        real = place <= last[chosen][:, None]
        inputs = moved(steps.inputs_at(np.minimum(place, last[chosen][:, None]), real), device)
        state = model.init_state(len(chosen))
        if (past := inputs.pop("past", None)) is not None:
            state = past.put_into(state)
        h, after = model(inputs.pop("codes"), state, **inputs)
        assert after is not None
        rows, at = torch.arange(len(chosen), device=device), torch.from_numpy(real.sum(1) - 1).to(device)
        yield Present(
            torch.from_numpy(chosen), after, h[rows, at],
            torch.from_numpy((log.until - log.times[last])[chosen]).clamp_min(0).to(device),
            torch.from_numpy(log.phases[last[chosen]]).to(device),
            (inputs.get("static"), inputs.get("static_codes")),
        )  # fmt: skip


# ---------------------------------------------------------------------- in closed form


class Ahead(NamedTuple):
    """What the model knows of the next event at J times after the end of observation, float64.

    hazard    (B, J, K) events of a kind in a unit of time, where none came before
    survival  (B, J) probability that no event comes before
    first     (B, J, K) probability that the next event comes before, and is of this kind
    """

    hazard: Tensor
    survival: Tensor
    first: Tensor


@torch.no_grad()
def ahead(model: EventModel, h: Tensor, after: Tensor, horizon: Tensor) -> Ahead:
    """At times `horizon` (J,), ascending, after the end of observation.

    h, after   as of Present
    """
    scale = model.time_scale.double()
    params = tuple(each.double().unsqueeze(1) for each in model.waits(h))
    after = (after.to(scale) / scale).unsqueeze(1)
    until = after + (horizon.to(after) / scale)
    survival = (model.head.passed(params, after) - model.head.passed(params, until)).exp()
    hazard = model.head.hazards(params, until) / scale
    # the next event's kind, averaged over its time: in units of probability, where the average is over a unit interval
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    share = torch.from_numpy((nodes + 1) / 2).to(after)
    inner = tuple(each.unsqueeze(1) for each in params)
    wait = model.head.quantile(inner, (1 - survival).unsqueeze(-1) * share, after.unsqueeze(-1))
    kinds = model.head.log_kinds(inner, wait.clamp_min(torch.finfo(wait.dtype).tiny)).exp()
    first = (1 - survival).unsqueeze(-1) * (kinds * torch.from_numpy(weights / 2).to(after).unsqueeze(-1)).sum(-2)
    return Ahead(hazard, survival, first)


# ---------------------------------------------------------------------- futures


class Futures(NamedTuple):
    """E events of M futures.

    series  (E,) of the log
    future  (E,) 0 to n - 1
    time    (E,) since the end of observation
    kind    (E,)
    """

    series: Ints
    future: Ints
    time: np.ndarray
    kind: Ints


@torch.no_grad()
def futures(
    model: EventModel, present: Present, horizon: float, n: int, generator: torch.Generator, most: int = _MOST
) -> Futures:
    """n futures of each series up to `horizon` after the end of its observation.

    Marks and values of events to come are not known: they are missing in what the model reads of them.

    Raises NotFiniteError for a future of more than `most` events, ConfigError for a horizon of more median gaps.
    """
    if (gaps := horizon / float(model.time_scale)) > most:
        raise ConfigError(
            f"the horizon {horizon:g} is {gaps:,.0f} times the median gap between events: simulate up to {most:,}"
        )
    rows = torch.arange(len(present.series)).repeat_interleave(n)
    number = torch.arange(n).repeat(len(present.series))
    parts: list[tuple[Tensor, ...]] = [(rows[:0], number[:0], present.after[:0].double(), rows[:0])]
    for chosen in torch.arange(len(rows)).split(_ROWS):
        parts += _drawn(model, select_rows(present, rows[chosen]), number[chosen], horizon, generator, most)
    return Futures(*(torch.cat([each.cpu() for each in part]).numpy() for part in zip(*parts, strict=True)))


def _drawn(
    model: EventModel, at: Present, number: Tensor, horizon: float, generator: torch.Generator, most: int
) -> list[tuple[Tensor, ...]]:
    """Futures in pieces, an event of each row at most."""
    scale, resolution = model.time_scale.double(), model.config.resolution
    time, after = torch.zeros_like(at.after), at.after
    parts: list[tuple[Tensor, ...]] = []
    last = torch.full((len(number),), -1, device=time.device)  # what stands at the end is complete
    for _ in range(most):
        wait, kind = model.head.sample(
            model.waits(at.h), generator, after=after / scale, resolution=resolution / float(scale)
        )
        wait = wait * scale
        tied = torch.zeros_like(last, dtype=torch.bool)
        if model.tie is not None:
            none, kinds = model.log_ties(at.h, last)
            drawn = torch.rand(none.shape, generator=generator, dtype=torch.float64, device=none.device)
            tied = drawn >= none.double().exp()
            if bool(tied.any()):
                kind[tied] = torch.multinomial(kinds[tied].exp(), 1, generator=generator)[:, 0]
        gap = torch.where(tied, 0.0, wait)
        time = torch.where(tied, time, time + wait - after)
        kept = (time <= horizon).nonzero().flatten()
        if not len(kept):
            return parts
        at, number, time, kind, gap = select_rows(at, kept), number[kept], time[kept], kind[kept], gap[kept]
        parts.append((at.series, number, time, kind))
        at = _read(model, at, kind, gap)
        after, last = torch.zeros_like(time), kind
    raise NotFiniteError(
        f"a simulated future has more than {most:,} events within {horizon:g}: the model's events excite others "
        "without end, or the horizon is too long; train longer, or give a shorter horizon"
    )


def _read(model: EventModel, at: Present, kind: Tensor, gap: Tensor) -> Present:
    """The model reads an event of each row."""
    config, (rows, device) = model.config, (len(kind), kind.device)
    periods = torch.tensor(_PERIODS, dtype=torch.float64, device=device)
    phases = (at.phases + gap.unsqueeze(1) / periods) % 1
    missing = torch.full((rows, 1, 1), torch.nan, device=device)
    sizes = {"marks": config.marks, "values": config.values}
    inputs: dict[str, Any] = dict(zip(("static", "static_codes"), at.facts, strict=True))
    inputs |= {name: missing.expand(-1, -1, size) for name, size in sizes.items() if size}
    if config.clock:
        inputs["phases"] = phases.unsqueeze(1)
    if config.mark_categories:
        inputs["mark_codes"] = missing.new_zeros(rows, 1, len(config.mark_categories), dtype=torch.int64)
    h, state = model((kind + FIRST).unsqueeze(1), at.state, dt=gap.unsqueeze(1), **inputs)
    assert state is not None
    return at._replace(state=state, h=h[:, 0], phases=phases)
