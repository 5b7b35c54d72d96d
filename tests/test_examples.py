"""Examples and experiments run as programs, at toy sizes and without a warning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from training_runs import call

ROOT = Path(__file__).resolve().parents[1]
#: test_outside.py, test_outside_models.py and test_series_aeon.py have those that are left out
LEFT_OUT = {"add_a_mixer", "outside_models", "aeon_classifier"}
EXAMPLES = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - LEFT_OUT)
EXPERIMENTS = sorted(path.stem for path in (ROOT / "research").glob("*.py") if '"--quick"' in path.read_text("utf-8"))

pytestmark = pytest.mark.example


def runs(*program: str) -> None:
    done = call([sys.executable, "-W", "error", *program, "--quick"])
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    runs(str(ROOT / "examples" / f"{name}.py"))


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.slow
def test_experiment(name):
    runs("-m", f"research.{name}")
