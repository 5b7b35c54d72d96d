"""What of the Continuous Transformer shows without training: its size, its leak, its projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed import random_bytes
from glissando.model import LanguageModel
from research.audit.claim import Finding, Plan
from research.audit.training import logits_of, parameters, seeded
from research.published.continuous_transformer import PublishedContinuousTransformer, standardise

PRESET = "continuous-transformer"
STATED = 2.91e6


def size_as_published(plan: Plan) -> Finding:
    """The published form's parameters, a complex number counted once."""
    with torch.device("meta"):
        model = PublishedContinuousTransformer()
    count, operator = parameters(model), parameters(model.operator)
    said = f"{count:,} parameters, a complex number counted once; {operator:,} of them ({operator / count:.2%}) in the "
    said += "operator that is applied six times, the others in the table, the lift and the head"
    return Finding(said, {"parameters": count, "operator": operator}, {"2.91M": _rounds_to(count)})


def size_corrected(plan: Plan) -> Finding:
    """The same as real numbers, of our preset."""
    with torch.device("meta"):
        count = LanguageModel.from_preset(PRESET).num_parameters()
    checks = {"2.91M, a complex number counted twice": _rounds_to(count)}
    return Finding(f"{count:,} real numbers: practically the same", {"parameters": count}, checks)


def _rounds_to(count: int) -> bool:
    return abs(count - STATED) < 5e3


# ---------------------------------------------------------------------- the leak


def causality_as_published(plan: Plan) -> Finding:
    """How far another last byte moves the logits at the first position, against the length."""
    lengths = [16, 64] if plan.quick else [64, 512, 2048, 8192]
    model = _published(plan)
    leaks = [float(_moved(model, length)[0]) for length in lengths]
    summary = ", ".join(f"{leak:.1e}" for leak in leaks)
    said = f"another last byte moves the first byte's logits by {summary} at lengths {', '.join(map(str, lengths))}: "
    said += "the convolution over time is circular"
    checks = {
        "the first position does not depend on the last": max(leaks) == 0,
        "it depends on it less, the longer the text": leaks[-1] < 0.5 * leaks[0],
    }
    return Finding(said, {"lengths": lengths, "leaks": leaks}, checks, draw=lambda target: _draw_leak(plan, target))


def causality_corrected(plan: Plan) -> Finding:
    """The same of the recurrence that the exponential kernel is, over all positions but the last."""
    lengths = [16, 64] if plan.quick else [64, 512, 2048, 8192]
    model = _ours(plan)
    leaks = [float(_moved(model, length)[:-1].max()) for length in lengths]
    said = f"the causal form: every position before the last moves by {max(leaks):g} at lengths "
    said += ", ".join(map(str, lengths))
    return Finding(said, {"lengths": lengths, "leaks": leaks}, {"no position depends on later ones": max(leaks) == 0})


def _width(plan: Plan) -> int:
    return 16 if plan.quick else 256


def _published(plan: Plan) -> PublishedContinuousTransformer:
    return seeded(0, lambda: PublishedContinuousTransformer(_width(plan)).eval())


def _ours(plan: Plan) -> LanguageModel:
    return seeded(0, lambda: LanguageModel.from_preset(PRESET, hidden_size=_width(plan)).eval())


@torch.no_grad()
def _moved(model: nn.Module, length: int) -> Tensor:
    """(T,) the largest change of a logit at each position where the last byte is another one."""
    ids = random_bytes(1, length)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    return (logits_of(model, ids) - logits_of(model, changed))[0].abs().amax(-1)


def _draw_leak(plan: Plan, target: Path) -> Path:
    from glissando.evaluation.figures import figure_and_axes

    length = 64 if plan.quick else 512
    figure, (axes,) = figure_and_axes()
    for name, model, color in (("published", _published(plan), "#b3261e"), ("causal", _ours(plan), "#0b6e99")):
        axes.plot(range(length), _moved(model, length), color=color, linewidth=1.6, label=name)
    axes.set(xlabel="position", ylabel="largest change of a logit", yscale="symlog")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_ylim(bottom=0)
    axes.set_title(f"Another last byte, of {length}")
    axes.legend(frameon=False, loc="upper center")
    figure.savefig(target)
    return target


# ---------------------------------------------------------------------- the projection

FAR = 2.0  # times the deviation it is said to give


def projection_as_published(plan: Plan) -> Finding:
    """P of noise whose phases are spread evenly: its mean, its deviation, P twice, and what a small change does."""
    z = torch.view_as_complex(_noise(plan))
    return _projected("the pseudo-variance", standardise, z)


def projection_corrected(plan: Plan) -> Finding:
    """The same of the norm that divides by the root of mean |z - mu|^2."""
    from glissando.kernels.complex_norm import complex_norm

    def project(z: Tensor) -> Tensor:
        return torch.view_as_complex(complex_norm(torch.view_as_real(z).flatten(-2)).unflatten(-1, (-1, 2)))

    return _projected("the variance", project, torch.view_as_complex(_noise(plan)))


def _noise(plan: Plan) -> Tensor:
    rows, size = (512, 64) if plan.quick else (20_000, 256)
    return torch.randn(rows, size, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _projected(name: str, project: Any, z: Tensor) -> Finding:
    """The mean and the root mean square of P z, |P P z - P z|, and by how much P magnifies a small change."""
    y = project(z)
    rms = y.abs().square().mean(-1).sqrt()
    mean, twice = float(y.mean(-1).abs().max()), float((project(y) - y).abs().max() / y.abs().max())
    step = 1e-6 * torch.view_as_complex(_shifted(z))
    gain = ((project(z + step) - y).norm(dim=-1) / step.norm(dim=-1)).max()
    figures = {
        "largest_mean": mean, "rms_median": float(rms.median()), "rms_largest": float(rms.max()),
        "entry_largest": float(y.abs().max()), "twice": twice, "gain_largest": float(gain),
    }  # fmt: skip
    said = (
        f"dividing by {name}, over {len(z):,} vectors of {z.shape[1]} complex normal numbers: root mean square "
        f"{figures['rms_median']:.2f} in the median and {figures['rms_largest']:.3g} at the most, largest entry "
        f"{figures['entry_largest']:.3g}; a small change is magnified up to {figures['gain_largest']:.3g} times; "
        f"P twice differs from P by {twice:.0e}"
    )
    checks = {
        "the mean is 0": mean < 1e-9,
        "P twice is P": twice < 1e-4,
        "the deviation is 1 within 1 %": bool((rms - 1).abs().max() < 0.01),
        "a small change stays within twice its size": float(gain) < FAR,
    }
    return Finding(said, figures, checks)


def _shifted(z: Tensor) -> Tensor:
    return torch.randn(*z.shape, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
