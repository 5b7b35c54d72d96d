"""The picture of a small model: every parameter of it as a square, beside what it is for.

python -m research.parameters_picture RUN PICTURE.png

RUN is a run or the name of a preset, whose new weights are drawn. A matrix has a row for each input and its bias below.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from glissando import load
from glissando.evaluation.figures import figure_and_axes
from glissando.model import LanguageModel
from glissando.presets import preset_names

#: of a model with more, no square would be visible
MOST = 10_000
#: the end of a module's name -> what it is for
ROLES = {
    "embedding": "embedding: what each byte is",
    "mixer_norm": "norm around attention",
    "mixer.qkv": "queries, keys, values",
    "mixer.out": "attention's output",
    "mlp_norm": "norm around the MLP",
    "mlp.up": "MLP, in",
    "mlp.down": "MLP, out",
    "final_norm": "last norm",
    "head": "head: which byte comes next",
}
#: squares of a row of the picture, and how much larger a square of a small matrix is
ACROSS, ENLARGED = 256, 3


def matrices(model: LanguageModel) -> list[tuple[str, str, Tensor]]:
    """Each module's parameters as one matrix, a row for each input and one for the bias, with layer and title."""
    titled = []
    for name, module in model.named_modules():
        parameters = [p.detach().cpu().double() for _, p in module.named_parameters(recurse=False)]
        if not parameters:
            continue
        rows = torch.cat([p.T if p.ndim == 2 else p.reshape(1, -1) for p in parameters])
        role = next((role for end, role in ROLES.items() if name.endswith(end)), name)
        layer = "".join(filter(str.isdigit, name))
        titled.append((layer, f"{role}\n{rows.numel():,} of $\\pm${rows.abs().max():.2g}", rows))
    return titled


def plot_parameters(model: LanguageModel, target: Path) -> Path:
    """Every parameter as a square: blue below zero, red above, white at zero, each matrix with its own scale.

    Raises ValueError for a model of more than MOST parameters.
    """
    count = sum(p.numel() for p in model.parameters())
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    preset = options.run in preset_names()
    model = LanguageModel.from_preset(options.run) if preset else load(options.run)
    print(plot_parameters(model, options.picture))


if __name__ == "__main__":
    main()
