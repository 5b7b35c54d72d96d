"""Pairs of processes that train together, forked once torch is loaded: to load it takes longer than what they do.

    python tests/two_processes.py FOLDER

runs `glissando train` on the arguments of each name in FOLDER/jobs.json, as torchrun would start it in two processes.
What both write to stderr is in FOLDER/NAME.stderr, and the packages that the first has loaded at the end are in
FOLDER/NAME.json. Last comes a loop of a user's own, see own_loop_worker.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import own_loop_worker

from glissando import shards  # noqa: F401  loaded before the processes are forked
from glissando.cli import main as glissando
from glissando.decoding import decoder  # noqa: F401
from glissando.training import fit  # noqa: F401
from glissando.training.language_task import LanguageTask

LanguageTask.sample.__defaults__ = (4,)  # of several hundred tokens, each gathers all shards


def torchrun_environment() -> dict[str, str]:
    """What torchrun tells every process, for a job without a name."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    two = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    return two | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}


def train(folder: Path, name: str, arguments: list[str], told: dict[str, str], rank: int) -> None:
    os.environ.update(told | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.dup2(os.open(folder / f"{name}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    status = glissando(["train", *arguments])
    if rank == 0:
        packages = sorted({module.partition(".")[0] for module, loaded in sys.modules.items() if loaded is not None})
        (folder / f"{name}.json").write_text(json.dumps(packages))
    sys.exit(status)


def pair(process: Callable[[int], None]) -> None:
    """Raises SystemExit where one of both fails."""
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=process, args=(rank,)) for rank in (0, 1)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    if any(each.exitcode for each in both):
        sys.exit(f"ended with {[each.exitcode for each in both]}")


def main(folder: Path) -> None:
    own_loop_worker.compute_whole()
    for name, arguments in json.loads((folder / "jobs.json").read_text()).items():
        told = torchrun_environment()
        pair(lambda rank, name=name, arguments=arguments, told=told: train(folder, name, arguments, told, rank))
    pair(lambda rank: own_loop_worker.rank_of_two(folder, rank))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
