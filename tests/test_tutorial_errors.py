"""The error messages that the tutorials quote are those of the program today, without the trainings before them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from test_troubleshooting import forgetting
from test_tutorials import tutorials

from glissando.cli import main as glissando

CASES = [
    (page, block.line)
    for page, path in tutorials.PAGES.items()
    for block in tutorials.blocks(path.read_text())
    if block.kind == "bash" and block.status and re.match(r"(\.\.\.\n)?glissando \w+: ", block.output or "")
]


def commands(code: str) -> list[str]:
    return code.replace("\\\n", " ").strip().split("\n")


def run(command: str) -> int:
    """A command of a block: `glissando` in this process, others by a shell."""
    if not command.startswith("glissando "):
        return subprocess.run(command, shell=True, check=True).returncode
    try:
        with forgetting():
            return glissando(shlex.split(command)[1:])
    except SystemExit as ended:
        return ended.code


def trained_before(found: list, last) -> list[str]:
    """The trainings of the page whose run the block needs, with a budget of one step."""
    lines = [
        line for block in found if block.kind == "bash" and block.line < last.line for line in commands(block.code)
    ]
    made = [(line, re.search(r"^glissando train .*--out (\S+)", line)) for line in lines]
    return [
        re.sub(r"--training\.steps \d+", "--training.steps 1", line)
        for line, out in made
        if out and out[1] in last.code
    ]


@pytest.mark.parametrize(("page", "line"), CASES)
def test_a_quoted_error_is_the_programs(page, line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    result = tutorials.blocks(tutorials.PAGES[page].read_text())
    last = next(block for block in result if block.line == line)
    for block in result:
        if block.file is not None and block.line < line:
            with Path(block.file.removesuffix(" (continued)")).open("a") as file:
                file.write(block.code)
    for command in trained_before(result, last):
        assert run(command) == 0, command
    capfd.readouterr()
    status = [run(command) for command in commands(last.code)][-1]
    printed = "".join(capfd.readouterr()).replace(str(tmp_path.resolve()), tutorials.HOME)
    assert status == last.status
    assert tutorials.agree(last.output, printed) is None, printed


def test_there_are_errors_to_compare():
    assert {page for page, _ in CASES} == {"compare-fairly", "irregular-series"}
