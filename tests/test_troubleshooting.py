"""Every command of docs/troubleshooting.md prints what the page shows."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from glissando import imports
from glissando.cli import main as glissando
from glissando.data.corpora import CORPORA
from glissando.depth import DEPTHS
from glissando.mixers import MIXERS
from glissando.training import launch
from glissando.training.progress import Progress

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
#: what stands for left-out text, and for the directory that a command runs in
LEFT_OUT, HOME = "…", "/home/you"
#: for the page's book.yaml, which leaves the sizes to the reader
BOOK = """
preset: transformer-nano
model: {hidden_size: 16, depth: {layers: 1}, mixer: {heads: 2}}
data: {kind: text, path: book.txt, seq_len: 16, batch_size: 2, max_valid_bytes: 100}
training: {steps: 8, schedule: {warmup_steps: 0}, sample_every: 1000000}
"""


def sections() -> dict[str, list[tuple[str, str]]]:
    """Title -> the section's commands, each with what the page shows below it."""
    result: dict[str, list[tuple[str, str]]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title = part.partition("\n")[0]
        for block in re.findall(r"^```\n(\$ .*?)^```$", part, re.DOTALL | re.MULTILINE):
            whole = block.replace("\\\n", " ")  # commands that are continued
            for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", whole, re.MULTILINE):
                result.setdefault(title, []).append((command, shown))
    return result


SECTIONS = sections()


def as_pattern(shown: str) -> str:
    """Lines may be wrapped anywhere, and … stands for anything."""
    words = " ".join(shown.replace("^C\n", "").split())
    return ".*".join(map(re.escape, words.split(LEFT_OUT)))


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """What a command registers is forgotten after it, as in a process of its own."""
    before = [(registry, dict(registry._classes), dict(registry.options)) for registry in (MIXERS, DEPTHS, CORPORA)]
    imported = dict(imports._imported)
    yield
    for registry, classes, options in before:
        registry._classes, registry.options = classes, options
    imports._imported.clear()
    imports._imported.update(imported)
    for name in [name for name in sys.modules if name.startswith("imported_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with what the page supposes: a text, its configuration, a mixer, two runs and some notes."""
    place = tmp_path_factory.mktemp("home")
    (place / "book.txt").write_text("Once upon a time a mouse lived in a mill by the river.\n" * 40)
    (place / "book.yaml").write_text(BOOK)
    (place / "notes").mkdir()
    (place / "notes" / "monday.txt").write_text("Milk.\n")
    shutil.copy(ROOT / "examples" / "add_a_mixer.py", place / "my_mixer.py")
    for more in (["runs/book"], ["runs/average", "--import", "my_mixer.py", "--model.mixer", "average"]):
        with contextlib.chdir(place), forgetting():
            assert glissando(["train", "--config", "book.yaml", "--out", *more]) == 0
    return place


@pytest.fixture
def home(place, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launch, "computes_bfloat16", lambda accelerator: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return place


def interrupt(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Press Ctrl-C while this step is taken."""
    original = Progress.after_step

    def after_step(self, loop):
        original(self, loop)
        if loop.state.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "after_step", after_step)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_shows_what_is_printed(title, home, monkeypatch, capfd):
    for command, shown in SECTIONS[title]:
        program, *words = shlex.split(command)
        if program != "glissando":
            subprocess.run(command, shell=True, check=True)
            continue
        if "cuda" in words and torch.cuda.is_available():
            continue
        with monkeypatch.context() as patched, forgetting():
            if "^C\n" in shown:
                interrupt(patched, 5)
            status = glissando(words)
        printed = " ".join("".join(reversed(capfd.readouterr())).replace(str(home), HOME).split())
        assert re.fullmatch(as_pattern(shown), printed, re.DOTALL), f"$ {command}\n{printed}"
        if "^C\n" in shown:
            assert status == 130
        else:
            assert bool(status) == (f"glissando {words[0]}: " in shown)


def test_the_page_has_the_errors_that_people_meet():
    shown = [part for blocks in SECTIONS.values() for _, part in blocks]
    assert sum("glissando " in part and ": " in part for part in shown) >= 20
