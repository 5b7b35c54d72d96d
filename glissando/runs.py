"""A run is a directory: everything that defines a trained model, and where it came from.

config.yaml         resolved configuration
tokenizer.json      tokenizer, if the model has one
imports/            copies of the Python files that registered what it is made of, if it needed any
environment.json    machine, versions, commit and command line that made it
metrics.csv         what was logged while training
checkpoints/        step-00000123/, ...: what training resumes from, each with copies of the small files
latest              names the newest checkpoint, whose weights are the run's until training ends
model.safetensors   weights, once training has ended
summary.json        how it ended: the best and the last validation
optimizer.safetensors  moments of the optimizer, of a run made by growing another
manifest.json       SHA-256 and size of the files above; what it does not list yet is not part of the run yet
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from glissando import pretrained
from glissando.checkpoints import (
    BEST,
    CHECKPOINTS,
    best_checkpoint,
    checkpoints,
    intact_advice,
    is_checkpoint,
    latest_checkpoint,
    of_model,
    saved_weights,
)
from glissando.data.tokenizers import Tokenizer, load_tokenizer
from glissando.errors import ConfigError, RunError, nearest
from glissando.imports import copies, require_registered, sections
from glissando.machine import environment
from glissando.quantisation import restored
from glissando.remote import resolve
from glissando.storage import (
    MANIFEST,
    delete,
    is_leftover,
    load_tensors,
    read_json,
    read_manifest,
    record,
    save_manifest,
    save_tensors,
    verify_manifest,
    write_atomic,
    write_manifest,
)
from glissando.untrusted import IMPORTS, copy_name, imported_names, read_bounded, require_no_links
from glissando.urls import is_url, without_passwords
from glissando.yaml_files import read_yaml

CONFIG, MODEL, TOKENIZER = "config.yaml", "model.safetensors", "tokenizer.json"
OPTIMIZER, SUMMARY, LOCK = "optimizer.safetensors", "summary.json", ".lock"
METRICS, ENVIRONMENT = "metrics.csv", "environment.json"
_SMALL = (CONFIG, TOKENIZER, ENVIRONMENT)  # what a checkpoint has copies of, beside imports/


@dataclass(frozen=True)
class Run:
    """A run directory, or one of its checkpoints.

    checkpoint  where configuration, tokenizer and weights are read in place of the run's own; None: these are read
    """

    path: Path
    checkpoint: Path | None = None

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
        for left in sorted(inside, key=lambda each: (each.name == MANIFEST, each.name == ENVIRONMENT)):
            delete(left)  # killed here, what is left still has only begun
        try:
            (run.path / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"could not make {path}: {error.strerror}. Choose a writable place.") from error
        made = {"id": uuid.uuid4().hex} | environment() | dict(notes or {})
        run._write(ENVIRONMENT, _environment_text(made))
        return run

    def require_free(self, anew: bool = False) -> list[Path]:
        """What is in the way of a new run and may be removed, see `create`; raises as that does."""
        inside = [each for each in self.path.iterdir() if each.name != LOCK] if self.path.is_dir() else []
        if not (inside and anew and self.has_only_begun()):
            require_new(self.path)
        return inside

    def has_only_begun(self) -> bool:
        """Whether all that is there was written by a training before its first checkpoint, and nobody changed it."""
        names = {each.name for each in self.path.iterdir() if not is_leftover(each)}
        first = {CHECKPOINTS, LOCK, MANIFEST}
        if checkpoints(self.path) or not names <= first | {*_SMALL, *_LOGS}:
            return False
        try:
            verify_manifest(self.path, names & {*_SMALL})
        except RunError:
            return names <= {CHECKPOINTS, LOCK}
        return (ENVIRONMENT in names or names <= first) and MODEL not in self._listed()

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run at `path`, its checkpoint `latest` until training has ended; that checkpoint if `path` is a
        checkpoint directory; a packaged model if `path` is its name, see glissando.pretrained; a copy of the run at a
        URL, see glissando.remote.

        Checks the digests of the small files; those of others are checked when they are read.
        Raises RunError if there is no such directory, or it is no run, or it is incomplete or damaged, and says which
        checkpoint is intact.
        """
        path = resolve(path)
        if is_checkpoint(path):
            run = cls(path.absolute().parent.parent)
            checkpoint = path if path.name != BEST else best_checkpoint(run.path)
            require_directory(checkpoint or path)
            run = cls(run.path, (checkpoint or path).resolve())
        else:
            require_directory(path)
            run = cls(path)
            run.require_run()
            if MODEL not in run._listed():
                run = cls(path, latest_checkpoint(path))
        run.require_inside(as_read=True)
        listed = read_manifest(run.folder) if (run.folder / MANIFEST).is_file() else {}
        if run.checkpoint is None and MODEL not in listed:
            missing = CONFIG if not (path / CONFIG).is_file() else MODEL
            raise RunError(f"{path} is incomplete: {missing} is missing. {run._advice()}")
        there = [name for name in _SMALL if (run.folder / name).is_file()]
        # A copy without the record of its making is whole.
        verify_manifest(run.folder, {*there, CONFIG, *({TOKENIZER} & listed.keys())}, run._advice)
        return run

    @property
    def folder(self) -> Path:
        """Where the configuration, the tokenizer and the weights are read."""
        return self.checkpoint or self.path

    @property
    def has_ended(self) -> bool:
        """Whether the run's own weights are there: its training has ended, or it was saved whole."""
        return MODEL in self._listed()

    # ------------------------------------------------------------------ writing

    def write_config(self, config: Mapping[str, Any], source: Run | None = None) -> None:
        """Writes config.yaml, and copies of the files that it imports, where there are none yet.

        source  the run that `config` comes from, which has copies; None: it is of this process, or of this run

        Raises ConfigError if it holds other than plain YAML values, RunError for a file without such a copy.
        """
        text = config_text(config)
        missing = [name for name in imported_names(config) if not (self.path / copy_name(name)).is_file()]
        for name, code in copies(None if source is None else source.folder, {"imports": missing}).items():
            self._write(name, code)
        self._write(CONFIG, text)

    def write_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Writes tokenizer.json."""
        self._write(TOKENIZER, tokenizer.to_json().encode())

    def write_model(
        self, state_dict: Mapping[str, Tensor], config: Mapping[str, Any], source: Run | None = None
    ) -> None:
        """Writes configuration (see `write_config`) and weights: the run is whole with that.

        Raises RunError if a file cannot be written.
        """
        self.write_config(config, source)
        self.write_tensors(MODEL, state_dict)

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes named tensors as safetensors."""
        save_tensors(self.path / name, tensors, {"format": "pt"})
        save_manifest(self.path, self._listed() | {name: record(self.path / name)})

    def small_files(self) -> dict[str, bytes]:
        """Configuration, tokenizer, the record of the making and copies of imported files, checked: what each
        checkpoint has copies of."""
        names = [name for name in read_manifest(self.folder) if name in _SMALL or name.startswith(f"{IMPORTS}/")]
        verify_manifest(self.folder, names, self._advice)
        return {name: (self.folder / name).read_bytes() for name in names}

    def finish(self, checkpoint: Path, summary: Mapping[str, Any]) -> None:
        """Writes how training ended and, from a checkpoint, the weights that are the run's own and the small files;
        the manifest, written last, lists them and the log. A run that has ended is left as it is.

        Raises RunError if a file cannot be written; `latest` holds then.
        """
        if self.has_ended:
            return
        source = Run(self.path, checkpoint)
        files = source.small_files() | {SUMMARY: (json.dumps(summary, indent=2) + "\n").encode()}
        for name, data in files.items():
            if not (self.path / name).is_file() or (self.path / name).read_bytes() != data:
                write_atomic(self.path / name, data)
        save_tensors(self.path / MODEL, source.read_state_dict(), {"format": "pt"})
        write_manifest(self.path, [*files, MODEL, *([METRICS] if (self.path / METRICS).is_file() else [])])

    def _write(self, name: str, data: bytes) -> None:
        """A small file of a new run, listed first: by it a run that has only begun is known from a user's own files."""
        entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        save_manifest(self.path, self._listed() | {name: entry})
        write_atomic(self.path / name, data)

    def _listed(self) -> dict[str, dict[str, Any]]:
        """What the manifest lists. Raises RunError if it is damaged."""
        return read_manifest(self.path, self._advice) if (self.path / MANIFEST).is_file() else {}

    # ------------------------------------------------------------------ reading

    def require_checkpoint(self) -> Path:
        """The checkpoint to go on from. Raises RunError that says what to do where there is none."""
        if newest := latest_checkpoint(self.path):
            return newest
        if self.has_only_begun():
            raise RunError(
                f"{self.path} was stopped before its first checkpoint, so that it cannot be resumed: the "
                f"command that made it, with --out {self.path} as before, starts it again"
            )
        raise RunError(
            f"{self.path} has no checkpoint to resume from: start a new training from its weights, with --from "
            f"{self.path}, or train again into another directory"
        )

    def own_checkpoint(self) -> Path | None:
        """The checkpoint whose weights are the run's own: the newest, or the best where training ended so."""
        kept = None
        if self.has_ended and SUMMARY in self._listed():
            verify_manifest(self.path, [SUMMARY], self._advice)
            kept = read_json(self.path / SUMMARY, "how training ended").get("weights")
        return (best_checkpoint(self.path) if kept == BEST else None) or latest_checkpoint(self.path)

    def read_config(
        self, trust_imports: bool = False, kind: str | None = None, to_train: bool = False
    ) -> dict[str, Any]:
        """The configuration of a run of the given `kind`: `series`, `events`, or none for language.

        Raises RunError if config.yaml is missing, damaged or malformed, or of another kind, and where its model, its
        data or, `to_train`, its training names something that is not registered, unless `trust_imports` has the run's
        own files executed, which register it.
        """
        path = self.folder / CONFIG
        if not path.is_file():
            raise RunError(f"{path} is missing. {self._advice()}")
        if (self.folder / MANIFEST).is_file():
            verify_manifest(self.folder, [CONFIG], self._advice)
        try:
            config = read_yaml(read_bounded(path))
        except ConfigError as error:
            raise RunError(f"{path} is malformed: {error}. {self._advice()}") from error
        if not isinstance(config, dict):
            raise RunError(f"{path} is malformed: it holds no mapping. {self._advice()}")
        if config.get("kind") != kind:
            raise RunError(pretrained.how_to_open(self.path, config.get("kind")))
        require_registered(self.folder, config, sections(to_train, kind), trust_imports)
        return config

    def read_tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer; None of a model without one. Raises RunError or DataError if it is damaged."""
        path = self.folder / TOKENIZER
        return load_tokenizer(path) if path.is_file() else None

    def require_tokenizer(self) -> Tokenizer:
        """As `read_tokenizer`. Raises RunError where there is none."""
        tokenizer = self.read_tokenizer()
        if tokenizer is None:
            raise RunError(f"{self.folder / TOKENIZER} is missing. {self._advice()}")
        return tokenizer

    def read_environment(self) -> dict[str, Any]:
        """Where and from what the run was made; nothing where that is not known. Raises RunError if it is damaged."""
        path = self.folder / ENVIRONMENT
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
        """The tensors of a safetensors file of the run, its digest checked; raises as `read_state_dict`."""
        verify_manifest(self.path, [name], self._advice)
        return load_tensors(self.path / name)

    def require_run(self) -> None:
        """Raises RunError if there is no such directory, or it was not made as a run."""
        require_directory(self.path)
        if not any((self.path / name).exists() for name in (ENVIRONMENT, CONFIG, CHECKPOINTS)):
            inside = sorted(path.parent.name for path in self.path.glob(f"*/{CONFIG}"))
            hint = f" It holds runs: {', '.join(inside[:5])}." if inside else ""
            raise RunError(f"{self.path} is not a run: it has no {CONFIG}.{hint}")

    def require_log(self, expected: Mapping[str, Any]) -> None:
        """Raises RunError where metrics.csv does not begin with what a checkpoint has recorded of it."""
        path, size = self.path / METRICS, int(expected["size"])
        text = path.read_bytes()[:size] if path.is_file() else None
        if text is None or hashlib.sha256(text).hexdigest() != expected["sha256"]:
            raise RunError(
                f"{path} is {'missing' if text is None else 'damaged'}: the checkpoint knows {size:,} bytes of it with "
                f"SHA-256 {expected['sha256']}. Put it back"
            )

    def require_inside(self, as_read: bool = False) -> None:
        """Raises RunError for a link out of the run; `as_read`: unless it is a file whose digest is listed."""
        listed: set[str] = set()
        for folder in (self.path, *checkpoints(self.path)) if as_read else ():
            with contextlib.suppress(RunError):
                listed |= {(folder / name).relative_to(self.path).as_posix() for name in read_manifest(folder)}
        require_no_links(self.path, listed)

    def _advice(self) -> str:
        """What to do about a file of `folder` that is damaged or missing."""
        if self.checkpoint is not None:
            return intact_advice(self.checkpoint)
        if checkpoints(self.path):
            return intact_advice(self.path / CHECKPOINTS / "none")
        return (
            "It has no complete checkpoint: copy the file back from where the run was; or, if it was killed before "
            "the first checkpoint, train again with the same command."
        )


#: what a training writes before its first checkpoint, beside small files
_LOGS = {METRICS, "samples.txt", "base", IMPORTS}


def resumed_environment(made: bytes, notes: Mapping[str, Any]) -> bytes:
    """environment.json with where it goes on, and `notes`; its first record stays otherwise."""
    first = json.loads(made)
    earlier = first.get("resumed")
    resumed = [*(earlier if isinstance(earlier, list) else []), environment()]
    return _environment_text(first | dict(notes) | {"resumed": resumed})


def _environment_text(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


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
    if path.is_dir() and any(each.name != LOCK for each in path.iterdir()):
        saved = any((path / CHECKPOINTS).glob("step-*"))
        further = f" (a training: `glissando train --resume {path}` continues it)" if saved else ""
        raise RunError(f"{path} exists and is not empty{further}. Choose a new name: nothing is overwritten.")
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
    beside = sorted(config.parent.name for config in path.parent.glob(f"*/{CONFIG}"))
    packaged = pretrained.names() if len(path.parts) == 1 else []
    close = nearest(path.name, [*beside, *packaged])
    if close:
        hint = f"Did you mean {path.parent / close if close in beside else close}?"
    else:
        names = f"trained models in the package: {', '.join(packaged)}"
        trained = names if packaged else "`glissando models` lists trained ones"
        hint = f"No run in {str(path.parent)!r} has a similar name; {trained}."
    if is_checkpoint(path) and beside:
        hint = f"It has: {', '.join(beside)}."
    raise RunError(f"no run at {path}. {hint}")
