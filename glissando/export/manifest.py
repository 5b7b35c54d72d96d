"""`export.json`: what a program needs to know to run the graphs, and the tokenizer beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glissando.data.tokenizers import FILE_NAME, ByteTokenizer
from glissando.depth import DEPTHS
from glissando.export.check import Check
from glissando.export.graph import BATCH, TIME, Stepper
from glissando.generation import tokenizer_of
from glissando.mixers import MIXERS
from glissando.model import LanguageModel
from glissando.runs import Run
from glissando.storage import write_atomic

MANIFEST = "export.json"


@dataclass(frozen=True)
class Request:
    """What is exported.

    stream    held-out tokens for the check
    capacity  None where no part of the state grows
    """

    model: LanguageModel
    run: Run
    kind: str
    stream: list[int]
    capacity: int | None


def graph_manifest(request: Request, stepper: Stepper, check: Check) -> dict[str, Any]:
    """Inputs, outputs, shapes and types of both graphs, the state before any token, and what stands around it."""
    from glissando import __version__
    from glissando.export import onnx, program

    files = (program if request.kind == "torch" else onnx).FILES
    model, tokenizer = request.model, tokenizer_of(request.model)
    state = [
        {"input": leaf.input, "output": leaf.output, "dtype": str(leaf.dtype).removeprefix("torch."),
         "shape": [BATCH, *leaf.shape], "start": leaf.start}
        for leaf in stepper.leaves
    ]  # fmt: skip
    dials = [{"name": "control", "dtype": "float32", "shape": [BATCH, len(stepper.dials)]}] if stepper.dials else []
    graphs = {}
    for kind, file in files.items():
        time = TIME if kind == "prefill" else 1
        graphs[kind] = {
            "file": file,
            "inputs": [{"name": "ids", "dtype": "int64", "shape": [BATCH, time]}, *dials],
            "outputs": [{"name": "logits", "dtype": "float32", "shape": [BATCH, time, model.config.vocab_size]}],
        }
    return {
        "format": 1,
        "made_by": f"glissando {__version__}",
        "kind": request.kind,
        "parameters": model.num_parameters(),
        "mixers": mixers_of(model),
        "depth": DEPTHS.kind_of(model.config.depth),
        "vocab_size": model.config.vocab_size,
        "tokens": tokenizer.vocab_size,
        # bytes: an id is a byte; hf: the file is one of Hugging Face's `tokenizers`
        "tokenizer": {
            "kind": "bytes" if isinstance(tokenizer, ByteTokenizer) else "hf",
            "file": FILE_NAME,
            "end": tokenizer.eos_id,
        },
        "capacity": request.capacity,
        "dials": stepper.dials,
        "graphs": graphs,
        "state": state,
        "check": check.as_dict(),
    }


def mixers_of(model: LanguageModel) -> list[str]:
    """Each kind of mixer once, in the order of the blocks."""
    return list(dict.fromkeys(MIXERS.kind_of(options) for options in model.config.mixers))


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(values, indent=2) + "\n").encode())
