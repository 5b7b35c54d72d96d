"""What a liquid model does with each token, layer by layer: a table and a picture.

The quantities are those that the publication returns with `return_diagnostics`: time constants, time step, norm of the
state, adaptation rate, the gate of a layer by its state and the gate by a running mean. Its time step is a substep
chosen for stability; a step is exact here, so that `dt` is the time that the token takes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.data.tokenizers import Tokenizer
from glissando.decoding import computing
from glissando.depth.mean_gate import MeanGate
from glissando.evaluation.figures import figure_and_axes
from glissando.evaluation.observe import layer_numbers, show
from glissando.evaluation.time_constants import liquid_mixers
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


class Diagnostics(NamedTuple):
    """ids (T,) that were read, the numbers of the liquid layers, and columns (L, T)."""

    ids: list[int]
    layers: list[int]
    columns: dict[str, Tensor]


def diagnose(model: LanguageModel, ids: list[int]) -> Diagnostics:
    """What the model's liquid mixers do with a text. Raises ValueError for a model without a liquid mixer."""
    mixers, layers = liquid_mixers(model), list[dict[str, Tensor]]()
    if not mixers:
        raise ValueError("this model has no liquid mixer, of which diagnostics are")

    def note(mixer: Any, x: Tensor, ctx: Context) -> None:
        layers.append(_measure(mixer, x, ctx))

    def note_gate(module: Any, args: tuple[Any, ...], returned: tuple[Tensor, Any]) -> None:
        if layers:  # of a block with another mixer otherwise
            layers[-1].setdefault("mean_gate", returned[0].squeeze(-1))

    gates = [module for module in model.modules() if isinstance(module, MeanGate)]
    handles = [gate.register_forward_hook(note_gate) for gate in gates]
    try:
        with computing(model):
            show(model, mixers, note, torch.tensor([ids], device=model.embedding.weight.device))
    finally:
        for handle in handles:
            handle.remove()
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
