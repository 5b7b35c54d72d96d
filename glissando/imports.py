"""Python files of the user's own, which register mixers, depths or corpora, and the runs that need them.

A run keeps the path of each file that was imported when it was made (`imports` in its config.yaml) and a copy of it
(imports/NAME.py). To import is to execute: opening a run executes neither unless the caller asks for it.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glissando.config import unregistered
from glissando.errors import ConfigError, RunError
from glissando.storage import MANIFEST, verify_manifest

#: inside a run: copies of the imported files
IMPORTS = "imports"

#: the files imported in this process, by name
_imported: dict[str, Path] = {}


def import_file(path: str | Path) -> None:
    """Execute a Python file as a module, once in a process.

    Raises ConfigError for a file that is not there, and for another file of the name of one that is imported.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"--import {path}: there is no such Python file")
    before = _imported.setdefault(file.name, file)
    if before != file and before.read_bytes() != file.read_bytes():
        raise ConfigError(f"--import {path}: {before} is imported already and has the same name; rename one of them")
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    if str(before) in {str(Path(name).resolve()) for name in loaded if name}:
        return
    name = f"imported_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _imported[file.name]
        raise


def imported() -> list[str]:
    """The paths of the files imported in this process."""
    return [str(file) for file in _imported.values()]


def missing_copies(run: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """What the run has no copy of yet, of the files that `config` names, as they were imported, by its name there.

    Raises RunError for a file that is no longer there.
    """
    copies: dict[str, bytes] = {}
    for name in config.get("imports", []):
        copy, source = f"{IMPORTS}/{Path(name).name}", _imported.get(Path(name).name, Path(name))
        if (run / copy).is_file():
            continue
        if not source.is_file():
            raise RunError(f"{source}, which {run} imports, is not there any more: put it back")
        copies[copy] = source.read_bytes()
    return copies


def require_registered(run: Path, config: Mapping[str, Any], hint: Any, trust_imports: bool) -> None:
    """Import the files of a run whose `config`, of the type `hint`, names kinds that nothing has registered, if
    `trust_imports`.

    Raises RunError without it, saying what to import, and where there is nothing to import.
    """
    files = [Path(name) for name in config.get("imports", [])]
    missing = ", ".join(dict.fromkeys(unregistered(hint, config)))
    if not missing:
        for file in files:
            if _imported.get(file.name) == file and not _is_unchanged(run, file):
                warnings.warn(f"{file} has changed since {run} was made with it; see {run / IMPORTS}", stacklevel=4)
        return
    needs = f"{run} needs {missing}, which nothing has registered"
    if not files:
        raise RunError(f"{needs}: give --import FILE, with the file that does")
    chosen = [_chosen(run, file, needs) for file in files]
    if not trust_imports:
        options = " ".join(f"--import {path}" for path in chosen)
        raise RunError(
            f"{needs} yet: it was made with {', '.join(map(str, files))}. Opening it executes that code; if you trust "
            f"it, add {options} (in Python: glissando.load(RUN, trust_imports=True))"
        )
    for file, path in zip(files, chosen, strict=True):
        if path != file:
            warnings.warn(f"{file} is not as it was when {run} was made; its copy {path} is imported", stacklevel=4)
        import_file(path)
    if missing := ", ".join(unregistered(hint, config)):
        raise RunError(f"{run} needs {missing}, and {', '.join(map(str, chosen))} does not register it")


def _chosen(run: Path, file: Path, needs: str) -> Path:
    """The file where it is as it was, else the run's copy."""
    if file.is_file() and _is_unchanged(run, file):
        return file
    copy = run / IMPORTS / file.name
    if not copy.is_file():
        raise RunError(
            f"{needs}: it was made with {file}, and neither that file as it was nor the copy {copy} is there. Put it "
            "back, or give --import FILE with one that registers the same"
        )
    if (run / MANIFEST).is_file():
        verify_manifest(run, [f"{IMPORTS}/{file.name}"], "Put the file that the run was made with back there.")
    return copy


def _is_unchanged(run: Path, file: Path) -> bool:
    copy = run / IMPORTS / file.name
    return not copy.is_file() or (file.is_file() and file.read_bytes() == copy.read_bytes())
