"""The runs of a comparison as rows of a CSV of docs/comparison, which docs/figures.py reads.

    python -m research.record DIR --corpus stories --bytes 8000000 --into docs/comparison/recipe.csv

DIR is the directory of `glissando compare`. `--bytes` is the budget as text, which a comparison counts in tokens. A row
that the file already has for the same corpus, bytes, model and seed is replaced where rate and precision are the same;
where they are not, nothing is written.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glissando.compare.measure import read_measured
from glissando.compare.results import bits_on
from glissando.runs import CONFIG
from glissando.storage import write_atomic
from glissando.yaml_files import read_yaml
from research.runs import options_of

COLUMNS = (
    "corpus", "bytes", "model", "seed", "learning_rate", "precision", "labels_told", "parameters", "bits_per_byte",
    "low", "high", "held_out_bytes", "commit", "modified", "machine", "threads", "date",
)  # fmt: skip
KEY = ("corpus", "bytes", "model", "seed")
#: these must be equal for a row to be replaced
SAME = ("learning_rate", "precision")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("directory", type=Path, help="of a comparison")
    parser.add_argument("--corpus", required=True, help="the text's name in the record")
    parser.add_argument("--bytes", type=float, required=True, help="of text that each run was trained on")
    parser.add_argument("--into", type=Path, required=True, metavar="CSV", help="made if it is missing")
    options = parser.parse_args()
    new = list(rows(options.directory, options.corpus, int(options.bytes)))
    if not new:
        sys.exit(f"{options.directory} has no finished run of a comparison")
    old = []
    if options.into.is_file():
        with options.into.open(newline="") as file:
            old = list(csv.DictReader(file))
    require_same(old, new)
    write_atomic(options.into, as_csv([*old, *new]).encode())
    print(f"{len(new)} run(s) recorded in {options.into}")


def rows(directory: Path, corpus: str, size: int) -> Iterator[dict[str, Any]]:
    """A row for each finished run of the comparison, in the order of models and seeds."""
    for path in sorted(directory.glob("runs/*/*")):
        figures = read_measured(path)
        if figures is None or "failed" in figures:
            continue
        origin = figures["provenance"]
        training = read_yaml((path / CONFIG).read_bytes())["training"]
        yield {
            "corpus": corpus,
            "bytes": size,
            "model": figures["model"],
            "seed": figures["seed"],
            "learning_rate": figures["learning_rate"],
            "precision": training["precision"],
            "parameters": figures["parameters"],
            "bits_per_byte": bits_on(figures, slice(None)),
            "held_out_bytes": round(sum(figures["held_out"]["bytes"])),
            **{name: origin[name] for name in ("commit", "modified", "machine", "threads", "date")},
        }


def require_same(old: list[dict[str, str]], new: list[dict[str, Any]]) -> None:
    """Exit with what is different where a new row would replace one that was trained in another way."""
    known = {tuple(row[name] for name in KEY): row for row in old}
    for row in new:
        before = known.get(tuple(str(row[name]) for name in KEY), {})
        for name in SAME:
            if before.get(name, str(row[name])) != str(row[name]):
                sys.exit(
                    f"{row['model']}, seed {row['seed']}, is recorded with {name} {before[name]}, and this run has "
                    f"{row[name]}: remove its row, or record the run elsewhere with another --into"
                )


def as_csv(found: list[dict[str, Any]]) -> str:
    """With the last row of each corpus, size, model and seed."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows({tuple(str(row[name]) for name in KEY): row for row in found}.values())
    return text.getvalue()


if __name__ == "__main__":
    main()
