"""What a run can be exported as, and how: into a folder that appears whole, once its check has passed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined

from glissando.config import to_dict
from glissando.data.tokenizers import FILE_NAME, ByteTokenizer
from glissando.depth import DEPTHS
from glissando.errors import ConfigError, unknown_name
from glissando.export import check, onnx, web
from glissando.export.check import Check
from glissando.export.graph import Stepper, grows
from glissando.generation import tokenizer_of
from glissando.mixers import MIXERS
from glissando.model import LanguageModel
from glissando.quantisation import Precision, matrices, reduced
from glissando.runs import MODEL, Run, require_new
from glissando.storage import publishing, write_atomic

#: tokens that a cache which grows holds by default
CAPACITY = 1024
MANIFEST = "export.json"
#: tensors of fewer bytes stay in the graph
_INLINE = 1024
#: --to, and the title of the folder's README
KINDS = {
    "onnx": "ONNX",
    "web": "a page",
    "safetensors-bf16": "a run in bfloat16",
    "safetensors-int8": "a run in int8",
}
#: --to, and how often `export` calls its `status`
PHASES = {"onnx": 3, "web": 4, "safetensors-bf16": 2, "safetensors-int8": 2}
_PRECISIONS: dict[str, Precision] = {"safetensors-bf16": "bf16", "safetensors-int8": "int8"}


def export(
    model: LanguageModel,
    run: Run,
    kind: str,
    out: str | Path,
    capacity: int | None = None,
    status: Callable[[str], None] = lambda _: None,
) -> Check:
    """Write `model`, of the run `run`, to the new folder `out` -> what the check found; in float32.

    kind      onnx, web, safetensors-bf16 or safetensors-int8
    capacity  tokens that a cache which grows holds; CAPACITY if None
    status    takes what begins, of which each part takes some seconds

    Raises UnknownNameError for a kind, ConfigError for a capacity that would do nothing, DataError where the page's
    runtime cannot be fetched, RunError where there is something at `out`, Refused for a model that cannot be exported
    so and for a check that fails, MissingExtraError where a package is missing. Whatever is raised, nothing stands at
    `out` that did not stand there before.
    """
    if kind not in KINDS:
        raise unknown_name("export", kind, KINDS)
    out = Path(out).expanduser()
    require_new(out)
    if any(p.dtype != torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
    room = _capacity(model, kind, capacity)
    with publishing(out) as folder:
        if kind in _PRECISIONS:
            return _write_run(model, run, kind, room, folder, status)
        return _write_graph(model, kind, run.path.name, room, folder, status)


def _capacity(model: LanguageModel, kind: str, requested: int | None) -> int | None:
    """Tokens that fit into the state; None: endless. Raises ConfigError for a request that would do nothing."""
    learned = model.config.max_length
    if kind in _PRECISIONS or not grows(model):
        if requested is not None:
            raise ConfigError(
                f"--capacity {requested} would do nothing: it is for --to onnx and web, and for models whose state "
                "grows with the text. Leave it out"
            )
        return learned
    most = learned or requested or CAPACITY
    if requested is not None and not 2 <= requested <= most:
        fix = "at least 2" if learned is None else f"from 2 to the model's {learned} positions"
        raise ConfigError(f"--capacity is the number of tokens that a text may have, {fix}; got {requested}")
    return requested or min(CAPACITY, most)


def _write_graph(
    model: LanguageModel, kind: str, name: str, capacity: int | None, folder: Path, status: Callable[[str], None]
) -> Check:
    """The graph, the tokenizer, and the page or an example."""
    onnx.require_installed()
    tokenizer = tokenizer_of(model)
    if kind == "web":  # what can be refused at once, before minutes of tracing
        web.require_tokenizer(tokenizer)
        status(f"looking for {web.PACKAGE} {web.VERSION}, which is fetched once")
        package = web.runtime_package()
    one_row = kind == "web"  # as its page reads
    stepper = Stepper(model, capacity or 0, one_row=one_row)
    graph = onnx.translated(stepper, status)
    import onnx_ir

    onnx_ir.save(graph, folder / onnx.GRAPH, external_data=onnx.WEIGHTS, size_threshold_bytes=_INLINE)
    status("checking the graph against the model")
    run = onnx.OnnxRuntime(folder / onnx.GRAPH)
    outcome = check.compare(model, run, stepper.start, capacity, "ONNX Runtime", one_row=one_row).require_equal()
    made = _manifest(model, stepper, kind, capacity) | {"name": name, "check": asdict(outcome)}
    write_atomic(folder / MANIFEST, (json.dumps(made, indent=2) + "\n").encode())
    tokenizer.save(folder)
    _write_text("readme.md.j2", folder / "README.md", outcome, made | {"version": web.VERSION})
    if kind == "web":
        web.write_page(folder, package)
    else:
        _write_text("example.py.j2", folder / "example.py", outcome, made)
    return outcome


def _write_run(
    model: LanguageModel, source: Run, kind: str, room: int | None, folder: Path, status: Callable[[str], None]
) -> Check:
    """A run again, its matrices in bfloat16 or int8, loaded and compared: the difference is reported."""
    from glissando.loading import load

    status("rounding the matrices")
    run = Run.create(folder)
    run.write_tokenizer(tokenizer_of(model))
    config = source.read_config() | {"model": to_dict(model.config)}
    run.write_model(reduced(model, _PRECISIONS[kind]), config, source=source)
    status("checking the run against the model")
    loaded = load(folder)

    def step(ids: torch.Tensor, *rest: Any) -> list[Any]:
        control, state = rest if model.config.dials else (None, *rest)
        with torch.no_grad():
            return [*loaded(ids, state, control=control)]

    by = f"glissando in {'int8' if kind == 'safetensors-int8' else 'bfloat16'}"
    outcome = check.compare(model, step, lambda rows: [loaded.init_state(rows)], room, by)
    chosen = matrices(model)
    total = sum(value.numel() for name, value in model.state_dict().items() if name in chosen)
    sizes = {"matrices": len(chosen), "total": total, "file": MODEL, "size": (folder / MODEL).stat().st_size}
    _write_text("readme.md.j2", folder / "README.md", outcome, _facts(model, kind) | sizes)
    return outcome


def _facts(model: LanguageModel, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "parameters": model.num_parameters(),
        "mixers": list(dict.fromkeys(MIXERS.kind_of(options) for options in model.config.mixers)),
        "depth": DEPTHS.kind_of(model.config.depth),
    }


def _manifest(model: LanguageModel, stepper: Stepper, kind: str, capacity: int | None) -> dict[str, Any]:
    """`export.json`: inputs, outputs and types of the graph, the state before any token, and the tokenizer."""
    from glissando import __version__

    tokenizer = tokenizer_of(model)
    types = {"ids": "int64"}
    # bytes: an id is a byte; hf: the file is one of Hugging Face's `tokenizers`
    form = "bytes" if isinstance(tokenizer, ByteTokenizer) else "hf"
    return {
        "format": 1,
        "made_by": f"glissando {__version__}",
        **_facts(model, kind),
        "vocab_size": model.config.vocab_size,
        "tokens": tokenizer.vocab_size,
        "tokenizer": {"kind": form, "file": FILE_NAME, "end": tokenizer.eos_id},
        "capacity": capacity,
        "dials": stepper.dials,
        "file": onnx.GRAPH,
        "inputs": [{"name": n, "dtype": types.get(n, "float32"), "shape": s} for n, s in stepper.inputs.items()],
        "outputs": [{"name": n, "dtype": "float32", "shape": s} for n, s in stepper.outputs.items()],
        "state": [leaf.described for leaf in stepper.leaves],
    }


def _write_text(template: str, path: Path, outcome: Check, values: dict[str, Any]) -> None:
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["thousands"] = "{:,}".format
    text = (resources.files(__package__) / "texts" / template).read_text("utf-8")
    rendered = environment.from_string(text).render(values, title=KINDS[values["kind"]], lines=outcome.lines())
    write_atomic(path, rendered.encode())
