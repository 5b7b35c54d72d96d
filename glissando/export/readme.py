"""What a person finds in the folder: README.md and example.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glissando.depth import DEPTHS
from glissando.export import web
from glissando.export.check import Check
from glissando.export.graph import Stepper
from glissando.export.manifest import mixers_of, tokenizer_kind
from glissando.generation import tokenizer_of
from glissando.model import LanguageModel
from glissando.storage import write_atomic

if TYPE_CHECKING:
    from glissando.export.request import Request

_EXAMPLE = '''"""python example.py "Once upon a time" -- needs {needs}."""

import json
import pathlib
import sys

{imports}

here = pathlib.Path(__file__).parent
made = json.loads((here / "export.json").read_text())
{runtime}
state = {{s["input"]: {start} for s in made["state"]}}
dials = {{"control": {zeros}}} if made["dials"] else {{}}
{tokenizer}
ids, read, written = [made["tokenizer"]["end"], *encode(" ".join(sys.argv[1:]) or "Once upon a time")], 0, []
for _ in range(200):
    read += len(ids)
    if made["capacity"] and read > made["capacity"]:
        sys.exit(f"the state holds {{made['capacity']}} tokens: export with a larger --capacity")
    {call}
    ids = [{draw}]
    if ids[0] == made["tokenizer"]["end"]:
        break
    written += ids
print(decode(written))
'''

_PARTS = {
    "onnx": {
        "needs": "onnxruntime and numpy",
        "imports": "import numpy as np\nimport onnxruntime",
        "runtime": 'run = {k: onnxruntime.InferenceSession(here / g["file"]) for k, g in made["graphs"].items()}\n'
        'outputs = ["logits", *(s["output"] for s in made["state"])]',
        "start": 'np.full([1, *s["shape"][1:]], s["start"], s["dtype"])',
        "zeros": 'np.zeros((1, len(made["dials"])), np.float32)',
        "call": 'feeds = {"ids": np.array([ids]), **dials, **state}\n'
        '    logits, *new = run["prefill" if len(ids) > 1 else "step"].run(outputs, feeds)\n'
        "    state = dict(zip(state, new))\n"
        '    weights = np.exp((logits[0, -1, : made["tokens"]] - logits.max()).astype(float) / 0.8)  # the temperature',
        "draw": "int(np.random.choice(len(weights), p=weights / weights.sum()))",
    },
    "torch": {
        "needs": "torch",
        "imports": "import torch",
        "runtime": 'run = {k: torch.export.load(here / g["file"]).module() for k, g in made["graphs"].items()}',
        "start": 'torch.full([1, *s["shape"][1:]], s["start"], dtype=getattr(torch, s["dtype"]))',
        "zeros": 'torch.zeros(1, len(made["dials"]))',
        "call": "with torch.no_grad():\n"
        "        given = torch.tensor([ids]), *dials.values(), *state.values()\n"
        '        logits, *new = run["prefill" if len(ids) > 1 else "step"](*given)\n'
        "    state = dict(zip(state, new))\n"
        '    weights = torch.softmax(logits[0, -1, : made["tokens"]] / 0.8, -1)  # the temperature',
        "draw": "int(torch.multinomial(weights, 1))",
    },
}
_TOKENIZERS = {
    "bytes": 'encode, decode = lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace")',
    "hf": 'bpe = tokenizers.Tokenizer.from_file(str(here / "tokenizer.json"))\n'
    "encode, decode = lambda text: bpe.encode(text, add_special_tokens=False).ids, bpe.decode",
}

_GRAPHS = """
## Running it

`export.json` lists inputs, outputs, shapes and types. Two graphs compute the same function, (ids, state) -> (logits,
state): `{step}` reads one token a row, ids (batch, 1), and `{prefill}` reads any number, ids (batch, time). Every input
`state.NAME` comes out as `next.NAME` and is given to the next call; before any token it is filled with `start`, see
`export.json`. Each tensor of the state has the batch in front, so that rows are joined and taken apart along it. All
tokens of a call are read: there is no padding.

A text begins with the token {end}, which also ends one. The first {tokens:,} of {vocabulary:,} logits are tokens.
{control}{capacity}
    python example.py "Once upon a time"
"""

_CONTROL = """
`control` (batch, {count}) holds the dials {names}, from -1 to 1. It is always given; 0 is the middle of a dial.
"""
_CAPACITY = """
The state has room for {capacity:,} tokens, prompt included (`--capacity`). A later token is an error: the example
checks this before each call, and ONNX Runtime and PyTorch on a CPU refuse the write, which would be out of bounds.
Other runtimes may not: compare `capacity` with the number of tokens read.
"""
_ENDLESS = """
The state has one size, however long the text is.
"""

_SERVED = """
## Running it

The folder is a page that computes the model in the browser, by onnxruntime-web on one thread. Any file server will do,
and no other server is asked for anything:

    cd this_folder
    python -m http.server 8000 --bind 127.0.0.1    # then open http://127.0.0.1:8000

Opened as a file, without a server, a page may not read the files beside it.
{dials}{capacity}
Numbers are drawn by xoshiro128** from the seed (sampling.js): the same seed, prompt and settings give the same text on
every machine whose browser computes the same logits, and another text than `glissando generate` gives with it. At
temperature 0 both take the likeliest token.

| file | what |
|---|---|
| `index.html`, `page.css`, `page.js` | the page |
| `worker.js`, `tokenizer.js`, `sampling.js` | the model's loop beside it, text to ids and back, drawing |
| `export.json`, `step.onnx`, `prefill.onnx`, `weights.bin`, `tokenizer.json` | the model, as `--to onnx` writes it |
| `ort/` | onnxruntime-web {version}, MIT licence |
"""


def write_served(request: Request, folder: Path, found: Check) -> None:
    """README.md of a page."""
    dials = request.model.config.dials
    sections = _SERVED.format(
        dials=f"\nThe page has a dial for {' and for '.join(f'`{name}`' for name in dials)}.\n" if dials else "",
        capacity=""
        if request.capacity is None
        else f"\nIts texts end at {request.capacity:,} tokens, prompt included (`--capacity`).\n",
        version=web.VERSION,
    )
    write_atomic(folder / "README.md", (heading(request.model, "a page") + sections + checked(found)).encode())


def write(request: Request, folder: Path, found: Check, stepper: Stepper) -> None:
    """README.md beside two graphs, and of a program of one's own also example.py."""
    if request.kind == "web":
        return write_served(request, folder, found)
    model, tokenizer = request.model, tokenizer_of(request.model)
    names = {"onnx": ("ONNX", "step.onnx", "prefill.onnx"), "torch": ("PyTorch program", "step.pt2", "prefill.pt2")}
    title, step, prefill = names[request.kind]
    parts, kind = dict(_PARTS[request.kind]), tokenizer_kind(tokenizer)
    if kind == "hf":
        parts["needs"] += ", and tokenizers"
        parts["imports"] = "\n".join(sorted([*parts["imports"].split("\n"), "import tokenizers"]))
    text = _EXAMPLE.format(**parts, tokenizer=_TOKENIZERS[kind])
    write_atomic(folder / "example.py", text.encode())
    dials = stepper.dials
    control = _CONTROL.format(count=len(dials), names=" and ".join(f"`{name}`" for name in dials)) if dials else ""
    capacity = _ENDLESS if request.capacity is None else _CAPACITY.format(capacity=request.capacity)
    sections = _GRAPHS.format(
        step=step,
        prefill=prefill,
        end=tokenizer.eos_id,
        tokens=tokenizer.vocab_size,
        vocabulary=model.config.vocab_size,
        control=control,
        capacity=capacity,
    )
    write_atomic(folder / "README.md", (heading(model, title) + sections + checked(found)).encode())


def heading(model: LanguageModel, title: str) -> str:
    """What the model is."""
    mixers, depth = ", ".join(mixers_of(model)), DEPTHS.kind_of(model.config.depth)
    return (
        f"# A language model as {title}\n\nMade by `glissando export`: {model.num_parameters():,} parameters, mixers "
        f"{mixers}, depth {depth}.\n"
    )


def checked(found: Check) -> str:
    """What the check found."""
    return "\n## Checked\n\n" + "\n".join(f"    {line}" for line in found.lines()) + "\n"
