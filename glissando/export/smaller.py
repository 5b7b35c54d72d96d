"""A run again, its matrices in bfloat16 or int8: what `glissando.load` and every command open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glissando.config import to_dict
from glissando.export import check, readme
from glissando.export.check import Check
from glissando.export.manifest import Request
from glissando.generation import tokenizer_of
from glissando.quantisation import Precision, matrices, reduced
from glissando.runs import MODEL, Run

_PRECISIONS: dict[str, Precision] = {"safetensors-bf16": "bf16", "safetensors-int8": "int8"}


def fill(request: Request, folder: Path) -> Check:
    """The run in `folder`, loaded again and compared: the difference is reported, whatever it is."""
    from glissando.loading import load

    model, run = request.model, Run.create(folder)
    config = request.run.read_config() | {"model": to_dict(model.config)}
    run.write_tokenizer(tokenizer_of(model))
    run.write_model(reduced(model, _PRECISIONS[request.kind]), config, source=request.run)
    loaded = load(folder)

    def step(_: str, ids: Tensor, *rest: Any) -> list[Any]:
        control, state = rest if model.config.dials else (None, *rest)
        with torch.no_grad():
            return [*loaded(ids, state, control=control)]

    def start(rows: int) -> list[Any]:
        return [loaded.init_state(rows)]

    texts = check.texts_of(request.stream, request.capacity)
    by = f"glissando in {'int8' if request.kind == 'safetensors-int8' else 'bfloat16'}"
    found = check.compare(model, step, start, texts, request.capacity, by)
    chosen = matrices(model)
    total = sum(value.numel() for name, value in model.state_dict().items() if name in chosen)
    size = (folder / MODEL).stat().st_size
    readme.write(request, folder, found, matrices=len(chosen), total=total, file=MODEL, size=size)
    return found
