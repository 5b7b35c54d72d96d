import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from glissando import precision

sys.path.insert(0, str(Path(__file__).parent))

# `make test &` and nohup start with interrupts ignored; the programs under test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Trainings compute in float32 unless a test asks for more, so that they end alike on every processor.
import machine  # noqa: F401  before it is replaced

precision.resolved_precision = lambda given, accelerator: "32-true" if given == "auto" else given

# The same cases each time, so that a commit passes or does not; `make slow` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)
