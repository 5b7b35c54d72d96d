"""What the steps of a flow cost and what they buy: quality, latency and convergence of every solver.

    distance of n steps = |H_n(1) - H*(1)| / |H*(1) - H(0)|,    H* by REFERENCE

H(0) is the flow's input and H(1) its output. The distance is relative to how far the flow moves its input, because a
flow that hardly moves it makes every solver look exact beside |H(1)|.

Every setting reads the same text, so that differences between settings are far surer than any of the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glissando.backbone import for_saved_weights
from glissando.data.base import IGNORED, Batch, Corpus
from glissando.depth.flow import FlowDepth
from glissando.depth.solvers import TABLEAUS, evaluations
from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.scoring import accepted_control, score
from glissando.generation import tokens_left
from glissando.kernels.precise import has_float64
from glissando.model import LanguageModel
from glissando.progress import track

STEPS = (1, 2, 4, 8, 16)
MOST_EVALUATIONS = 32
#: of held-out text that every setting reads: one to two minutes on one core at the nano size
SAMPLE_BYTES = 8192
_CONTEXT, _NEW = 16, 4  # tokens that are read, then decoded and timed
_PATH = 128  # tokens whose way through the flow is followed


class Setting(NamedTuple):
    """How a flow is solved."""

    method: str
    n_steps: int

    def __str__(self) -> str:
        return f"{self.method}, {self.n_steps} step{'s' if self.n_steps > 1 else ''}"


REFERENCE = Setting("rk4", 32)


@dataclass(frozen=True)
class Solved:
    """A model under one setting: field evaluations a pass, bits per byte, milliseconds, and the distance above."""

    method: str
    n_steps: int
    evaluations: int
    bits_per_byte: float
    forward_ms: float
    token_ms: float
    distance: float


@dataclass(frozen=True)
class StepCurve:
    """A model under every setting; `trained` is its own, `n_bytes` what was read, `length` the tokens of a forward."""

    rows: list[Solved]
    trained: Setting
    n_bytes: int
    length: int

    def as_dict(self) -> dict[str, Any]:
        """What `glissando evaluate --steps true` writes."""
        return {
            "bytes": self.n_bytes,
            "forward_tokens": self.length,
            "trained": self.trained._asdict(),
            "settings": [asdict(row) for row in self.rows],
        }

    def table(self) -> str:
        """One line a setting."""
        lines = [
            f"steps of the flow: {self.n_bytes:,} bytes of held-out text; ms to read {self.length} tokens and to "
            "decode one; distance over |H(1) - H(0)|; * as trained",
            "    method     steps  evaluations  bits per byte   ms read   ms token   distance",
        ]
        for row in self.rows:
            mark = "*" if Setting(row.method, row.n_steps) == self.trained else " "
            lines.append(
                f"  {mark} {row.method:9}  {row.n_steps:5}  {row.evaluations:11}  {row.bits_per_byte:13.4f}  "
                f"{row.forward_ms:8.2f}   {row.token_ms:8.2f}   {row.distance:8.1e}"
            )
        return "\n".join(lines)


def has_flow(model: LanguageModel) -> bool:
    return isinstance(model.depth, FlowDepth)


def settings(trained: Setting) -> list[Setting]:
    """Every method at every number of steps that takes at most MOST_EVALUATIONS, and the trained setting."""
    every = [Setting(method, n) for method in TABLEAUS for n in STEPS]
    chosen = [setting for setting in every if evaluations(*setting) <= MOST_EVALUATIONS]
    order = list(TABLEAUS)
    return sorted({*chosen, trained}, key=lambda setting: (order.index(setting.method), setting.n_steps))


def measure_steps(
    model: LanguageModel,
    corpus: Corpus,
    trained: Setting | None = None,
    *,
    sample_bytes: int = SAMPLE_BYTES,
    rounds: int = 5,
) -> StepCurve:
    """The model under every setting, on at most about `sample_bytes` of the corpus's held-out text.

    trained   the setting to mark: the model's own if None
    rounds    timings of each setting, taken in turn so that all share what else the machine does; the median counts

    Raises ValueError for a model without a flow, DataError if there is nothing to score.
    """
    if not isinstance(model.depth, FlowDepth):
        raise ValueError(f"steps are those of a flow, and this model's depth is a {type(model.depth).__name__}")
    config = model.depth.config
    trained = trained or Setting(config.method, model.depth.n_steps)
    models = {setting: solved_with(model, setting) for setting in settings(trained)}
    batches = sample(corpus, sample_bytes)
    row = one_text(batches[len(batches) // 2])
    times = _latencies(models, row, rounds)
    gaps = distances(model, [*models], row)
    rows = [
        Solved(
            *setting,
            evaluations(*setting),
            score(variant, batches).bits_per_byte,
            *times[setting],
            gaps[setting],
        )
        for setting, variant in track(models.items(), "reading the text", total=len(models), unit="settings")
    ]
    return StepCurve(rows, trained, sum(batch.n_bytes for batch in batches), row.ids.shape[1])


def solved_with(model: LanguageModel, setting: Setting) -> LanguageModel:
    """The same weights, not copied, under another setting, in evaluation mode."""
    depth = replace(model.config.depth, n_steps=setting.n_steps, method=setting.method)
    with torch.device("meta"):
        variant = LanguageModel(replace(for_saved_weights(model.config), depth=depth), model.tokenizer)
    variant.load_state_dict(model.state_dict(), assign=True)
    return variant.eval()


def sample(corpus: Corpus, n_bytes: int) -> list[Batch]:
    """Held-out batches spread evenly over the corpus, of about `n_bytes`; of a single larger one, its first rows."""
    sizes = [batch.n_bytes for batch in corpus.batches("valid")]
    every = max(1, math.ceil(sum(sizes) / n_bytes))
    chosen = [batch for i, batch in enumerate(corpus.batches("valid")) if i % every == min(every, len(sizes)) // 2]
    largest = max(1, n_bytes // max(len(chosen), 1))
    return [_rows(b, max(1, len(b.ids) * largest // b.n_bytes)) if b.n_bytes > 2 * largest else b for b in chosen]


def _rows(batch: Batch, n: int) -> Batch:
    """The first n rows; their bytes are their targets' share of the batch's."""
    if n >= len(batch.ids):
        return batch
    scored = batch.targets != IGNORED
    n_bytes = round(batch.n_bytes * int(scored[:n].sum()) / max(int(scored.sum()), 1))
    tensors = {name: value[:n] for name, value in batch._asdict().items() if isinstance(value, Tensor)}
    return batch._replace(**tensors, n_bytes=n_bytes, floor_bits=None)


def one_text(batch: Batch) -> Batch:
    """The first row without its padding."""
    row = _rows(batch, 1)
    n = row.ids.shape[1] if row.mask is None else int(row.mask.sum())
    return row._replace(ids=row.ids[:, :n], targets=row.targets[:, :n], mask=None)


# ---------------------------------------------------------------------- latency


def _latencies(models: dict[Setting, LanguageModel], batch: Batch, rounds: int) -> dict[Setting, tuple[float, float]]:
    """Milliseconds to read one row and to decode one token: medians over rounds, the settings in turn."""
    taken: dict[Setting, list[tuple[float, float]]] = {setting: [] for setting in models}
    for _ in track(range(rounds + 1), "timing every setting", unit="rounds"):
        for setting, model in models.items():
            taken[setting].append((_forward_ms(model, batch), _token_ms(model, batch)))
    # The first round is slower for what is allocated and remembered in it.
    return {
        setting: (statistics.median(f for f, _ in seen[1:]), statistics.median(t for _, t in seen[1:]))
        for setting, seen in taken.items()
    }


@torch.no_grad()
def _forward_ms(model: LanguageModel, batch: Batch) -> float:
    control, device = accepted_control(model, batch), model.embedding.weight.device
    ids = batch.ids.to(device)
    control = None if control is None else control.to(device)
    return _milliseconds(lambda: model(ids, control=control), device)


@torch.no_grad()
def _token_ms(model: LanguageModel, batch: Batch) -> float:
    """Greedy decoding behind a short context, a token at a time."""
    control, device = accepted_control(model, batch), model.embedding.weight.device
    control = None if control is None else control.to(device)
    new = min(_NEW, max(1, tokens_left(model, 1)))
    prompt = batch.ids[:, : max(1, min(_CONTEXT, tokens_left(model, new)))].to(device)
    logits, state = model(prompt, model.init_state(1), control=control)

    def decode() -> None:
        nonlocal logits, state
        for _ in range(new):
            logits, state = model(logits[:, -1:].argmax(-1), state, control=control, donate=True)

    return _milliseconds(decode, device) / new


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    run()
    wait()
    return 1e3 * (time.perf_counter() - began)


# ---------------------------------------------------------------------- convergence


def distances(model: LanguageModel, chosen: list[Setting], batch: Batch) -> dict[Setting, float]:
    """|H_n(1) - H*(1)| / |H*(1) - H(0)| over one row, in float64; NaN if the flow does not move at all."""
    start, end = flow_ends(solved_with(model, REFERENCE), batch)
    moved = (end - start).norm()
    ends = track(chosen, "distances from the reference", unit="settings")
    away = {setting: (flow_ends(solved_with(model, setting), batch)[1] - end).norm() for setting in ends}
    return {setting: float(gap / moved) if moved > 0 else math.nan for setting, gap in away.items()}


@torch.no_grad()
def flow_ends(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """H(0) and H(1) of a batch, in float64. The model, one of `solved_with`, is made float64 by it."""
    model = (model if has_float64(model.embedding.weight.device) else model.cpu()).double()
    depth, seen = model.depth, {}
    assert isinstance(depth, FlowDepth)

    def keep(name: str, index: int) -> Callable[..., None]:
        def hook(_: Any, given: Any, result: Any = None) -> None:
            seen[name] = (given if result is None else result)[index]

        return hook

    # The flow starts from the last block before it; without one from the depth's input.
    hooks = [
        depth.before[-1].register_forward_hook(keep("start", 0))
        if len(depth.before)
        else depth.register_forward_pre_hook(keep("start", 0)),
        depth.end.register_forward_pre_hook(keep("end", 0)),
    ]
    device, control = model.embedding.weight.device, accepted_control(model, batch)
    try:
        model(batch.ids[:, :_PATH].to(device), control=None if control is None else control.to(device, torch.float64))
    finally:
        for hook in hooks:
            hook.remove()
    return seen["start"], seen["end"]


# ---------------------------------------------------------------------- pictures

_STYLES = {"euler": ("#5f6b76", "o"), "midpoint": ("#c77700", "s"), "heun": ("#0b6e99", "^"), "rk4": ("#b3261e", "D")}


def plot_steps(curve: StepCurve, target: Path) -> Path:
    """Bits per byte against field evaluations (log) and against milliseconds; a ring around the trained setting."""
    figure, (left, right) = figure_and_axes(columns=2)
    for axes, x in ((left, "evaluations"), (right, "forward_ms")):
        for method, rows in _by_method(curve):
            _line(axes, method, [(getattr(row, x), row.bits_per_byte) for row in rows])
        _ring(axes, curve, x, "bits_per_byte")
        axes.set(ylabel="bits per byte", xscale="log", ylim=_room([row.bits_per_byte for row in curve.rows]))
        axes.ticklabel_format(axis="y", useOffset=False)
        _plain_ticks(axes, [getattr(row, x) for row in curve.rows])
    left.set(xlabel="field evaluations a pass", title=f"{curve.n_bytes:,} bytes sampled from held-out text")
    right.set(xlabel=f"ms to read {curve.length:,} tokens, one row", title="Latency, median of runs in turn")
    bits = [row.bits_per_byte for row in curve.rows]
    note = f"largest difference: {max(bits) - min(bits):.1g} bits per byte"
    right.text(0.97, 0.97, note, transform=right.transAxes, fontsize=8, ha="right", va="top")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(target)
    return target


def plot_convergence(curve: StepCurve, target: Path) -> Path:
    """How far each setting ends from REFERENCE, over how far the flow goes, against the number of steps."""
    figure, (axes,) = figure_and_axes()
    for method, rows in _by_method(curve):
        _line(axes, f"{method} (order {TABLEAUS[method].order})", [(row.n_steps, row.distance) for row in rows], method)
    _ring(axes, curve, "n_steps", "distance")
    axes.set(xscale="log", yscale="log", xlabel="steps")
    axes.set(ylabel="|H$_n$(1) $-$ H*(1)| / |H*(1) $-$ H(0)|", title=f"Distance from {REFERENCE}")
    _plain_ticks(axes, [row.n_steps for row in curve.rows])
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target)
    return target


def _by_method(curve: StepCurve) -> Iterator[tuple[str, list[Solved]]]:
    for method in TABLEAUS:
        yield method, [row for row in curve.rows if row.method == method]


def _line(axes: Any, label: str, points: list[tuple[float, float]], method: str | None = None) -> None:
    color, marker = _STYLES.get(method or label, ("#2e7d32", "v"))
    axes.plot(*zip(*points, strict=True), label=label, color=color, marker=marker, markersize=4.5, linewidth=1.5)


def _ring(axes: Any, curve: StepCurve, x: str, y: str) -> None:
    for row in curve.rows:
        if Setting(row.method, row.n_steps) == curve.trained:
            label = f"as trained: {curve.trained}"
            ring = {"s": 130, "facecolors": "none", "edgecolors": "black", "linewidths": 1.3, "zorder": 5}
            axes.scatter([getattr(row, x)], [getattr(row, y)], label=label, **ring)


def _room(values: list[float], least: float = 0.01) -> tuple[float, float]:
    """Limits around the values, at least `least` apart: what makes no difference shall not look like one."""
    middle, half = (min(values) + max(values)) / 2, max(0.56 * (max(values) - min(values)), least / 2)
    return middle - half, middle + half


def _plain_ticks(axes: Any, values: list[float]) -> None:
    """Powers of two within the values, as plain numbers."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    ticks = [2.0**power for power in range(low, high + 1)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def main() -> None:
    """Print the table, and draw the pictures into --out."""
    from glissando.config import from_dict
    from glissando.data.corpora import CORPORA, build_corpus
    from glissando.loading import load
    from glissando.runs import Run

    parser = argparse.ArgumentParser(prog="python -m research.flow_steps", description=__doc__)
    parser.add_argument("run", help="run directory of a flow")
    parser.add_argument("--out", type=Path, required=True, help="directory to create for steps.json and pictures")
    options = parser.parse_args()
    model = load(options.run)
    data = from_dict(CORPORA.section(), Run.open(options.run).read_config().get("data", {}), "data")
    corpus = build_corpus(data, model.tokenizer)
    curve = measure_steps(model, corpus)
    print(curve.table())
    options.out.mkdir(parents=True)
    pictures = [
        plot_steps(curve, options.out / "steps.png"), plot_convergence(curve, options.out / "convergence.png")
    ]  # fmt: skip
    (options.out / "steps.json").write_text(json.dumps({"steps": curve.as_dict()}, indent=2) + "\n")
    for picture in pictures:
        print(f"picture: {picture}")


if __name__ == "__main__":
    main()
