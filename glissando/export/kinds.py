"""What a run can be exported as, and how: into a folder that appears whole, once its check has passed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from glissando.errors import ConfigError, unknown_name
from glissando.export import check, readme, smaller
from glissando.export.check import Check
from glissando.export.forms import grows
from glissando.export.graph import Stepper
from glissando.export.manifest import MANIFEST, Request, graph_manifest, write_json
from glissando.generation import tokenizer_of
from glissando.model import LanguageModel
from glissando.runs import Run, require_new
from glissando.storage import publish_directory

#: tokens that a cache which grows holds by default
CAPACITY = 1024


#: fills a folder and returns the check's result
Writer = Callable[[Request, Path], Check]


def _graph(write: Callable[[Stepper, Path], list[str]], runtime: Callable[[Path, Stepper], Any]) -> Writer:
    def fill(request: Request, folder: Path) -> Check:
        stepper = Stepper(request.model, request.capacity or 0)
        write(stepper, folder)
        texts = check.texts_of(request.stream, request.capacity)
        run = runtime(folder, stepper)
        found = check.compare(request.model, run, stepper.init_state, texts, request.capacity, run.name)
        write_json(folder / MANIFEST, graph_manifest(request, stepper, found.require_equal()))
        tokenizer_of(request.model).save(folder)
        readme.write(request, folder, found)
        return found

    return fill


def _onnx(request: Request, folder: Path) -> Check:
    from glissando.export import onnx

    onnx.require_installed()

    def runtime(place: Path, stepper: Stepper) -> Any:
        return onnx.OnnxRuntime(place, stepper.input_names, len(stepper.dials))

    return _graph(onnx.write, runtime)(request, folder)


def _web(request: Request, folder: Path) -> Check:
    from glissando.export import web

    # What can be refused at once, before minutes of tracing.
    web.require_tokenizer(tokenizer_of(request.model))
    package = web.runtime_package()
    found = _onnx(request, folder)
    web.write_page(folder, package)
    return found


def _torch(request: Request, folder: Path) -> Check:
    from glissando.export import program

    return _graph(program.write, lambda place, _: program.TorchRuntime(place))(request, folder)


#: --to
KINDS: dict[str, Writer] = {
    "onnx": _onnx,
    "web": _web,
    "torch": _torch,
    "safetensors-bf16": smaller.fill,
    "safetensors-int8": smaller.fill,
}


def export(
    model: LanguageModel,
    run: Run,
    kind: str,
    out: str | Path,
    stream: list[int],
    capacity: int | None = None,
) -> Check:
    """Write `model`, of the run `run`, to the new folder `out` -> what the check found; in float32.

    kind      onnx, web, torch, safetensors-bf16 or safetensors-int8
    stream    held-out tokens, some hundreds: what the check reads
    capacity  tokens that a cache which grows holds; CAPACITY if None

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
    request = Request(model, run, kind, stream, _capacity(model, kind, capacity))
    found: list[Check] = []
    publish_directory(out, lambda folder: found.append(KINDS[kind](request, folder)))
    return found[0]


def _capacity(model: LanguageModel, kind: str, requested: int | None) -> int | None:
    learned = model.config.max_length
    if kind not in ("onnx", "web", "torch"):
        if requested is not None:
            raise ConfigError(f"--capacity is of --to onnx, web and torch, and this is --to {kind}: leave it out")
        return learned
    if not grows(model):
        if requested is not None:
            raise ConfigError(
                f"--capacity {requested} would do nothing: the state of this model has one size at any length. "
                "Leave it out"
            )
        return learned
    if requested is not None and requested < 2:
        raise ConfigError(f"--capacity is the number of tokens that a text may have, at least 2; got {requested}")
    if learned is not None and requested is not None and requested > learned:
        raise ConfigError(f"--capacity {requested} is above the model's {learned} positions; give at most so many")
    return requested or min(CAPACITY, learned or CAPACITY)
