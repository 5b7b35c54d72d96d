"""Commands of the pages that start a program of the repository other than `glissando` are understood by its parser."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from test_page_commands import PAGES, Parsed

from benchmarks.rows import select as select_rows
from research.audit.claims import select as select_claims

ROOT = Path(__file__).parent.parent
WHERE = [ROOT / "CONTRIBUTING.md", ROOT / "research" / "README.md", *PAGES]
CODE = re.compile(r"^```.*?^```|^ {4}[^\n]*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(r"python -m ((?:research|benchmarks)[\w.]*)([^`#|\n]*)|python (examples/\w+)\.py([^`#|\n]*)")
#: what the reader puts a name in place of
PLACEHOLDERS = {"research.audit": {"NAME": "hybrid-memory"}}


def commands(text: str) -> set[tuple[str, str]]:
    """(module, arguments) of every such command in the code of a page."""
    result = set()
    for code in CODE.findall(text.replace("\\\n", " ")):
        for module, words, file, others in PROGRAM.findall(code):
            result.add((module or file.replace("/", "."), (words or others).strip()))
    return result


# research.steering has the options of `glissando steer`; tests/test_steering.py runs it.
CASES = sorted(c for c in set().union(*(commands(page.read_text()) for page in WHERE)) if c[0] != "research.steering")


def parsed(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """What the program's parser makes of the arguments; the program ends there."""
    result = []
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        result.append(original(self, args, namespace))
        raise Parsed

    name = f"{module}.__main__" if module in ("benchmarks", "research.audit") else module
    program = importlib.import_module(name)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(Parsed):
        program.main()
    return result[0]


@pytest.mark.parametrize("module", sorted({module for module, _ in CASES}))
def test_the_commands_of_the_pages_are_understood(module, monkeypatch):
    for arguments in (arguments for name, arguments in CASES if name == module):
        for name, value in PLACEHOLDERS.get(module, {}).items():
            arguments = arguments.replace(name, value)
        with monkeypatch.context() as patch:
            understand(module, shlex.split(arguments), patch)


def understand(module: str, words: list[str], patch: pytest.MonkeyPatch) -> None:
    if "--help" in words:
        words.remove("--help")
    if not hasattr(importlib.import_module(module), "main") and module not in ("benchmarks", "research.audit"):
        assert not words, f"{module} takes no arguments"
        return
    options = parsed(module, words, patch)
    if module == "benchmarks" and hasattr(options, "rows"):
        assert not options.rows or select_rows(options.rows)
    if module == "research.audit":
        assert not options.claims or select_claims(options.claims)


def test_a_stale_command_is_found(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed("research.shift_rule", ["--no_such_option"], monkeypatch)
    assert "--no_such_option" in capsys.readouterr().err


def test_there_are_commands_to_check():
    assert len(CASES) > 30
    text = "`python -m research.a --b`\n\n    python examples/c.py --d e    # f\n\npython -m research.not_code"
    assert commands(text) == {("research.a", "--b"), ("examples.c", "--d e")}
