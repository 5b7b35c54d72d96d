"""What a person finds in the folder: README.md, and beside graphs example.py; their texts are in `texts/`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from glissando.data.tokenizers import ByteTokenizer
from glissando.depth import DEPTHS
from glissando.export import web
from glissando.export.check import Check
from glissando.export.manifest import Request, mixers_of
from glissando.generation import tokenizer_of
from glissando.storage import write_atomic

_TITLES = {
    "onnx": "ONNX",
    "torch": "PyTorch program",
    "web": "a page",
    "safetensors-bf16": "a run in bfloat16",
    "safetensors-int8": "a run in int8",
}


def write(request: Request, folder: Path, check: Check, **numbers: Any) -> None:
    """Write the texts of this kind of export; `numbers` are those that only a run's README has."""
    model, tokenizer = request.model, tokenizer_of(request.model)
    values = {
        "titles": _TITLES, "kind": request.kind, "capacity": request.capacity, "check": check, "tokenizer": tokenizer,
        "hf": not isinstance(tokenizer, ByteTokenizer), "parameters": model.num_parameters(),
        "mixers": mixers_of(model), "depth": DEPTHS.kind_of(model.config.depth), "version": web.VERSION,
        "dials": [f"`{name}`" for name in model.config.dials], "vocab_size": model.config.vocab_size,
    }  # fmt: skip
    texts = {"readme.md.j2": "README.md"}
    if request.kind in ("onnx", "torch"):
        texts["example.py.j2"] = "example.py"
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["thousands"] = "{:,}".format
    for source, name in texts.items():
        template = environment.from_string((resources.files(__package__) / "texts" / source).read_text("utf-8"))
        write_atomic(folder / name, template.render(values | numbers).encode())
