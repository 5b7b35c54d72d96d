"""Is growing cheaper? FLOPs and seconds until a held-out loss is reached: grown in stages, and from scratch.

For each task and seed a model is trained from scratch at the final size, and once more in stages that grow to it. The
target is the held-out loss that the first ends with, and 0.01 nats more. FLOPs are those of glissando.flops; the
grown run pays for all of its stages. It is given --budget times the FLOPs of the other, over which its learning rate
falls: what half the FLOPs are worth is not to be seen half way through a schedule made for all of them. Every run
leaves its directory, with metrics.csv.

    python -m research.grow_or_scratch --tasks shift stories --seeds 3 --out runs/growth
    python -m research.grow_or_scratch --quick
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from glissando.config import merge
from glissando.metrics import read_metrics
from glissando.presets import load_preset
from glissando.runs import METRICS, Run
from glissando.stages import plans, train_stages
from glissando.training.config import RunConfig
from glissando.training.fit import train
from research.runs import configured, options_of


class Task(NamedTuple):
    """The smallest model, how it grows, what share of the FLOPs each size is given, and what scratch may spend."""

    preset: str
    model: dict[str, Any]
    data: dict[str, Any]
    growths: list[dict[str, Any]]
    shares: list[float]
    flops: float
    rate: float
    final_ratio: float


TASKS = {
    # 2,648 -> 7,232 -> 19,328 parameters; a head size of 8 tells positions apart, see docs/minimal-transformer.md
    "shift": Task(
        "minimal-transformer",
        {},
        {"kind": "shift", "seq_len": 32, "batch_size": 128, "valid_rows": 512},
        [{"width": 2, "head_size": 8}, {"width": 2}],
        [0.05, 0.15, 0.8],
        2e12,
        1e-2,
        0.05,
    ),
    # 267,968 -> 1,037,696 parameters, transformer-nano's size
    "stories": Task(
        "transformer-nano",
        {"hidden_size": 64, "mixer": {"kind": "attention", "heads": 2, "head_size": 32}, "depth": {"layers": 5}},
        {"kind": "stories", "seq_len": 512, "batch_size": 4},
        [{"width": 2}],
        [0.2, 0.8],
        1.2e13,
        2e-3,
        0.02,
    ),
}


def main() -> None:
    options = _options()
    if options.out is not None:
        report(options, Path(options.out))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(options, Path(folder))


def report(options: argparse.Namespace, folder: Path) -> None:
    """The table, a line as soon as its runs are done."""
    print(
        f"{'task':9}{'seed':>5}{'target':>9}{'scratch FLOPs':>15}{'grown':>11}{'share':>7}{'seconds':>18}{'share':>7}"
    )
    for name in options.tasks:
        shares = [compare(name, seed, options, folder) for seed in range(options.seeds)]
        reached = [share for share in shares if share is not None]
        middle = f"median {median(reached):.0%} of the FLOPs" if reached else "never"
        print(f"{name}: target reached in {len(reached)} of {len(shares)} seeds; {middle}", flush=True)


def compare(name: str, seed: int, options: argparse.Namespace, folder: Path) -> float | None:
    """Grown over scratch in FLOPs to the target; None if the grown run does not reach it."""
    scratch, grown = trained(TASKS[name], seed, options, folder / f"{name}-{seed}")
    target = validations([scratch])[-1][0] + options.slack
    first, second = cost(validations([scratch]), target), cost(validations(grown), target)
    assert first is not None
    show(name, seed, target, first, second)
    return None if second is None else second[0] / first[0]


def trained(task: Task, seed: int, options: argparse.Namespace, folder: Path) -> tuple[Run, list[Run]]:
    """The run from scratch, and those of the stages, in folders whose names begin so."""
    flops = options.flops or task.flops
    staged, place = _staged(task, seed, options.budget * flops, options), folder.with_name(f"{folder.name}-grown")
    grown = train_stages(staged, place)
    *_, last = plans(staged, place)
    large = {"model": last.config.as_dict()["model"], "training": {"flops": flops}, "data": {"seed": seed}}
    config = configured(_shared(task, seed, options), large)
    # Sizes stay; what makes a grown model a grown one does not.
    config.model.logit_scale, config.model.depth.gated, config.model.mixer.scale = 1.0, [], None
    return train(config, folder.with_name(f"{folder.name}-scratch")), grown


def show(name: str, seed: int, target: float, first: tuple[float, float], second: tuple[float, float] | None) -> None:
    line = f"{name:9}{seed:>5}{target:>9.4f}{first[0]:>15.3g}"
    if second is None:
        print(f"{line}    not reached", flush=True)
        return
    shares = f"{second[0]:>11.3g}{second[0] / first[0]:>7.0%}", f"{second[1] / first[1]:>7.0%}"
    print(f"{line}{shares[0]}{first[1]:>9.0f}{second[1]:>9.0f}{shares[1]}", flush=True)


def cost(validations: list[tuple[float, float, float]], target: float) -> tuple[float, float] | None:
    """FLOPs and seconds at the first validation whose loss is at most the target."""
    return next(((flops, seconds) for loss, flops, seconds in validations if loss <= target), None)


def validations(runs: list[Run]) -> list[tuple[float, float, float]]:
    """Held-out loss, FLOPs and seconds, over all runs in a row."""
    found, flops, seconds = [], 0.0, 0.0
    for run in runs:
        rows = read_metrics(run.path / METRICS)
        for row in rows:
            if row["valid_loss"]:
                spent = flops + float(row["flops"]), seconds + float(row["seconds"])
                found.append((float(row["valid_loss"]), *spent))
        flops, seconds = flops + float(rows[-1]["flops"]), seconds + float(rows[-1]["seconds"])
    return found


def _shared(task: Task, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    preset = load_preset(task.preset)
    training = {
        "seed": seed,
        "optimizer": {"kind": "adamw", "learning_rate": options.rate or task.rate, "beta2": 0.99},
        "schedule": {"kind": "warmup-cosine", "warmup_steps": 50, "final_ratio": task.final_ratio},
        "validate_every": options.every,
        "sample_every": 10**9,
        "save_every": 10**9,
        "log_every": options.every,
    }
    return merge(RunConfig, preset, {"model": task.model, "data": task.data, "training": training})


def _staged(task: Task, seed: int, flops: float, options: argparse.Namespace) -> RunConfig:
    """Constant rates until the last stage, which falls as scratch does; stages see other data."""
    stages = []
    for number, (growth, share) in enumerate(zip([{}, *task.growths], options.shares or task.shares, strict=True)):
        last = number == len(task.growths)
        schedule = {"kind": "warmup-cosine" if last else "constant", "warmup_steps": 0 if number else 50}
        stages.append(
            {
                "name": f"size-{number + 1}",
                "grow": growth,
                "data": {"seed": 1000 * number + seed},
                "training": {"flops": share * flops, "schedule": schedule},
            }
        )
    shared = merge(RunConfig, _shared(task, seed, options), {"training": {"optimizer": {"release": options.release}}})
    return configured(shared, {"stages": stages})


def _options() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--flops", type=float, help="what each run may spend, if other than the task's own")
    parser.add_argument("--budget", type=float, default=1.0, help="what the grown run may spend, of that")
    parser.add_argument(
        "--shares", type=float, nargs="+", help="how it divides that among its sizes, if not as its task says"
    )
    parser.add_argument("--rate", type=float, help="learning rate of both, if other than the task's own")
    parser.add_argument("--every", type=int, default=100, help="steps between validations")
    parser.add_argument("--slack", type=float, default=0.01, help="nats that the target is above scratch's last loss")
    parser.add_argument("--release", type=int, help="steps after which grown matrices get the whole learning rate back")
    parser.add_argument("--out", help="directory for the runs; a temporary one if none")
    parser.add_argument("--quick", action="store_true", help="one task, a few steps: shows that it runs")
    options = parser.parse_args()
    if options.shares and (len(options.tasks) > 1 or len(options.shares) != len(TASKS[options.tasks[0]].shares)):
        parser.error("--shares are of one task, one for each of its sizes: name it with --tasks")
    if options.shares and abs(sum(options.shares) - 1) > 1e-6:
        parser.error(f"--shares must sum to 1, got {sum(options.shares):g}")
    if options.quick:
        options.tasks, options.seeds, options.flops, options.every = ["shift"], 1, 1e9, 5
    return options


if __name__ == "__main__":
    main()
