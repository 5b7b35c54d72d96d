"""PyTorch's exported program: `step.pt2` and `prefill.pt2`, which torch alone loads."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from glissando.export.graph import Stepper

FILES = {"step": "step.pt2", "prefill": "prefill.pt2"}


def write(stepper: Stepper, folder: Path) -> list[str]:
    """Both programs in `folder` -> the names of the files."""
    for kind, name in FILES.items():
        program = without_notes(stepper.trace(prefill=kind == "prefill"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's own old calls
            torch.export.save(program, folder / name)
    return list(FILES.values())


def without_notes(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Without what PyTorch notes of where each operation was written, which is longer than the graph itself."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for note in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
                node.meta.pop(note, None)
    return program


class TorchRuntime:
    """The files of `write`, run by torch."""

    name = "torch"

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._programs = {kind: torch.export.load(folder / name).module() for kind, name in FILES.items()}

    def __call__(self, kind: str, *arguments: Tensor) -> list[Tensor]:
        """Logits and the state after these inputs."""
        with torch.no_grad():
            return list(self._programs[kind](*arguments))
