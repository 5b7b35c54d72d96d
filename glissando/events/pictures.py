"""Pictures of a model of events: a history with the hazards under it, and the residuals against what they should be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from glissando.evaluation.figures import figure_and_axes, label_ends
from glissando.events.baselines import Predicted
from glissando.events.batches import Windows
from glissando.events.log import FIRST, EventLog
from glissando.events.model import EventModel
from glissando.events.scores import Residuals, residuals
from glissando.events.task import EventRun, features
from glissando.series.batches import Floats
from glissando.series.pictures import readable
from glissando.series.tables import counted

#: file names of the pictures
HISTORY, RESIDUALS = "history.png", "residuals.png"
#: series, steps of each and kinds that are drawn at most, and points of a wait
_SERIES, _STEPS, _KINDS, _POINTS = 2, 60, 6, 24
_COLOURS = ("#0b6e99", "#c26a00", "#5a8f29", "#8e4585", "#b5343c", "#6b7280")


class Track(NamedTuple):
    """The last scored steps of a series, and the hazards between them.

    series   its name
    times    (N,) of its events, in the unit of the log
    kinds    (N,) their kinds
    at       (M,) times, ascending
    hazards  (M, K) events of each kind in a unit of time, from what came before
    """

    series: str
    times: Floats
    kinds: np.ndarray
    at: Floats
    hazards: Floats


def draw(run: EventRun, windows: Windows, log: EventLog, prediction: Predicted, out: Path) -> None:
    """Both pictures in the directory `out`, which is made where it is not there."""
    out.mkdir(parents=True, exist_ok=True)
    came = windows.steps.after.scored()
    number, events = np.unique(came.series[came.is_event], return_counts=True)
    longest = number[np.argsort(-events, kind="stable")][:_SERIES]
    some = [track(run.model, windows, log, int(series)) for series in longest]
    assert prediction.low is not None
    assert prediction.high is not None
    draw_histories(some, run.encoding.kinds, out / HISTORY, log.clock.unit)
    draw_residuals(residuals(came, prediction.low, prediction.high), out / RESIDUALS)


@torch.no_grad()
def track(model: EventModel, windows: Windows, log: EventLog, series: int) -> Track:
    """The last steps of a series as the model reads them."""
    model.eval()
    after = windows.steps.after
    index = np.flatnonzero(after.is_scored & (after.series == series))[-_STEPS:]
    window = np.flatnonzero((windows.scored <= index[-1]) & (index[-1] < windows.end))
    batch = windows.batch(window)
    h, targets, _ = features(model, batch)
    kept = (batch.index >= int(index[0])) & (targets.wait.cpu() > 0)
    step, wait, within = batch.index[kept].numpy(), targets.wait[kept].double(), targets.within[kept].double()
    shares = torch.linspace(0, 1, _POINTS, dtype=torch.float64, device=wait.device).clamp_min(1e-3) ** 2
    waits = within.unsqueeze(-1) + (wait - within).unsqueeze(-1) * shares  # denser after an event
    params = tuple(part.unsqueeze(1) for part in model.waits(h[kept]))
    hazards = model.head.hazards(params, (waits / model.time_scale).to(params[0].dtype)) / model.time_scale
    at = log.times[step][:, None] + waits.cpu().numpy()
    first = log.starts[series]
    place = np.arange(max(first, step[0]), log.starts[series + 1])
    kinds = log.codes[place] - FIRST
    shown = (kinds >= 0) & (kinds < model.config.kinds)
    return Track(
        log.names[series], log.times[place][shown], kinds[shown], at.ravel(),
        hazards.double().cpu().numpy().reshape(-1, model.config.kinds),
    )  # fmt: skip


def draw_histories(tracks: Sequence[Track], kinds: Sequence[str], out: Path, unit: str) -> None:
    """Each track's events as marks, a row for each kind, and under them the hazards."""
    factor, unit = readable(unit, max(float(np.ptp(track.at)) for track in tracks))
    usual = np.argsort(-sum(np.bincount(track.kinds, minlength=len(kinds)) for track in tracks), kind="stable")
    drawn = usual[:_KINDS].tolist()
    figure, every = figure_and_axes(len(tracks), 2)
    largest = np.concatenate([track.hazards[:, drawn].max(1) for track in tracks]) / factor
    low, top = np.quantile(largest, [0.02, 0.98])
    for column, track in enumerate(tracks):
        events, below = every[column], every[len(tracks) + column]
        for row, kind in enumerate(drawn):
            times, colour = factor * track.times[track.kinds == kind], _COLOURS[row]
            events.plot(times, np.full(len(times), -row), "|", color=colour, markersize=9)
            hazard = np.maximum(track.hazards[:, kind], 1e-12) / factor
            below.plot(factor * track.at, hazard, color=colour, linewidth=1.1)
        events.set_yticks([-row for row in range(len(drawn))], [str(kinds[kind]) for kind in drawn])
        for label, colour in zip(events.get_yticklabels(), _COLOURS, strict=False):
            label.set_color(colour)
        events.set_ylim(0.6 - len(drawn), 0.6)
        events.set_title(f"events of series {track.series}" if track.series else "events", fontsize=10)
        events.sharex(below)
        if top > 30 * max(low, 1e-12):
            below.set_yscale("log")
            below.set_ylim(max(low / 3, 1e-3 * top), 1.5 * largest.max())  # a log-normal's is 0 right after an event
        else:
            below.set_ylim(0, 1.3 * top)
        below.set_title("their hazards, in the colours of the kinds", fontsize=10)
        below.set_xlabel(f"time since the first step ({unit})")
        below.set_ylabel(f"events per {unit}" if unit else "hazard")
    figure.savefig(out)


def draw_residuals(residuals: Residuals, out: Path) -> None:
    """Quantiles of the residuals, ascending, against those of the exponential distribution, with the band within which
    19 of 20 lie where the model is right."""
    figure, (axes,) = figure_and_axes()
    values, count = residuals.values, len(residuals.values)
    share = (np.arange(count) + 0.5) / count
    expected = -np.log1p(-share)
    spread = 1.96 * np.sqrt(share / (1 - share) / count)  # of an order statistic, at its quantile
    axes.fill_between(
        expected, np.maximum(expected - spread, 0), expected + spread, color="#9aa5b1", alpha=0.35, linewidth=0
    )
    axes.plot([0, expected[-1]], [0, expected[-1]], color="#222222", linewidth=0.8)
    axes.plot(expected, values, ".", color="#0b6e99", markersize=3)
    axes.set_xlabel("quantile of the exponential distribution")
    axes.set_ylabel("quantile of the integrated hazards")
    drawn = f"\n{residuals.drawn:,} cut by the end of observation, completed by a draw" if residuals.drawn else ""
    figure.suptitle(f"hazards integrated over {counted(count, 'wait')}{drawn}", fontsize=10)
    ends = ((expected[-1], "a right model", "#222222"), (expected[-1] + spread[-1], "95 % of right ones", "#5f6b76"))
    label_ends(axes, [*ends, (values[-1], "this model", "#0b6e99")])
    figure.savefig(out)
