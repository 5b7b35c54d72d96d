"""Peers of other packages on the tables of tasks.yaml: `python -m benchmarks.series.peers TASK --data DIR --out DIR`

In an environment of their own: `pip install ncps torchcde pypots aeon statsforecast`. Those that are layers take the
mixer's place in the frame of `compare`: inputs, anchor, head, loop, budget and parameters are the same, so that what
differs is how they carry information along time. One layer replaces each of the two mixers.

    grud        GRU whose state decays over the step before it reads it, by TemporalDecay of pypots: its GRU-D imputes
                and classifies on a fixed number of steps, and cannot forecast. Ages, masks and means of channels, by
                which GRU-D decays inputs, are inputs of the frame
    cfc         CfCCell of ncps, looped here: CfC multiplies the times of a batch along the wrong axis
    cde         a neural controlled differential equation of torchcde along the line through what was read, by the
                midpoint rule with a step an observation, which reads nothing ahead
    time        attention over learned features of time, after Shukla and Marlin 2021; those of pypots cannot forecast

And those that are no layers, as the only model named, whose lines go to OUT/others.jsonl:

    minirocket  MiniRocketClassifier of aeon on classes of series, stretched to the longest: the channels and time
    ets         AutoETS of statsforecast with a period of 24 rows, a channel of a series each, on tasks with horizons.
                It takes no gaps, so that missing hours are interpolated. It is fitted to the end of what is trained
                on, and reads the last 60 days before each origin
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.series import compare
from glissando.config import options
from glissando.errors import InputError
from glissando.mixers import Context, Mixer, register_mixer
from glissando.mixers.base import placement


@options
class PeerConfig:
    """Peers have no options, and each a class of them, by which a saved model is known."""


class Peer(Mixer):
    """A layer that is trained and tested on whole windows: it has no state to continue from."""

    accepts = frozenset({"mask", "dt"})

    def __init__(self, hidden_size: int, config: PeerConfig | None = None) -> None:
        super().__init__()
        self.width = hidden_size

    def init_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> Tensor:
        return torch.zeros(batch_size, self.width, **placement(self, device, dtype))

    def forward(self, x: Tensor, state: Any = None, ctx: Context | None = None) -> tuple[Tensor, Any]:
        if state is not None:
            raise InputError("a peer reads whole windows: leave the state out")
        dt = self.context(ctx).dt
        return self.along(x, torch.ones_like(x[..., 0]) if dt is None else dt.to(x.dtype)), None

    @abstractmethod
    def along(self, x: Tensor, dt: Tensor) -> Tensor:
        """y (B, T, D) of x (B, T, D), dt (B, T) the time since the step before."""


class GRUD(Peer):
    """h <- exp(-max(0, w dt + b)) h; h <- GRU(x, h)."""

    def __init__(self, hidden_size: int, config: PeerConfig | None = None) -> None:
        from pypots.nn.modules.grud.layers import TemporalDecay

        super().__init__(hidden_size)
        self.cell = nn.GRUCell(hidden_size, hidden_size)
        self.decay = TemporalDecay(input_size=1, output_size=hidden_size)

    def along(self, x: Tensor, dt: Tensor) -> Tensor:
        h, made = torch.zeros_like(x[:, 0]), list[Tensor]()
        for value, decay in zip(x.unbind(1), self.decay(dt.unsqueeze(-1)).unbind(1), strict=True):
            h = self.cell(value, h * decay)
            made.append(h)
        return torch.stack(made, 1)


class CfC(Peer):
    """The closed-form continuous-time cell of Hasani et al. 2022."""

    def __init__(self, hidden_size: int, config: PeerConfig | None = None) -> None:
        from ncps.torch import CfCCell

        super().__init__(hidden_size)
        self.cell = CfCCell(hidden_size, hidden_size, backbone_units=hidden_size, backbone_layers=1)

    def along(self, x: Tensor, dt: Tensor) -> Tensor:
        h, made = torch.zeros_like(x[:, 0]), list[Tensor]()
        for value, gap in zip(x.unbind(1), dt.unsqueeze(-1).unbind(1), strict=True):
            y, h = self.cell(value, h, gap)
            made.append(y)
        return torch.stack(made, 1)


class CDE(Peer):
    """dz = f(z) dX (Kidger et al. 2020), X the line through a projection of x and the time."""

    channels = 8

    def __init__(self, hidden_size: int, config: PeerConfig | None = None) -> None:
        super().__init__(hidden_size)
        self.read = nn.Linear(hidden_size, self.channels)
        self.field = nn.Sequential(
            nn.Linear(hidden_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size * (self.channels + 1))
        )

    def along(self, x: Tensor, dt: Tensor) -> Tensor:
        import torchcde

        path = torch.cat([self.read(x), dt.cumsum(1).unsqueeze(-1)], -1)
        path = torch.cat([torch.zeros_like(path[:, :1]), path], 1)  # from zero, so that the first step is read too
        line = torchcde.LinearInterpolation(torchcde.linear_interpolation_coeffs(path))

        def field(_: Tensor, z: Tensor) -> Tensor:
            return self.field(z).tanh().unflatten(-1, (self.width, self.channels + 1))

        z = torchcde.cdeint(
            X=line, func=_Field(field), z0=torch.zeros_like(x[:, 0]), t=line.grid_points, adjoint=False,
            method="midpoint", options={"step_size": 1.0},
        )  # fmt: skip
        return z[:, 1:]


class _Field(nn.Module):
    """torchcde takes a module alone."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.function(t, z)


class TimeAttention(Peer):
    """Attention whose queries and keys read features (w t, sin(v t)) of the time since the window's first step."""

    heads = 2

    def __init__(self, hidden_size: int, config: PeerConfig | None = None) -> None:
        super().__init__(hidden_size)
        self.time = nn.Linear(1, hidden_size)
        self.queries, self.keys = nn.Linear(2 * hidden_size, hidden_size), nn.Linear(2 * hidden_size, hidden_size)
        self.values, self.out = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def along(self, x: Tensor, dt: Tensor) -> Tensor:
        t = self.time(dt.cumsum(1).unsqueeze(-1))
        read = torch.cat([x, torch.cat([t[..., :1], t[..., 1:].sin()], -1)], -1)
        parts = (self.queries(read), self.keys(read), self.values(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


PEERS: dict[str, type[Peer]] = {"grud": GRUD, "cfc": CfC, "cde": CDE, "time": TimeAttention}


# ---------------------------------------------------------------------- no layers


def minirocket(task: str, settings: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The accuracy by test, and the CPU seconds of the fit."""
    from aeon.classification.convolution_based import MiniRocketClassifier

    train, tests = compare.tables(task, settings.data, settings.out)
    longest = max(_longest(path) for path in (train, *tests.values()))
    began = time.process_time()
    model = MiniRocketClassifier(random_state=seed, n_jobs=1).fit(*_stretched(train, longest))
    seconds = time.process_time() - began
    found = {}
    for name, path in tests.items():
        x, y = _stretched(path, longest)
        found[name] = {"label": {"model": {"accuracy": float((model.predict(x) == y).mean())}}}
    return {"task": task, "model": "minirocket", "seed": seed, "seconds": seconds, "tests": found}


def _longest(path: Path) -> int:
    import pandas as pd

    return int(pd.read_csv(path).groupby("series").size().max())


def _stretched(path: Path, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Series (N, channels and time, length), drawn out evenly over their time, and their labels (N,)."""
    import pandas as pd

    made, labels = [], []
    for _, group in pd.read_csv(path).groupby("series", sort=False):
        values = group.drop(columns=["series", "label"]).to_numpy(float).T
        at = group["t"].to_numpy(float)
        grid = np.linspace(at[0], at[-1], length)
        made.append(np.stack([np.interp(grid, at, channel) for channel in values]))
        labels.append(str(group["label"].iloc[0]))
    return np.stack(made), np.array(labels)


def ets(task: str, settings: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The root mean square error by horizon and channel, from origins spaced as those of `compare.at_horizons`."""
    import pandas as pd
    from statsforecast.models import AutoETS

    made, days = compare.TASKS[task], 60 * 24
    train, tests = compare.tables(task, settings.data, settings.out)
    hours = {name: int(text.removesuffix("h")) for name, text in made["horizons"].items()}
    errors: dict[str, dict[str, list[float]]] = {name: {channel: [] for channel in made["score"]} for name in hours}
    seen, held = (dict(iter(pd.read_csv(path).groupby("origin"))) for path in (train, tests[""]))
    began = time.process_time()
    for who, rows in held.items():
        rows = rows.set_index(pd.to_datetime(rows["time_hour"]))
        whole = pd.concat([seen[who].set_index(pd.to_datetime(seen[who]["time_hour"])), rows])
        at = np.unique(np.linspace(len(rows) // 2, len(rows) - 1, made["origins"] + 1).astype(int))[:-1]
        for channel in made["score"]:
            hourly = whole[channel].resample("h").mean()

            def until(end: Any, hourly: pd.Series = hourly) -> np.ndarray:
                """What is known at a time: its gaps, which the model cannot have, are filled from before it alone."""
                return hourly[:end].iloc[-days:].interpolate(limit_direction="both").to_numpy(float)

            model = AutoETS(season_length=24).fit(until(rows.index[0] - pd.Timedelta(hours=1)))
            for origin in rows.index[at]:
                ahead = model.forward(until(origin), max(hours.values()))["mean"]
                for name, h in hours.items():
                    value = rows[channel].get(origin + pd.Timedelta(hours=h), np.nan)
                    errors[name][channel] += [] if np.isnan(value) else [float(ahead[h - 1] - value) ** 2]
    found = {
        name: {channel: {"model": {"rmse": float(np.mean(squares) ** 0.5)}} for channel, squares in each.items()}
        for name, each in errors.items()
    }  # fmt: skip
    return {"task": task, "model": "ets", "seed": seed, "seconds": time.process_time() - began, "tests": found}


OTHERS = {"minirocket": minirocket, "ets": ets}


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models", default=",".join(PEERS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    settings, rest = parser.parse_known_args(arguments)
    if settings.models not in OTHERS:
        for name, peer in PEERS.items():
            register_mixer(name, options(type(f"{peer.__name__}Config", (PeerConfig,), {})))(peer)
        compare.main(arguments, {name: {"kind": name} for name in PEERS})
        return
    for task in [each for each in rest if each in compare.TASKS]:
        made = [OTHERS[settings.models](task, settings, seed) for seed in range(settings.seeds)]
        with (settings.out / "others.jsonl").open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in made)
        for one in made:
            print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
