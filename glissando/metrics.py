"""What a training reports: metrics.csv, read back without what a crash has cut short, and its summary."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glissando.errors import RunError, TrainingError
from glissando.storage import write_atomic

COLUMNS = (
    "step", "epoch", "tokens", "seconds", "flops", "train_loss", "valid_loss", "learning_rate", "grad_norm",
    "tokens_per_second",
)  # fmt: skip


class Metrics:
    """The file; `latest` are the newest values of all columns."""

    def __init__(self, path: Path, columns: list[str], step: int) -> None:
        """Rows after `step`, of a training that got further than its checkpoint, are dropped."""
        self.path, self.columns, self.latest = path, [*COLUMNS, *columns], dict[str, Any]()
        rows = [row for row in read_metrics(path) if int(row["step"]) <= step]
        write_atomic(path, _csv([self.columns, *[[row.get(c, "") for c in self.columns] for row in rows]]))

    def write(self, row: dict[str, Any]) -> None:
        self.latest |= row
        values = [row.get(name, "") for name in self.columns]
        append(self.path, _csv([[f"{v:.7g}" if isinstance(v, float) else v for v in values]]))


def append(path: Path, data: bytes) -> int:
    """The number of bytes added. Raises TrainingError if the disk does not take them, or the directory is gone."""
    require_there(path.parent)
    try:
        with path.open("ab") as file:
            return file.write(data)
    except OSError as error:
        raise TrainingError(
            f"could not write {path}: {error.strerror}. The last checkpoint is kept: free space and resume."
        ) from error


def require_there(path: Path) -> None:
    """Raises TrainingError where a part of the run was removed or moved meanwhile."""
    if not path.exists():
        gone = path if path.parent.exists() else path.parent
        raise TrainingError(
            f"{gone} was removed or moved while the training wrote to it, and training ends. If the run was moved, "
            "resume it where it is now; else train again"
        )


def read_metrics(path: Path) -> list[dict[str, str]]:
    """The complete rows of a metrics.csv; a last line cut short by a crash is left out. [] without a file.

    Raises RunError for a file that does not begin with the names of its columns.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    rows = csv.DictReader(lines)
    if lines and "step" not in (rows.fieldnames or ()):
        raise RunError(
            f"{path} is damaged: its first line names no column `step`. Move it elsewhere; training continues without "
            "its rows"
        )
    return [row for row in rows if None not in row.values() and row["step"].isdigit()]


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to.

    depth.blocks.3.mixer.qkv.weight -> depth.blocks.3.mixer;   depth.time.0.bias -> depth.time
    """
    stem = re.sub(r"(\.\d+)?\.(weight|bias)$", "", name)
    return re.findall(r"^(?:depth\.(?:.*\.)?\d+\.\w+|depth\.\w+|\w+)", stem)[0]


def part_norms(norms: Mapping[str, float]) -> dict[str, float]:
    """The norm of each part from those of its parameters."""
    parts: dict[str, list[float]] = {}
    for name, norm in norms.items():
        parts.setdefault(part_of(name), []).append(norm)
    return {part: math.hypot(*inside) for part, inside in parts.items()}


def summarize(rows: Sequence[Mapping[str, str]], best_step: int) -> dict[str, Any]:
    """How a training ended, by its rows: its `best` and `last` validation, None before the first."""
    validations = []
    for row in rows:
        loss = float(row.get("valid_loss") or math.nan)
        if math.isfinite(loss):
            validations.append({
                "step": int(row["step"]), "tokens": int(row["tokens"]), "seconds": float(row["seconds"]), "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": float(row["valid_bits_per_byte"]),
            })  # fmt: skip
    best = next((each for each in validations if each["step"] == best_step), None)
    return {"best": best, "last": validations[-1] if validations else None}


def summary_lines(summary: Mapping[str, Any], best_path: str, beside: str = "") -> list[str]:
    """The summary in a few lines for a person; `beside`: what the bits per byte compare with."""
    best, last = summary["best"], summary["last"]
    lines = ["{steps:,} steps, {tokens:,} tokens, {seconds:,.0f} s".format(**summary)]
    if best is None:
        return lines
    figures = "{bits_per_byte:.4f} bits/byte (loss {loss:.4f} a token, perplexity {perplexity:.4g})".format(**best)
    ended = best["step"] == last["step"]
    # A training that was stopped has no validation of its last step.
    at_best, at_last = (
        "the end" if each["step"] == summary["steps"] else f"step {each['step']} of {summary['steps']}"
        for each in (best, last)
    )
    lines.append(f"held out: {figures} at {at_best}, the best validation{beside}; {best_path}")
    if (stride := summary["valid_stride"]) > 1:
        lines.append(
            f"to save time, one of {stride} held-out batches was scored: `glissando evaluate` scores all of them"
        )
    if ended and summary["finished"]:
        lines.append("still falling at the end: a longer training gives a better model")
    if not ended:
        worse = last["loss"] - best["loss"]
        lines.append(
            f"at {at_last}: {last['bits_per_byte']:.4f} bits/byte, {worse:.4f} nats a token worse: more text or a "
            "smaller model helps, more steps do not"
        )
    kept = "best validation" if summary["weights"] == "best" else "last step"
    return [*lines, f"the run's own weights are those of the {kept}"]
