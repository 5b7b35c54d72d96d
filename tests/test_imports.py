"""What each command imports: a start waits for nothing that it does not use. For training see test_distributed.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from training_runs import UNUSED

from glissando.cli import main

TINY = [
    "train", "--preset", "transformer-nano", "--model.hidden_size", "16", "--model.mixer.heads", "2",
    "--model.depth.layers", "1", "--data.kind", "text", "--data.seq_len", "32", "--data.batch_size", "2",
    "--training.steps", "1",
]  # fmt: skip


def loaded(*commands: list[str]) -> set[str]:
    """The packages that are loaded once the commands have ended."""
    code = (
        "import json, sys\nfrom glissando.cli import main\n"
        "def status(arguments):\n try: return main(arguments)\n except SystemExit as end: return end.code\n"
        "failed = any([status(arguments) for arguments in json.loads(sys.argv[1])])\n"
        "names = sorted({name.partition('.')[0] for name, module in sys.modules.items() if module is not None})\n"
        "print(json.dumps(names), file=sys.stderr)\nsys.exit(failed)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_what_computes_nothing_needs_no_torch():
    assert (
        loaded(["--help"], ["presets"], ["presets", "gpt"], ["generate", "--help"])
        & (UNUSED | {"torch", "lightning_fabric", "numba", "numpy"})
        == set()
    )


@pytest.mark.slow
def test_writing_text_loads_neither_fabric_nor_pictures(tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    assert main([*TINY, "--data.path", str(text), "--out", str(run)]) == 0
    result = loaded(["generate", str(run), "--prompt", "the", "--max_tokens", "2"])
    assert "torch" in result
    assert result & (UNUSED | {"lightning_fabric", "sympy"}) == set()  # sympy: torch._dynamo was loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.seconds", "-5", "--out", "new"], "training.seconds: expected a number greater than 0, got -5"),
        (["--training.steps=2", "--training.tokens", "9", "--out", "new"], "the budget is one of --training.steps"),
        (["--preset", "transfromer", "--out", "new"], "unknown preset 'transfromer'. Did you mean"),
        (["--training.steps", "2"], "--out is missing"),
        (["--training.steps", "2", "--out", "full"], "full exists and is not empty"),
        (["--training.steps", "2", "--out", "full/file/run"], "could not make full/file/run"),
    ],
)
def test_a_budget_or_an_out_that_cannot_be_used_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    values = arguments if "--preset" in arguments else ["--preset", "transformer-nano", *arguments]
    assert main(["train", *values, "--model.hidden_size", "16", "--data.valid_rows", "2"]) in (1, 2)
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]
