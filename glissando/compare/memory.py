"""How much memory a process holds, now and at its peak.

On Linux the peak is VmHWM of /proc/self/status, which is of this program alone: what getrusage reports is inherited
from the process that started it. Windows reports neither.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_STATUS = Path("/proc/self/status")


def is_reported() -> bool:
    """Whether this system reports it; what follows may be called only then."""
    return resource is not None or _STATUS.is_file()


def resident_bytes() -> int:
    """What is held now; the peak so far where the system does not report it."""
    return _status("VmRSS") if _STATUS.is_file() else peak_bytes()


def peak_bytes() -> int:
    """The most that was held since the start, or since `forget_peak`."""
    if _STATUS.is_file():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> bool:
    """The peak counts from now on; False where the system does not let it (macOS, some containers)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def release_freed() -> None:
    """Collect garbage and return to the system what the allocator keeps of it.

    Without the latter (other than glibc) what is used again does not show as a peak over what is held.
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _status(field: str) -> int:
    """Bytes of a field, which has KiB."""
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024
