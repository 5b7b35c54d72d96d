"""Where and how a process runs: its machine, devices, memory, versions, commit and command line."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from glissando.errors import ConfigError
from glissando.urls import redacted

PACKAGES = ("glissando", "lightning-fabric", "numpy", "safetensors", "tokenizers", "torch")


def environment() -> dict[str, Any]:
    """Where and how this process runs: no absolute paths, nothing that names the user."""
    cuda = range(torch.cuda.device_count())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [_without_folders(argument) for argument in sys.argv],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(index) for index in cuda] or ["cpu"],
        "versions": {name: _version(name) for name in PACKAGES},
        "git": git_state(),
    }


def _without_folders(argument: str) -> str:
    """A command-line argument without a URL's password, an absolute path in it relative to here or cut to its last
    part."""
    argument = redacted(argument)
    option, equals, value = argument.rpartition("=")
    if not os.path.isabs(value):
        return argument
    inside = Path(value).is_relative_to(Path.cwd())
    return option + equals + (os.path.relpath(value) if inside else Path(value).name)


def _cpu_model() -> str:
    model = re.search(r"^model name\s*: *(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, Any] | None:
    """Commit of the working tree this code runs from, and whether tracked files differ; None outside."""
    here = Path(__file__)
    # An installed copy may lie inside somebody else's repository: only a tracked file speaks for its commit.
    if _git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": bool(changes)} if commit else None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# ---------------------------------------------------------------------- devices and memory


def available_devices() -> list[str]:
    """`cpu`, and the kind of accelerator that PyTorch finds here: cuda, mps, xpu, ..."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def find_device(name: str) -> torch.device:
    """The device called `name`, `cuda:1` among others; `auto` is the accelerator, or the CPU where there is none.

    Raises ConfigError, which names what is available, for a device that is not.
    """
    if name == "cpu":  # looking for accelerators takes time where there are any
        return torch.device(name)
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


def available_bytes(device: torch.device) -> int:
    """What may still be taken on a device: of a GPU what is free, else what the system or this container has left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**32
    if match := re.search(r"MemAvailable:\s+(\d+) kB", _text("/proc/meminfo")):
        free = int(match[1]) * 1024
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if not (limit.isdigit() and used.isdigit()):
        return free
    cached = re.search(r"^inactive_file (\d+)$", _text("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
    return max(0, min(free, int(limit) - int(used) + (int(cached[1]) if cached else 0)))  # files give way


def resident_bytes(device: torch.device) -> int:
    """What this process takes now: on a GPU in tensors, else in memory; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    match = re.search(r"VmRSS:\s+(\d+) kB", _text("/proc/self/status"))
    return int(match[1]) * 1024 if match else 0


def allocated_at_peak(device: torch.device, work: Callable[[], object]) -> int:
    """The most bytes of tensors that `work` has at a time, beside those that there were before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes of its start and end to stderr
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        work()
    results: Any = profile.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    return max(accumulate((size for _, size in events), initial=0))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def readable(count: float) -> str:
    """1536 -> 1.5 KiB."""
    power = next(power for power in (0, 1, 2, 3) if count < 1024 ** (power + 1) or power == 3)
    count, unit = count / 1024**power, ("bytes", "KiB", "MiB", "GiB")[power]
    return f"{count:,.1f} {unit}" if power and count < 100 else f"{count:,.0f} {unit}"
