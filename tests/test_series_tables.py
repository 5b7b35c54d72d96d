"""Tables as people have them: dates, gaps, names, an index of pandas, values that float32 has no room for."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest
from training_runs import train_series as train

from glissando.cli import main
from glissando.data import tables
from glissando.data.series import Series, SeriesData, prepare, read_series, resolved, scales
from glissando.data.tables import read_table
from glissando.errors import ConfigError, DataError, GlissandoError
from glissando.evaluation.series import evaluate

TINY = {"hidden_size": 8, "depth": {"layers": 1}, "mixer": {"kind": "liquid", "state_size": 8}}


def write(path: Path, times: list, values: list | None = None) -> Path:
    values = [k % 7 for k in range(len(times))] if values is None else values
    path.write_text("\n".join(["t,v", *(f"{t},{v}" for t, v in zip(times, values, strict=True))]) + "\n")
    return path


def series_of(path: Path, **options) -> list[Series]:
    table = read_table(path)
    return read_series(resolved(SeriesData(path=str(path), **options), table), table)


def gaps_of(path: Path, **options) -> list[float]:
    return series_of(path, time="t", **options)[0].dt.tolist()


def in_parquet(path: Path, make) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    times = make(pyarrow)
    parquet.write_table(pyarrow.table({"t": times, "v": [float(k % 7) for k in range(len(times))]}), path)
    return path


# ---------------------------------------------------------------------- dates


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        (["20250131", "20250201", "20250301"], [86400.0, 28 * 86400.0]),
        (["20250131.0", "20250201.0", "20250301.0"], [86400.0, 28 * 86400.0]),  # integers that were floats once
        (["202501", "202502", "202503"], [31 * 86400.0, 28 * 86400.0]),
        (["2025013123", "2025020100", "2025020106"], [3600.0, 6 * 3600.0]),
        (["202501312359", "202502010000", "202502010030"], [60.0, 1800.0]),
        (["20250131235959", "20250201000000", "20250201000030"], [1.0, 30.0]),
        (["20250131235959999", "20250201000000000", "20250201000000500"], [0.001, 0.5]),
        (["2025-01-31", " 2025-02-01 ", "2025-02-01T01:00+01:00"], None),
        (["2025-01-31 23:59:59.9999995", "2025-02-01", "2025-02-01 00:00:00.0000005"], [5e-7, 5e-7]),
    ],
)
def test_dates_are_read_to_the_nanosecond(times, gaps, tmp_path):
    path = write(tmp_path / "t.csv", times)
    if gaps is None:
        with pytest.raises(DataError, match=r"line 4, column 't': the time does not increase"):
            gaps_of(path)
    else:
        assert gaps_of(path) == gaps


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        ([20250131, 20250201, 20250230, 20259999, 3, 4, 5], None),  # as many are dates as are not
        ([1738281600, 1738281660, 1738281720], [60.0, 60.0]),  # seconds since 1970
        ([1712010100, 1712010200, 1712010300], [100.0, 100.0]),  # each of these would be an hour of 1712
        ([2023, 2024, 2025], [1.0, 1.0]),
        ([202500, 202550, 202600], [50.0, 50.0]),
        (["20250131.5", "20250201.5"], [70.0]),
    ],
)
def test_numbers_that_resemble_dates_stay_numbers(times, gaps, tmp_path):
    path = write(tmp_path / "t.csv", times)
    assert tables.time_format(read_table(path), "t") == "number"
    assert gaps is None or gaps_of(path) == gaps


def test_compact_dates_are_said_overridden_and_kept(tmp_path, capsys):
    """The form of the training's times is that of any other file that the run reads."""
    days = [f"202501{day:02}" for day in range(12, 32)] + [f"202502{day:02}" for day in range(1, 21)]
    path = write(tmp_path / "t.csv", days)
    assert gaps_of(path, time_format="number")[19] == 70.0
    values = {"data": {"path": str(path), "time": "t"}, "model": TINY, "training": {"steps": 2}}
    run = train(values, tmp_path / "run")
    said = capsys.readouterr().err
    assert (
        "the times t are read as dates, 20250112 as 2025-01-12 00:00:00; if they are numbers, give --data.time_" in said
    )
    assert "median step 86,400 s (1 d)" in said
    assert run.read_config(kind="series")["data"]["time_format"] == "date"
    evaluate(run.path, str(write(tmp_path / "iso.csv", ["2025-03-01", "2025-03-03", "2025-03-05"])))
    assert "median step 172,800 s (2 d)" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"line 2, column 't': '7' is not a time: give a number, or a date such as"):
        evaluate(run.path, str(write(tmp_path / "numbers.csv", [7, 8, 9])))
    with pytest.raises(ConfigError, match=r"data\.time_format is of the column data\.time, which is not named"):
        series_of(path, time_format="number")


def test_a_date_that_does_not_exist_is_found_among_dates(tmp_path):
    path = write(tmp_path / "t.csv", ["20250130", "20250131", "20250132", "20250201"])
    with pytest.raises(DataError, match=r"line 4, column 't': 20250132 is no date, and 3 of the column's 4 values are"):
        gaps_of(path)
    assert gaps_of(path, time_format="number") == [1.0, 1.0, 69.0]


# ---------------------------------------------------------------------- exact differences


@pytest.mark.parametrize(
    ("times", "gap"),
    [
        ([1738281600123456789 + 500 * k for k in range(9)], 500.0),
        ([2**63 + 500 * k for k in range(9)], 500.0),
        ([f"1738281600.{123456789 + 500 * k}" for k in range(9)], 5e-7),
        ([f"{k / 10:.1f}" for k in range(9)], 0.1),
    ],
)
def test_differences_are_taken_before_times_are_rounded(times, gap, tmp_path):
    assert gaps_of(write(tmp_path / "t.csv", times)) == [gap] * 8


DAYS = [datetime.date(2025, 1, 31) + datetime.timedelta(days=k) for k in range(4)]


@pytest.mark.parametrize(
    ("column", "gap"),
    [
        (lambda pa: pa.array(DAYS, pa.date32()), 86400.0),
        (lambda pa: pa.array(DAYS, pa.date64()), 86400.0),
        (lambda pa: pa.array([str(day) for day in DAYS]), 86400.0),
        (lambda pa: pa.array([int(f"{day:%Y%m%d}") for day in DAYS], pa.int32()), 86400.0),
        (lambda pa: pa.array([datetime.timedelta(minutes=5 * k) for k in range(4)], pa.duration("us")), 300.0),
        (lambda pa: pa.array(1738281600123456789 + 500 * np.arange(4), pa.timestamp("ns", tz="Europe/Berlin")), 5e-7),
        (lambda pa: pa.array(1738281600123456789 + 500 * np.arange(4)), 500.0),
        (lambda pa: pa.array(np.arange(2**63, 2**63 + 2000, 500, dtype=np.uint64)), 500.0),
        (lambda pa: pa.array([0, 1, 2, 3], pa.int8()), 1.0),
        (lambda pa: pa.array(["0.1", "0.2", "0.3", "0.4"]).dictionary_encode(), 0.1),
    ],
)
def test_times_of_parquet(column, gap, tmp_path):
    assert gaps_of(in_parquet(tmp_path / "t.parquet", column)) == [gap] * 3


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (
            lambda pa: pa.array([None, *DAYS[1:]], pa.date32()),
            {},
            r"row 1, column 't': the time is missing \(1 of its 4",
        ),
        (lambda pa: pa.array([1, 2, 3, None]), {}, r"row 4, column 't': the time is missing"),
        (
            lambda pa: pa.array([datetime.time(k) for k in range(4)]),
            {},
            r"row 1, column 't': datetime.time\(0, 0\) is not",
        ),
        (lambda pa: pa.array(DAYS), {"time_format": "number"}, r"column 't' holds dates: leave data\.time_format out"),
    ],
)
def test_times_of_parquet_that_cannot_be_used(column, options, message, tmp_path):
    with pytest.raises(DataError, match=message):
        gaps_of(in_parquet(tmp_path / "t.parquet", column), **options)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(86400.0, "86,400 s (1 d)"), (5e-7, "5e-07 s (500 ns)"), (30.0, "30 s"), (2678400.0, "2,678,400 s (31 d)")],
)
def test_a_duration_is_written_in_seconds_and_a_fitting_unit(seconds, text):
    assert tables.duration(seconds) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"time": "t"}, "median step 0.5, in the unit of the numbers in t"),
        ({"columns": "v"}, "median step 1 row: no column of times is named (--data.time)"),
    ],
)
def test_the_median_step_is_said_with_its_unit(options, text, tmp_path):
    path = write(tmp_path / "t.csv", [k / 2 for k in range(30)])
    assert prepare(SeriesData(path=str(path), **options)).lines == [text]


# ---------------------------------------------------------------------- names


def test_names_are_stripped(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("g,v,k\nA,1,up\nA ,2,up \n B,3,down\nB,4, down\n")
    found = series_of(path, group="g", columns="v", target="k", task="classification")
    assert [(one.name, one.target.tolist()) for one in found] == [("A", ["up", "up"]), ("B", ["down", "down"])]


@pytest.mark.parametrize("blank", ["", " ", "nan", "\u00a0"])
@pytest.mark.parametrize(
    ("column", "what"), [(0, "'g': the group is missing"), (1, "'t': the time is missing"), (3, "'k': the class is mi")]
)
def test_a_blank_name_or_time_is_an_error(blank, column, what, tmp_path):
    rows = [["A", 1, 1, "up"], ["A", 2, 2, "up"], ["B", 1, 3, "up"], ["B", 2, 4, "up"]]
    rows[2][column] = blank
    path = tmp_path / "t.csv"
    path.write_text("g,t,v,k\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"t\.csv, line 4, column {what}.*\(1 of its 4 rows\)"):
        series_of(path, group="g", time="t", columns="v", target="k", task="classification")


def test_an_index_of_pandas_is_left_out_and_said(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"{k},{k},{k},{k},{k % 3}" for k in range(30)]
    path.write_text("\n".join([",,Unnamed: 0,__index_level_0__,v", *lines]) + "\n")
    found = prepare(SeriesData(path=str(path)))
    assert found.data.columns == found.data.target == ["v"]
    assert (
        "a column without a name is left out, as an index that pandas wrote; to use it, give it a name"
        in found.lines[0]
    )
    assert "the column '__index_level_0__' is left out" in found.lines[-2]
    named = prepare(SeriesData(path=str(path), time="__index_level_0__", columns="v,Unnamed: 0"))
    assert named.data.columns == ["v", "Unnamed: 0"]
    assert not any("'" in line for line in named.lines)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("constant", [0.1, 1.0, 1e6 + 0.1, 1e-35, 0.0])
def test_a_constant_column_has_the_scale_1(constant, tmp_path):
    path = write(tmp_path / "t.csv", list(range(30)), [constant] * 30)
    data = resolved(SeriesData(path=str(path), columns="v"), read_table(path))
    found = scales(data, read_series(data, read_table(path)))
    assert (found.input_mean.tolist(), found.input_scale.tolist()) == ([constant], [1.0])


def counting(**changed) -> list:
    return [changed.get(f"v{k}", k) for k in range(40)]


@pytest.mark.parametrize(
    ("times", "values", "message"),
    [
        (counting(), counting(v5=1e39), r"line 7, column 'v': 1e\+39 is beyond 1e\+30, where float32 leaves no room"),
        (counting(), counting(v5="1e400"), r"line 7, column 'v': '1e400' is no finite number"),
        (counting(), counting(v39=1e20), r"line 41, column 'v': 1e\+20 is .* deviations from the mean of what"),
        (counting(), [1e-35 * (k % 3) for k in range(40)], r"column 'v' varies by 8.*e-36 .*: multiply it by"),
        (counting(v39=1e300), counting(), r"line 41, column 't': 1e\+300 is beyond 1e\+30"),
        (counting(v39=1e20), counting(), r"line 41, column 't': 1e\+20 is 1e\+20 times the median step of what"),
        ([f"{k}e-33" for k in range(40)], counting(), r"column 't': the median step 1e-33 is too small for float32"),
        (counting(), counting(v5="1_000"), r"line 7, column 'v': '1_000' is no finite number"),
        (counting(), counting(v5="\uff11\uff12"), r"line 7, column 'v': '\uff11\uff12' is no finite number"),
        (counting(v5="5_0"), counting(), r"line 7, column 't': '5_0' is no finite number"),
        ([f"{k}_000" for k in range(40)], counting(), r"line 2, column 't': '0_000' is not a time"),
    ],
)  # fmt: skip
def test_values_that_float32_has_no_room_for(times, values, message, tmp_path):
    path = write(tmp_path / "t.csv", times, values)
    with pytest.raises(GlissandoError, match=rf"t\.csv.*{message}"):
        train({"data": {"path": str(path), "time": "t"}, "model": TINY}, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_far_from_what_was_trained_on_is_refused_with_its_line(tmp_path, capsys):
    path = write(tmp_path / "t.csv", counting())
    arguments = ["--data.path", str(path), "--data.time", "t", "--training.steps", "1", "--out", str(tmp_path / "run")]
    assert main(["series", "train", *arguments]) == 0
    far = write(tmp_path / "far.csv", [1, 2, 3], [1, 1e25, 2])
    assert main(["series", "evaluate", str(tmp_path / "run"), "--file", str(far)]) == 1
    assert "far.csv, line 3, column 'v': 1e+25 is" in capsys.readouterr().err


def test_the_largest_values_are_learned(tmp_path):
    """Near the bounds, errors and gradients are those of the same numbers near 1."""
    losses = []
    for factor in (1.0, 1e29, 1e-29):
        path = write(tmp_path / f"t{factor}.csv", list(range(40)), [factor * (k % 7) for k in range(40)])
        run = train(
            {"data": {"path": str(path), "time": "t"}, "model": TINY, "training": {"steps": 3}}, tmp_path / f"{factor}"
        )
        losses.append(evaluate(run.path).loss)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-3)


# ---------------------------------------------------------------------- memory


def test_a_table_larger_than_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """Equal rows take nothing in Parquet and a lot once they are read."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bomb.parquet"
    part = pyarrow.table({"t": np.zeros(1_000_000, np.int8), "v": np.zeros(1_000_000, np.int8)})
    with parquet.ParquetWriter(path, part.schema) as writer:
        for _ in range(3):
            writer.write_table(part)
    assert path.stat().st_size < 30_000
    monkeypatch.setattr(tables, "available_bytes", lambda device: 2**29)
    monkeypatch.setattr(parquet.ParquetFile, "read", lambda *arguments: pytest.fail("it was read"))
    with pytest.raises(
        DataError, match=r"bomb\.parquet has about 6,000,000 values, which take .* MiB of memory are free"
    ):
        read_table(path)
    monkeypatch.setattr(tables, "available_bytes", lambda device: 2**12)
    with pytest.raises(DataError, match=r"t\.csv has about 82 values, which take .* 4\.0 KiB of memory are free"):
        read_table(write(tmp_path / "t.csv", counting()))


def test_equal_texts_of_parquet_are_one_object(tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    path = in_parquet(tmp_path / "t.parquet", lambda pa: pa.array(["a" * 1000] * 500 + ["b"] * 500))
    column = read_table(path).columns["t"]
    assert len(column) == 1000
    assert len({id(text) for text in column}) == 2
