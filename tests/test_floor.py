"""The oldest torch that pyproject.toml allows has every name that the package uses.

A name is a module, function, class or method of torch written in full, as `torch.cpu.get_capabilities`; options of
functions and methods of values are tried where all oldest versions are installed (test_wheel.py, slow).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAD, *NEWER = (ROOT / "tests" / "data" / "newer_torch.txt").read_text(encoding="utf-8").splitlines()


def used(source: str) -> Iterator[str]:
    """The names of torch that a program writes, in full."""
    nodes = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom, ast.Attribute))
    ]
    known = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            known |= {each.asname: each.name for each in node.names if each.asname and each.name.startswith("torch.")}
            yield from (each.name for each in node.names)
    yield from known.values()
    for node in nodes:
        if isinstance(node, ast.Attribute) and (parts := dotted(node)) and parts[0] in known:
            yield ".".join([known[parts[0]], *parts[1:]])


def dotted(node: ast.AST) -> list[str]:
    """["a", "b", "c"] for a.b.c; nothing where it does not begin with a name."""
    rest = []
    while isinstance(node, ast.Attribute):
        rest.append(node.attr)
        node = node.value
    return [node.id, *reversed(rest)] if isinstance(node, ast.Name) else []


def newer(source: str) -> set[str]:
    listed = set(NEWER)
    return {
        name
        for name in set(used(source))
        if any(name[:end] in listed for end in [*(dot.start() for dot in re.finditer(r"\.", name)), len(name)])
    }


def test_no_name_is_newer():
    result = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / "glissando").rglob("*.py"))
        if "torch" in (source := path.read_text(encoding="utf-8")) and (names := newer(source))
    }
    assert result == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.LinearCrossEntropyLoss(3, 4)",
        "from torch import nn\nnn.LinearCrossEntropyLoss",
        "from torch.nn import LinearCrossEntropyLoss as Loss",
        "import torch.nn as layers\nlayers.LinearCrossEntropyLoss.forward",
    ],
)
def test_a_newer_name_is_found(source):
    assert len(newer(source)) >= 1


def test_the_list_is_of_these_versions():
    """Another oldest or pinned torch needs another list: torch_names.py says how it is made."""
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pinned is not None
    assert oldest is not None
    expected = f"# torch {pinned[1]} has these and {oldest[1]} does not: tests/torch_names.py"
    assert expected == HEAD
