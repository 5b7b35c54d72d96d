"""How many threads compute: what decides it, and that a busy machine's choice is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_runs import PLAIN, configuration

from glissando import threads
from glissando.cli import main
from glissando.threads import measure, threads_of, use_threads
from glissando.training.fit import train


@pytest.fixture
def counted(monkeypatch):
    """OMP_NUM_THREADS is not set, and the number of threads is put back."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that it is put back, whatever is set
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    return train(configuration(folder, PLAIN), folder / "run").path


def test_the_fastest_number_is_taken_and_said(counted, monkeypatch):
    for seconds, chosen, said in (
        ({1: 1.0, 2: 1.5, 4: 2.5}, 1, "threads: 1 of 4 (4 compute 0.4 times as fast as 1 now)"),
        ({1: 3.0, 2: 1.5, 4: 1.0}, 4, "threads: 4 of 4 (4 compute 3.0 times as fast as 1 now)"),
    ):
        monkeypatch.setattr(threads, "measure", lambda counts, rows, width, s=seconds: {n: s[n] for n in counts})
        torch.set_num_threads(4)
        assert use_threads(None, 8, 8) == said
        assert torch.get_num_threads() == chosen


def test_a_number_that_is_given_or_was_used_before_is_not_measured(counted, monkeypatch):
    monkeypatch.setattr(threads, "measure", lambda *_: pytest.fail("measured"))
    assert use_threads(None, 8, 8, before=3) is None
    assert torch.get_num_threads() == 3
    assert use_threads(2, 8, 8, before=3) is None
    assert torch.get_num_threads() == 2
    assert os.environ["OMP_NUM_THREADS"] == "2"
    torch.set_num_threads(4)
    assert use_threads(None, 8, 8, before=3) is None, "the environment's number stays"
    assert torch.get_num_threads() == 4


def test_a_run_of_a_larger_machine_is_measured_anew_and_that_is_said(counted, monkeypatch):
    monkeypatch.setattr(threads, "measure", lambda counts, rows, width: {n: float(n) for n in counts})
    assert use_threads(None, 8, 8, before=64).endswith(
        "the run was made with 64, and these 4 cores may round otherwise"
    )
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("rows", [1, pytest.param(4096, marks=pytest.mark.slow)])
def test_measuring_is_short_and_leaves_the_number_as_it_is(counted, rows):
    torch.set_num_threads(3)
    began = time.perf_counter()
    result = measure([1, 2], rows, 64)
    assert time.perf_counter() - began < 20, "a fifth of a second on a quiet machine"
    assert torch.get_num_threads() == 3
    assert set(result) == {1, 2}
    assert all(0 < seconds < 1 for seconds in result.values())


def test_a_run_says_how_many_and_resumes_with_as_many(run, counted, monkeypatch, capsys):
    assert threads_of(run) == json.loads((run / "environment.json").read_bytes())["threads"]
    assert threads_of(run / "nowhere") is None
    monkeypatch.setattr(threads, "threads_of", lambda path: 3 if path == run else None)
    assert main(["train", "--resume", str(run)]) == 0, capsys.readouterr().err
    assert torch.get_num_threads() == 3
    assert main(["train", "--resume", str(run), "--threads", "2"]) == 0, capsys.readouterr().err
    assert torch.get_num_threads() == 2


def test_generating_takes_the_number_that_is_given(run, counted, capsys):
    assert main(["generate", str(run), "--max_tokens", "2", "--threads", "2"]) == 0
    assert torch.get_num_threads() == 2
    for arguments in ("0", "-1", "two"):
        assert main(["generate", str(run), "--threads", arguments]) == 2
        assert "--threads: expected" in capsys.readouterr().err


def test_one_text_behind_a_short_prompt_is_not_worth_a_measurement(run, counted, monkeypatch, capsys):
    """By the compiled step, which computes a row on one thread; by PyTorch's a measurement decides."""
    measured = []
    monkeypatch.setattr(threads, "measure", lambda counts, *_: measured.append(counts) or {n: 1.0 / n for n in counts})
    assert main(["generate", str(run), "--prompt", "Once", "--max_tokens", "2"]) == 0
    assert measured == []
    assert torch.get_num_threads() == 1
    for more in (["--step", "plain"], ["--prompt", "Twice"], ["--prompt", "long " * 400]):
        torch.set_num_threads(4)
        measured.clear()
        monkeypatch.setattr("glissando.cli.generate._SHORT", 1e5)
        first = [] if "long" in more[-1] else ["--prompt", "Once"]
        assert main(["generate", str(run), *first, "--max_tokens", "1", *more]) == 0
        assert measured == [[1, 2, 4]]
        assert torch.get_num_threads() == 4


def _environment(code: str, **given: str) -> list[str]:
    """What GOMP_SPINCOUNT, and OMP_WAIT_POLICY are after the code, in a process of its own."""
    code += "\nimport os; print(*(os.environ.get(name, '-') for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')))"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    plain = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", code], env=plain | given, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


@pytest.mark.slow
def test_the_program_waits_briefly_and_the_library_changes_nothing():
    program = "from glissando.cli import main; main(['presets', 'gpt'])"
    assert _environment(program)[0].isdigit()
    assert _environment(program, OMP_WAIT_POLICY="ACTIVE") == ["-", "ACTIVE"], "what the user has set stands"
    assert _environment("import glissando.threads, glissando.cli.train") == ["-", "-"]
    assert _environment("import torch, glissando.threads as t; t.wait_briefly()") == ["-", "-"], "it would do nothing"


@pytest.mark.parametrize("count", ["", "many", "0"])
def test_what_is_no_number_of_threads_is_as_if_not_set(count, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", count)
    asked = []
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr("glissando.threads.measure", lambda counts, *_: {1: 1.0, 2: 0.5})
    assert use_threads(None, 16, 16) == "threads: 2 of 2 (2 compute 2.0 times as fast as 1 now)"
    assert asked == [2]
