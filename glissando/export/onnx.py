"""ONNX: `step.onnx` and `prefill.onnx`, which share one file of weights, `weights.bin`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
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


def write(stepper: Stepper, folder: Path) -> list[str]:
    """Both graphs and their weights in `folder` -> the names of the files.

    Raises Refused, with the exporter's reason, for an operation that ONNX does not have.
    """
    weights: dict[bytes, int] = {}
    with open(folder / WEIGHTS, "wb") as file:
        for kind, name in FILES.items():
            model = _translated(stepper, kind)
            _name_axes(stepper, model, kind)
            _put_aside(model, file, weights, folder)
            _without_traces(model)
            import onnx_ir

            onnx_ir.save(model, folder / name)
    return [*FILES.values(), WEIGHTS]


def _translated(stepper: Stepper, kind: str) -> Any:
    program = stepper.trace(prefill=kind == "prefill")
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
                input_names=stepper.input_names,
                output_names=stepper.output_names,
            )
    except Exception as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise Refused(f"the {kind} cannot be written as ONNX: {type(error).__name__}: {reason}") from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert made is not None
    return made.model


def _name_axes(stepper: Stepper, model: Any, kind: str) -> None:
    """Free axes are called `batch` and `time`, everything else has its size."""
    import onnx_ir

    time = TIME if kind == "prefill" else 1
    states: list[list[Any]] = [[BATCH, *leaf.shape] for leaf in stepper.leaves]
    control: list[list[Any]] = [[BATCH, len(stepper.dials)]] if stepper.dials else []
    vocabulary = stepper.model.config.vocab_size
    inputs = [[BATCH, time], *control, *states]
    outputs = [[BATCH, time, vocabulary], *states]
    for values, shapes in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, shape in zip(values, shapes, strict=True):
            value.shape = onnx_ir.Shape(shape)


def _without_traces(model: Any) -> None:
    """Without PyTorch's notes of where each node comes from, which are longer than the graph and name places here."""
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


class OnnxRuntime:
    """The files of `write`, run by ONNX Runtime on one thread."""

    name = "ONNX Runtime"

    def __init__(self, folder: Path, inputs: Sequence[str], dials: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._sessions = {
            kind: onnxruntime.InferenceSession(folder / name, options, ["CPUExecutionProvider"])
            for kind, name in FILES.items()
        }
        self._inputs = list(inputs)

    def __call__(self, kind: str, *arguments: Tensor) -> list[Tensor]:
        """Logits and the state after these inputs."""
        feeds = {name: np.ascontiguousarray(x.numpy()) for name, x in zip(self._inputs, arguments, strict=True)}
        return [torch.from_numpy(y) for y in self._sessions[kind].run(None, feeds)]
