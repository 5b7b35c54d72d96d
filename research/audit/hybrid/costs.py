"""What the flow of the Hybrid ODE Transformer costs: latency (experiment 4) and memory."""

from __future__ import annotations

import itertools
import statistics
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from research.audit.claim import Finding, Plan
from research.audit.hybrid.training import GPT2_ENTRIES, gradient_of, size_of
from research.intervals import Median, median_of
from research.published.hybrid_ode import ODEBlock, PublishedHybrid
from research.reversible import ReversibleFlow


def latency_as_published(plan: Plan) -> Finding:
    """Whole passes of both models with their heads of 50,257 rows, in turn."""
    found = latency_of(plan, head=True)
    said = f"{1e3 * found.hybrid:.1f} against {1e3 * found.baseline:.1f} ms a batch of {_batch(plan)}: {found.ratio}"
    checks = {"1.27x within 5 %": found.ratio.between(0.95 * 1.27, 1.05 * 1.27)}
    return Finding(said, found._asdict(), checks)


def latency_corrected(plan: Plan) -> Finding:
    """The same with and without the head, beside the ratio of multiplications in matrix products."""
    said, figures, checks = [], {}, dict[str, bool | None]()
    for name, head in (("with the head", True), ("without it", False)):
        found = latency_of(plan, head=head)
        said.append(f"{name} {found.ratio}, of {found.counted:.3f}x the multiplications")
        figures[name] = found._asdict()
        checks[f"{name}, 1.33 times the multiplications"] = abs(found.counted / (4 / 3) - 1) < 0.02
        likely = found.ratio.between(0.9 * found.counted, 1.1 * found.counted)
        checks[f"{name}, the time that the multiplications predict within 10 %"] = likely
    return Finding(f"{'; '.join(said)} (a batch of {_batch(plan)}; medians of pairs)", figures, checks)


class Latency(NamedTuple):
    """Median seconds of both, the ratio of pairs, and the ratio of multiplications."""

    hybrid: float
    baseline: float
    ratio: Median
    counted: float


def _batch(plan: Plan) -> str:
    size = size_of(plan)
    return f"{size.batch // 4} x {size.length}"


@lru_cache(maxsize=4)
def latency_of(plan: Plan, head: bool) -> Latency:
    """Both forms of the claim read the same measurement."""
    from benchmarks.flow import multiplications, seconds
    from benchmarks.speed import in_turn

    size = size_of(plan)
    vocabulary = 256 if plan.quick else GPT2_ENTRIES
    models = [PublishedHybrid(vocabulary, size.width, size.heads, ode=ode).eval() for ode in (True, False)]
    ids = torch.randint(vocabulary, (size.batch // 4, size.length), generator=torch.Generator().manual_seed(0))
    calls = [lambda m=m: m(ids) if head else m.features(ids) for m in models]
    counted = [multiplications(call) for call in calls]
    pairs = in_turn(lambda: seconds(calls[0]), lambda: seconds(calls[1]), 2 if plan.quick else 31)
    hybrid, baseline = (statistics.median(side) for side in zip(*pairs, strict=True))
    return Latency(hybrid, baseline, median_of([x / y for x, y in pairs]), counted[0] / counted[1])


# ---------------------------------------------------------------------- memory


def memory_as_published(plan: Plan) -> Finding:
    """Bytes that the adjoint keeps between the passes, without the weights, against the number of steps."""
    from benchmarks.flow import kept_bytes

    steps, size = _memory_steps(plan), size_of(plan)
    x = torch.randn(16, size.length, size.width, generator=torch.Generator().manual_seed(0))
    kept = []
    for n in steps:
        block = ODEBlock(size.width, size.heads, 0.0, n)
        kept.append(kept_bytes(lambda block=block: block(x.clone().requires_grad_()), block.parameters()))  # type: ignore[misc]
    said = (
        f"{_mebibytes(kept)} MiB kept at n = {', '.join(map(str, steps))} (16 x {size.length} tokens, without weights)"
    )
    figures = {"steps": steps, "kept_bytes": kept}
    return Finding(said, figures, {"the same at every n within 5 %": kept[-1] <= 1.05 * kept[0]})


def memory_corrected(plan: Plan) -> Finding:
    """The same of our backward modes and of the adjoint that is asked for its two ends alone, on one row."""
    from benchmarks.flow import memory_table

    steps, size = _memory_steps(plan), size_of(plan)
    table = memory_table(steps, size.width, size.length)
    said = f"MiB kept at n = {', '.join(map(str, steps))} (1 x {size.length} tokens): "
    said += "; ".join(f"{name} {_mebibytes(kept)}" for name, kept in table.items())
    kept, error = table["reversible"], reversible_error(size.width, size.length)
    said += f". Gradients of the reversible mode against autograd's through the same scheme: relative error {error:.0e}"
    checks = {
        "reversible: the same at every n within 5 %": kept[-1] <= 1.05 * kept[0],
        "reversible: gradients are those of the scheme": error < 1e-4,
    }
    figures = {"steps": steps, "kept_bytes": table, "gradient_error": error}
    return Finding(said, figures, checks, draw=lambda target: _draw_memory(steps, table, target))


def reversible_error(width: int, length: int) -> float:
    """|g' - g| / |g| over the weights of a flow: g' of the reversible backward, g of autograd through its steps."""
    from benchmarks.flow import flow_depth

    torch.manual_seed(0)
    depth, gradients = flow_depth(width, n_steps=4), []
    depth.__class__ = ReversibleFlow
    x = torch.randn(1, length, width)
    for depth.unrolled in (False, True):  # type: ignore[assignment]
        depth.zero_grad()
        depth(x)[0].square().sum().backward()
        gradients.append(gradient_of(depth))
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm())


def _memory_steps(plan: Plan) -> list[int]:
    return [2, 8] if plan.quick else [4, 16, 64]


def _mebibytes(sizes: list[int]) -> str:
    return ", ".join(f"{size / 2**20:.3g}" for size in sizes)


def _draw_memory(steps: list[int], table: dict[str, list[int]], target: Path) -> Path:
    from glissando.evaluation.figures import figure_and_axes

    figure, (axes,) = figure_and_axes()
    styles = (("#5f6b76", "o-"), ("#0b6e99", "s-"), ("#2e7d32", "D-"), ("#b3261e", "^--"), ("#c77700", "v--"))
    for (name, kept), (color, style) in zip(table.items(), itertools.cycle(styles), strict=False):
        width = 4 if name == "reversible" else 1.6  # it lies under another line
        sizes = [size / 2**20 for size in kept]
        axes.plot(steps, sizes, style, color=color, markersize=5, linewidth=width, label=name)
    axes.set(xscale="log", yscale="log", xlabel="Euler steps", ylabel="MiB kept for the backward pass")
    axes.set_title("One row, without weights")
    axes.set_xticks(steps, [str(n) for n in steps])
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target)
    return target
