"""What a liquid model does with each token, layer by layer: a table and a picture; and its time constants by pattern.

The quantities of a token are those that the publication returns with `return_diagnostics`: time constants, time step,
norm of the state, adaptation rate, the gate of a layer by its state and the gate by a running mean. Its time step is a
substep chosen for stability; a step is exact here, so that `dt` is the time that the token takes.

The publication claims that time constants grow where the input is smooth and shrink where it is spiky, and showed it
with patterns along the features of a single step. Here patterns run over time (`compare_patterns`).
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.backbone import Backbone
from glissando.data.tokenizers import Tokenizer
from glissando.decoding import computing
from glissando.depth.mean_gate import MeanGate
from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.observe import layer_numbers, show
from glissando.mixers import Context
from glissando.mixers.liquid import Liquid, Published
from glissando.model import LanguageModel

TABLE, PICTURE = "diagnostics.csv", "diagnostics.png"
#: columns that are drawn, with their titles
_DRAWN = {
    "tau": "time constant, median over modes (tokens)", "state_norm": "norm of the state",
    "gate": "gate, mean over channels", "mean_gate": "gate by the mean of what the block contributed",
}  # fmt: skip
_LOGARITHMIC = ("tau", "state_norm")
#: tokens that fit beside each other with their texts
_LABELLED = 120
#: rows of each pattern, and steps of a row, by default
SEEDS, LENGTH = 8, 256
#: a pattern: (generator, steps) -> the input of one row, (T,) ids or (T, F) numbers
Pattern = Callable[[torch.Generator, int], Tensor]


def liquid_mixers(model: Backbone) -> list[Liquid]:
    """Every liquid mixer with weights of its own, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, Liquid)]


class Diagnostics(NamedTuple):
    """ids (T,) that were read, the numbers of the liquid layers, and columns (L, T)."""

    ids: list[int]
    layers: list[int]
    columns: dict[str, Tensor]


def diagnose(model: LanguageModel, ids: list[int]) -> Diagnostics:
    """What the model's liquid mixers do with a text. Raises ValueError for a model without a liquid mixer."""
    layers: list[dict[str, Tensor]] = []
    if not (mixers := liquid_mixers(model)):
        raise ValueError("this model has no liquid mixer, of which diagnostics are")

    def note_gate(module: Any, args: tuple[Any, ...], returned: tuple[Tensor, Any]) -> None:
        if layers:  # of a block with another mixer otherwise
            layers[-1].setdefault("mean_gate", returned[0].squeeze(-1))

    with computing(model), contextlib.ExitStack() as stack:
        for gate in (module for module in model.modules() if isinstance(module, MeanGate)):
            stack.enter_context(gate.register_forward_hook(note_gate))
        inputs = torch.tensor([ids], device=model.embedding.weight.device)
        show(model, mixers, lambda *seen: layers.append(_measure(*seen)), inputs)
    columns = {name: torch.cat([layer[name] for layer in layers]).cpu().double() for name in layers[0]}
    return Diagnostics(ids, layer_numbers(model, Liquid, len(layers)), columns)


def _measure(mixer: Liquid, x: Tensor, ctx: Context) -> dict[str, Tensor]:
    """Columns (1, T) of a mixer that is given x behind an empty state."""
    inputs, before = mixer.layer.inputs(x), mixer.init_state(len(x), x.device).x
    states = mixer.dynamics(inputs, before, ctx.dt)
    tau = mixer.dynamics.time_constants(inputs, before, ctx.dt)
    low, median, high = tau.quantile(tau.new_tensor([0.05, 0.5, 0.95]), -1).unbind()
    if isinstance(mixer.layer, Published):
        gate = mixer.layer.gate(states.to(x.dtype)).squeeze(-1)
    else:
        gate = F.silu(inputs[-1]).mean(-1)
    return {
        "tau_p05": low,
        "tau": median,
        "tau_p95": high,
        "dt": torch.ones_like(median),
        "state_norm": states.norm(dim=-1),
        "adaptation_rate": mixer.dynamics.adaptations().mean().expand_as(median),
        "gate": gate,
    }


def write(model: LanguageModel, diagnostics: Diagnostics, folder: Path) -> list[Path]:
    """TABLE, a line for each token and layer, and PICTURE, in `folder`."""
    ids, layers, columns = diagnostics
    texts = [str(i) if model.tokenizer is None else model.tokenizer.decode([i]) for i in ids]
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["position", "token", "text", "layer", *columns])
        for t, token in enumerate(ids):
            for i, layer in enumerate(layers):
                values = (f"{float(column[i, t]):.6g}" for column in columns.values())
                lines.writerow([t, token, texts[t], layer, *values])
    drawn = [name for name in _DRAWN if name in columns]
    figure, every = figure_and_axes(rows=len(drawn), size=(11, len(drawn) * (0.2 * len(layers) + 0.6) + 0.5))
    for axes, name in zip(every, drawn, strict=True):
        image = _draw_heat(axes, columns[name], layers, log=name in _LOGARITHMIC)
        bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=8)
        if name in _LOGARITHMIC:
            log_ticks(bar, 4)
        else:
            bar.formatter.set_useOffset(False)
        axes.set_title(_DRAWN[name], loc="left")
    if len(ids) <= _LABELLED and model.tokenizer is not None:
        labels, turn = _token_labels(model.tokenizer, ids)
        every[-1].set_xticks(range(len(ids)), labels, fontfamily="monospace", fontsize=7, rotation=turn)
    else:
        every[-1].set_xticks(range(0, len(ids), max(1, len(ids) // 10)))
    every[-1].set_xlabel("token")
    figure.savefig(folder / PICTURE)
    return [folder / TABLE, folder / PICTURE]


def _draw_heat(axes: Any, values: Tensor, numbers: list[int], log: bool) -> Any:
    """values (L, T), the first layer at the bottom, their `numbers` beside them."""
    from matplotlib.colors import LogNorm, Normalize

    low, high = float(values.min()), float(values.max())
    norm = LogNorm(max(low, 1e-6 * high, 1e-30), max(high, 1.01 * low, 1e-29)) if log else Normalize(low, high)
    image = axes.imshow(
        values.numpy(), cmap="viridis", norm=norm, aspect="auto", origin="lower", interpolation="nearest"
    )
    layers = range(0, len(values), max(1, len(values) // 8))
    axes.set(ylabel="layer", xticks=[])
    axes.set_yticks(layers, [numbers[layer] for layer in layers])
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return image


def log_ticks(bar: Any, count: int) -> None:
    """So many ticks from end to end: decades are too far apart, as tau of a text often stays within one."""
    at = torch.logspace(math.log10(bar.norm.vmin), math.log10(bar.norm.vmax), count).tolist()
    bar.set_ticks(at, labels=[f"{value:.3g}" for value in at])
    bar.minorticks_off()


def _token_labels(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], int]:
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


def every_time_constant(model: Backbone, inputs: Tensor, dt: Tensor | None = None) -> list[Tensor]:
    """tau in units of dt, (B, T, modes) of each application of a liquid mixer, by one forward in the model's mode.

    inputs  ids (B, T) of a language model, or the embeddings (B, T, D) of its ids; x (B, T, F) of a series model
    dt      (B, T), 1 if None

    Raises ValueError for a model without a liquid mixer.
    """
    constants: list[Tensor] = []
    if not (mixers := liquid_mixers(model)):
        raise ValueError("this model has no liquid mixer; it has no time constants")
    show(model, mixers, lambda mixer, x, ctx: constants.append(mixer.time_constants(x, ctx)), inputs, dt=dt)
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

    def rescaled(pattern: Pattern) -> Pattern:
        return lambda generator, length: pattern(generator, length) * scale + mean

    return {
        "smooth": rescaled(smooth),
        "spiky": rescaled(spiky),
        "constant": rescaled(lambda generator, length: noise(generator, size).expand(length, size)),
        "random": rescaled(lambda generator, length: noise(generator, length, size)),
    }


def _unit(x: Tensor) -> Tensor:
    """Each column of x (T, F) over its root mean square; a column of zeros stays so."""
    return x / x.square().mean(0).sqrt().clamp_min(1e-6)


def pattern_table(rows: Sequence[PatternRow], against: str = "random") -> str:
    """The rows of `compare_patterns` as text."""
    lines = [f"{'pattern':12}{'tau':>9}   over that of {against} (95 %)"]
    lines += [f"{r.pattern:12}{r.tau:>9.3g}   {r.ratio:.3f} ({r.low:.3f} to {r.high:.3f})" for r in rows]
    return "\n".join(lines)
