"""What a liquid model's time constants do: over a text or a signal, as a picture; by kind of pattern, as a table too.

The publication claims that they grow where the input is smooth and shrink where it is spiky, and showed it with
patterns along the features of a single step. Here patterns run over time (`compare_patterns`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glissando.backbone import Backbone
from glissando.data.tokenizers import Tokenizer
from glissando.errors import unknown_name
from glissando.evaluation.layers import layer_numbers
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


def time_constants(model: Backbone, inputs: Tensor, dt: Tensor | None = None) -> Tensor:
    """The median over the modes of tau, in units of dt -> (L, B, T), L applications of liquid mixers.

    inputs  ids (B, T) of a language model, or the embeddings (B, T, D) of its ids; x (B, T, F) of a series model
    dt      (B, T), 1 if None

    By one forward of the model in the mode that it is in. Raises ValueError for a model without a liquid mixer.
    """
    return torch.stack([tau.quantile(0.5, -1) for tau in _every_time_constant(model, inputs, dt)])


def _every_time_constant(model: Backbone, inputs: Tensor, dt: Tensor | None = None) -> list[Tensor]:
    """(B, T, modes) of each application."""
    mixers, found = liquid_mixers(model), list[Tensor]()
    if not mixers:
        raise ValueError("this model has no liquid mixer; it has no time constants")

    def note(mixer: Liquid, x: Tensor, ctx: Context) -> None:
        found.append(mixer.time_constants(x, ctx))

    show(model, mixers, note, inputs, dt=dt)
    return found


# ---------------------------------------------------------------------- pictures


def stacked(heights: list[float]) -> tuple[Any, list[Any]]:
    """A figure of axes one below the other, so many inches high."""
    figure, axes = _grid(heights, 1)
    return figure, [row[0] for row in axes]


def _grid(heights: list[float], columns: int) -> tuple[Any, list[list[Any]]]:
    """A figure of rows of axes, so many inches high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, sum(heights) + 0.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).tolist()


def draw_heat(
    axes: Any, tau: Tensor, whole: Tensor, numbers: list[int], edges: list[float] | None = None, log: bool = True
) -> Any:
    """tau (L, T), the first layer at the bottom, their `numbers` beside them; colours are those of `whole`."""
    from matplotlib.colors import LogNorm, Normalize

    layers = len(tau)
    columns = [i - 0.5 for i in range(tau.shape[1] + 1)] if edges is None else edges
    low, high = float(whole.min()), float(whole.max())
    norm = LogNorm(max(low, 1e-6 * high, 1e-30), max(high, 1.01 * low, 1e-29)) if log else Normalize(low, high)
    image = axes.pcolormesh(columns, [i + 0.5 for i in range(layers + 1)], tau.numpy(), cmap="viridis", norm=norm)
    axes.set(ylabel="layer")
    every = max(1, layers // 8)
    axes.set_yticks(range(1, layers + 1, every), numbers[::every])
    axes.tick_params(axis="x", length=0)
    axes.spines[:].set_visible(False)
    return image


def finish(figure: Any, drawn: list[Any], image: Any, title: str) -> None:
    """A colour bar beside the axes `drawn`, and a title."""
    tall = sum(axes.get_position().height for axes in drawn) * figure.get_figheight()
    log_ticks(figure.colorbar(image, ax=drawn, label="tau", pad=0.01, aspect=6 * tall), 3 if tall < 2 else 5)
    figure.suptitle(f"{title}: median over the modes of a layer, in units of dt", fontsize=10)


def log_ticks(bar: Any, count: int) -> None:
    """So many ticks from end to end: decades are too far apart, as tau of a text often stays within one."""
    at = torch.logspace(math.log10(bar.norm.vmin), math.log10(bar.norm.vmax), count).tolist()
    bar.set_ticks(at, labels=[f"{value:.3g}" for value in at])
    bar.minorticks_off()


def token_labels(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], int]:
    """Each token's text, and by how many degrees to turn them, as words do not fit side by side.

    Signs for spaces and line ends, and a dot for what is no character or is not in the font.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties(family="monospace"))).get_charmap()
    signs = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5", "$": r"\$"}

    def label(token: int) -> str:
        text = "".join(
            signs.get(c, c if ord(c) in known and c.isprintable() else "\u00b7") for c in tokenizer.decode([token])
        )
        return text.replace("\ufffd", "\u00b7")

    labels = [label(token) for token in ids]
    return labels, 90 if any(len(label.lstrip("\\")) > 1 for label in labels) else 0


# ---------------------------------------------------------------------- patterns


@dataclass(frozen=True)
class PatternRow:
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
    if against not in patterns:
        raise unknown_name("pattern", against, patterns)
    if seeds < 2 or length < 4:
        raise ValueError(f"a spread needs at least 2 seeds and 4 steps, got {seeds} and {length}")
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
    settled = [tau[:, length // 4 :].cpu().double().log().mean((1, 2)) for tau in _every_time_constant(model, rows)]
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


def plot_patterns(
    model: Backbone, patterns: Mapping[str, Pattern], rows: Sequence[PatternRow], target: Path, length: int = 128
) -> Path:
    """The patterns of seed 0 side by side: at most three features over time, and below them tau of each layer.

    rows  of `compare_patterns`: those of all seeds stand above
    """
    made = {name: pattern(torch.Generator().manual_seed(0), length) for name, pattern in patterns.items()}
    like = next(model.parameters())
    every = {name: x.unsqueeze(0).to(like.device, like.dtype) for name, x in made.items()}
    taus = {name: time_constants(model, x)[:, 0].cpu() for name, x in every.items()}
    whole, by_pattern = torch.stack([*taus.values()]), {row.pattern: row for row in rows}
    layers = layer_numbers(model, Liquid, whole.shape[1])
    low, high = (float(edge) for edge in torch.cat([x[:, :3] for x in made.values()]).aminmax())
    figure, axes = _grid([1.4, 0.22 * len(layers) + 0.5], len(made))
    for column, (name, tau) in enumerate(taus.items()):
        above, below, row = axes[0][column], axes[1][column], by_pattern[name]
        above.plot(made[name][:, :3], linewidth=0.8)
        above.set_title(f"{name}: tau {row.tau:.3g}, {row.ratio:.2f} x random", fontsize=9)
        above.set(xlim=(0, length - 1), ylim=(low - 0.05 * (high - low), high + 0.05 * (high - low)))
        above.tick_params(labelbottom=False, labelleft=column == 0)
        image = draw_heat(below, tau, whole, layers)
        below.set(xlabel="step", ylabel="layer" if column == 0 else "")
    axes[0][0].set_ylabel("input")
    finish(figure, axes[1], image, "Time constants by pattern")
    figure.savefig(target)
    return target


def _unit(x: Tensor) -> Tensor:
    """Each column of x (T, F) over its root mean square; a column of zeros stays so."""
    return x / x.square().mean(0).sqrt().clamp_min(1e-6)


def pattern_table(rows: Sequence[PatternRow], against: str = "random") -> str:
    """The rows of `compare_patterns` as text."""
    lines = [f"{'pattern':12}{'tau':>9}   over that of {against} (95 %)"]
    lines += [f"{r.pattern:12}{r.tau:>9.3g}   {r.ratio:.3f} ({r.low:.3f} to {r.high:.3f})" for r in rows]
    return "\n".join(lines)
