"""Records of the documents' pictures, which docs/pictures.py draws.

    python -m research.pictures decoding          CPU milliseconds a token of the compiled step, and bytes of state
    python -m research.pictures flow              paths of the packaged model `dial` through its flow, by its mood dial
    python -m research.pictures forecast          a forecast of the packaged model `series` beside what came
    python -m research.pictures hazard RUN        a run trained on `events example --process hawkes1`, beside the truth
    python -m research.pictures kernels           decay times and periods of the spectral channels of `stories`
    python -m research.pictures dial DIR          of `glissando steer dial --dials mood --prompts 96 --cost_rows 0`
    python -m research.pictures growth DIR        shift-0-grown of `research.grow_or_scratch --tasks shift`

Each writes its CSV into docs/comparison.
"""

from __future__ import annotations

import csv
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import glissando
from glissando.metrics import read_metrics
from glissando.mixers.spectral import Spectral
from glissando.runs import METRICS
from research.runs import options_of

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "comparison"
#: what is recommended, the baseline, and a model without attention of each other kind
DECODED = ("spectral-delta-nano", "composite-nano", "hybrid-ode-nano", "transformer-plus-nano", "liquid-ssm-nano")
CONTEXTS = (256, 1024, 4096, 16384)
_ROUNDS, _TOKENS = 7, 25


def write(name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with (FOLDER / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows([f"{value:.5g}" if isinstance(value, float) else value for value in row] for row in rows)


def decoding() -> None:
    """Medians of seven turns of 25 tokens, the models in turn, one text, one thread."""
    from benchmarks.speed import random_bytes
    from glissando.decoding.decoder import Decoder
    from glissando.state import state_bytes
    from research.audit.ledger import machine

    rows, one = [], torch.zeros(1, dtype=torch.int64)
    models = {name: glissando.LanguageModel.from_preset(name).eval() for name in DECODED}
    for context in CONTEXTS:
        steps, seconds, sizes = {}, {name: list[float]() for name in DECODED}, {}
        for name, model in models.items():
            with torch.no_grad():
                _, state = model(random_bytes(1, context), model.init_state(1))
            decoder = Decoder(model)
            sizes[name], steps[name] = state_bytes(state), (decoder, decoder.rows(state))
        for _ in range(_ROUNDS + 1):
            for name, (decoder, cache) in steps.items():
                began = time.process_time()
                for _ in range(_TOKENS):
                    decoder.step(one, cache)
                seconds[name].append((time.process_time() - began) / _TOKENS)
        rows += [
            (name, context, 1e3 * statistics.median(seconds[name][1:]), sizes[name], machine(), f"{date.today()}")
            for name in DECODED
        ]
    write("decoding", ("model", "context", "milliseconds", "state_bytes", "machine", "date"), rows)


def flow(prompts: int = 64, tokens: int = 40, steps: int = 16) -> None:
    """H(depth) - H(0) of the last token of each prompt, in the plane of two directions: that in which u = +1 and u = -1
    end apart on average, and what is left of the mean path."""
    from glissando.data.stories import generate

    model = glissando.load("dial")
    assert isinstance(model, glissando.LanguageModel)
    assert model.tokenizer is not None
    depth: Any = model.depth
    depth.n_steps = steps
    ids = torch.tensor([model.tokenizer.encode(generate(5, "valid", i).text)[:tokens] for i in range(prompts)])
    dial, paths = (-1.0, -0.5, 0.0, 0.5, 1.0), []
    for u in dial:
        slopes: list[torch.Tensor] = []

        def watch(_: Any, x: Any, given: dict[str, Any], slopes: list[torch.Tensor] = slopes) -> Any:
            return x, given | {"watch": lambda _, slope: slopes.append(slope[:, -1])}

        hook = depth.register_forward_pre_hook(watch, with_kwargs=True)
        with torch.no_grad():
            model(ids, control=torch.tensor([[u, 0.0]]).repeat(prompts, 1))
        hook.remove()
        moved = torch.stack(slopes).cumsum(0) / steps
        paths.append(torch.cat([torch.zeros_like(moved[:1]), moved]))
    path = torch.stack(paths)  # (dial, steps + 1, prompts, D)
    apart = (path[-1, -1] - path[0, -1]).mean(0)
    apart = apart / apart.norm()
    along = path[:, -1].mean((0, 1))
    along = along - (along @ apart) * apart
    along = along / along.norm()
    rows = [
        (u, prompt, step / steps, float(path[i, step, prompt] @ apart), float(path[i, step, prompt] @ along))
        for i, u in enumerate(dial)
        for prompt in range(prompts)
        for step in range(0, steps + 1, 2)
    ]
    means = [(u, "mean", step, *np.mean([row[3:] for row in rows if row[0] == u and row[2] == step], 0).tolist())
             for u in dial for step in (i / 8 for i in range(9))]  # fmt: skip
    write("flow", ("u", "prompt", "depth", "apart", "along"), [row for row in rows if row[1] < 12] + means)


def forecast(read: int = 240, horizon: float = 12.0) -> None:
    """Channel a of a series that the model was not trained on: its values, the median and the 90 % interval ahead."""
    from glissando.series.example import oscillators

    model = glissando.SeriesModel.load("series").eval()
    values, times = oscillators(31, 700, seed=0)[3]
    x = torch.tensor(values[:read], dtype=torch.float32).unsqueeze(0)
    dt = torch.tensor(np.diff(times[:read], prepend=times[0]), dtype=torch.float32).unsqueeze(0)
    ahead = np.linspace(0.1, horizon, 60)
    with torch.no_grad():
        asked = torch.tensor(ahead, dtype=torch.float32).expand(1, read, -1)
        y, _ = model(x, model.init_state(1), dt=dt, horizon=asked)
        low, middle, high = model.distribution.quantile(y[0, -1, :, 0], [0.05, 0.5, 0.95]).unbind(-1)
    now = times[read - 1]
    seen = (times > now - 1.5 * horizon) & (times <= now + horizon)
    rows: list[tuple[Any, ...]] = [
        (float(t - now), float(v), "", "", "") for t, v in zip(times[seen], values[seen, 0], strict=True)
    ]
    rows += [
        (float(t), "", *each) for t, *each in zip(ahead, low.tolist(), middle.tolist(), high.tolist(), strict=True)
    ]
    write("forecast", ("time", "value", "low", "median", "high"), rows)


def hazard(run: Path) -> None:
    """The model's hazard and the true one of the first series that the run has held out, and its events."""
    from glissando.events.log import FIRST
    from glissando.events.pictures import track
    from glissando.events.processes import process_of
    from glissando.events.task import EventRun, prepare

    trained = EventRun.open(run)
    prepared = prepare(trained.data, trained.encoding)
    log = prepared.valid_log
    drawn = track(trained.model, prepared.valid, log, 0)
    mine = slice(log.starts[0], log.starts[1])
    times = log.times[mine][log.codes[mine] >= FIRST]
    true = process_of("hawkes1").intensities(drawn.at, times, np.zeros(len(times), int))[:, 0]
    rows: list[tuple[Any, ...]] = [
        (float(t), float(h), float(of)) for t, h, of in zip(drawn.at, drawn.hazards[:, 0], true, strict=True)
    ]
    rows += [(float(t), "", "") for t in times if drawn.at.min() <= t <= drawn.at.max()]
    write("hazard", ("time", "hazard", "truth"), rows)


def base_rates(mixer: Spectral) -> tuple[Tensor, Tensor]:
    """gamma and w (N,): decay and angular frequency of a channel per token, with r = 0 where the decay depends on the
    input."""
    constants = mixer._derive()
    factor = 8 * torch.sigmoid(mixer.decay_bias) if mixer.config.projections else 1.0
    return constants.gamma * factor, constants.turn


def kernels() -> None:
    """1 / gamma and 2 pi / |w| in tokens, the decay at its bias, of the channels of every spectral layer."""
    from glissando.evaluation.observe import layer_numbers

    model = glissando.load("stories")
    assert isinstance(model, glissando.LanguageModel)
    mixers = [module for module in model.modules() if isinstance(module, Spectral)]
    rows: list[tuple[Any, ...]] = []
    for layer, mixer in zip(layer_numbers(model, Spectral, len(mixers)), mixers, strict=True):
        decay, turn = (rate.detach().double() for rate in base_rates(mixer))
        channels = zip((1 / decay).tolist(), (2 * np.pi / turn.abs()).tolist(), strict=True)
        rows += [(layer, *channel) for channel in sorted(channels)]
    write("kernels", ("layer", "decay_time", "period"), rows)


def dial(sweep: Path) -> None:
    """The mood of each text by u, and of all texts of a u their mean and the cost at u."""
    from glissando.data.stories import judge

    (figures,) = json.loads((sweep / "steering.json").read_text())["dials"]
    rows: list[tuple[Any, ...]] = []
    for number, line in enumerate((sweep / "texts.jsonl").read_text().splitlines()):
        text = json.loads(line)
        label = judge(text["text"])["mood"]
        rows.append((text["u"], number % figures["prompts"], "" if label is None else label, ""))
    costs = zip(figures["u"], figures["mean_label"], figures["perplexity_against_uncontrolled"], strict=True)
    write("dial", ("u", "prompt", "mood", "cost"), rows + [(u, "mean", mean, cost) for u, mean, cost in costs])


def growth(stages: Path) -> None:
    """Held-out loss of a model that grew, against the FLOPs of all its stages together."""
    rows: list[tuple[Any, ...]] = []
    before = 0.0
    for run in sorted(stages.glob("*-size-?")):
        parameters, metrics = glissando.load(run).num_parameters(), read_metrics(run / METRICS)
        losses = [(before + float(row["flops"]), float(row["valid_loss"])) for row in metrics if row["valid_loss"]]
        rows += [(parameters, *point) for point in losses]
        before += float(metrics[-1]["flops"])
    write("growth", ("parameters", "flops", "valid_loss"), rows)


def main() -> None:
    parser = options_of(__doc__)
    records = {draw.__name__: draw for draw in (decoding, flow, forecast, hazard, kernels, dial, growth)}
    parser.add_argument("record", choices=records)
    parser.add_argument("source", type=Path, nargs="*", help="what the record is read from, if it is not measured here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records[options.record](*options.source)


if __name__ == "__main__":
    main()
