"""The program: one command, its options, and errors a person can act on. One module a command, each with
`main(arguments)`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from glissando.errors import GlissandoError, Stopped, nearest
from glissando.progress import never_silent

#: command -> what it does; each is a module of this package with `main(arguments)`
COMMANDS = {
    "train": "train a preset on text, or resume a run",
    "generate": "write text with a trained model",
    "evaluate": "bits per byte, perplexity and accuracy on held-out text",
    "serve": "serve models over HTTP with OpenAI's API, with a playground in the browser",
    "export": "write a model for ONNX Runtime or a browser, or with smaller weights",
    "grow": "make a run's model larger without changing what it computes",
    "compare": "train several models under one budget and write a report",
    "steer": "measure what a model's dials do to the texts of held-out prompts",
    "series": "train and evaluate a model of time series on a CSV or Parquet file",
    "events": "train and evaluate a model of a log: when the next event comes, and of which kind",
    "models": "list the trained models in the package, or show one's card",
    "presets": "list the presets, or show one",
    "corpora": "list the corpora, or show samples of one",
}

#: commands whose first answer is waited for: looking for cycles among what they import takes a tenth of the start
_STARTS_SOON = ("generate", "serve")

_USAGE = """usage: glissando COMMAND [options]

Small sequence models in continuous time and continuous depth: train, generate, compare, serve.

commands:
{commands}

`glissando COMMAND --help` shows a command's options and an example. A model of your own text:
  glissando train --data.path book.txt --training.seconds 600 --out runs/book
  glissando generate runs/book --prompt "Once upon a time"
"""


def usage() -> str:
    abouts = COMMANDS | {name: f"from {point.module}" for name, point in installed().items()}
    return _USAGE.format(commands="\n".join(f"  {name:10} {about}" for name, about in abouts.items()))


def installed() -> dict[str, Any]:
    """Further commands, by name: entry points `glissando.commands` of installed packages, called with the arguments."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group="glissando.commands")}


def function_of(command: str) -> Callable[[Sequence[str]], None]:
    """What runs a command, imported now."""
    if command in COMMANDS:
        return importlib.import_module(f"glissando.cli.{command}").main
    return installed()[command].load()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for a command or options that cannot be used, 1 for other errors that
    name their fix, and 128 and the signal's number for what a signal has ended."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if arguments[0] == "--version":
        from glissando import __version__

        print(f"glissando {__version__}")
        return 0
    command = arguments[0]
    if command not in COMMANDS and command not in installed():
        known = [*COMMANDS, *installed()]
        close = nearest(command, known)
        hint = f" Did you mean {close!r}?" if close else ""
        print(f"glissando: unknown command {command!r}.{hint} Commands: {', '.join(known)}.", file=sys.stderr)
        return 2
    return _run(command, arguments[1:])


def _run(command: str, arguments: list[str]) -> int:
    if sys.stdout is None:  # closed by the shell, >&-: output goes nowhere
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows only ASCII shows ? and does not end the run
    from glissando.threads import wait_briefly

    wait_briefly()
    collected = gc.get_threshold()
    gc.set_threshold(100_000 if command in _STARTS_SOON else collected[0])
    try:
        # A server is silent until it is asked.
        with contextlib.nullcontext() if "serve" in (command, *arguments[:1]) else never_silent():
            function_of(command)(arguments)
    except GlissandoError as error:
        from glissando.cli.options import as_flags

        is_option = f"--{str(error).partition(':')[0]}" in [argument.partition("=")[0] for argument in arguments]
        text = as_flags(f"{'--' if is_option else ''}{error}", arguments)
        print(f"glissando {command}: {text}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        # The reader (head, less) has had enough; Python must not complain when it flushes at exit.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141  # as shells have it for a program that SIGPIPE ends
    except OSError as error:
        places = " -> ".join(repr(str(path)) for path in (error.filename, error.filename2) if path is not None)
        print(f"glissando {command}: {error.strerror or error}{places and f': {places}'}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not (missing := _missing_memory(error)):
            raise
        print(f"glissando {command}: {missing}", file=sys.stderr)
        return 1
    except Stopped as error:
        return error.status  # what was saved and how to go on has been printed
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    finally:
        gc.set_threshold(*collected)  # for who called `main` in a process of their own
    return 0


def _missing_memory(error: MemoryError | RuntimeError) -> str | None:
    """For an allocation that was refused, by the system or by PyTorch, what would not fit; None for other errors."""
    refused = str(error).strip().split("\n")[0]
    is_allocation = "can't allocate memory" in refused or type(error).__name__ == "OutOfMemoryError"
    if not (is_allocation or isinstance(error, MemoryError)):
        return None
    return (
        f"not enough memory{f': {refused}' if refused else ''}. Lower the batch (--data.batch_size), the length of its "
        "rows (--data.seq_len) or the sizes of the model"
    )
