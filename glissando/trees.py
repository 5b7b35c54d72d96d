"""Trees of tensors and plain values as two files: safetensors and JSON, no pickle."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from glissando.errors import RunError
from glissando.storage import RETRAIN, load_tensors, read_json, save_tensors, verify_manifest, write_atomic

MAX_DEPTH = 200


def save_tree(directory: str | Path, tree: Any, name: str = "tree") -> None:
    """Writes a tree as `<name>.safetensors` (its tensors under their path) and `<name>.json` (its structure).

    A tree is made of dict (str or int keys), list, tuple, None, bool, int, float, str and Tensor; `load_tree`
    gives back exactly this, tensors on the CPU, without gradient, each with storage of its own.
    Raises TypeError that names the path of anything else, RunError if a file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    structure = _encode(tree, (), tensors)
    save_tensors(Path(directory) / f"{name}.safetensors", tensors)
    text = json.dumps({"format": 1, "tree": structure}, allow_nan=False, indent=1)
    write_atomic(Path(directory) / f"{name}.json", text.encode())


def load_tree(directory: str | Path, name: str = "tree", advice: str | Callable[[], str] = RETRAIN) -> Any:
    """The tree that `save_tree` wrote into a directory that has a manifest, whose digests of both files are checked.

    Raises RunError that names the file that is missing, damaged or malformed, and `advice` on what to do.
    """
    path = Path(directory) / f"{name}.json"
    verify_manifest(directory, [path.name, f"{name}.safetensors"], advice)
    structure = read_json(path, "the structure of a saved tree")
    tensors = load_tensors(path.with_suffix(".safetensors"))
    try:
        return _decode(structure["tree"], tensors)
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise RunError(f"{path} is malformed or belongs to other tensors ({error!r}). {RETRAIN}") from error


def _encode(node: Any, path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> Any:
    if len(path) > MAX_DEPTH:
        raise TypeError(f"{_show(path[:5])}...: nested deeper than {MAX_DEPTH} levels (a cycle?)")
    kind = type(node)
    if node is None or kind in (bool, int, str):
        return node
    if kind is float:
        return node if abs(node) < float("inf") else {"float": repr(node)}
    if kind is list:
        return [_encode(item, (*path, index), tensors) for index, item in enumerate(node)]
    if kind is tuple:
        return {"tuple": _encode(list(node), path, tensors)}
    if kind is dict:
        return _encode_dict(node, path, tensors)
    if isinstance(node, Tensor):
        return {"tensor": _register(node, path, tensors)}
    raise TypeError(
        f"{_show(path)}: cannot save a {kind.__module__}.{kind.__qualname__}; "
        "a tree holds dict, list, tuple, None, bool, int, float, str and Tensor"
    )


def _encode_dict(node: dict[Any, Any], path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> Any:
    for key in node:
        if type(key) not in (str, int):
            raise TypeError(f"{_show(path)}: key {key!r} is a {type(key).__name__}; keys are str or int")
    if all(type(key) is str for key in node):
        return {"dict": {key: _encode(value, (*path, key), tensors) for key, value in node.items()}}
    return {"items": [[key, _encode(value, (*path, key), tensors)] for key, value in node.items()]}


def _register(tensor: Tensor, path: tuple[str | int, ...], tensors: dict[str, Tensor]) -> str:
    """Stores the tensor under its path; a suffix distinguishes paths that read the same, as keys 0 and "0"."""
    stem = "/".join(map(str, path)).encode("ascii", "backslashreplace").decode() or "tensor"
    names = itertools.chain([stem], (f"{stem}#{count}" for count in itertools.count(1)))
    name = next(name for name in names if name not in tensors and name != "__metadata__")
    tensors[name] = tensor
    return name


def _decode(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in value.items()}
    if kind == "items":
        return {key: _decode(item, tensors) for key, item in value}
    if kind == "tuple":
        return tuple(_decode(value, tensors))
    if kind == "float":
        return float(value)
    if kind == "tensor":
        return tensors[value]
    raise ValueError(f"unknown kind {kind!r}")


def _show(path: tuple[str | int, ...]) -> str:
    return "tree" + "".join(f"[{key!r}]" for key in path)
