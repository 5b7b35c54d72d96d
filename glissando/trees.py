"""A tree of tensors and plain values as two files: safetensors and JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from glissando.errors import RunError
from glissando.storage import RETRAIN, load_tensors, read_json, save_tensors, verify_manifest, write_atomic

#: the only key of what stands for a tensor
_TENSOR = "$tensor"


def save_tree(directory: str | Path, tree: Any, name: str = "tree") -> None:
    """Writes a tree as `<name>.safetensors` (its tensors under their path) and `<name>.json` (the rest).

    A tree is a dict, made of dict with str keys, list, tuple (read as a list), None, bool, int, float, str and Tensor.
    Raises TypeError that names the path of anything else, RunError if a file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    rest = _without_tensors(tree, "", tensors)
    save_tensors(Path(directory) / f"{name}.safetensors", tensors)
    write_atomic(Path(directory) / f"{name}.json", json.dumps(rest).encode())


def load_tree(directory: str | Path, name: str = "tree", advice: str | Callable[[], str] = RETRAIN) -> Any:
    """The tree that `save_tree` wrote into a directory that has a manifest, whose digests of both files are checked;
    tensors are on the CPU.

    Raises RunError that names the file that is missing, damaged or malformed, and `advice` on what to do.
    """
    path = Path(directory) / f"{name}.json"
    verify_manifest(directory, [path.name, f"{name}.safetensors"], advice)
    tensors = load_tensors(path.with_suffix(".safetensors"))
    try:
        return _with_tensors(read_json(path, "a saved tree"), tensors)
    except (KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path} is malformed or belongs to other tensors ({error!r}). {RETRAIN}") from error


def _without_tensors(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, Tensor):
        assert path not in tensors, f"two tensors have the path {path}"
        tensors[path] = node
        return {_TENSOR: path}
    if isinstance(node, dict) and all(type(key) is str for key in node):
        return {key: _without_tensors(value, f"{path}/{key}".lstrip("/"), tensors) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_without_tensors(value, f"{path}/{number}", tensors) for number, value in enumerate(node)]
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(
        f"{path or 'tree'}: cannot save a {type(node).__qualname__}; a tree holds dict with str keys, list, tuple, "
        "None, bool, int, float, str and Tensor"
    )


def _with_tensors(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_with_tensors(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    return tensors[node[_TENSOR]] if _TENSOR in node else {k: _with_tensors(v, tensors) for k, v in node.items()}
