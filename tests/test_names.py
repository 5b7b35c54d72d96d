"""Names and sentences of the package say what a thing is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "glissando"
FILES = sorted(PACKAGE.rglob("*.py"))
#: they say how a value came here, and not what it is
EMPTY = {"theirs", "ours", "mine", "found", "held", "given", "own", "told", "looks"}


@pytest.mark.parametrize("folder", sorted({path.relative_to(PACKAGE).parts[0] for path in FILES}))
def test_a_local_name_has_a_role_and_a_docstring_a_subject(folder):
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] == folder:
            assert problems(path.read_text()) == [], path


def problems(code: str) -> list[str]:
    """Local names without a role, and docstrings without a subject."""
    wrong = []
    tree = ast.parse(code)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    for node in (part for function in functions for part in ast.walk(function)):
        if isinstance(node, ast.Name | ast.arg):
            name = node.id if isinstance(node, ast.Name) else node.arg
            if name in EMPTY:
                wrong.append(f"line {node.lineno}: {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").split(" ")[0]
            if first == "Of" or (ast.get_docstring(node) or "").startswith(("Those of", "That of")):
                wrong.append(f"{getattr(node, 'name', 'module')}: a docstring that begins with {first}")
    return wrong


def test_such_a_name_and_such_a_docstring_are_found():
    assert problems("def f(x):\n    '''Of x.'''\n    found = x\n    return found") != []
    assert problems("def f(x):\n    '''The square of x.'''\n    square = x * x\n    return square") == []
