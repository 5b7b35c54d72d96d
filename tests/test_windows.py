"""The verbs that a user starts with, where what Windows lacks and refuses is emulated (windows/sitecustomize.py)."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent / "windows"


def on_windows(*arguments: object, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "warn_default_encoding", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def book(tmp_path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("The fox who had a plan went out to find the hen who had none.\n" * 40, encoding="utf-8")
    return path


def test_a_training_survives_a_power_cut_and_its_model_is_used(book):
    printed = on_windows(HERE / "session.py", book, "trains", folder=book.parent)
    assert "at http://127.0.0.1:" in printed
    assert (book.parent / "run" / "summary.json").is_file()


@pytest.mark.slow
def test_models_are_trained_further_exported_and_compared(book):
    on_windows(HERE / "session.py", book, "measures", folder=book.parent)
    speed = json.loads((book.parent / "compared" / "speed.json").read_text())["models"]
    assert [figures["memory_mib"] > 0 for figures in speed.values()] == [True, True]


REFUSED = """
import resource
os.fsync(open('book.txt'))
os.open('.', os.O_RDONLY)
os.kill(os.getpid(), 0)
file = open('book.txt'); os.replace('book.txt', 'other.txt')
os.rename('book.txt', 'taken.txt')
open('a:b.txt', 'w')
open('/proc/self/status')
os.fork()
os.dup(socket.socket().fileno())
"""


def test_the_emulation_refuses(book):
    (book.parent / "taken.txt").touch()
    program = f"""
import os, socket
for line in {REFUSED.strip().splitlines()!r}:
    try:
        exec(line)
    except (OSError, ImportError, AttributeError, RuntimeError):
        continue
    print(line)
"""
    assert on_windows("-c", program, folder=book.parent) == ""


def test_every_text_file_is_read_and_written_as_utf_8():
    """Windows' own encoding is another; `open` of what this package defines has no encoding."""
    forgotten = []
    for path in sorted((ROOT / "glissando").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"open\(|_text\(|TemporaryFile|subprocess", text):
            continue  # parsing takes longest
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        place = path.relative_to(ROOT)
        forgotten += [f"{place}:{call.lineno}: {ast.unparse(call)}" for call in calls if _has_no_encoding(call)]
    assert forgotten == []


def _has_no_encoding(call: ast.Call) -> bool:
    words = {word.arg: word.value for word in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if "encoding" in words or "subprocess" in ast.unparse(call.func):
        return "encoding" not in words and ("text" in words or "universal_newlines" in words)
    if name in ("read_text", "write_text"):
        return len(call.args) < (1 if name == "read_text" else 2)
    mode = call.args[0 if isinstance(call.func, ast.Attribute) else 1 :][:1]
    is_text = (
        bool(mode) and isinstance(mode[0], ast.Constant) and str(mode[0].value) in ("r", "w", "a", "x", "w+", "a+")
    )
    return is_text and name in ("open", "TemporaryFile", "NamedTemporaryFile")
