"""A family is a folder: the tau mixer's, moved out of the package, is a package of its own that keeps every feature."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packages import installed

import glissando
from glissando.errors import ConfigError

PACKAGE = Path(glissando.__file__).parent
#: run in a process where glissando has no tau, and the package `tauformer` has it
PROGRAM = """
import sys
import glissando
from glissando.errors import ConfigError
from glissando.cli import main
from glissando.mixers import MIXERS
from glissando.testing import check_mixer

assert "tau" not in MIXERS
options = MIXERS.read({"kind": "tau", "heads": 2, "importance": True, "forget_gate": True, "output_gate": True})
assert type(options).__module__ == "tauformer.layer"
check_mixer(MIXERS["tau"], options)

source = ["--corpus", "shift", "--tokens", "3000", "--size", "8"]
assert main(["laplacian", "build", *source, "--out", "graph.safetensors"]) == 0
small = ["--model.hidden_size", "16", "--model.mixer.heads", "2", "--model.depth.layers", "1"]
graph = ["--model.mixer.laplacian", "graph.safetensors", "--model.mixer.laplacian_weights", "fixed"]
short = ["--training.steps", "3", "--training.log_every", "1", "--data.batch_size", "2", "--data.seq_len", "24"]
calibrated = ["--model.mixer.calibration", "start"]
text = ["--data.kind", "text", "--data.path", "text.txt", "--data.tokenizer", "bytes", "--training.accelerator", "cpu"]
assert main(["train", "--preset", "tauformer-nano", *text, *small, *graph, *short, *calibrated, "--out", "run"]) == 0
rows = open("run/metrics.csv").read().splitlines()
assert "calibrations" in rows[0] and "effective_keys" in rows[0]
assert main(["generate", "run", "--prompt", "a", "--max_tokens", "3", "--step", "compiled"]) == 0
assert main(["grow", "run", "--heads", "4", "--out", "grown"]) == 0
assert not any(name.startswith("glissando.mixers.tau") for name in sys.modules)
"""


@pytest.fixture
def site(tmp_path) -> Path:
    """glissando by links, without the folder, and the folder's copy beside it."""
    site, without = tmp_path / "site", {PACKAGE: "mixers", PACKAGE / "mixers": "tau"}
    for folder, left_out in without.items():
        copy = site / "glissando" / folder.relative_to(PACKAGE)
        copy.mkdir(parents=True)
        for child in folder.iterdir():
            if child.name not in (left_out, "__pycache__"):
                (copy / child.name).symlink_to(child)
    shutil.copytree(PACKAGE / "mixers" / "tau", site / "tauformer", ignore=shutil.ignore_patterns("__pycache__"))
    installed(site, "glissando")
    commands = {"laplacian": "tauformer.command:main"}
    installed(site, "tauformer", {"glissando.mixers": {"tau": "tauformer"}, "glissando.commands": commands})
    return site


@pytest.mark.slow
def test_the_folder_moved_out_is_a_package_of_its_own(site, tmp_path):
    """Found by its entry points, it obeys the laws, calibrates itself in training, generates by a compiled step, grows
    and brings its command."""
    (tmp_path / "text.txt").write_text("an apple and a pear and a plum. " * 400)
    # In plain Python the kernels of a new place need not be compiled.
    environment = os.environ | {"PYTHONPATH": str(site), "NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_an_entry_point_that_registers_nothing_is_named(tmp_path, monkeypatch):
    (tmp_path / "empty_mixer.py").write_text("")
    installed(tmp_path, "empty", {"glissando.mixers": {"nothing": "empty_mixer"}})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"empty_mixer, the entry point of mixer 'nothing', registers no"):
        glissando.LanguageModel.from_config({"mixer": "nothing"})
    with pytest.raises(ConfigError, match=r"unknown mixer 'nothin'. Did you mean 'nothing'"):
        glissando.LanguageModel.from_config({"mixer": "nothin"})
