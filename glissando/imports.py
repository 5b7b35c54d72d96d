"""Python files of the user's own, which register mixers, depths or corpora, and the runs that need them.

A run keeps the path of each file that was imported when it was made (`imports` in its config.yaml) and a copy of it
(imports/NAME.py). To import is to execute: opening a run does not unless the caller asks for it, and then executes the
copies; the path is a name, which is never opened (glissando.untrusted).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glissando.config import unregistered
from glissando.errors import ConfigError, RunError
from glissando.storage import MANIFEST, verify_manifest
from glissando.untrusted import IMPORTS, copy_name, file_name, imported_names, read_bounded

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
    loaded = filter(None, (getattr(module, "__file__", None) for module in list(sys.modules.values())))
    if any(os.path.exists(name) and os.path.samefile(before, name) for name in loaded):
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


def copies(run: Path | None, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The contents of the files that `config` imports, by their names in a run.

    run  where the configuration comes from, with copies of its own; None: from this process

    Raises RunError for a file that was not imported here and has no intact copy in `run`: its path is not read.
    """
    contents: dict[str, bytes] = {}
    for name in imported_names(config):
        copy = copy_name(name)
        if file := _imported.get(file_name(name)):
            contents[copy] = file.read_bytes()
        elif run is not None and (run / copy).is_file():
            _verify(run, copy)
            contents[copy] = read_bounded(run / copy)
        else:
            raise RunError(
                f"{run or 'the configuration'} was made with {name}, has no copy of it, and this process has not "
                f"imported it; a path in a run is not read: if you trust that file, add --import {name}"
            )
    return contents


def sections(to_train: bool, kind: str | None = None) -> dict[str, Any]:
    """The types of the sections that a reader of a configuration needs; kind: as of Run.read_config."""
    from glissando.backbone import BackboneConfig
    from glissando.data.corpora import CORPORA

    registries: dict[str, Any] = {"model": BackboneConfig} | ({"data": CORPORA.section()} if kind is None else {})
    if to_train:
        from glissando.training.config import TrainingConfig

        registries["training"] = TrainingConfig
    return registries


def require_registered(run: Path, config: Mapping[str, Any], hint: Any, trust_imports: bool) -> None:
    """Import the run's copies of its files, where its `config`, of the type `hint`, names kinds that nothing has
    registered, if
    `trust_imports`.

    Raises RunError without it, saying what to import, and where there is nothing to import.
    """
    names = imported_names(config)
    missing = ", ".join(dict.fromkeys(unregistered(hint, config)))
    if not missing:
        for file in filter(None, (_imported.get(Path(name).name) for name in names)):
            copy = run / IMPORTS / file.name
            if copy.is_file() and not (file.is_file() and file.read_bytes() == read_bounded(copy)):
                warnings.warn(f"{file} has changed since {run} was made with it; see {run / IMPORTS}", stacklevel=4)
        return
    needs = f"{run} needs {missing}, which nothing has registered"
    if not names:
        raise RunError(f"{needs}: give --import FILE, with the file that does")
    chosen = [_copy(run, name, needs) for name in names]
    if not trust_imports:
        options = " ".join(f"--import {path}" for path in chosen)
        raise RunError(
            f"{needs} yet: it was made with {', '.join(names)}. Opening it executes that code; if you trust "
            f"it, add {options} (in Python: glissando.load(RUN, trust_imports=True))"
        )
    for path in chosen:
        import_file(path)
    if missing := ", ".join(unregistered(hint, config)):
        raise RunError(f"{run} needs {missing}, and {', '.join(map(str, chosen))} does not register it")


def _copy(run: Path, name: str, needs: str) -> Path:
    copy = run / copy_name(name)
    if not copy.is_file():
        raise RunError(
            f"{needs}: it was made with {name}, and the copy {copy} is not there. Put it back, or give --import FILE "
            "with one that registers the same"
        )
    _verify(run, copy_name(name))
    return copy


def _verify(run: Path, name: str) -> None:
    if (run / MANIFEST).is_file():
        verify_manifest(run, [name], "Put the file that the run was made with back there.")
