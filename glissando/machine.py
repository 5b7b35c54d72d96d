"""Where and how a process runs: its machine, versions, commit and command line."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

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
    """A command-line argument, an absolute path in it relative to here or cut to its last part."""
    option, equals, value = argument.rpartition("=")
    if not os.path.isabs(value):
        return argument
    inside = Path(value).is_relative_to(Path.cwd())
    return option + equals + (os.path.relpath(value) if inside else Path(value).name)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
