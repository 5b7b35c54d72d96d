"""Series sampled at uneven times: forecast the next value, whose time is known. Liquid models against `ncps`.

Every step is given the value x_t and dt_t, the time to the next one; what is read at the end of it is the forecast of
x_{t+1}. By default the series are generated: two decaying oscillators, kicked now and then, whose frequencies switch
between two regimes. With --data they are the rows of every .npy file (time, features) of a folder, of which a share is
dropped at random. Series are held out whole; errors are mean squares in units of each feature's variance.

All models have the same number of parameters within 5 %, the same windows, epochs and optimizer, and the learning rate
and epoch that do best on validation series. CfC and LTC are the cells of `ncps` (pip install ncps), looped here,
because its own loop over batches multiplies times with the wrong axis.

Then the trained liquid models are shown four patterns that run over time: are their time constants larger where the
input is smooth than where it is spiky, as the publication claims?

    python -m research.irregular_series
    python -m research.irregular_series --data traces/ --seeds 3
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from glissando.evaluation.diagnostics import compare_patterns, pattern_table, signals
from glissando.series import SeriesModel
from glissando.series.example import oscillators
from glissando.series.history import Past, history
from research.network import Network
from research.runs import at_least, options_of


class Windows(NamedTuple):
    x: Tensor  # (W, T, F), standardised
    dt: Tensor  # (W, T), time to the next value
    target: Tensor  # (W, T, F)


#: a series: values (T, F) and the time of each (T,)
Series = tuple[np.ndarray, np.ndarray]

# ---------------------------------------------------------------------- series


def from_folder(folder: Path, drop: float) -> list[Series]:
    """Every .npy file of the folder; of its rows, the share `drop` is left out."""
    if not folder.is_dir():
        raise SystemExit(
            f"--data {folder} is {'a file' if folder.exists() else 'not there'}; name a folder of .npy files"
        )
    paths, rng = sorted(folder.glob("*.npy")), np.random.default_rng(0)
    if len(paths) < 4:
        raise SystemExit(f"{folder} holds {len(paths)} .npy files; at least 4 are needed to train, validate and test")
    made: list[Series] = []
    for path in paths:
        values = trace(path)
        if values.shape[1] != (features := made[0][0].shape[1] if made else values.shape[1]):
            raise SystemExit(f"{path} has {values.shape[1]} features and {paths[0]} {features}; all need the same")
        kept = np.flatnonzero(rng.random(len(values)) >= drop)
        made.append((values[kept], kept.astype(float)))
    return made


def trace(path: Path) -> np.ndarray:
    """The file's values (time, features), float64. SystemExit for what is no such array, or holds NaN or infinity."""
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SystemExit(f"{path} could not be read as an array of numbers: {error}") from error
    if values.ndim != 2 or not values.shape[1] or values.dtype.kind not in "fiu":
        raise SystemExit(f"{path} must hold real numbers (time, features), got {values.dtype} {values.shape}")
    if bad := np.size(values) - int(np.isfinite(values).sum()):
        raise SystemExit(f"{path}: {bad} of its {values.size} values are not finite; leave out the rows they are in")
    return values.astype(float)


def split(series: list[Series], length: int) -> tuple[Windows, Windows, Windows]:
    """Windows to train on, to choose by and to report; from different series, a seventh of them for each of the two."""
    order, held = np.random.default_rng(1).permutation(len(series)), max(len(series) // 7, 1)
    train = [series[i] for i in order[2 * held :]]
    everything = np.concatenate([values for values, _ in train])
    mean, scale = everything.mean(0), everything.std(0) + 1e-8
    parts = train, [series[i] for i in order[held : 2 * held]], [series[i] for i in order[:held]]
    train_w, valid_w, test_w = (windows(part, mean, scale, length) for part in parts)
    for name, part in zip(("train", "choose by", "report"), (train_w, valid_w, test_w), strict=True):
        if not len(part.x):
            longest = max(len(values) for values, _ in series)
            raise SystemExit(
                f"no series to {name} has the {length + 1} rows of a window and its target (the longest of all has "
                f"{longest}); take a smaller --window, now {length}, or drop fewer rows"
            )
    return train_w, valid_w, test_w


def windows(part: list[Series], mean: np.ndarray, scale: np.ndarray, length: int) -> Windows:
    x, dt, target = [], [], []
    for values, times in part:
        values = (values - mean) / scale
        for start in range(0, len(values) - length, length):
            x.append(values[start : start + length])
            target.append(values[start + 1 : start + length + 1])
            dt.append(np.diff(times[start : start + length + 1]))
    return Windows(*(torch.tensor(np.array(each), dtype=torch.float32) for each in (x, dt, target)))


# ---------------------------------------------------------------------- models


LIQUID: dict[str, Any] = {"adaptation": 0.9, "coupled": True, "steps": [0.02, 0.7], "turns": "matched"}


class Liquid(nn.Module):
    """Two layers; whether the states take dt, and whether dt is one more feature."""

    def __init__(
        self, features: int, width: int, knows_time: bool = True, reads_time: bool = False, **options: Any
    ) -> None:
        super().__init__()
        liquid = LIQUID | options
        liquid["state_size"] = width + width % 2
        config = {"hidden_size": width, "depth": {"layers": 2}, "block": {"mlp": {"hidden": width}}}
        self.model = Network({**config, "mixer": {"kind": "liquid", **liquid}}, features + reads_time, features)
        self.knows_time, self.reads_time = knows_time, reads_time

    def forward(self, x: Tensor, dt: Tensor) -> Tensor:
        if self.reads_time:
            x = torch.cat([x, dt.unsqueeze(-1)], -1)
        return self.model(x, dt=dt if self.knows_time else None)[0]


class Asked(nn.Module):
    """The library's SeriesModel: it reads the time since the value before, and is asked with the time to the next."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        liquid = {"kind": "liquid", **LIQUID, "state_size": width + width % 2}
        config = {"hidden_size": width, "depth": {"layers": 2}, "block": {"mlp": {"hidden": width}}, "forecast": True}
        self.model = SeriesModel.from_config({**config, "mixer": liquid, "inputs": features, "outputs": features})

    def begin(self, train: Windows) -> None:
        """Set the time scale, and solve for the linear anchor."""
        model, count = self.model, train.dt.numel()
        model.set_scales(time_scale=float(train.dt.median()))
        observed = torch.ones_like(train.x, dtype=torch.bool)
        known = history(train.x, observed, since(train.dt) / model.time_scale)
        row = [part.flatten(0, 1).unsqueeze(0) for part in (*known, train.dt / model.time_scale, train.target)]
        none = torch.zeros(count, 0)
        model.fit_anchor(Past(*row[:5]), row[5], row[6], none, none.long(), None)

    def forward(self, x: Tensor, dt: Tensor) -> Tensor:
        return self.model(x, dt=since(dt), horizon=dt.unsqueeze(-1))[0][:, :, 0]


def since(dt: Tensor) -> Tensor:
    """The time since the value before, of the time to the next one (B, T)."""
    return torch.cat([torch.zeros_like(dt[:, :1]), dt[:, :-1]], 1)


class Delta(nn.Module):
    """Layers of delta, or of it and liquid in turn; the states take dt, and dt is one more feature."""

    def __init__(self, features: int, width: int, layers: int = 2, liquid: bool = False, **options: Any) -> None:
        super().__init__()
        mixers = [{"kind": "delta", "heads": 4, "key_size": 8, **options}]
        if liquid:
            mixers.append({"kind": "liquid", **LIQUID, "state_size": width + width % 2})
        config = {"hidden_size": width, "depth": {"layers": layers}, "block": {"mlp": {"hidden": width}}}
        self.model = Network({**config, "mixer": mixers}, features + 1, features)

    def forward(self, x: Tensor, dt: Tensor) -> Tensor:
        return self.model(torch.cat([x, dt.unsqueeze(-1)], -1), dt=dt)[0]


class Gru(nn.Module):
    """dt is one more feature."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(features + 1, width, batch_first=True), nn.Linear(width, features)

    def forward(self, x: Tensor, dt: Tensor) -> Tensor:
        return self.head(self.gru(torch.cat([x, dt.unsqueeze(-1)], -1))[0])


class Cell(nn.Module):
    """A cell of `ncps`, which takes the time of each row as (B, 1)."""

    def __init__(self, cell: nn.Module, features: int, width: int) -> None:
        super().__init__()
        self.cell, self.head, self.width = cell, nn.Linear(width, features), width

    def forward(self, x: Tensor, dt: Tensor) -> Tensor:
        state, said = x.new_zeros(len(x), self.width), []
        for value, gap in zip(x.unbind(1), dt.unsqueeze(-1).unbind(1), strict=True):
            y, state = self.cell(value, state, gap)
            said.append(y)
        return self.head(torch.stack(said, 1))


def cfc(features: int, width: int) -> nn.Module:
    from ncps.torch import CfC

    return Cell(CfC(features, width, backbone_units=2 * width).rnn_cell, features, width)


def ltc(features: int, width: int) -> nn.Module:
    from ncps.torch import LTC
    from ncps.wirings import FullyConnected

    return Cell(LTC(features, FullyConnected(width)).rnn_cell, features, width)


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "liquid": Liquid,
    "liquid, dt a feature too": lambda f, w: Liquid(f, w, reads_time=True),
    "liquid, asked with a horizon": Asked,
    "liquid, tau of the input alone": lambda f, w: Liquid(f, w, state_dependence=False),
    "liquid without dt": lambda f, w: Liquid(f, w, knows_time=False),
    "delta, dt a feature too": Delta,
    "delta that rotates, dt a feature too": lambda f, w: Delta(f, w, transition="rotate"),
    "delta and liquid, dt a feature too": lambda f, w: Delta(f, w, liquid=True),
    "GRU, dt a feature": Gru,
    "CfC (ncps)": cfc,
    "LTC (ncps)": ltc,
}


def fitted(make: Callable[[int, int], nn.Module], features: int, parameters: int) -> nn.Module:
    """The model whose width brings it nearest to so many parameters; SystemExit if that is not within 5 %."""
    low, high = 1, 2
    while size(make(features, high)) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if size(make(features, middle)) >= parameters else (middle, high)
    best = min((make(features, width) for width in (low, high)), key=lambda m: abs(size(m) - parameters))
    if abs(size(best) - parameters) > 0.05 * parameters:
        raise SystemExit(f"no width gives {parameters} parameters within 5 %, {size(best)} is nearest; ask for more")
    return best


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# ---------------------------------------------------------------------- training


class Outcome(NamedTuple):
    model: nn.Module
    valid: float
    test: float
    seconds: float  # of the fastest epoch
    rate: float


def batches(data: Windows, rows: int, generator: torch.Generator | None = None) -> Iterator[Windows]:
    order = torch.arange(len(data.x)) if generator is None else torch.randperm(len(data.x), generator=generator)
    for chosen in order.split(rows):
        yield Windows(*(each[chosen] for each in data))


def learn(model: nn.Module, parts: tuple[Windows, Windows, Windows], rate: float, seed: int, epochs: int) -> Outcome:
    """Adam, cosine to a twentieth of the rate, gradients clipped at 1; the weights of the best epoch."""
    train, valid, test = parts
    if isinstance(model, Asked):
        model.begin(train)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, rate / 20)
    best, kept, fastest = float("inf"), copy.deepcopy(model.state_dict()), float("inf")
    for _ in range(epochs):
        began = time.perf_counter()
        for batch in batches(train, 8, generator):
            optimizer.zero_grad()
            (model(batch.x, batch.dt) - batch.target).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        fastest = min(fastest, time.perf_counter() - began)
        schedule.step()
        if (now := error(model, valid)) < best:
            best, kept = now, copy.deepcopy(model.state_dict())
    if best == float("inf"):
        raise SystemExit(f"at the rate {rate:g} no epoch ended with a finite error; take smaller --rates")
    model.load_state_dict(kept)
    return Outcome(model, best, error(model, test), fastest, rate)


@torch.no_grad()
def error(model: nn.Module, data: Windows) -> float:
    """The mean square over windows, steps and features."""
    total = sum(float((model(b.x, b.dt) - b.target).square().sum()) for b in batches(data, 64))
    return total / data.target.numel()


def compare(names: list[str], parts: tuple[Windows, Windows, Windows], options: argparse.Namespace) -> dict[str, Any]:
    """Rates are tried with the first seed; the better one is kept for the others."""
    features, found = parts[0].x.shape[2], {}
    print(f"{'model':38}{'parameters':>11}{'rate':>8}{'held-out error':>20}{'s an epoch':>12}", flush=True)
    for name in names:

        def run(rate: float, seed: int, name: str = name) -> Outcome:
            torch.manual_seed(seed)
            model = fitted(MODELS[name], features, options.parameters)
            return learn(model, parts, rate, seed, options.epochs)

        first = min((run(rate, 0) for rate in options.rates), key=lambda outcome: outcome.valid)
        outcomes = [first, *(run(first.rate, seed) for seed in range(1, options.seeds))]
        errors = np.array([outcome.test for outcome in outcomes])
        spread = f" +- {errors.std(ddof=1):.4f}" if len(errors) > 1 else ""
        seconds = min(outcome.seconds for outcome in outcomes)
        shown = f"{errors.mean():.4f}{spread}"
        print(f"{name:38}{size(first.model):>11,}{first.rate:>8g}{shown:>20}{seconds:>12.2f}", flush=True)
        found[name] = outcomes
    return found


def main() -> None:
    options = _options()
    torch.set_num_threads(1)  # models this small do not gain by more
    long = (7, 90) if options.quick else (31, 700)
    series = oscillators(*long) if options.data is None else from_folder(options.data, options.drop)
    train, valid, test = split(series, options.window)
    print(
        f"{len(series)} series, {train.x.shape[2]} features; windows of {options.window} steps: {len(train.x)} to train"
    )
    print(f"error of the mean: {float(test.target.square().mean()):.4f}", end=", ")
    print(f"of the value before: {float((test.x - test.target).square().mean()):.4f}")
    found = compare(_available(options.models), (train, valid, test), options)
    for seed, outcome in enumerate(found.get("liquid", [])):
        model = outcome.model.model
        print(f"\ntime constants of liquid, seed {seed}, in units of dt")
        print(pattern_table(compare_patterns(model, signals(model), against="spiky"), against="spiky"))


def _available(names: list[str]) -> list[str]:
    try:
        import ncps  # noqa: F401
    except ImportError:
        print("CfC and LTC are left out: they need ncps; install it with `pip install ncps`")
        return [name for name in names if "ncps" not in name]
    return names


def add_training_options(parser: argparse.ArgumentParser, epochs: int, rates: list[float]) -> None:
    parser.add_argument("--parameters", type=at_least(1), default=10_000)
    parser.add_argument("--epochs", type=at_least(1), default=epochs)
    parser.add_argument("--rates", type=rate, nargs="+", default=rates, help="the best with the first seed is kept")
    parser.add_argument("--seeds", type=at_least(1), default=1)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, such as 3e-3, got {text}")
    return value


def _options() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder of .npy files (time, features); generated series if absent")
    parser.add_argument("--drop", type=float, default=0.3, help="share of the rows that is dropped, with --data")
    parser.add_argument("--window", type=at_least(1), default=64)
    add_training_options(parser, 20, [3e-3, 1e-2])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    help = "a few windows, one epoch, in the place of what the other options say: shows that it runs"
    parser.add_argument("--quick", action="store_true", help=help)
    options = parser.parse_args()
    if not 0 <= options.drop < 1:
        parser.error(f"--drop must be at least 0 and below 1, got {options.drop}")
    if options.quick:
        options.window, options.parameters, options.epochs, options.rates = 16, 10_000, 1, [1e-2]
    return options


if __name__ == "__main__":
    main()
