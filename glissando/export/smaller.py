"""A run again, its matrices in bfloat16 or int8: what `glissando.load` and every command open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glissando.config import to_dict
from glissando.export import check, readme
from glissando.export.check import Check
from glissando.generation import tokenizer_of
from glissando.quantisation import Precision, matrices, reduced
from glissando.runs import MODEL, Run
from glissando.storage import write_atomic

if TYPE_CHECKING:
    from glissando.export.request import Request

_TEXT = """
## Running it

This folder is a run: `glissando.load(DIR)` and every command of glissando open it. What is computed is float32.

    glissando generate DIR --prompt "Once upon a time"

    import glissando

    model = glissando.load("DIR")
    print(*glissando.stream(model, "Once upon a time", max_tokens=200), sep="")

{matrices} matrices of {total:,} numbers are in {precision}{how}; everything else is in float32. `{file}` has {size:,}
bytes.
"""
_HOW = {"bf16": ", 8 bits of precision", "int8": ", each row with one scale: w = scale * q, q from -127 to 127"}
_NAME = {"bf16": "bfloat16", "int8": "int8"}


def fill(request: Request, folder: Path, precision: Precision) -> Check:
    """The run in `folder`, loaded again and compared: the difference is reported, whatever it is."""
    from glissando.loading import load

    model, run = request.model, Run.create(folder)
    config = request.run.read_config() | {"model": to_dict(model.config)}
    run.write_tokenizer(tokenizer_of(model))
    run.write_model(reduced(model, precision), config, source=request.run)
    loaded = load(folder)

    def step(_: str, ids: Tensor, *rest: Any) -> list[Any]:
        control, state = rest if model.config.dials else (None, *rest)
        with torch.no_grad():
            return [*loaded(ids, state, control=control)]

    def start(rows: int) -> list[Any]:
        return [loaded.init_state(rows)]

    texts = check.texts_of(request.stream, request.capacity)
    found = check.compare(model, step, start, texts, request.capacity, f"glissando in {_NAME[precision]}")
    chosen = matrices(model)
    total = sum(value.numel() for name, value in model.state_dict().items() if name in chosen)
    text = _TEXT.format(
        matrices=len(chosen),
        total=total,
        precision=_NAME[precision],
        how=_HOW[precision],
        file=MODEL,
        size=(folder / MODEL).stat().st_size,
    )
    title = f"a run in {_NAME[precision]}"
    write_atomic(folder / "README.md", (readme.heading(model, title) + text + readme.checked(found)).encode())
    return found
