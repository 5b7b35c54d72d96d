"""ONNX: `model.onnx`, and its weights in `weights.bin`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.errors import MissingExtraError, Refused
from glissando.export.graph import Step

GRAPH, WEIGHTS = "model.onnx", "weights.bin"


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


def translated(step: Step, status: Callable[[str], None] = lambda _: None) -> Any:
    """The graph as a model of onnx_ir; `status` takes what begins, of which each part takes some seconds.

    Raises Refused, with the exporter's reason, for what cannot be traced and for what ONNX does not have.
    """
    import onnx_ir

    status("tracing the model")
    program = step.trace()
    status("translating the graph to ONNX")
    inputs, outputs = step.shapes
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "onnxscript", "onnx_ir")}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's own old calls
            made = torch.onnx.export(
                program, (), dynamo=True, optimize=False, verbose=False,
                input_names=list(inputs), output_names=list(outputs),
            )  # fmt: skip
    except Exception as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise Refused(f"the model cannot be written as ONNX: {type(error).__name__}: {reason}") from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert made is not None
    model = made.model
    for values, shapes in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, shape in zip(values, shapes.values(), strict=True):
            value.shape = onnx_ir.Shape(shape)
    return _simplified(model)


def _simplified(model: Any) -> Any:
    """The model with constants folded and without what nothing reads, and without PyTorch's notes of where each node
    comes from, which are longer than the graph and name places here.

    PyTorch's own `optimize` also tries some hundred patterns at each node, of which ONNX Runtime does what helps.
    """
    from onnx_ir import passes
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants_ir

    common.InlinePass()(model)
    fold_constants_ir(model)
    result = passes.Sequential(
        common.IdentityEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.ClearMetadataAndDocStringPass(),
    )(model)
    model.producer_name, model.producer_version = "glissando", None
    return result.model


class OnnxRuntime:
    """A graph, run by ONNX Runtime on one thread."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Outputs and the state after these inputs, in the graph's order."""
        names = [each.name for each in self._session.get_inputs()]
        feeds = {name: np.ascontiguousarray(x.numpy()) for name, x in zip(names, arguments, strict=True)}
        return [torch.from_numpy(y) for y in self._session.run(None, feeds)]
