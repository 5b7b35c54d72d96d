"""A comparison at a URL: it is made in a directory of this machine, and what is saved there is copied.

The URL holds what the directory holds, but for compare.log. plan.json is copied first: by it a comparison is known. A
run is copied as `glissando train --out URL` does; measured.json follows once the run is finished, after its manifest.
The report comes last.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glissando.errors import RunError
from glissando.remote import Mirror, fetch_finished, in_turn, place, rename_aside
from glissando.runs import CONFIG, ENVIRONMENT, TOKENIZER, Run
from glissando.storage import write_atomic
from glissando.training.mirroring import SAME_COMMAND
from glissando.urls import whole_url

#: the options of a comparison, and its id
PLAN = "plan.json"
#: in each run's directory: what was measured of it, or that it has failed
MEASURED = "measured.json"
#: in a comparison's directory: the measured speed of its models
SPEED = "speed.json"
#: where the runs are, and in how many levels of directories
_RUNS = {"sweep": 2, "runs": 2, "probes": 3}


class Copy:
    """The comparison in the directory `path` of this machine, and its copy at `url`.

    One machine at a time makes a comparison, but for the workers of a cluster, each of which trains other runs.
    """

    def __init__(self, url: str, path: Path) -> None:
        self.url, self.path = whole_url(url), path
        self._there = place(url)
        self._finished: set[str] = set()  # runs whose measured.json is there
        self._is_fetched = False

    def url_of(self, run: Path) -> str:
        """Where a run's directory is copied to."""
        return f"{self.url}/{self._name(run)}"

    def _name(self, run: Path) -> str:
        return run.relative_to(self.path).as_posix()

    @property
    def seal(self) -> str:
        """The id of the comparison here; "" where there is none. Raises RunError for a damaged plan."""
        plan = self.path / PLAN
        return _id(plan.read_bytes(), str(plan)) if plan.is_file() else ""

    # ---------------------------------------------------------------------- reading

    def fetch(self) -> None:
        """Make the directory as new as the URL, once: plan, tokenizer, speed, and the runs that are finished. What is
        here of another comparison, or differs from a finished run, is renamed.

        Raises RunError where the URL has files and no comparison, or cannot be read.
        """
        if self._is_fetched:
            return
        print(f"made in {self.path}, copied to {self.url} after every save", file=sys.stderr, flush=True)
        if self._there.is_file():
            raise RunError(f"{self.url} is a file; nothing is overwritten: choose another --out")
        if self._there.names():
            plan = self._there.read(PLAN)
            if plan is None:
                raise RunError(
                    f"{self.url} is not empty and has no {PLAN}, so it is no comparison; nothing is overwritten: "
                    "choose another --out"
                )
            if self.path.exists() and self.seal != _id(plan, f"{self.url}/{PLAN}"):
                rename_aside(self.path, self.url, "comparison")
            for name in (TOKENIZER, PLAN, SPEED):
                self._fetch_file(name)
            for name in self._runs():
                self.fetch_run(self.path / name)
        self._is_fetched = True

    def _fetch_file(self, name: str) -> None:
        file, text = self.path / name, self._there.read(name)
        if text is None:
            file.unlink(missing_ok=True)
        elif not file.is_file() or file.read_bytes() != text:
            write_atomic(file, text)

    def _runs(self) -> Iterator[str]:
        """The directories of runs at the URL."""
        for kind, depth in _RUNS.items():
            names = [kind]
            for _ in range(depth):
                names = [f"{name}/{inside}" for name in names for inside in (self._there / name).names()]
            yield from names

    def fetch_run(self, run: Path) -> bool:
        """Whether the run is finished at the URL; then its files, without its checkpoints, are in its directory."""
        text = (self._there / self._name(run)).read(MEASURED)
        if text is None:
            return False
        if not (run / MEASURED).is_file() or (run / MEASURED).read_bytes() != text:
            fetch_finished(self.url_of(run), run, also=[MEASURED])
        self._finished.add(self._name(run))
        return True

    def read_config(self, run: Path) -> dict[str, Any] | None:
        """The configuration of a run at the URL that is not finished; None where there is none."""
        if self._name(run) in self._finished:
            return None
        text = (self._there / self._name(run)).read(CONFIG)
        if text is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / CONFIG).write_bytes(text)
            return Run(Path(folder)).read_config()

    def threads(self) -> int | None:
        """How many threads a run at the URL was made with; None where none says."""
        for name in self._runs():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if (text := (self._there / name).read(ENVIRONMENT)) is not None:
                    return int(json.loads(text)["threads"])
        return None

    def require(self, seal: str) -> None:
        """Have plan and tokenizer of the comparison with the id `seal` here, for a worker; what is here of another
        comparison is renamed. Raises RunError where the URL has another comparison, or none."""
        plan = self._there.read(PLAN)
        if plan is None or _id(plan, f"{self.url}/{PLAN}") != seal:
            raise RunError(
                f"the worker does not see the comparison at {self.url}, or sees another one there: name an --out in a "
                "storage that all machines of the cluster reach"
            )
        with in_turn(self.path):  # of the workers on this machine
            if self.path.exists() and self.seal != seal:
                rename_aside(self.path, self.url, "comparison")
            for name in (PLAN, TOKENIZER):
                self._fetch_file(name)

    # ---------------------------------------------------------------------- writing

    def push_plan(self) -> None:
        """Copy plan and tokenizer; a tokenizer of other options is deleted before. Raises RunError if that fails."""
        plan, tokenizer = (self.path / PLAN).read_bytes(), self.path / TOKENIZER
        ours, theirs = tokenizer.read_bytes() if tokenizer.is_file() else None, self._there.read(TOKENIZER)
        try:
            if theirs not in (None, ours):
                self._there.delete(TOKENIZER)
            if plan != self._there.read(PLAN):
                self._there.put(PLAN, plan)
            if ours not in (None, theirs):
                self._there.put(TOKENIZER, tokenizer)
        except (FileNotFoundError, RunError) as error:
            raise RunError(
                f"{error}. Nothing was trained: name an --out in a storage that can be written to"
            ) from error

    def push(self, *files: Path) -> None:
        """Copy files of the directory. Raises RunError that says where they are if the storage does not take them."""
        with copying(self.path):
            for file in files:
                self._there.put(self._name(file), file)

    def push_run(self, run: Path) -> None:
        """Copy a finished run, unless it is there; raises as `push`."""
        if self._name(run) not in self._finished:
            push_finished(self.url_of(run), run)
            self._finished.add(self._name(run))


def push_finished(url: str, run: Path) -> None:
    """Copy the run, what has changed alone, and then measured.json. Raises RunError if the storage does not take it."""
    Mirror(url, run, SAME_COMMAND).push()
    with copying(run):
        place(url).put(MEASURED, run / MEASURED)


@contextlib.contextmanager
def copying(path: Path) -> Iterator[None]:
    """Errors of the storage say where the files are, and what copies them again."""
    try:
        yield
    except (FileNotFoundError, RunError) as error:
        raise RunError(f"{error}. All of it is in {path}; {SAME_COMMAND}") from error


def _id(plan: bytes, name: str) -> str:
    try:
        return str(json.loads(plan).get("id", ""))
    except (ValueError, AttributeError) as error:
        raise RunError(f"{name} is malformed ({error}): put it back, or choose another --out") from error
