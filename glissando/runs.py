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

import contextlib
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from glissando import pretrained
from glissando.checkpoints import (
    BEST,
    CHECKPOINTS,
    checkpoint_step,
    checkpoints,
    is_checkpoint,
    latest_checkpoint,
    of_model,
    saved_weights,
)
from glissando.data.tokenizers import Tokenizer, load_tokenizer
from glissando.errors import ConfigError, RunError, nearest
from glissando.imports import copies, require_registered, sections
from glissando.loggers import TENSORBOARD, WANDB
from glissando.machine import environment
from glissando.places import taken
from glissando.quantisation import restored
from glissando.remote import resolve
from glissando.storage import (
    MANIFEST,
    RETRAIN,
    delete,
    find_published,
    is_leftover,
    load_tensors,
    put_aside,
    read_json,
    read_manifest,
    record,
    refuse_pickle,
    save_manifest,
    save_tensors,
    verify_manifest,
    write_atomic,
)
from glissando.untrusted import IMPORTS, copy_name, imported_names, read_bounded, require_no_links
from glissando.urls import is_url, without_passwords
from glissando.yaml_files import read_yaml

CONFIG, MODEL, TOKENIZER = "config.yaml", "model.safetensors", "tokenizer.json"
OPTIMIZER, SUMMARY, LOCK = "optimizer.safetensors", "summary.json", ".lock"
METRICS, ENVIRONMENT = "metrics.csv", "environment.json"
_SMALL = (CONFIG, TOKENIZER, ENVIRONMENT)  # what a checkpoint has copies of


@dataclass(frozen=True)
class Run:
    """A run directory, or one of its checkpoints.

    checkpoint  whose weights are read in place of the run's own; None: these are read
    source      where the configuration, the tokenizer and the record of the making are read; None: in the run
    """

    path: Path
    checkpoint: Path | None = None
    source: Path | None = None

    @classmethod
    def create(cls, path: str | Path, notes: Mapping[str, Any] | None = None, anew: bool = False) -> Run:
        """Makes a new run directory with its environment record; `notes` go into that.

        anew  remove what a training that was killed before its first checkpoint has left there; the caller has made
              sure that none is going on

        Raises RunError if anything else is there: nothing is overwritten.
        """
        run = cls(Path(path).expanduser())
        if inside := run.require_free(anew):
            print(f"{path} was stopped before its first checkpoint: it is started again", file=sys.stderr)
        for found in sorted(inside, key=lambda found: (found.name == MANIFEST, found.name == ENVIRONMENT)):
            delete(found)  # killed here, what is left still has only begun
        try:
            (run.path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"could not make {path}: {error.strerror}. Choose a writable place.") from error
        run._write_environment({"id": uuid.uuid4().hex} | environment() | dict(notes or {}))
        return run

    def require_free(self, anew: bool = False) -> list[Path]:
        """What is in the way of a new run and may be removed, see `create`; raises as that does."""
        inside = [found for found in self.path.iterdir() if found.name != LOCK] if self.path.is_dir() else []
        if not (inside and anew and self.has_only_begun()):
            require_new(self.path)
        return inside

    def has_only_begun(self) -> bool:
        """Whether all that is there was written by a training before its first checkpoint, and nobody changed it."""
        names = {found.name for found in self.path.iterdir() if not is_leftover(found)}
        kept = self.path / CHECKPOINTS
        try:
            listed = read_manifest(self.path) if MANIFEST in names else {}
            verify_manifest(self.path, [name for name in _SMALL if name in names])
        except RunError:
            return not names - {CHECKPOINTS, LOCK} and not checkpoints(kept)
        logs = {METRICS, "samples.txt", TENSORBOARD, WANDB, "base", IMPORTS} if ENVIRONMENT in names else set()
        known = {CHECKPOINTS, LOCK, MANIFEST, *_SMALL, *logs}
        has_checkpoint = kept.is_dir() and any(not is_leftover(found) for found in kept.iterdir())
        return names <= known and MODEL not in listed and not has_checkpoint and not checkpoints(kept)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The finished run at `path`, or the run and its checkpoint if `path` is a checkpoint directory; a packaged
        model if `path` is its name, see glissando.pretrained; a copy of the run at a URL, see glissando.remote.

        Checks the digests of the small files and, for a checkpoint, of all of its files. Where one of the run's own is
        missing or damaged, or its manifest is, the copies in a checkpoint are read in the place of all of them, and a
        line on stderr says so.
        Raises RunError if there is no such directory, or it is no run, or it is incomplete or damaged and has no
        checkpoint with such copies.
        """
        path = resolve(path)
        if path.name == BEST:
            path = find_published(path)
        require_directory(path)
        if is_checkpoint(path):
            checkpoint = path.resolve()
            run = cls(checkpoint.parent.parent, checkpoint)
            run.require_inside(as_read=True)
            verify_manifest(checkpoint, advice=run._advice)
        else:
            run = cls(path)
            run.require_run()
            run.require_inside(as_read=True)
            if not (path / MODEL).is_file():
                missing = CONFIG if not (path / CONFIG).is_file() else MODEL
                raise RunError(f"{path} is incomplete: {missing} is missing. {run._advice(missing)}")
        return run.with_intact_files()

    def with_intact_files(self) -> Run:
        """This run, its small files read from a checkpoint if they, or the manifest, are damaged; raises as `open`."""
        broken = ""
        try:
            listed = read_manifest(self.path)
            for broken in _SMALL:
                found = [(self.path / broken).is_file(), broken in listed]
                # A copy without the record of its making is whole, and a model without a tokenizer.
                if broken == CONFIG or all(found) or (broken == TOKENIZER and any(found)):
                    verify_manifest(self.path, [broken], "")
        except RunError as error:
            problem = str(error).removesuffix(RETRAIN).strip()
        else:
            return self
        spare = self.checkpoint or self.own_checkpoint()
        if spare is None or not (spare / CONFIG).is_file():
            raise RunError(f"{problem} {self._advice(broken or CONFIG)}")
        what = "such files" if broken or self.checkpoint else "weights, configuration and tokenizer"
        print(f"{problem} The checkpoint {spare} is intact: {what} are read from there", file=sys.stderr)
        return replace(self, source=spare, checkpoint=self.checkpoint if broken else spare)

    def restore(self, checkpoint: Path) -> None:
        """Puts the copies in `source` in the place of damaged files, and those in `checkpoint` in that of a log that
        has not only grown since. What stood there is kept, as NAME.damaged."""
        with contextlib.suppress(FileNotFoundError):  # of an earlier version, which kept no copy
            log = (checkpoint / METRICS).read_bytes()
            if not (self.path / METRICS).is_file() or not (self.path / METRICS).read_bytes().startswith(log):
                put_aside(self.path / METRICS)
                write_atomic(self.path / METRICS, log)
        if self.source is None:
            return
        if not self._listed():
            put_aside(self.path / MANIFEST)
        for name in self.source_files():
            ours, copy = self.path / name, (self.source / name).read_bytes()
            if name == METRICS:
                continue
            if ours.is_file() and ours.read_bytes() != copy:
                put_aside(ours)
            self._write(name, copy)

    def copy_files(self, directory: Path, logged: int = -1) -> None:
        """Copies of the small files, which are checked first, into a checkpoint's directory; of the log, which grows,
        the first `logged` bytes."""
        names = self.source_files()
        if checked := [name for name in names if name != METRICS]:
            verify_manifest(self.path, checked)
        for name in names:
            (directory / name).parent.mkdir(exist_ok=True)
            with (self.path / name).open("rb") as file:
                (directory / name).write_bytes(file.read(logged if name == METRICS else -1))

    def source_files(self) -> list[str]:
        """The names of what a checkpoint has copies of, where they are read."""
        folder = self.source or self.path
        names = [*_SMALL, METRICS, *(f"{IMPORTS}/{copy.name}" for copy in (folder / IMPORTS).glob("*.py"))]
        return [name for name in names if (folder / name).is_file()]

    def write_config(self, config: Mapping[str, Any], source: Run | None = None) -> None:
        """Writes config.yaml if it differs, and copies of the files that it imports, where there are none yet.

        source  the run that `config` comes from, which has copies; None: it is of this process, or of this run

        Raises ConfigError if it holds other than plain YAML values, RunError for a file without such a copy.
        """
        text = config_text(config)
        missing = [name for name in imported_names(config) if not (self.path / copy_name(name)).is_file()]
        origin = None if source is None else source.source or source.path
        for name, code in copies(origin, {"imports": missing}).items():
            self._write(name, code)
        target = self.path / CONFIG
        if not target.is_file() or target.read_bytes() != text:
            self._write(CONFIG, text)

    def write_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Writes tokenizer.json."""
        self._write(TOKENIZER, tokenizer.to_json().encode())

    def write_model(
        self, state_dict: Mapping[str, Tensor], config: Mapping[str, Any], source: Run | None = None
    ) -> None:
        """Writes configuration (see `write_config`) and weights, then the manifest.

        A crash at any moment leaves a run that opens with the old or with the new weights.
        Raises RunError if a file cannot be written; the old one stands then.
        """
        self.write_config(config, source)
        self.write_tensors(MODEL, state_dict)
        files = {name: self._settled(name, entry) for name, entry in read_manifest(self.path).items()}
        if (self.path / METRICS).is_file():
            files[METRICS] = record(self.path / METRICS)
        save_manifest(self.path, files)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes named tensors as safetensors."""
        save_tensors(self.path / name, tensors, {"format": "pt"}, lambda new: self._announce(name, record(new)))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json. Raises RunError if it cannot be written."""
        self._write(SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())

    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best validation, or None."""
        path = find_published(self.path / CHECKPOINTS / BEST)
        return path if (path / MANIFEST).is_file() else None

    def require_checkpoint(self) -> Path:
        """The checkpoint to go on from: the newest complete one; of a run that was killed early, that of the best
        validation. Raises RunError that says what to do where there is none."""
        if found := self.latest_checkpoint() or self.best_checkpoint():
            return found
        if self.has_only_begun():
            raise RunError(
                f"{self.path} was stopped before its first checkpoint, so that it cannot be resumed: the "
                f"command that made it, with --out {self.path} as before, starts it again"
            )
        if damaged := checkpoints(self.path / CHECKPOINTS):
            try:
                verify_manifest(damaged[0], advice="Train again into another directory.")
            except RunError as error:
                raise RunError(f"{self.path} has no complete checkpoint to resume from: {error}") from error
        raise RunError(
            f"{self.path} has no checkpoint to resume from: start a new training from its weights, with --from "
            f"{self.path}, or train again into another directory"
        )

    def own_checkpoint(self) -> Path | None:
        """The checkpoint whose weights are the run's own: the newest complete one, or the best where it ended so."""
        kept = None
        if (self.path / SUMMARY).is_file():
            if SUMMARY in self._listed():
                verify_manifest(self.path, [SUMMARY])
            kept = read_json(self.path / SUMMARY, "how training ended").get("weights")
        best = self.best_checkpoint() if kept == BEST else None
        if best is not None:
            verify_manifest(best)
        return best or self.latest_checkpoint()

    def read_config(
        self, trust_imports: bool = False, kind: str | None = None, to_train: bool = False
    ) -> dict[str, Any]:
        """The configuration of a run of the given `kind`: `series`, or none for language.

        Raises RunError if config.yaml is missing, damaged or malformed, or of another kind, and where its model, its
        data or, `to_train`, its training names something that is not registered, unless `trust_imports` has the run's
        own files executed, which register it.
        """
        path = (self.source or self.path) / CONFIG
        if not path.is_file():
            raise RunError(f"{path} is missing. {self._advice(CONFIG)}")
        if self.source is None and (self.path / MANIFEST).is_file():
            verify_manifest(self.path, [CONFIG], partial(self._advice, CONFIG))
        try:
            config = read_yaml(read_bounded(path))
        except ConfigError as error:
            raise RunError(f"{path} is malformed: {error}. {self._advice(CONFIG)}") from error
        if not isinstance(config, dict):
            raise RunError(f"{path} is malformed: it holds no mapping. {self._advice(CONFIG)}")
        if config.get("kind") != kind:
            raise RunError(pretrained.how_to_open(self.path, config.get("kind")))
        require_registered(self.source or self.path, config, sections(to_train), trust_imports)
        return config

    def read_tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None of a model without one. Raises RunError or DataError if it is damaged."""
        path = (self.source or self.path) / TOKENIZER
        return load_tokenizer(path) if path.is_file() else None

    def require_tokenizer(self) -> Tokenizer:
        """As `read_tokenizer`. Raises RunError where there is none."""
        tokenizer = self.read_tokenizer()
        if tokenizer is None:
            raise RunError(f"{self.path / TOKENIZER} is missing. {self._advice(TOKENIZER)}")
        return tokenizer

    def read_environment(self) -> dict[str, Any]:
        """Where and from what the run was made; nothing where that is not known. Raises RunError if it is damaged."""
        path = (self.source or self.path) / ENVIRONMENT
        return read_json(path, "the record of its making") if path.is_file() else {}

    def read_state_dict(self) -> dict[str, Tensor]:
        """The model's weights on the CPU, after checking their digest; a checkpoint's by the names of the model, and
        int8 ones are float32 again.

        Raises RunError that names the file that is missing or damaged, and the checkpoint that is still good.
        """
        if self.checkpoint is None:
            return restored(self.read_tensors(MODEL))
        return of_model(saved_weights(self.checkpoint))

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Those of a safetensors file of the run, after checking its digest; raises as `read_state_dict`."""
        refuse_pickle(self.path / name)
        verify_manifest(self.path, [name], self._advice)
        return load_tensors(self.path / name)

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        return latest_checkpoint(self.path / CHECKPOINTS)

    def _write(self, name: str, data: bytes) -> None:
        self._announce(name, {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)})
        write_atomic(self.path / name, data)

    def _announce(self, name: str, new: dict[str, Any]) -> None:
        """Lists a new file beside the intact old one before it takes its place: a crash between the two
        leaves a manifest that holds for either. What is listed of other files is carried over."""
        files = read_manifest(self.path) if (self.path / MANIFEST).exists() else {}
        old = self._settled(name, files.get(name, {}))
        if old.get("sha256") and (self.path / name).is_file() and record(self.path / name) == old:
            new = new | {"previous": old}
        save_manifest(self.path, files | {name: new})

    def _listed(self) -> dict[str, dict[str, Any]]:
        """What the manifest lists; nothing where it is damaged, which opening the run reports."""
        try:
            return read_manifest(self.path)
        except RunError:
            return {}

    def _settled(self, name: str, entry: dict[str, Any]) -> dict[str, Any]:
        """The one record of a file that holds, where a crash may have left it the old one or the new one."""
        if "previous" not in entry:
            return entry
        found = record(self.path / name) if (self.path / name).is_file() else None
        return entry["previous"] if found == entry["previous"] else {key: entry[key] for key in ("sha256", "size")}

    def require_run(self) -> None:
        """Raises RunError if there is no such directory, or it was not made as a run."""
        require_directory(self.path)
        if not any((self.path / name).exists() for name in (ENVIRONMENT, CONFIG, CHECKPOINTS)):
            inside = sorted(path.parent.name for path in self.path.glob(f"*/{CONFIG}"))
            hint = f" It holds runs: {', '.join(inside[:5])}." if inside else ""
            raise RunError(f"{self.path} is not a run: it has no {CONFIG}.{hint}")

    def require_inside(self, as_read: bool = False) -> None:
        """Raises RunError for a link out of the run; `as_read`: unless it is a file whose digest is listed."""
        require_no_links(self.path, self._listed() if as_read and (self.path / MANIFEST).is_file() else ())

    def _advice(self, name: str = MODEL) -> str:
        good = self.latest_checkpoint()
        if good is None and name != MODEL:
            return (
                "Copy it back from where the run was; or, if it was killed before the first checkpoint, train again "
                "with the same command."
            )
        if good is None:
            return "It has no complete checkpoint (killed before the first one?): train again; the same command does."
        if name != MODEL and not (good / CONFIG).is_file():  # one of an earlier version
            return f"Put the {name} that it was trained with back; its checkpoints need it as well."
        return f"This checkpoint is complete and loads instead: {good}"

    def note_resumed(self, notes: Mapping[str, Any] | None = None) -> None:
        """Adds where it goes on, and `notes`, to environment.json, whose first record stays otherwise."""
        first = self.read_environment() or environment()
        earlier = first.get("resumed")
        resumed = [*(earlier if isinstance(earlier, list) else []), environment()]
        self._write_environment(first | dict(notes or {}) | {"resumed": resumed})

    def _write_environment(self, values: Mapping[str, Any]) -> None:
        self._write(ENVIRONMENT, (json.dumps(values, indent=2) + "\n").encode())


def config_text(config: Mapping[str, Any]) -> bytes:
    """What config.yaml holds, without passwords of URLs. Raises ConfigError for other than plain YAML values."""
    try:
        return yaml.safe_dump(without_passwords(dict(config)), sort_keys=False, allow_unicode=True).encode()
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration cannot be YAML: {error}. Use plain values.") from error


def require_new(path: str | Path) -> None:
    """Check that a model can be saved at `path`, before a training loop of your own.

    Raises:
        RunError: Something is there, or nothing can be written there."""
    if is_url(path):
        raise RunError(f"{path} is a URL, which only `glissando train` can write to; give a local directory.")
    path = Path(path).expanduser()
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; choose another name for the run directory.")
    if path.is_dir() and any(found.name != LOCK for found in path.iterdir()):
        raise taken(path, any((path / CHECKPOINTS).glob("step-*")))
    above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "is not writable" if above.is_dir() else "is a file"
        raise RunError(f"could not make {path}: {above} {reason}. Choose a writable place.")


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
    beside = [found.parent.name for found in path.parent.glob(f"*/{CONFIG}")]
    packaged = pretrained.names() if len(path.parts) == 1 else []
    close = nearest(path.name, [*beside, *packaged])
    if close:
        hint = f"Did you mean {path.parent / close if close in beside else close}?"
    else:
        trained = f"; trained models in the package: {', '.join(packaged)}" if packaged else ""
        hint = f"No run in {str(path.parent)!r} has a similar name{trained}."
    raise RunError(f"no run at {path}. {hint}")


def choose_checkpoint(path: str | Path, name: str) -> Path:
    """The run's checkpoint `best`, `last` or of a step.

    Raises RunError where there is no run at `path`, ConfigError, saying what there is, for a checkpoint that is not.
    """
    run = Run(pretrained.resolve(path))
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
