"""Examples and experiments run at toy sizes and without a warning; in `make test` examples alone, in its process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from training_runs import call

ROOT = Path(__file__).resolve().parents[1]
#: test_outside.py, test_outside_models.py and test_series_aeon.py have those that are left out
LEFT_OUT = {"add_a_mixer", "outside_models", "aeon_classifier"}
EXAMPLES = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - LEFT_OUT)
EXPERIMENTS = sorted(path.stem for path in (ROOT / "research").glob("*.py") if '"--quick"' in path.read_text("utf-8"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick"])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    "program",
    [*([str(ROOT / "examples" / f"{name}.py")] for name in EXAMPLES), *(["-m", f"research.{n}"] for n in EXPERIMENTS)],
    ids=[*EXAMPLES, *EXPERIMENTS],
)
@pytest.mark.slow
def test_program(program):
    done = call([sys.executable, "-W", "error", *program, "--quick"])
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
