"""The picture of a small model: every parameter of it as a square, beside what it is for.

python -m research.parameters_picture RUN PICTURE.png

RUN is a run or the name of a preset, whose new weights are drawn. A matrix has a row for each input and its bias below.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from glissando import load
from glissando.evaluation.figures import figure_and_axes
from glissando.model import LanguageModel
from glissando.presets import preset_names
from research.runs import options_of

#: of a model with more, no square would be visible
MOST = 10_000
#: the end of a module's name -> what it is for
ROLES = {
    "embedding": "embedding: what each byte is",
    "mixer_norm": "norm before the mixer",
    "mixer.qkv": "queries, keys, values",
    "mixer.qk": "queries and keys",
    "mixer.v": "values",
    "project": "the mixer's inputs",
    "out": "the mixer's output",
    "control": "dials",
    "mlp_norm": "norm before the MLP",
    "mlp.up": "MLP, in",
    "mlp.down": "MLP, out",
    "norm": "last norm",
    "head": "head: which byte comes next",
}
#: squares of a row of the picture, and how much larger a square of a small matrix is
ACROSS, ENLARGED = 256, 3
#: characters of a title of names
LONGEST = 40


def matrices(model: LanguageModel) -> list[tuple[str, str, Tensor]]:
    """Each module's parameters of one width as one matrix, a row for each input and one for the bias, with layer and
    title: its role, or where it has none in ROLES the names of module and parameters."""
    titled = []
    for name, module in model.named_modules():
        by_width: dict[int, dict[str, Tensor]] = {}
        for own, parameter in module.named_parameters(recurse=False):
            rows = _rows(parameter.detach().cpu())
            by_width.setdefault(rows.shape[1], {})[own] = rows
        for parts in by_width.values():
            rows = torch.cat([*parts.values()])
            also = f"{name.split('.')[-1]}: {', '.join(parts)}" if name else ", ".join(parts)
            role = next((role for end, role in ROLES.items() if f".{name}".endswith(f".{end}")), also[:LONGEST])
            layer = next(filter(str.isdigit, name.split(".")), "")
            titled.append((layer, f"{role}\n{rows.numel():,} of $\\pm${rows.abs().max():.2g}", rows))
    return titled


def _rows(parameter: Tensor) -> Tensor:
    """A parameter as a matrix of real numbers, a row for each input; of complex ones both parts beside each other."""
    if parameter.is_complex():
        parameter = torch.view_as_real(parameter).flatten(-2)
    return (parameter.flatten(0, -2).T if parameter.ndim > 1 else parameter.reshape(1, -1)).double()


def plot_parameters(model: LanguageModel, target: Path) -> Path:
    """Every parameter as a square: blue below zero, red above, white at zero, each matrix with its own scale.

    Raises ValueError for a model of more than MOST parameters.
    """
    count = model.num_parameters()
    if count > MOST:
        raise ValueError(f"the model has {count:,} parameters, and squares of more than {MOST:,} are too small to see")
    figure, (axes,) = figure_and_axes(size=(12, 5.6))
    left = bottom = depth = 0.0
    before = None
    for layer, title, rows in matrices(model):
        side = ENLARGED if rows.shape[1] * ENLARGED < ACROSS / 4 else 1
        width, height = side * rows.shape[1], ENLARGED * rows.shape[0]
        if before is not None and (layer != before or left + width > ACROSS):
            left, bottom, depth = 0.0, bottom - depth - 15, 0.0
        if layer and layer != before:
            axes.text(left, bottom - 1, f"layer {int(layer) + 1}", fontsize=11, va="top")
            left += 24
        largest = float(rows.abs().max())
        axes.imshow(
            rows.numpy(), cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto", interpolation="none",
            extent=(left, left + width, bottom - height, bottom),
        )  # fmt: skip
        axes.text(left, bottom + 1, title, fontsize=9, va="bottom")
        left, depth, before = left + max(width, 2.0 * title.index("\n")) + 4, max(depth, height), layer
    axes.set(xlim=(-1, ACROSS + 1), ylim=(bottom - depth - 2, 11))
    axes.set_title(f"{count:,} parameters: a square each, blue below zero and red above", fontsize=13)
    axes.axis("off")
    figure.savefig(target)
    return target


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("run")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    preset = options.run in preset_names()
    model = LanguageModel.from_preset(options.run) if preset else load(options.run)
    print(plot_parameters(model, options.picture))


if __name__ == "__main__":
    main()
