"""Errors a user can act on: what was given, what was expected, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from glissando.urls import redacted


class GlissandoError(Exception):
    """Base of every error that stems from what the user gave, never from a defect in the library."""

    #: the program's exit status: 2 for a command or an option that cannot be used, as shells define it, else 1
    status = 1

    def __init__(self, *values: object) -> None:
        # Messages are printed and logged, and URLs in them may hold passwords.
        super().__init__(*(redacted(value) if isinstance(value, str) else value for value in values))


class UnknownNameError(GlissandoError, ValueError):
    """A name that is not in a registry or a configuration; the message offers the nearest one."""

    status = 2


class ConfigError(GlissandoError, ValueError):
    """A configuration value that cannot be used."""

    status = 2


class LengthError(GlissandoError, ValueError):
    """More tokens than a model with learned positions has positions for."""


class InputError(GlissandoError, ValueError):
    """What a model was called with and cannot read: other shapes or types, unknown ids, another model's state."""


class DataError(GlissandoError, ValueError):
    """Input text that is missing, empty, too short or malformed."""


class RunError(GlissandoError, RuntimeError):
    """A run directory or checkpoint that is missing, incomplete or damaged."""


class Refused(RunError):
    """A model that cannot be exported so; the message names the part and what to do."""


class NotCompiled(GlissandoError):
    """A model, or an option of it, that has no compiled decoding step; the plain forward computes it."""


class TrainingError(GlissandoError, RuntimeError):
    """Training that cannot go on, such as a disk that takes no more."""


class DivergenceError(TrainingError):
    """Training whose loss, gradients or weights are no longer finite: the same settings would end there again."""


class NotFiniteError(GlissandoError, FloatingPointError):
    """A model whose logits are not finite: nothing can be drawn of them."""


class MissingExtraError(GlissandoError, ImportError):
    """A part of the library whose optional packages are not installed."""


class Stopped(KeyboardInterrupt):
    """Training that ended because a signal asked for it, with everything saved and a message printed."""

    def __init__(self, message: str = "", number: int | None = None) -> None:
        super().__init__(message)
        self.number = number or 2  # SIGINT: another process received it

    @property
    def status(self) -> int:
        """The exit status for it, as shells define it."""
        return 128 + self.number


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None if nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """An error for `name` that offers the nearest and lists the known ones."""
    known = sorted(known)
    close = nearest(name, known)
    hint = f" Did you mean {close!r}?" if close else ""
    return UnknownNameError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")
