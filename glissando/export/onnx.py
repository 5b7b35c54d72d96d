"""ONNX: `step.onnx` and `prefill.onnx`, which share one file of weights, `weights.bin`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import MissingExtraError, Refused
from glissando.export.graph import BATCH, TIME, Stepper

WEIGHTS = "weights.bin"
FILES = {"step": "step.onnx", "prefill": "prefill.onnx"}
#: tensors of fewer bytes stay in the graph
_INLINE = 1024


def require_installed() -> None:
    """Raise MissingExtraError where a package is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"--to onnx needs onnx, onnxscript and onnxruntime ({error}): pip install -e '.[export]' in a checkout"
        ) from error


def write(stepper: Stepper, folder: Path, status: Callable[[str], None] = lambda _: None) -> None:
    """Both graphs and their weights in `folder`; `status` takes what begins, of which each part takes some seconds.

    Raises Refused, with the exporter's reason, for an operation that ONNX does not have.
    """
    weights: dict[bytes, int] = {}
    with open(folder / WEIGHTS, "wb") as file:
        for kind, name in FILES.items():
            status(f"tracing the {kind}")
            program = stepper.trace(prefill=kind == "prefill")
            status(f"translating the {kind} to ONNX")
            model = translated(program, kind, *_shapes(stepper, kind))
            _put_aside(model, file, weights, folder)
            import onnx_ir

            onnx_ir.save(model, folder / name)


#: of inputs or outputs by their names; a free axis has a name
Shapes = dict[str, list[str | int]]


def translated(program: torch.export.ExportedProgram, what: str, inputs: Shapes, outputs: Shapes) -> Any:
    """The graph as a model of onnx_ir. Raises Refused, with the exporter's reason, for what ONNX does not have."""
    import onnx_ir

    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript", "onnx_ir")}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's own old calls
            made = torch.onnx.export(
                program,
                (),
                dynamo=True,
                optimize=True,
                verbose=False,
                input_names=list(inputs),
                output_names=list(outputs),
            )
    except Exception as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise Refused(f"the {what} cannot be written as ONNX: {type(error).__name__}: {reason}") from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert made is not None
    model = made.model
    for values, shapes in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, shape in zip(values, shapes.values(), strict=True):
            value.shape = onnx_ir.Shape(shape)
    _drop_traces(model)
    return model


def _shapes(stepper: Stepper, kind: str) -> tuple[Shapes, Shapes]:
    """Those of inputs and outputs: free axes are called `batch` and `time`, everything else has its size."""
    time, stepped = TIME if kind == "prefill" else 1, stepper.leaves
    control: Shapes = {"control": [BATCH, len(stepper.dials)]} if stepper.dials else {}
    inputs: Shapes = {"ids": [BATCH, time], **control, **{leaf.input: [BATCH, *leaf.shape] for leaf in stepped}}
    logits: Shapes = {"logits": [BATCH, time, stepper.model.config.vocab_size]}
    return inputs, logits | {leaf.output: [BATCH, *leaf.shape] for leaf in stepped}


def _drop_traces(model: Any) -> None:
    """Drop PyTorch's notes of where each node comes from, which are longer than the graph and name places here."""
    for graph in (model.graph, *model.functions.values()):
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
        for value in (*graph.inputs, *graph.outputs):
            value.metadata_props.clear()
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "glissando", None


def _put_aside(model: Any, file: Any, weights: dict[bytes, int], folder: Path) -> None:
    """Large tensors go to the shared file, each number once, aligned as memory maps need it."""
    import onnx_ir

    for initializer in model.graph.initializers.values():
        tensor = initializer.const_value
        data = tensor.tobytes()
        if len(data) < _INLINE:
            continue
        if data not in weights:
            file.write(b"\0" * (-file.tell() % 64))
            weights[data] = file.tell()
            file.write(data)
            file.flush()
        initializer.const_value = onnx_ir.ExternalTensor(
            WEIGHTS,
            weights[data],
            len(data),
            tensor.dtype,
            shape=tensor.shape,
            name=initializer.name,
            base_dir=str(folder),
        )


def session(path: Path) -> Any:
    """A graph opened by ONNX Runtime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


class OnnxRuntime:
    """The files of `write`, run by ONNX Runtime on one thread."""

    def __init__(self, folder: Path, inputs: Sequence[str]) -> None:
        self._sessions = {kind: session(folder / name) for kind, name in FILES.items()}
        self._inputs = list(inputs)

    def __call__(self, kind: str, *arguments: Tensor) -> list[Tensor]:
        """Logits and the state after these inputs."""
        feeds = {name: np.ascontiguousarray(x.numpy()) for name, x in zip(self._inputs, arguments, strict=True)}
        return [torch.from_numpy(y) for y in self._sessions[kind].run(None, feeds)]
