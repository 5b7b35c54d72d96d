"""Names and sentences of the package say what a thing is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import CodeType

PACKAGE = Path(__file__).parent.parent / "glissando"
FILES = sorted(PACKAGE.rglob("*.py"))
#: they say how a value came here, and not what it is
EMPTY = {"theirs", "ours", "mine", "found", "held", "given", "own", "told", "looks"}
BEGINNING = re.compile(r"^\s*r?(?:\"{3}|'{3})\s*(Of|Those of|That of) ", re.MULTILINE)


def test_a_local_name_has_a_role_and_a_docstring_a_subject():
    assert not (wrong := {str(path): each for path in FILES if (each := problems(path.read_text()))}), wrong


def problems(code: str) -> list[str]:
    """Local names without a role, and docstrings without a subject."""
    wrong = [f"a docstring that begins with {first}" for first in BEGINNING.findall(code)]
    todo = [compile(code, "code", "exec")]
    while todo:
        part = todo.pop()
        todo += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
        if part.co_flags & inspect.CO_OPTIMIZED:  # a function, whose names are local
            names = EMPTY & {*part.co_varnames, *part.co_cellvars}
            wrong += [f"line {part.co_firstlineno}, {part.co_name}: {name}" for name in sorted(names)]
    return wrong


def test_such_a_name_and_such_a_docstring_are_found():
    assert problems("def f(x):\n    '''Of x.'''\n    found = x\n    return found")[1:] != []  # both
    assert problems("def f(x):\n    '''The square of x.'''\n    square = x * x\n    return square") == []
