import functools
import os
import signal
import sys
from pathlib import Path

import collecting
import pytest
import torch
from hypothesis import settings

from glissando import machine as program
from glissando import precision
from glissando.cache_directory import cache_dir
from glissando.training.language_task import LanguageTask

# Tests move the user's cache directory, and the programs that they start would compile every kernel anew.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_dir("kernels")))

sys.path.insert(0, str(Path(__file__).parent))

# `make test &` and nohup start with interrupts ignored; the programs under test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if sys.platform != "win32":  # which has no such locks
    import compiled_once

    compiled_once.share_compiled_kernels()

# Trainings compute in float32 unless a test asks for more, so that they end alike on every processor.
import machine  # noqa: F401  before it is replaced
import registries

# No test cuts the power: of fsync remains that it refuses what is no open file.
os.fsync = os.fstat
# Three processes of git for each training, and the answer is the same.
program.git_state = functools.cache(program.git_state)
# The sample that every training ends with.
LanguageTask.sample.__defaults__ = (20,)
precision.resolved_precision = lambda given, accelerator: "32-true" if given == "auto" else given

# The same cases each time, so that a commit passes or does not; `make slow` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# torch.manual_seed writes down its callers for each kind of accelerator, also where there is none: 2 ms a test.
seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


pytest_runtestloop = collecting.pytest_runtestloop


@pytest.fixture(autouse=True)
def _reproducible():
    seed(0)
    # A program that trains, called by a test before, leaves subnormal numbers flushed, which Hypothesis refuses.
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _registries_as_they_were():
    with registries.registries_as_they_were():
        yield
