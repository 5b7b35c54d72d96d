"""The state of all random numbers, as plain values that a file can hold."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)


def rng_state() -> dict[str, Any]:
    """The state of the random numbers of Python, NumPy, torch on the CPU and each CUDA device, as plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in cuda],
    }


def restore_rng(states: list[dict[str, Any]], rank: int) -> None:
    """Put back this process's `rng_state`, on CUDA of the devices that both machines have.

    Logs a warning if the checkpoint was saved with fewer processes: this one keeps the state that it has.
    """
    if rank >= len(states):
        log.warning("the checkpoint has no random state for process %d, which starts with a new one", rank)
        return
    version, internal, gauss = states[rank]["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states[rank]["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.as_tensor(states[rank]["torch"], dtype=torch.uint8))
    for device, state in zip(range(torch.cuda.device_count()), states[rank]["cuda"], strict=False):
        torch.cuda.set_rng_state(torch.as_tensor(state, dtype=torch.uint8), device)
