"""A run is a directory: everything that defines a trained model, and where it came from.

config.yaml         resolved configuration
model.safetensors   weights
tokenizer.json      tokenizer, if the model has one
imports/            copies of the Python files that registered what it is made of, if it needed any
optimizer.safetensors  moments of the optimizer, of a run made by growing another
environment.json    machine, versions, commit and command line that made it
metrics.csv         what was logged while training
summary.json        how training ended: the best and the last validation
checkpoints/        step-00000123/, ...: what training resumes from; best/: that of the best validation
manifest.json       SHA-256 and size of the files above, as of the last save; written last
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from glissando.errors import ConfigError, RunError, nearest
from glissando.imports import IMPORTS, keep_imports, require_registered
from glissando.migration import migrated
from glissando.storage import (
    MANIFEST,
    find_published,
    load_tensors,
    read_manifest,
    record,
    refuse_pickle,
    remove_directory,
    save_manifest,
    save_tensors,
    verify_manifest,
    write_atomic,
    write_manifest,
)
from glissando.trees import load_tree

log = logging.getLogger(__name__)

CONFIG, MODEL, TOKENIZER = "config.yaml", "model.safetensors", "tokenizer.json"
OPTIMIZER = "optimizer.safetensors"
METRICS, ENVIRONMENT, CHECKPOINTS = "metrics.csv", "environment.json", "checkpoints"
SUMMARY, BEST = "summary.json", "best"
LISTED = (CONFIG, ENVIRONMENT, METRICS, MODEL, OPTIMIZER, SUMMARY, TOKENIZER)
PACKAGES = ("glissando", "lightning-fabric", "numpy", "safetensors", "tokenizers", "torch")
MODULE_PREFIX = "model."  # the attribute under which the training objective holds the language model
#: how a run of another kind is opened
_OPENS = {
    "series": "use `glissando series`, or glissando.SeriesModel.load(RUN)",
    None: "use the other commands, or glissando.load(RUN)",
}
_STEP = re.compile(r"\.?step-(\d{8,})(\.old-.*)?")


@dataclass(frozen=True)
class Run:
    """A run directory, or one of its checkpoints; `checkpoint` is None if the weights are the run's own."""

    path: Path
    checkpoint: Path | None = None

    @classmethod
    def create(cls, path: str | Path, resume: bool = False, notes: Mapping[str, Any] | None = None) -> Run:
        """Makes a new run directory with its environment record, or with `resume` takes up one that is there.

        `notes` go into the record.

        Raises RunError if something else is there: nothing is overwritten.
        """
        run = cls(Path(path).expanduser())
        if resume and run.path.is_dir() and any(run.path.iterdir()):
            _require_resumable(run.path)
        else:
            require_new(run.path)
        try:
            (run.path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"could not make {path}: {error.strerror}. Choose a writable place.") from error
        run._write_environment(notes or {})
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The finished run at `path`, or the run and its checkpoint if `path` is a checkpoint directory.

        Checks the digests of the small files and, for a checkpoint, of all of its files.
        Raises RunError if there is no such directory, or it is no run, incomplete or damaged.
        """
        path = Path(path).expanduser()
        if path.name == BEST:
            path = find_published(path)
        require_directory(path)
        if _is_checkpoint(path):
            return cls._open_checkpoint(path.resolve())
        run = cls(path)
        run._require_complete()
        run._verify_listed(CONFIG, TOKENIZER)
        if (path / ENVIRONMENT).is_file():  # provenance, nothing that the model needs
            run._verify_listed(ENVIRONMENT)
        return run

    @classmethod
    def _open_checkpoint(cls, checkpoint: Path) -> Run:
        run = cls(checkpoint.parent.parent, checkpoint)
        if not (run.path / CONFIG).is_file():
            raise RunError(f"{checkpoint} needs {run.path / CONFIG}, which is missing: put it back there.")
        if (run.path / MANIFEST).is_file():
            run._verify_listed(TOKENIZER)
        verify_manifest(checkpoint, advice=run._advice)
        return run

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes config.yaml if it differs, and copies of the files that it imports.

        Raises ConfigError if it holds other than plain YAML values.
        """
        text = config_text(config)
        keep_imports(self.path, config)
        target = self.path / CONFIG
        if not target.is_file() or target.read_bytes() != text:
            self._replace(CONFIG, text)

    def write_model(self, state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Writes configuration and weights, then the manifest.

        A crash at any moment leaves a run that opens with the old or with the new weights.
        Raises RunError if a file cannot be written; the old one stands then.
        """
        self.write_config(config)
        save_tensors(self.path / MODEL, state_dict, {"format": "pt"}, lambda new: self._announce(MODEL, record(new)))
        self.refresh_manifest()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json. Raises RunError if it cannot be written."""
        self._replace(SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())

    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best validation, or None."""
        path = find_published(self.path / CHECKPOINTS / BEST)
        return path if (path / MANIFEST).is_file() else None

    def own_checkpoint(self) -> Path | None:
        """The checkpoint whose weights are the run's own: the newest complete one, or the best where it ended so."""
        try:
            kept = json.loads((self.path / SUMMARY).read_bytes())["weights"]
        except (OSError, ValueError, KeyError, TypeError):
            kept = None
        return (self.best_checkpoint() if kept == BEST else None) or self.latest_checkpoint()

    def read_config(self, trust_imports: bool = False, kind: str | None = None) -> dict[str, Any]:
        """The configuration, in today's form, of a run of the given `kind`: `series`, or none for language.

        Raises RunError if config.yaml is missing, damaged or malformed, or of another kind, and where it names a mixer
        or another kind of option that is not registered, unless `trust_imports` has the run's own files executed, which
        register it.
        """
        path = self.path / CONFIG
        if not path.is_file():
            raise RunError(f"{path} is missing. {self._advice(CONFIG)}")
        if (self.path / MANIFEST).is_file():
            self._verify_listed(CONFIG)
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RunError(f"{path} is malformed: {error}. {self._advice(CONFIG)}") from error
        if not isinstance(config, dict):
            raise RunError(f"{path} is malformed: it holds no mapping. {self._advice(CONFIG)}")
        if config.get("kind") != kind:
            held = config.get("kind")
            raise RunError(
                f"{self.path} holds a model of {held or 'language'}: {_OPENS.get(held, 'its kind is unknown')}"
            )
        config = migrated(config)
        require_registered(self.path, config, trust_imports)
        return config

    def read_state_dict(self) -> dict[str, Tensor]:
        """The model's weights on the CPU, after checking their digest; a checkpoint's lose MODULE_PREFIX.

        Raises RunError that names the file that is missing or damaged, and the checkpoint that is still good.
        """
        if self.checkpoint is None:
            refuse_pickle(self.path / MODEL)
            verify_manifest(self.path, [MODEL], self._advice)
            return load_tensors(self.path / MODEL)
        weights = load_tree(self.checkpoint, "model")
        ours = {name: value for name, value in weights.items() if name.startswith(MODULE_PREFIX)}
        return {name.removeprefix(MODULE_PREFIX): value for name, value in (ours or weights).items()}

    def refresh_manifest(self) -> None:
        """Lists the files as they are now. Raises RunError if the manifest cannot be written."""
        names = [*LISTED, *(f"{IMPORTS}/{copy.name}" for copy in (self.path / IMPORTS).glob("*.py"))]
        write_manifest(self.path, [name for name in names if (self.path / name).is_file()])

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return latest_checkpoint(self.path / CHECKPOINTS)

    def _replace(self, name: str, data: bytes) -> None:
        self._announce(name, {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)})
        write_atomic(self.path / name, data)

    def _announce(self, name: str, new: dict[str, Any]) -> None:
        """Lists a new file beside the intact old one before it takes its place: a crash between the two
        leaves a manifest that holds for either."""
        try:
            entries = read_manifest(self.path)
        except RunError:
            entries = {}
        try:
            verify_manifest(self.path, [name])
            new = new | {"previous": record(self.path / name)}
        except RunError:
            pass
        save_manifest(self.path, entries | {name: new})

    def _verify_listed(self, *names: str) -> None:
        """A checkpoint has a manifest of its own: damage to the run's is reported then, and does not block it."""
        try:
            listed = read_manifest(self.path)
        except RunError as error:
            if self.checkpoint is None:
                raise
            warnings.warn(f"{error} What {self.checkpoint} needs of the run is not checked.", stacklevel=4)
            return
        for name in names:
            if name in listed:
                verify_manifest(self.path, [name], partial(self._advice, name))

    def require_run(self) -> None:
        """Raises RunError if there is no such directory, or it was not made as a run."""
        require_directory(self.path)
        if not (self.path / ENVIRONMENT).is_file() and not (self.path / CONFIG).is_file():
            inside = sorted(path.parent.name for path in self.path.glob(f"*/{CONFIG}"))
            hint = f" It holds runs: {', '.join(inside[:5])}." if inside else ""
            raise RunError(f"{self.path} is not a run: it has no {CONFIG}.{hint}")

    def _require_complete(self) -> None:
        self.require_run()
        for name in (CONFIG, MODEL, MANIFEST):
            if not (self.path / name).is_file():
                raise RunError(f"{self.path} is incomplete: {name} is missing. {self._advice(name)}")

    def _advice(self, name: str = MODEL) -> str:
        good = self.latest_checkpoint()
        if good is None and name != MODEL:
            return (
                "Copy it back from where the run was; or, if it was killed before the first checkpoint, train again "
                "into another directory."
            )
        if good is None:
            return "It has no complete checkpoint (killed before the first one?): train again into another directory."
        if name in (CONFIG, TOKENIZER):  # which a checkpoint has no copy of
            return f"Put the {name} that it was trained with back there; its checkpoints need it as well."
        return f"This checkpoint is complete and loads instead: {good}"

    def _write_environment(self, notes: Mapping[str, Any]) -> None:
        """Writes environment.json; a resumed run keeps its first record and adds this one to "resumed"."""
        path, now = self.path / ENVIRONMENT, environment() | dict(notes)
        if path.is_file():
            try:
                first = json.loads(path.read_bytes())
                first.setdefault("resumed", []).append(now)
            except (ValueError, AttributeError) as error:
                raise RunError(f"{path} is malformed ({error}): move it elsewhere and resume again.") from error
            now = first
        self._replace(ENVIRONMENT, (json.dumps(now, indent=2) + "\n").encode())


def config_text(config: Mapping[str, Any]) -> bytes:
    """What config.yaml holds. Raises ConfigError for other than plain YAML values."""
    try:
        return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True).encode()
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration cannot be YAML: {error}. Use plain values.") from error


def require_new(path: str | Path) -> None:
    """Raise RunError where no run directory can be made at `path`: something is there, or nothing can be written there.

    `save` and `train` check it themselves, before anything else; before a training loop of one's own it saves the loop.
    """
    path = Path(path).expanduser()
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; choose another name for the run directory.")
    if path.is_dir() and any(path.iterdir()):
        further = "Resume that run, or choose" if any((path / CHECKPOINTS).glob("step-*")) else "Choose"
        raise RunError(f"{path} exists and is not empty. {further} a new name: nothing is overwritten.")
    above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "is not writable" if above.is_dir() else "is a file"
        raise RunError(f"could not make {path}: {above} {reason}. Choose a writable place.")


def _require_resumable(path: Path) -> None:
    if not any((path / name).exists() for name in (CONFIG, ENVIRONMENT, CHECKPOINTS)):
        raise RunError(f"{path} is not a run, so it cannot be resumed. Choose a new name; nothing is overwritten.")


def require_replaceable(path: Path, overwrite: bool) -> None:
    """Raises RunError where a saved model may not be put: something is there and `overwrite` is not given, or more than
    a saved model is."""
    known = (CONFIG, ENVIRONMENT, IMPORTS, MANIFEST, MODEL, TOKENIZER)
    inside = list(path.iterdir()) if path.is_dir() else []
    others = [o for o in inside if o.name not in known and not (o.name == CHECKPOINTS and not any(o.iterdir()))]
    if others and overwrite:
        what = "a training with its checkpoints" if others[0].name == CHECKPOINTS else f"{others[0].name} in it"
        raise RunError(f"{path} has {what}, so overwrite=True does not replace it: choose a new name.")
    if others or not (path / CONFIG).is_file():
        require_new(path)
    elif not overwrite:
        raise RunError(f"{path} exists and is not empty. Choose a new name, or overwrite=True: nothing is overwritten.")


def require_directory(path: Path) -> None:
    """Raises RunError that names the nearest directory beside it if there is none at `path`."""
    if path.is_dir():
        return
    if path.exists():
        raise RunError(f"{path} is a file; give the run directory that holds {CONFIG} and {MODEL}.")
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    siblings = [sibling.name for sibling in beside if sibling.is_dir() and sibling.name[0] != "."]
    close = nearest(path.name, siblings)
    hint = f"Did you mean {path.parent / close}?" if close else f"Nothing in {str(path.parent)!r} is called like it."
    raise RunError(f"no run at {path}. {hint}")


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """Where the checkpoint of an optimizer step belongs: `directory/step-00000123`."""
    return Path(directory) / f"step-{step:08d}"


def checkpoint_step(path: str | Path) -> int:
    """The optimizer step of a checkpoint directory, or -1 if it is not named like one."""
    match = _STEP.fullmatch(Path(path).name)
    return int(match[1]) if match else -1


def _is_checkpoint(path: Path) -> bool:
    named = checkpoint_step(path) >= 0 or re.fullmatch(rf"{BEST}|\.{BEST}\.old-.*", path.name) is not None
    return named and path.resolve().parent.name == CHECKPOINTS


def saved_step(checkpoint: Path) -> int:
    """The optimizer step of a checkpoint, whatever its name. Raises RunError if it is damaged."""
    step = checkpoint_step(checkpoint)
    if step >= 0:
        return step
    saved = load_tree(checkpoint, "trainer")
    return int(saved["step"] if "step" in saved else saved["global_step"])  # as versions before named it


def choose_checkpoint(path: str | Path, name: str) -> Path:
    """The run's checkpoint `best`, `last` or of a step.

    Raises RunError where there is no run at `path`, ConfigError, saying what there is, for a checkpoint that is not.
    """
    run = Run(Path(path).expanduser())
    run.require_run()
    kept = checkpoints(run.path / CHECKPOINTS)
    best, last = run.best_checkpoint(), run.latest_checkpoint()
    known = {str(checkpoint_step(found)): found for found in kept}
    known |= {key: found for key, found in (("last", last), (BEST, best)) if found is not None}
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"{path} has no checkpoint {name!r}; it has: {there}. Without it the run's own weights are read"
        )
    return known[name]


def checkpoints(directory: str | Path) -> list[Path]:
    """Everything that is named like a checkpoint, complete or not, newest first."""
    if not Path(directory).is_dir():
        return []
    found = (path for path in Path(directory).iterdir() if checkpoint_step(path) >= 0 and path.is_dir())
    # What a crash left renamed aside counts only where nothing stands under the name itself.
    found = (
        path for path in found if path.name[0] != "." or not checkpoint_path(directory, checkpoint_step(path)).exists()
    )
    return sorted(found, key=lambda path: (checkpoint_step(path), path.name), reverse=True)


def latest_checkpoint(directory: str | Path) -> Path | None:
    """The newest complete checkpoint, each file checked, or None. Logs what it skips and why."""
    for path in checkpoints(directory):
        try:
            verify_manifest(path)
        except RunError as error:
            log.warning("skipping checkpoint %s: %s", path.name, error)
        else:
            return path
    return None


def keep_newest(directory: str | Path, count: int) -> None:
    """Deletes all but the newest `count` checkpoints, never the newest complete one.

    Raises ValueError if `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}: a run keeps its last checkpoint")
    old = checkpoints(directory)[count:]
    if not old:
        return
    last_good = latest_checkpoint(directory)
    for path in old:
        if last_good is not None and path != last_good:
            remove_directory(path)


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
