"""Models of easy-tpp on the logs of tasks.yaml: `python -m benchmarks.events.peers --data DIR --out DIR [TASK ...]`.

In an environment of its own, in which glissando's dependencies are: `pip install --no-deps easy_tpp==0.3.0` and
`pip install omegaconf antlr4-python3-runtime==4.9.3`. Layers, likelihood and its sums by the trapezoid rule are
theirs; the logs, the splits, the budget of CPU seconds, the learning rates to choose from and the number of parameters
are those of `compare`. Training has 20 points between two events, testing 200. `--time EVENTS` measures the time of a
step instead.

    nhp, rmtpp, thp, sahp, s2p2   the ends of observation are events of the padding kind: they have no intensity, and
                                  the integral runs up to them
    ifree                         IntensityFree: its likelihood leaves the waits that nothing ends out, which is mended
                                  here by their log-survival; kinds are independent of the waits, as published

Kinds and times alone are read: no static columns, marks or clock, for which easy-tpp has no place. Where times have a
resolution, each event is moved back by a uniform share of it, drawn anew in each epoch, and for the test five times:
the mean log-density plus the logarithm of the resolution bounds the log-probability of the interval from below.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas
import torch
from torch import Tensor, nn

from benchmarks import tuned
from benchmarks.events import compare
from benchmarks.events.compare import TASKS, logs
from benchmarks.series.compare import GRU, GRUConfig
from glissando.config import from_dict, merge
from glissando.events.log import FIRST, EventLog, parts
from glissando.events.options import EventsData
from glissando.events.reading import read_events
from glissando.events.task import build, call, prepare
from glissando.mixers import register_mixer

#: name -> class and module of easy-tpp, and its own options
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nhp": ("NHP", "nhp", {}),
    "rmtpp": ("RMTPP", "rmtpp", {}),
    "thp": ("THP", "thp", {}),
    "sahp": ("SAHP", "sahp", {}),
    "s2p2": ("S2P2", "s2p2", {}),
    "ifree": ("IntensityFree", "intensity_free", {"num_mix_components": 8}),
}
#: events of a window, and those before it that are read
_WINDOW, _WARM = 192, 64
_BATCH, _DRAWS = 8, 5


class Rows(NamedTuple):
    """R sequences: kinds (K where nothing happens), times, what of them counts, padded behind."""

    kinds: Tensor  # (R, T)
    times: Tensor  # (R, T), in median gaps
    real: Tensor  # (R, T) bool
    event: Tensor  # (R, T) bool: a scored event
    live: Tensor  # (R, T) bool: the interval before it counts


def rows_of(log: EventLog, kinds: int, scale: float, resolution: float, chance: np.random.Generator) -> Rows:
    """The sequences of a log: windows of its series with the events before them, the end of observation at the end."""
    made: list[tuple[np.ndarray, ...]] = []
    for s, (begin, end) in enumerate(zip(log.starts[:-1], log.starts[1:], strict=True)):
        code = log.codes[begin:end] - FIRST
        kind = np.where((code >= 0) & (code < kinds), code, kinds)
        times, scored = log.times[begin:end].copy(), log.scored[begin:end]
        if resolution:
            times = np.where(kind < kinds, times - resolution * chance.random(len(times)), times)
            order = np.argsort(times, kind="stable")
            kind, times, scored = kind[order], times[order], scored[order]
        live = times > log.since[s]
        if log.ended[s] and log.until[s] > times[-1]:
            kind, times = np.append(kind, kinds), np.append(times, log.until[s])
            scored, live = np.append(scored, False), np.append(live, True)
        first = int(np.argmax(live)) if live.any() else len(live)
        for at in range(max(first, 1), len(kind), _WINDOW):
            low, high = max(at - _WARM, 0), min(at + _WINDOW, len(kind))
            counts = np.arange(low, high) >= at
            part = slice(low, high)
            made.append((kind[part], times[part] - times[low], scored[part] & counts, live[part] & counts))
    made.sort(key=lambda row: len(row[0]))
    longest = max(len(row[0]) for row in made)

    def padded(column: int, fill: Any, dtype: Any) -> Tensor:
        whole = np.full((len(made), longest), fill, dtype)
        for line, row in zip(whole, made, strict=True):
            line[: len(row[0])] = row[column]
        return torch.from_numpy(whole)

    lengths = torch.tensor([len(row[0]) for row in made])
    real = torch.arange(longest) < lengths[:, None]
    since = padded(1, 0.0, np.float64) / scale
    since = torch.where(real, since, since.amax(1, keepdim=True))  # nothing passes behind the end of a row
    return Rows(padded(0, kinds, np.int64), since.float(), real, padded(2, False, bool), padded(3, False, bool))


def batches(rows: Rows, chance: np.random.Generator | None = None) -> Iterator[Rows]:
    starts = np.arange(0, len(rows.kinds), _BATCH)
    for at in starts if chance is None else chance.permutation(starts):
        some = Rows(*(part[at : at + _BATCH] for part in rows))
        length = int(some.real.sum(1).max())
        yield Rows(*(part[:, :length] for part in some))


def model_of(name: str, kinds: int, parameters: int) -> nn.Module:
    """A model of about so many parameters."""
    import importlib

    from easy_tpp.config_factory.model_config import ModelConfig

    cls, module, own = PEERS[name]

    def made(width: int) -> nn.Module:
        config = ModelConfig(
            hidden_size=width, num_event_types=kinds, num_event_types_pad=kinds + 1, event_pad_index=kinds,
            use_mc_samples=False, num_heads=2, time_emb_size=width, gpu=-1, model_specs={**own, "P": width},
        )  # fmt: skip
        config.get = lambda key, default: default  # which IntensityFree asks of it, and it has not
        model: nn.Module = getattr(importlib.import_module(f"easy_tpp.model.{module}"), cls)(config)
        return model

    def size(model: nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    return min((made(width) for width in range(8, 129, 4)), key=lambda model: abs(size(model) - parameters))


def log_likelihood(model: Any, batch: Rows, points: int) -> tuple[Tensor, int]:
    """The sum over what is scored, in the unit of median gaps, and the number of events and ends."""
    gaps = torch.diff(batch.times, prepend=batch.times[:, :1], dim=1)
    model.loss_integral_num_sample_per_step = points
    later = torch.ones(gaps.shape[1], gaps.shape[1], dtype=torch.bool).triu(1).expand(len(gaps), -1, -1)
    event, live = batch.event[:, 1:], batch.live[:, 1:]
    ends = (live & ~event & (batch.kinds[:, 1:] == model.num_event_types)).sum()
    if type(model).__name__ == "IntensityFree":
        found = _intensity_free(model, batch, gaps, event, live)
        return found, int(event.sum() + ends)
    seen: dict[str, Tensor] = {}
    own = type(model).compute_loglikelihood

    def caught(**parts: Any) -> Any:
        found = own(model, **parts)
        seen["event"], seen["none"] = found[0], found[1]
        return found

    model.compute_loglikelihood = caught
    model.loglike_loss(
        time_seqs=batch.times, time_delta_seqs=gaps, type_seqs=batch.kinds, seq_non_pad_mask=batch.real,
        attention_mask=later,
    )  # fmt: skip
    total = (seen["event"] * event).sum() - (seen["none"] * live).sum()
    return total, int(event.sum() + ends)


def _intensity_free(model: Any, batch: Rows, gaps: Tensor, event: Tensor, live: Tensor) -> Tensor:
    from easy_tpp.model.intensity_free import LogNormalMixtureDistribution, clamp_preserve_gradients

    context = model.forward(gaps[:, :-1], batch.kinds[:, :-1])
    locs, scales, weights = model.linear(context).chunk(3, -1)
    scales = clamp_preserve_gradients(scales, -5.0, 3.0)
    waits = LogNormalMixtureDistribution(
        locs=locs, log_scales=scales, log_weights=weights.log_softmax(-1), mean_log_inter_time=0.0,
        std_log_inter_time=1.0,
    )  # fmt: skip
    wait = gaps[:, 1:].clamp(min=1e-5)
    kinds = model.mark_linear(context)[..., : model.num_event_types].log_softmax(-1)
    kind = kinds.gather(-1, batch.kinds[:, 1:, None].clamp_max(model.num_event_types - 1))[..., 0]
    arrives = torch.where(event, waits.log_prob(wait) + kind, 0)
    return arrives.sum() + torch.where(live & ~event, waits.log_survival_function(wait), 0).sum()


def trained(task: str, name: str, rate: float, seed: int, settings: argparse.Namespace) -> dict[str, Any]:
    """Train and test one model."""
    read, test, reading = logs(task, settings.data, settings.out)
    options = merge({}, TASKS[task]["options"]["data"], read)
    log, encoding = read_events(from_dict(EventsData, options, "data"))
    held = read_events(from_dict(EventsData, {**options, **reading, "path": test}, "data"), None, encoding)[0]
    data = from_dict(EventsData, options, "data")
    train, valid, _ = parts(log, data, encoding.resolution)
    kinds, r, scale = len(encoding.kinds), encoding.resolution, float(np.median(train.gaps[train.gaps > 0]))
    chance = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = model_of(name, kinds, settings.parameters)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    valid_rows = rows_of(valid, kinds, scale, r, np.random.default_rng(0))
    best, state, steps, began, scored = math.inf, {}, 0, time.process_time(), 0.0
    while (spent := time.process_time() - began) < settings.seconds:
        for batch in batches(rows_of(train, kinds, scale, r, chance), chance):
            for group in optimizer.param_groups:
                group["lr"] = rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(spent / settings.seconds, 1))))
            total, count = log_likelihood(model, batch, 20)
            optimizer.zero_grad()
            (-total / max(count, 1)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
            spent = time.process_time() - began
            if spent - scored > settings.seconds / 8 or spent >= settings.seconds:
                scored = spent
                if (loss := measured(model, valid_rows)[0]) < best:
                    best, state = loss, {key: value.clone() for key, value in model.state_dict().items()}
            if spent >= settings.seconds:
                break
    model.load_state_dict(state)
    chance = np.random.default_rng(1)
    drawn = [measured(model, rows_of(held, kinds, scale, r, chance), 200)[1] for _ in range(_DRAWS if r else 1)]
    figure = float(np.mean(drawn)) - math.log(scale) + (math.log(r) if r else 0.0)
    size = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": size, "steps": steps, "valid": best, "figures": {"model": {"log_likelihood": figure}}}


@torch.no_grad()
def measured(model: nn.Module, rows: Rows, points: int = 20) -> tuple[float, float]:
    """The loss over events and ends, and the log-likelihood an event."""
    model.eval()
    parts = [(*log_likelihood(model, batch, points), int(batch.event.sum())) for batch in batches(rows)]
    model.train()
    total = sum(float(part) for part, _, _ in parts)
    return -total / sum(count for _, count, _ in parts), total / sum(events for _, _, events in parts)


def milliseconds(name: str, events: int, parameters: int, kinds: int = 5, rows: int = 4, rounds: int = 7) -> float:
    """CPU time an event of a loss and its gradients over rows of so many events, the median of `rounds`; of a peer with
    20 points between two events, or of one of our mixers."""
    chance = np.random.default_rng(0)
    times = np.cumsum(chance.exponential(1.0, (rows, events)), 1)
    kind = chance.integers(kinds, size=(rows, events))
    if name in PEERS:
        model, yes = model_of(name, kinds, parameters), torch.ones(rows, events, dtype=torch.bool)
        batch = Rows(torch.from_numpy(kind), torch.from_numpy(times).float(), yes, yes, yes)

        def loss() -> Tensor:
            return -log_likelihood(model, batch, 20)[0]
    else:
        who = np.repeat(np.arange(rows).astype(str), events)
        frame = pandas.DataFrame({"who": who, "t": times.ravel(), "k": kind.ravel().astype(str)})
        options = {"group": "who", "time": "t", "kind": "k", "window": events, "batch_size": rows}
        prepared = prepare(from_dict(EventsData, options, "data"), source=frame)
        chosen = compare.model_of(name, parameters, prepared, {"head": "intensity"})
        model = build(chosen, prepared.encoding, prepared.scales)
        whole = prepared.train.batch(np.arange(len(prepared.train)))

        def loss() -> Tensor:
            found = call(model, whole)
            return -(found.time.sum() + found.kind.sum())

    taken = []
    for _ in range(rounds + 1):
        began = time.process_time()
        loss().backward()
        taken.append(1e3 * (time.process_time() - began))
    return float(np.median(taken[1:])) / (rows if name in PEERS else len(whole.inputs["codes"])) / events


def main(arguments: Sequence[str] | None = None) -> None:
    about = "Compare models of easy-tpp on logs."
    parser = tuned.parser_of("benchmarks.events.peers", about, TASKS, PEERS, "1e-3,3e-3,1e-2", 20.0)
    parser.add_argument("--time", type=int, metavar="EVENTS", help="measure a step over rows of so many events alone")
    settings = parser.parse_args(arguments)
    torch.set_num_threads(1)
    register_mixer("gru", GRUConfig)(GRU)
    if settings.time:
        for name in [*PEERS, *compare.MODELS]:
            print(f"{name:10} {1e3 * milliseconds(name, settings.time, settings.parameters):8.2f} us an event")
        return
    settings.out.mkdir(parents=True, exist_ok=True)
    for task in settings.tasks or TASKS:
        models = settings.models.split(",")
        for name in models:
            values = list(tuned.compared(task, name, settings, trained))
            shown = [one["figures"]["model"]["log_likelihood"] for one in values]
            print(task, name, values[0]["rate"], values[0]["parameters"], values[0]["steps"], *shown, flush=True)


if __name__ == "__main__":
    main()
