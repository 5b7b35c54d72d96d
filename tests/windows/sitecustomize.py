"""A Python that has of the operating system what Windows has, for programs under test: PYTHONPATH names this folder.

What Windows lacks is gone, and calls that it refuses raise what it raises. Not emulated: paths with backslashes, a file
that another process has open, and what libraries do in C and Rust.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from typing import Any

_GONE = {
    os: ("fork", "sysconf", "getuid", "geteuid", "O_DIRECTORY", "O_TMPFILE", "sched_getaffinity"),
    signal: ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "pthread_sigmask"),
}
_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
_FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f]|[. ]$')
_MAPS = "/proc/self/../self/maps"  # which no program under test reads
_fsync, _rename, _replace, _dup, _stat = os.fsync, os.rename, os.replace, os.dup, os.stat


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and arguments[0] != _MAPS:
        path = arguments[0]
        _check_present(path)
        if arguments[1] is None and os.path.isdir(path):  # os.open; elsewhere the directory may be for an opener
            raise PermissionError(errno.EACCES, "Windows opens no directory", path)
        _check_name(path)
    elif event == "os.mkdir":
        _check_name(arguments[0])
    elif event == "os.rename":
        _check_name(arguments[1])
        _check_closed(arguments[0])
        _check_closed(arguments[1])
    elif event == "os.remove":
        _check_closed(arguments[0])
    elif event == "os.kill" and arguments[1] == 0:
        raise RuntimeError("signal 0 is Ctrl-C on Windows, and would be sent")


def _check_present(path: Any) -> None:
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(errno.ENOENT, "there is no such file on Windows", path)


def _check_name(path: Any) -> None:
    if _FORBIDDEN.search(os.path.basename(os.fspath(path))):
        raise OSError(errno.EINVAL, "Windows has no files of such names", path)


def _check_closed(path: Any) -> None:
    """Neither it nor a file in it may be open, or mapped into memory."""
    whole = os.path.realpath(path)
    for opened in _opened():
        if opened == whole or opened.startswith(whole + "/"):
            raise PermissionError(errno.EACCES, "Windows neither moves nor deletes what is open", whole)


def _opened() -> list[str]:
    result = []
    for number in os.listdir("/proc/self/fd"):
        try:
            result.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the listing itself
            continue
    with open(_MAPS, encoding="utf-8") as file:
        return result + [line.split(maxsplit=5)[5].rstrip("\n") for line in file if line.count("/")]


def fsync(file: Any) -> None:
    number = file if isinstance(file, int) else file.fileno()
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Windows syncs what is open for writing alone")
    _fsync(number)


def rename(source: Any, target: Any) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "Windows renames to no name that is taken", target)
    _rename(source, target)


def replace(source: Any, target: Any) -> None:
    if os.path.isdir(target):
        raise PermissionError(errno.EACCES, "Windows replaces no directory", target)
    _replace(source, target)


def stat(path: Any, **options: Any) -> os.stat_result:
    _check_present(path)
    return _stat(path, **options)


def dup(number: int) -> int:
    if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
        raise OSError(errno.EBADF, "sockets of Windows are no files")
    return _dup(number)


for module, names in _GONE.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in _MODULES:
    sys.modules[name] = None  # type: ignore[assignment]
os.fsync, os.rename, os.replace, os.dup, os.stat = fsync, rename, replace, dup, stat
signal.CTRL_C_EVENT = 0  # type: ignore[attr-defined]
shutil._use_fd_functions = False  # type: ignore[attr-defined]
tempfile.TemporaryFile = tempfile.NamedTemporaryFile  # type: ignore[assignment, misc]
# What is read or written in the system's encoding, which is not UTF-8 there (-X warn_default_encoding).
warnings.filterwarnings("error", category=EncodingWarning, module=r"glissando(\.|$)")
sys.addaudithook(_refuse)
