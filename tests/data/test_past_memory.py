"""Texts larger than memory: what a process keeps of a file of several GB has a bound."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(3000)]
ROOT = Path(__file__).resolve().parents[2]
SIZE = 3 * 10**9
FILES = 6
#: above the imports and a training on a small text
BOUND = 300 * 10**6


def real_lines() -> list[bytes]:
    """Those of the pages in docs/."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [line.encode() for page in pages for line in page.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_text(path: Path, size: int, seed: int) -> None:
    """Real lines in an order that is new every 400 KB."""
    rng, lines = np.random.default_rng(seed), np.array(real_lines(), object)
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(b"%d\n" % file.tell() + b"\n".join(rng.permutation(lines)) + b"\n")


def write_documents(path: Path, size: int, seed: int) -> None:
    """Documents of ten such lines."""
    rng, lines = np.random.default_rng(seed), [line.decode() for line in real_lines()]
    groups = rng.permutation(len(lines))[: len(lines) // 10 * 10].reshape(-1, 10)
    texts = np.array([json.dumps("\n".join(lines[i] for i in group)).encode() for group in groups], object)
    with path.open("wb") as file:
        while file.tell() < size:
            at = file.tell()
            file.write(b"".join(b'{"id": %d, "text": %s}\n' % (at, text) for text in rng.permutation(texts)))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory whose files are deleted at once: pytest would keep three of them."""
    if shutil.disk_usage(tmp_path).free < 4 * SIZE:
        pytest.skip(f"{tmp_path} has less than {4 * SIZE:,} bytes free")
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    yield tmp_path
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def measured(data: dict[str, Any], starts: list[int], small: dict[str, str], out: Path) -> dict[str, Any]:
    arguments = {"data": data, "starts": starts, "small": small, "out": str(out)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("past_memory.py")), json.dumps(arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def report(name: str, size: int, found: dict[str, Any]) -> None:
    times = ", ".join(f"{what} {wall:.1f} s ({cpu:.1f} s of CPU)" for what, (wall, cpu) in found["seconds"].items())
    print(
        f"{name}: {size / 1e9:.2f} GB, peak {found['peak'] / 1e6:.0f} MB above the {found['imports'] / 1e6:.0f} MB of "
        f"imports and a small training; {found['rows']:,} rows; {times}"
    )


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize("files", [1, FILES])
def test_memory_is_bounded_while_rows_are_drawn_all_over(kind: str, files: int, place: Path, capfd: Any) -> None:
    write, suffix = (write_text, "txt") if kind == "text" else (write_documents, "jsonl")
    (folder := place / "corpus").mkdir()
    begin = time.perf_counter()
    for number in range(files):
        write(folder / f"part-{number}.{suffix}", SIZE // files, number)
    write(small := place / f"small.{suffix}", 10**6, 99)
    size, written = sum(path.stat().st_size for path in folder.iterdir()), time.perf_counter() - begin
    path = str(folder / f"*.{suffix}") if files > 1 else str(folder / f"part-0.{suffix}")
    data: dict[str, Any] = {"kind": kind, "path": path, "seq_len": 256, "batch_size": 32}
    if kind == "text":
        # Each batch is from all over the file; windows are visited once an epoch.
        data |= {"stride": 256, "max_valid_bytes": 10**6}
        starts = list(range(0, 10**6, 10**4))
    else:
        # Batches are numbered in the order of the file: into its last tenth, then back by the marks.
        starts = [0, int(0.85 * size) // 8192, *(int(share * size) // 8192 for share in (0.5, 0.1, 0.8, 0.3))]
    result = measured(data, starts, {"path": str(small)}, place / "runs")
    with capfd.disabled():
        print(f"\nwritten in {written:.0f} s")
        report(f"{kind}, {files} files", size, result)
    assert result["rows"] == 4 * 32 * len(starts)
    assert result["peak"] < BOUND


def test_a_bpe_reads_a_sample_and_tokens_go_to_the_disk(place: Path, capfd: Any) -> None:
    """Training reads 16 MiB of any text; tokenising holds a few pieces of 64 KiB."""
    (folder := place / "corpus").mkdir()
    for number in range(2):
        write_text(folder / f"part-{number}.txt", 10**8, number)
    write_text(small := place / "small.txt", 10**6, 99)
    data: dict[str, Any] = {"kind": "text", "path": str(folder / "*.txt"), "seq_len": 256, "batch_size": 32}
    data |= {"tokenizer": {"kind": "bpe", "vocab_size": 1024}, "max_valid_bytes": 10**6}
    result = measured(data, list(range(0, 1000, 10)), {"path": str(small)}, place / "runs")
    size = sum(path.stat().st_size for path in folder.iterdir())
    with capfd.disabled():
        print()
        report("bpe, 2 files", size, result)
    assert result["peak"] < BOUND


def test_a_stream_is_not_kept(place: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for folder, files, size in ((place / "set", 4, 125 * 10**6), (place / "small", 1, 10**7)):
        folder.mkdir()
        for number in range(files):
            write_documents(folder / f"train-{number}.jsonl", size, number)
    data: dict[str, Any] = {"kind": "hub_stream", "name": str(place / "set"), "valid_split": None}
    data |= {"max_valid_bytes": 10**6, "seq_len": 256, "batch_size": 32}
    size = sum(path.stat().st_size for path in (place / "set").iterdir())
    starts = [0, *(int(share * size) // 8192 for share in (0.8, 0.2, 0.5))]
    result = measured(data, starts, {"name": str(place / "small")}, place / "runs")
    with capfd.disabled():
        print()
        report("hub_stream, 4 files", size, result)
    assert result["peak"] < BOUND
