"""Devices by name, for commands that run a trained model."""

from __future__ import annotations

import torch

from glissando.errors import ConfigError


def available_devices() -> list[str]:
    """`cpu`, and the kind of accelerator that PyTorch finds here: cuda, mps, xpu, ..."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def find_device(name: str) -> torch.device:
    """The device called `name`, `cuda:1` among others; `auto` is the accelerator, or the CPU where there is none.

    Raises ConfigError, which names what is available, for a device that is not.
    """
    available = available_devices()
    if name == "auto":
        return torch.device(available[-1])
    kind, _, index = name.partition(":")
    count = torch.accelerator.device_count() if kind != "cpu" else 1
    if kind in available and (not index or (index.isdecimal() and int(index) < count)):
        return torch.device(name)
    numbers = f" ({count} of it, from 0)" if kind in available and kind != "cpu" else ""
    raise ConfigError(
        f"--device {name} is not available here; available: auto, {', '.join(available)}{numbers}. A GPU needs its own "
        "build of PyTorch: https://pytorch.org/get-started"
    )
