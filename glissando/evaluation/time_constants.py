"""What a liquid model's time constants do, by kind of pattern.

The publication claims that they grow where the input is smooth and shrink where it is spiky, and showed it with
patterns along the features of a single step. Here patterns run over time (`compare_patterns`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glissando.backbone import Backbone
from glissando.evaluation.observe import show
from glissando.mixers import Context
from glissando.mixers.liquid import Liquid
from glissando.model import LanguageModel

#: rows of each pattern, and steps of a row, by default
SEEDS, LENGTH = 8, 256
#: a pattern: (generator, steps) -> the input of one row, (T,) ids or (T, F) numbers
Pattern = Callable[[torch.Generator, int], Tensor]


def liquid_mixers(model: Backbone) -> list[Liquid]:
    """Every liquid mixer with weights of its own, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, Liquid)]


def every_time_constant(model: Backbone, inputs: Tensor, dt: Tensor | None = None) -> list[Tensor]:
    """tau in units of dt, (B, T, modes) of each application of a liquid mixer, by one forward in the model's mode.

    inputs  ids (B, T) of a language model, or the embeddings (B, T, D) of its ids; x (B, T, F) of a series model
    dt      (B, T), 1 if None

    Raises ValueError for a model without a liquid mixer.
    """
    mixers, constants = liquid_mixers(model), list[Tensor]()
    if not mixers:
        raise ValueError("this model has no liquid mixer; it has no time constants")

    def note(mixer: Liquid, x: Tensor, ctx: Context) -> None:
        constants.append(mixer.time_constants(x, ctx))

    show(model, mixers, note, inputs, dt=dt)
    return constants


class PatternRow(NamedTuple):
    """tau of one kind of pattern: its geometric mean over layers, modes and steps, and over seeds; units of dt.

    ratio is to the same seed's row of the pattern that it is compared with, its geometric mean over seeds; low and high
    are its 95 % interval, by Student's t.
    """

    pattern: str
    tau: float
    ratio: float
    low: float
    high: float


def compare_patterns(
    model: Backbone, patterns: Mapping[str, Pattern], against: str = "random", seeds: int = SEEDS, length: int = LENGTH
) -> list[PatternRow]:
    """tau by pattern, `seeds` rows of `length` steps each; the first quarter, in which the state settles, is left out.

    patterns  by name, such as those of `signals`;  against  the one that the others are compared with
    """
    logs = {name: _log_tau(model, pattern, seeds, length) for name, pattern in patterns.items()}
    rows = []
    for name, log in logs.items():
        gap = log - logs[against]
        center, half = float(gap.mean()), _T_95[min(seeds - 1, len(_T_95)) - 1] * float(gap.std()) / math.sqrt(seeds)
        ratio, low, high = (math.exp(edge) for edge in (center, center - half, center + half))
        rows.append(PatternRow(name, math.exp(float(log.mean())), ratio, low, high))
    return rows


#: Student's t at 97.5 %, for 1, 2, ... degrees of freedom; the last for all above
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def _log_tau(model: Backbone, pattern: Pattern, seeds: int, length: int) -> Tensor:
    """(seeds,) float64: the mean of log tau."""
    rows = torch.stack([pattern(torch.Generator().manual_seed(seed), length) for seed in range(seeds)])
    like = next(model.parameters())
    rows = rows.to(like.device, like.dtype if rows.is_floating_point() else None)
    settled = [tau[:, length // 4 :].cpu().double().log().mean((1, 2)) for tau in every_time_constant(model, rows)]
    return torch.stack(settled).mean(0)


def signals(model: Backbone) -> dict[str, Pattern]:
    """Patterns over time for every input, all but `constant` of variance 1 over time; `constant` over rows.

    A language model is given them in the place of embeddings, as ids cannot be smooth: each feature with the mean and
    the deviation that it has over the vocabulary.
    """
    if isinstance(model, LanguageModel):
        weight = model.embedding.weight.detach().cpu()
        size, mean, scale = weight.shape[1], weight.mean(0), weight.std(0)
    else:
        mean, scale = (model.get_buffer(name).cpu().float() for name in ("input_mean", "input_scale"))
        size = len(mean)

    def noise(generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def smooth(generator: torch.Generator, length: int) -> Tensor:
        """Three sines of periods from 32 to 128 steps."""
        turn = 2 * math.pi / (32 * 4 ** torch.rand(3, size, generator=generator))
        phase = 2 * math.pi * torch.rand(3, size, generator=generator)
        return _unit(torch.sin(torch.arange(length).view(-1, 1, 1) * turn + phase).sum(1))

    def spiky(generator: torch.Generator, length: int) -> Tensor:
        """0, but for one step in twenty."""
        return _unit(noise(generator, length, size) * (torch.rand(length, size, generator=generator) < 0.05))

    made: dict[str, Pattern] = {
        "smooth": smooth,
        "spiky": spiky,
        "constant": lambda generator, length: noise(generator, size).expand(length, size),
        "random": lambda generator, length: noise(generator, length, size),
    }
    return {name: _rescaled(pattern, scale, mean) for name, pattern in made.items()}


def _rescaled(pattern: Pattern, scale: Tensor, mean: Tensor) -> Pattern:
    return lambda generator, length: pattern(generator, length) * scale + mean


def _unit(x: Tensor) -> Tensor:
    """Each column of x (T, F) over its root mean square; a column of zeros stays so."""
    return x / x.square().mean(0).sqrt().clamp_min(1e-6)


def pattern_table(rows: Sequence[PatternRow], against: str = "random") -> str:
    """The rows of `compare_patterns` as text."""
    lines = [f"{'pattern':12}{'tau':>9}   over that of {against} (95 %)"]
    lines += [f"{r.pattern:12}{r.tau:>9.3g}   {r.ratio:.3f} ({r.low:.3f} to {r.high:.3f})" for r in rows]
    return "\n".join(lines)
