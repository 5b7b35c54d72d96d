"""metrics.csv: rows appended as training goes, read back without what a crash has cut short."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from glissando.errors import RunError, TrainingError
from glissando.storage import write_atomic

COLUMNS = (
    "step", "tokens", "seconds", "flops", "train_loss", "train_bits_per_byte", "learning_rate", "grad_norm",
    "tokens_per_second", "valid_loss", "valid_bits_per_byte", "valid_accuracy", "train_accuracy", "stability", "epoch",
)  # fmt: skip


class Metrics:
    """The file, and TensorBoard's events where they are requested; `latest` are the newest values of all columns."""

    def __init__(self, path: Path, columns: list[str], step: int, tensorboard: bool) -> None:
        """Rows after `step`, of a training that got further than its checkpoint, are dropped."""
        self.path, self.columns, self.latest, self.events = path, [*COLUMNS, *columns], dict[str, Any](), None
        rows = [row for row in read_metrics(path) if int(row["step"]) <= step]
        write_atomic(path, _csv([self.columns, *[[row.get(c, "") for c in self.columns] for row in rows]]))
        if tensorboard:
            from tensorboardX import SummaryWriter

            self.events = SummaryWriter(str(path.parent / "tensorboard"), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        self.latest |= row
        values = [row.get(name, "") for name in self.columns]
        append(self.path, _csv([[f"{v:.7g}" if isinstance(v, float) else v for v in values]]))
        if self.events is not None:
            for name, value in row.items():
                if value != "":
                    self.events.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


def append(path: Path, data: bytes) -> int:
    """The number of bytes added. Raises TrainingError if the disk does not take them."""
    try:
        with path.open("ab") as file:
            return file.write(data)
    except OSError as error:
        raise TrainingError(
            f"could not write {path}: {error.strerror}. The last checkpoint stands: free space and resume."
        ) from error


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
            f"{path} is damaged: its first line names no column `step`. Move it elsewhere; training goes on without "
            "its rows"
        )
    return [row for row in rows if None not in row.values() and row["step"].isdigit()]


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
