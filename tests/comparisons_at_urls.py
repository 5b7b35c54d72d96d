"""Comparisons at a URL of fsspec's memory, for tests: small ones, machines without their files, what is stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from comparisons import comparison
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import text_file, weights

from glissando import remote
from glissando.compare import run as compare
from glissando.compare import training
from glissando.compare.plan import Comparison

URL = "memory://bucket/compared"
TIMED = {"decode": {}, "state": {}, "train": {"median": 1.0, "low": 1.0, "high": 1.0}, "memory_mib": 1.0}
SMALL: dict[str, Any] = {
    "data": {"seq_len": 32, "batch_size": 1, "valid_stories": 2},
    "training": {"log_every": 1, "save_every": 2, "schedule": {"warmup_steps": 2}, "accelerator": "cpu"},
    "contexts": [8],
    "learning_rates": [2e-3],
}


class Killed(BaseException):
    """What no code of the library catches."""


def cache_of_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, an empty memory, and no time spent on speed."""

    def of_the_test(kind: str) -> Path:
        (tmp_path / "cache" / kind).mkdir(parents=True, exist_ok=True)
        return tmp_path / "cache" / kind

    monkeypatch.setattr(remote, "cache_dir", of_the_test)
    monkeypatch.setattr(compare, "measure_speed", lambda runs, *_: dict.fromkeys(runs, TIMED))
    empty()
    return tmp_path / "cache"


def empty() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def toy(out: str | Path, given: Sequence[str] = ("transformer-nano",), **changes: Any) -> Comparison:
    """Of one model, four steps, saved after two."""
    asked = comparison(Path(), **(SMALL | changes))
    asked.given, asked.out = list(given), out
    return asked


def text(folder: Path) -> dict[str, Any]:
    """A text of invented words, whose tokenizer is trained."""
    path, tokenizer = str(text_file(folder)), {"kind": "bpe", "vocab_size": 300}
    rows = {"seq_len": 32, "batch_size": 1, "max_valid_bytes": 100}
    return {"kind": "text", "path": path, "tokenizer": tokenizer} | rows


def stored() -> dict[str, bytes]:
    return {path.removeprefix("/bucket/"): bytes(file.getvalue()) for path, file in MemoryFileSystem.store.items()}


def on_another_machine(cache: Path) -> None:
    shutil.rmtree(cache)


def nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "resume", "measure"):
        monkeypatch.setattr(training, name, lambda *_, **__: pytest.fail("trained or measured again"))


def trained(out: Path) -> dict[str, dict[str, Any]]:
    """The weights of each run, and what was measured on each held-out row."""
    found = {}
    for path in sorted(out.glob("*/**/measured.json")):
        nats = json.loads(path.read_bytes())["held_out"]["nats"]
        found[path.parent.relative_to(out).as_posix()] = {"nats": nats, "weights": weights(path.parent)}
    return found
