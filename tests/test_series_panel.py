"""Tables as people have them -> panels: gaps, long tables, categories, static facts, labels, times, and mistakes."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glissando.errors import ConfigError, DataError, UnknownNameError
from glissando.series import Panel, SeriesData, read_panel
from glissando.series import tables as reading_tables
from glissando.series.inspection import duration
from glissando.series.panel import Clock, Encoding, parts
from glissando.series.steps import Clash, merge
from glissando.series.tables import as_number, read_table
from glissando.series.times import time_form

NAN = np.nan


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def table(path: Path, times: list, values: list | None = None) -> Path:
    values = [k % 7 for k in range(len(times))] if values is None else values
    return write(path, "\n".join(["t,v", *(f"{t},{v}" for t, v in zip(times, values, strict=True))]) + "\n")


def panel_of(source, encoding: Encoding | None = None, **options) -> Panel:
    return read_panel(SeriesData(**options), source, encoding)[0]


def gaps_of(path: Path, **options) -> list[float]:
    return panel_of(path, **{"time": "t", **options}).gaps[1:].tolist()


def assert_equal(one: Panel, other: Panel, *without: str) -> None:
    for name in vars(one):
        if name not in ("report", "clock", "source", "unit", *without):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def in_parquet(path: Path, make) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    times = make(pyarrow)
    parquet.write_table(pyarrow.table({"t": times, "v": [float(k % 7) for k in range(len(times))]}), path)
    return path


VISITS = """id,day,sex,bili,stage,hour
a,0,f,1.5,2,8
a,10,f,,3,9
b,5,m,2.5,NA,8
b,7,m,3.5,2,10
b,12,m,NaN,,11
"""
OPTIONS = {
    "group": "id", "time": "day", "time_unit": "d", "static": "sex", "categorical": "stage", "future": "hour",
}  # fmt: skip


# ---------------------------------------------------------------------- wide tables


def test_a_wide_table_with_gaps_categories_static_and_future_columns(tmp_path):
    path = write(tmp_path / "visits.csv", VISITS)
    panel, encoding = read_panel(SeriesData(path=str(path), **OPTIONS))
    assert panel.names == ["a", "b"]
    assert panel.starts.tolist() == [0, 2, 5]
    assert panel.times.tolist() == [0, 10, 0, 2, 7]
    assert panel.gaps.tolist() == [0, 10, 0, 2, 5]
    np.testing.assert_array_equal(panel.values, [[1.5], [NAN], [2.5], [3.5], [NAN]])
    assert panel.codes.tolist() == [[2], [3], [0], [2], [0]]
    assert panel.future.tolist() == [[8], [9], [8], [10], [11]]
    assert panel.static.shape == (2, 0)
    assert panel.static_codes.tolist() == [[2], [3]]
    assert panel.rows.tolist() == [2, 3, 4, 5, 6]
    assert (panel.target, panel.labels, panel.scored.all()) == (None, None, True)
    assert encoding == Encoding(
        columns=["bili"], categorical={"stage": ["2", "3"]}, static_categorical={"sex": ["f", "m"]}, future=["hour"],
        target=["bili"], time_form="number", unit="d",
    )  # fmt: skip
    assert panel.report[:3] == [
        f"{path}: 2 series of 2 to 3 steps, 5 in all; 2 channels: bili, stage",
        "6 values, 40 % of the cells missing: bili 40 %, stage 40 %",
        "median step 5 d: the numbers day are read in d",
    ]


@pytest.mark.parametrize("blank", ["", " ", "NA", "N/A", "NaN", "nan", "null", "NULL", "NaT", "<NA>", "\u00a0"])
def test_a_cell_without_a_value_is_not_observed(blank, tmp_path):
    panel = panel_of(table(tmp_path / "t.csv", [1, 2, 3], [4, blank, 5]), time="t")
    np.testing.assert_array_equal(panel.values, [[4], [NAN], [5]])
    assert "3 steps" in panel.report[0]
    assert "33 % of the cells missing" in panel.report[1]


def test_a_run_reads_other_tables_as_its_own(tmp_path):
    """Unknown categories are counted and have their own index, a missing column is an error."""
    _, encoding = read_panel(SeriesData(**OPTIONS), write(tmp_path / "visits.csv", VISITS))
    new = "bili,stage,id,sex,hour,day\n1,4,c,x,5,1\n,2.0,c,x,6,3\n"
    panel, same = read_panel(SeriesData(**OPTIONS), write(tmp_path / "new.csv", new), encoding)
    assert same is encoding
    assert panel.codes.tolist() == [[1], [2]]
    assert panel.static_codes.tolist() == [[1]]
    assert "unknown to the model: 1 value of 'stage', such as 4" in panel.report
    assert "unknown to the model: 1 value of 'sex', such as x" in panel.report
    without = write(tmp_path / "without.csv", "stage,id,sex,hour,day\n1,c,m,5,1\n")
    with pytest.raises(DataError, match=r"there is no column 'bili' in .*without\.csv, and the model reads it"):
        panel_of(without, encoding, **OPTIONS)


def test_texts_are_categories_and_a_mistake_among_numbers_is_not(tmp_path):
    path = write(tmp_path / "t.csv", "t,v,w\n1,4,up\n2,five,down\n3,6,up\n")
    with pytest.raises(DataError, match=r"t\.csv, line 3, column 'v': 'five' is no finite number \(1 of its 3 rows\)"):
        panel_of(path, time="t")
    panel = panel_of(path, time="t", columns="w")
    assert panel.codes.tolist() == [[2], [3], [2]]
    assert "categories of 'w', 2 in all: up, down" in panel.report


def test_texts_that_do_not_repeat_are_left_out_unless_they_are_named(tmp_path):
    rows = [f"{k},{k % 5},note {k}" for k in range(30)]
    path = write(tmp_path / "t.csv", "\n".join(["t,v,notes", *rows]) + "\n")
    panel = panel_of(path, time="t")
    assert panel.codes.shape == (30, 0)
    assert any(
        "the column 'notes' is left out: it holds 30 different texts in 30 rows" in line for line in panel.report
    )
    assert panel_of(path, time="t", categorical="notes").codes.tolist() == [[k + 2] for k in range(30)]


def test_columns_without_a_value_are_named_where_no_other_is_left(tmp_path):
    path = write(tmp_path / "t.csv", "t,a,b\n" + "".join(f"{k},,\n" for k in range(30)))
    with pytest.raises(
        ConfigError, match="no column to read: the column 'a' is left out: it has no value; the column 'b'"
    ):
        panel_of(path, time="t")


def test_an_index_of_pandas_is_left_out_and_said(tmp_path):
    lines = [f"{k},{k},{k},{k % 3}" for k in range(30)]
    path = write(tmp_path / "t.csv", "\n".join([",t,Unnamed: 0,v", *lines]) + "\n")
    panel, encoding = read_panel(SeriesData(path=str(path), time="t"))
    assert encoding.columns == ["v"]
    assert "the column 'Unnamed: 0' is left out: it is an index that pandas wrote" in "".join(panel.report)
    named = read_panel(SeriesData(path=str(path), time="t", columns="v,Unnamed: 0"))[1]
    assert named.columns == ["v", "Unnamed: 0"]


@pytest.mark.parametrize("number", ["1_000", "\uff11\uff12", "inf", "1e400", "true"])
def test_what_is_no_number_is_refused_with_its_place(number, tmp_path):
    path = table(tmp_path / "t.csv", range(10), [*range(5), number, *range(4)])
    with pytest.raises(DataError, match=rf"t\.csv, line 7, column 'v': '{number}' is no finite number \(1 of its 10"):
        panel_of(path, time="t")


def test_a_number_without_room_in_float32_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"line 3, column 'v': 1e39 is beyond 1e\+30, where float32 leaves no room"):
        panel_of(table(tmp_path / "t.csv", [1, 2, 3], [1, "1e39", 2]), time="t")


# ---------------------------------------------------------------------- long tables


LONG = """id,day,test,value
a,0,hdl,50
a,0,sbp,130
a,10,hdl,60
b,5,sbp,120
b,9,hdl,
b,2,chol,200
"""
MEASURED = {"group": "id", "time": "day", "channel": "test", "value": "value"}


def test_a_long_table_has_each_channel_at_its_own_times(tmp_path):
    panel, encoding = read_panel(SeriesData(**MEASURED), write(tmp_path / "labs.csv", LONG))
    assert encoding.columns == encoding.target == ["hdl", "sbp", "chol"]
    np.testing.assert_array_equal(
        panel.values, [[50, 130, NAN], [60, NAN, NAN], [NAN, NAN, 200], [NAN, 120, NAN]]
    )  # fmt: skip
    assert panel.times.tolist() == [0, 10, 0, 3]
    assert panel.rows.tolist() == [2, 4, 7, 5]
    assert "left out: 1 row without a value" in panel.report
    assert "sorted: 1 row after a later time of the same series" in panel.report


def test_channels_of_a_long_table_are_chosen_and_kept_by_a_run(tmp_path):
    path = write(tmp_path / "labs.csv", LONG)
    panel, encoding = read_panel(SeriesData(**MEASURED, columns="sbp"), path)
    assert (panel.names, panel.times.tolist()) == (["a", "b"], [0, 0])
    assert "left out: 4 rows of other channels, hdl, chol" in panel.report
    with pytest.raises(
        UnknownNameError, match=r"unknown channel of .*labs\.csv, column 'test' 'hdll'.*Did you mean 'hdl'"
    ):
        panel_of(path, **MEASURED, columns="hdll")
    other = panel_of(write(tmp_path / "other.csv", "id,day,test,value\nc,1,hdl,5\nc,1,sbp,100\n"), encoding, **MEASURED)
    assert other.values.tolist() == [[100]]
    assert "left out: 1 row of channels that the model does not read, hdl" in other.report


def test_channels_of_texts_are_categories(tmp_path):
    text = "t,k,x\n0,rhythm,sinus\n0,rate,70\n1,rhythm,flutter\n2,rhythm,sinus\n3,rate,80\n"
    panel, encoding = read_panel(SeriesData(time="t", channel="k", value="x"), write(tmp_path / "t.csv", text))
    assert (encoding.columns, encoding.categorical) == (["rate"], {"rhythm": ["sinus", "flutter"]})
    np.testing.assert_array_equal(panel.values, [[70], [NAN], [NAN], [80]])
    assert panel.codes.tolist() == [[2], [3], [2], [0]]


def test_long_and_wide_tables_are_the_same_panel():
    rng = np.random.default_rng(0)
    wide = pandas.DataFrame({"id": np.repeat(["a", "b", "c"], 20), "t": np.tile(np.arange(20) ** 1.5, 3)})
    for name in ("x", "y"):
        wide[name] = np.where(rng.random(60) < 0.3, NAN, rng.normal(size=60))
    wide = wide[wide[["x", "y"]].notna().any(axis=1)]
    long = wide.melt(["id", "t"], var_name="test", value_name="value").dropna().sample(frac=1, random_state=1)
    one = panel_of(wide, group="id", time="t")
    other = panel_of(long, group="id", time="t", channel="test", value="value", columns="x,y")
    order = np.argsort(other.names)
    assert_equal(one, other.choose(order), "rows")


# ---------------------------------------------------------------------- order and duplicates


def test_rows_in_any_order_are_the_same_panel(tmp_path):
    head, *rows = VISITS.splitlines()
    panel = panel_of(write(tmp_path / "one.csv", VISITS), **OPTIONS)
    mixed = panel_of(
        write(tmp_path / "two.csv", "\n".join([head, rows[1], rows[4], rows[0], rows[3], rows[2]])), **OPTIONS
    )
    assert_equal(panel, mixed, "rows")
    assert mixed.rows.tolist() == [4, 2, 6, 5, 3]
    assert "sorted: 3 rows after a later time of the same series" in mixed.report
    assert not any("sorted: " in line for line in panel.report)


def test_rows_of_one_time_complement_each_other(tmp_path):
    path = write(tmp_path / "t.csv", "t,x,y\n1,5,\n1,,6\n1,5,\n2,7,8\n")
    panel = panel_of(path, time="t")
    assert panel.values.tolist() == [[5, 6], [7, 8]]
    assert panel.rows.tolist() == [2, 5]
    assert "merged: 1 cell of one (t), up to 2 rows each, with equal values" in panel.report


@pytest.mark.parametrize(("how", "value"), [("mean", 6.0), ("first", 5.0), ("last", 8.0)])
def test_unequal_duplicates_are_refused_or_chosen(how, value, tmp_path):
    path = write(tmp_path / "t.csv", "id,t,v\na,1,5\na,0,1\na,1,5\na,1,8\nb,1,9\n")
    message = r"t\.csv, line 5, column 'v': 'v' of id 'a' at t 1 is 8, and in line 2 it is 5: correct one, or "
    with pytest.raises(DataError, match=message):
        panel_of(path, group="id", time="t")
    panel = panel_of(path, group="id", time="t", duplicates=how)
    assert panel.values.tolist() == [[1], [value], [9]]
    assert any(
        "merged: 1 cell of one (id, t), up to 3 rows each, 1 with unequal values, by" in line for line in panel.report
    )
    long = write(tmp_path / "l.csv", "id,t,k,v\na,1,x,5\na,0,x,1\na,1,x,5\na,1,x,8\na,1,y,7\n")
    options = {"group": "id", "time": "t", "channel": "k", "value": "v"}
    with pytest.raises(
        DataError, match=r"l\.csv, line 5, column 'v': the channel 'x' of id 'a' at t 1 is 8, and in line 2"
    ):
        panel_of(long, **options)
    np.testing.assert_array_equal(panel_of(long, **options, duplicates=how).values, [[1, NAN], [value, 7]])


@pytest.mark.parametrize("blank", ["", " ", "nan", "\u00a0"])
@pytest.mark.parametrize(("column", "what"), [(0, "'g': the group is missing"), (1, "'t': the time is missing")])
def test_a_blank_group_or_time_is_an_error(blank, column, what, tmp_path):
    rows = [["A", 1, 1], ["A", 2, 2], ["B", 1, 3], ["B", 2, 4]]
    rows[2][column] = blank
    path = write(tmp_path / "t.csv", "g,t,v\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"t\.csv, line 4, column {what} \(1 of its 4 rows\)"):
        panel_of(path, group="g", time="t")


def test_names_are_stripped(tmp_path):
    path = write(tmp_path / "t.csv", "g,v,k\nA,1,up\nA ,2,up \n B,3,down\nB,4, down\n")
    panel, encoding = read_panel(SeriesData(group="g", columns="v", target="k"), path)
    assert panel.names == ["A", "B"]
    assert (encoding.task, encoding.label, encoding.classes) == ("classification", "series", ["up", "down"])
    assert panel.labels.tolist() == [0, 1]


# ---------------------------------------------------------------------- static facts, labels, targets


def test_a_static_column_that_varies_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "t.csv", "id,t,v,age\na,1,5,40\na,2,6,\na,3,7,41\nb,1,8,\n")
    message = r"t\.csv, line 4, column 'age': the static 'age' of id 'a' is 41, and in line 2 it is 40: correct"
    with pytest.raises(DataError, match=message):
        panel_of(path, group="id", time="t", static="age")
    panel = panel_of(
        write(tmp_path / "t.csv", path.read_text().replace("41", "40")), group="id", time="t", static="age"
    )
    np.testing.assert_array_equal(panel.static, [[40], [NAN]])
    assert "static: age (50 % missing)" in panel.report


def test_static_facts_and_labels_of_a_second_table(tmp_path):
    facts = write(tmp_path / "people.csv", "age,id,sex,died\n70,b,m,1\n40,a,f,0\n99,z,f,0\n40,a,f,0\n")
    path = write(tmp_path / "labs.csv", LONG + "c,1,hdl,5\n")
    options = {**MEASURED, "static": "age,sex", "static_path": str(facts), "target": "died", "task": "classification"}
    panel, encoding = read_panel(SeriesData(**options), path)
    np.testing.assert_array_equal(panel.static, [[40], [70], [NAN]])
    assert panel.static_codes.tolist() == [[3], [2], [0]]
    assert panel.labels.tolist() == [1, 0, -1]
    assert (encoding.label, encoding.classes) == ("series", ["1", "0"])
    assert f"without a row in {facts}: 1 series, c" in panel.report
    assert "not scored: 1 series without 'died'" in panel.report
    chosen, _ = read_panel(
        SeriesData(**options, columns="hdl,sbp,chol"), path
    )  # a label is no channel of the long table
    assert chosen.labels.tolist() == panel.labels.tolist()
    with pytest.raises(ConfigError, match=r"data\.static_path is given and data\.static names none of its columns"):
        panel_of(path, **MEASURED, static_path=str(facts))
    write(facts, "age,id\n70,b\n40,a\n41,a\n")
    with pytest.raises(DataError, match=r"people\.csv, line 4, column 'age': the static 'age' of id 'a' is 41, and"):
        panel_of(path, **MEASURED, static="age", static_path=str(facts))


def test_a_channel_is_of_the_first_table_where_the_second_names_such_a_column_too(tmp_path):
    facts = write(tmp_path / "people.csv", "id,v,age\nb,-9,70\na,-9,40\n")
    path = write(tmp_path / "t.csv", "id,t,v\na,1,5\na,2,6\nb,1,8\n")
    panel = panel_of(path, group="id", time="t", columns="v", static="age", static_path=str(facts))
    assert panel.values.tolist() == [[5], [6], [8]]
    assert panel.static.tolist() == [[40], [70]]


def test_labels_are_of_series_where_none_has_two(tmp_path):
    text = "id,t,v,k\na,1,5,up\na,2,6,up\nb,1,7,down\nb,2,8,\n"
    options = {"group": "id", "time": "t", "target": "k"}
    path = write(tmp_path / "t.csv", text)
    panel, encoding = read_panel(SeriesData(**options), path)
    assert (encoding.label, panel.labels.tolist()) == ("series", [0, 1])
    assert panel_of(path, **options, label="step").labels.tolist() == [0, 0, 1, -1]
    varying = write(tmp_path / "varying.csv", text.replace("b,2,8,", "b,2,8,up"))
    assert panel_of(varying, **options).labels.tolist() == [0, 0, 1, 0]
    with pytest.raises(
        DataError, match=r"varying\.csv, line 5, column 'k': 'k', the label of a series, of id 'b' is up, and "
    ):
        panel_of(varying, **options, label="series")


def test_a_class_that_training_does_not_know_is_refused(tmp_path):
    options = {"group": "id", "target": "k"}
    _, encoding = read_panel(SeriesData(**options), write(tmp_path / "t.csv", "id,v,k\na,5,up\nb,7,down\n"))
    other = write(tmp_path / "other.csv", "id,v,k\nc,5,up\nd,7,left\n")
    with pytest.raises(DataError, match=r"other\.csv, line 3, column 'k': the class 'left' is not among those that"):
        panel_of(other, encoding, **options)
    unlabelled = panel_of(write(tmp_path / "un.csv", "id,v\nc,5\nd,7\n"), encoding, **options)
    assert unlabelled.labels is None
    assert "there is no column 'k': nothing is scored" in unlabelled.report


def test_targets_of_a_regression_may_be_missing(tmp_path):
    path = write(tmp_path / "t.csv", "id,t,v,y\na,1,5,\na,2,6,2.5\nb,1,7,\nb,2,8,3.5\n")
    panel, encoding = read_panel(SeriesData(group="id", time="t", target="y"), path)
    assert (encoding.task, encoding.columns, encoding.target) == ("regression", ["v"], ["y"])
    np.testing.assert_array_equal(panel.target, [[NAN], [2.5], [NAN], [3.5]])
    whole = panel_of(
        write(tmp_path / "w.csv", path.read_text().replace("1,5,", "1,5,2.5")),
        group="id",
        time="t",
        target="y",
        label="series",
    )
    np.testing.assert_array_equal(whole.target, panel.target)


def test_a_future_column_is_known_at_every_step(tmp_path):
    path = write(tmp_path / "t.csv", "t,v,hour\n1,5,8\n2,6,\n")
    with pytest.raises(
        DataError, match=r"t\.csv, line 3, column 'hour': the value is missing \(1 of 2 steps\), and a col"
    ):
        panel_of(path, time="t", future="hour")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"channel": "v"}, ConfigError, r"data\.channel needs data\.value"),
        ({"channel": "v", "value": "w"}, ConfigError, r"data\.channel needs data\.time"),
        ({"time": "tt"}, UnknownNameError, r"unknown column of .*t\.csv \(data\.time\) 'tt'\. Did you mean 't'"),
        ({"time": "t", "static": "t"}, ConfigError, r"the column t is named by two options of data"),
        ({"target": "w", "columns": "v,w"}, ConfigError, r"w is in data\.columns and has another role too"),
        ({"time_format": "date"}, ConfigError, r"data\.time_format needs data\.time, which is not named"),
        ({"label": "step"}, ConfigError, r"data\.label needs data\.target, which is not named"),
        ({"time_unit": "h"}, ConfigError, r"data\.time_unit needs data\.time, which is not named"),
        ({"static_path": "x.csv", "static": "v"}, ConfigError, r"data\.static_path needs data\.group"),
        ({"task": "regression"}, ConfigError, r"data\.task regression needs data\.target"),
        ({"categorical": "x"}, UnknownNameError, r"unknown column of data\.categorical 'x'"),
        ({"target": "w,v", "task": "classification"}, ConfigError, r"data\.task classification is of one target"),
        ({"columns": "t,v", "time": "t"}, ConfigError, r"t is in data\.columns and has another role too"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(options, error, message, tmp_path):
    path = write(tmp_path / "t.csv", "t,v,w\n1,2,3\n2,3,4\n")
    with pytest.raises(error, match=message):
        panel_of(path, **options)


# ---------------------------------------------------------------------- times


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        (["20250131", "20250201", "20250301"], [86400.0, 28 * 86400.0]),
        (["20250131.0", "20250201.0", "20250301.0"], [86400.0, 28 * 86400.0]),  # integers that were floats once
        (["2025-01-31", " 2025-01-31T01:00Z ", "2025-01-31T03:00+01:00"], [3600.0, 3600.0]),
        (["2025-01-31 23:59:59.9999995", "2025-02-01", "2025-02-01 00:00:00.0000005"], [5e-7, 5e-7]),
        (["2025-02-01", "2025-02-01 00:00:00.000000001", "2025-02-01T00:00:00.000001"], [1e-9, 9.99e-7]),
    ],
)
def test_dates_are_read_to_the_nanosecond(times, gaps, tmp_path):
    assert gaps_of(table(tmp_path / "t.csv", times)) == gaps


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
    path = table(tmp_path / "t.csv", times)
    assert time_form(read_table(path), "t") == "number"
    assert gaps is None or gaps_of(path) == gaps


@pytest.mark.parametrize(
    ("times", "gap"),
    [
        ([1738281600123456789 + 500 * k for k in range(9)], 500.0),
        ([2**63 + 500 * k for k in range(9)], 500.0),
        ([f"1738281600.{123456789 + 500 * k}" for k in range(9)], 5e-7),
        ([f"{k / 10:.1f}" for k in range(9)], 0.1),
        ([f"{k}e-33" for k in range(9)], 1e-33),
        ([k * 10**25 for k in range(9)], 1e25),
    ],
)
def test_differences_are_taken_before_times_are_rounded(times, gap, tmp_path):
    path = table(tmp_path / "t.csv", times)
    assert gaps_of(path) == [gap] * 8
    backwards = panel_of(table(tmp_path / "b.csv", times[::-1]), time="t")
    assert backwards.gaps.tolist() == [0] + [gap] * 8
    assert backwards.rows.tolist() == [*range(10, 1, -1)]


def test_a_date_that_does_not_exist_is_found_among_dates(tmp_path):
    path = table(tmp_path / "t.csv", ["20250130", "20250131", "20250132", "20250201"])
    with pytest.raises(
        DataError,
        match=r"line 4, column 't': '20250132' is no date \(1 of its 4 rows\): write it as .*time_format number",
    ):
        gaps_of(path)
    assert gaps_of(path, time_format="number") == [1.0, 1.0, 69.0]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (
            ["2025-01-01", "soon", "2025-01-03"],
            r"'soon' is no date \(1 of its 3 rows\): write it as 2026-01-31 12:00:00",
        ),
        ([1, "5_0", 70], "'5_0' is no finite number"),
        ([1, "1e300", 70], "1e300 is beyond 1e\\+30"),
        (["2025-01-01", "today", "2025-01-03"], "'today' is no date"),
        (["2025-01-01", "3000-01-01", "2025-01-03"], "'3000-01-01' is no date .* in a year from 1678 to 2261"),
        (["2025-01-01", "2025-01-02T00:00:00.0000000001", "2025-01-03"], "is no date"),
    ],
)
def test_what_is_no_time_is_refused_with_its_place(times, message, tmp_path):
    with pytest.raises(DataError, match=rf"t\.csv, line 3, column 't': .*{message}"):
        gaps_of(table(tmp_path / "t.csv", times))


def test_compact_dates_and_time_zones_are_said(tmp_path):
    days = table(tmp_path / "t.csv", [f"202501{day:02}" for day in range(12, 32)])
    report = panel_of(days, time="t").report
    assert (
        "the times t, such as 20250112, are read as dates; if they are numbers, give --data.time_format number"
        in report
    )
    assert "median step 86,400 s (1 d)" in report
    mixed = table(tmp_path / "z.csv", ["2025-01-31", "2025-01-31T02:00+01:00", "2025-01-31T03:00"])
    assert (
        "converted to UTC: 1 time t with a time zone; 2 without a time zone, read as UTC"
        in panel_of(mixed, time="t").report
    )


DAYS = [datetime.date(2025, 1, 31) + datetime.timedelta(days=k) for k in range(4)]


@pytest.mark.parametrize(
    ("column", "gap"),
    [
        (lambda pa: pa.array(DAYS, pa.date32()), 86400.0),
        (lambda pa: pa.array(DAYS, pa.date64()), 86400.0),
        (lambda pa: pa.array([str(day) for day in DAYS]), 86400.0),
        (lambda pa: pa.array([int(f"{day:%Y%m%d}") for day in DAYS], pa.int32()), 86400.0),
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
        (lambda pa: pa.array([None, *DAYS[1:]], pa.date32()), {}, r"row 1, column 't': the time is missing \(1 of"),
        (lambda pa: pa.array([1, 2, 3, None]), {}, r"row 4, column 't': the time is missing"),
        (lambda pa: pa.array([datetime.timedelta(k) for k in range(4)]), {}, r"column 't' holds durations: give num"),
        (lambda pa: pa.array([datetime.time(k) for k in range(4)]), {}, r"row 1, column 't': datetime.time\(0, 0\)"),
        (lambda pa: pa.array(np.arange(4), pa.timestamp("s")), {"time_format": "number"}, r"column 't' holds dates"),
        (lambda pa: pa.array(32503680000 * np.arange(4), pa.timestamp("s")), {}, r"row 2, column .t.: .* is no date"),
        (lambda pa: pa.array(DAYS), {"time_unit": "h"}, r"data\.time_unit is h, and the times t are dates"),
    ],
)  # fmt: skip
def test_times_of_parquet_that_cannot_be_used(column, options, message, tmp_path):
    with pytest.raises((DataError, ConfigError), match=message):
        gaps_of(in_parquet(tmp_path / "t.parquet", column), **options)


@pytest.mark.parametrize(
    ("trained", "other", "message"),
    [
        (["2025-01-01", "2025-01-02"], [7, 8], r"frame row 1, column 't': 7 is no date .*: write it as 2026"),
        ([1.5, 2.5], ["2025-01-01", "2025-01-02"], r"'2025-01-01' is no finite number .*: write it as the other times"),
        (
            [1, 2],
            pandas.to_datetime(["2025-01-01", "2025-01-02"]),
            r"column 't' holds dates: leave data\.time_format out",
        ),
    ],
)
def test_a_run_reads_times_of_its_own_form_alone(trained, other, message):
    unit = {} if isinstance(trained[0], str) else {"time_unit": "h"}
    _, encoding = read_panel(SeriesData(time="t", **unit), pandas.DataFrame({"t": trained, "v": [1, 2]}))
    with pytest.raises(DataError, match=message):
        panel_of(pandas.DataFrame({"t": other, "v": [1, 2]}), encoding, time="t", **unit)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(86400.0, "86,400 s (1 d)"), (5e-7, "5e-07 s (500 ns)"), (30.0, "30 s"), (2678400.0, "2,678,400 s (31 d)")],
)
def test_a_duration_is_written_in_seconds_and_a_fitting_unit(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"time": "t"}, "median step 0.5 s: the numbers t are read in s; if they are not, give --data.time_unit"),
        ({"time": "t", "time_unit": "h"}, "median step 0.5 h: the numbers t are read in h"),
        ({"columns": "v"}, "median step 1 row: no column of times is named (--data.time)"),
    ],
)  # fmt: skip
def test_the_median_step_is_said_with_its_unit(options, text, tmp_path):
    assert text in panel_of(table(tmp_path / "t.csv", [k / 2 for k in range(30)]), **options).report


# ---------------------------------------------------------------------- the user's own times


@pytest.mark.parametrize(
    ("times", "options", "later", "expected"),
    [
        (["2025-01-31T23:00:00+01:00", "2025-01-31T23:30:00Z"], {}, 5400.25, "2025-01-31T23:30:00.25Z"),
        (["20250131", "20250201"], {}, 1e-9, "2025-01-31T00:00:00.000000001Z"),
        (["1900-01-01", "2025-01-01"], {}, 3944678400.1, "2025-01-01T00:00:00.1Z"),
        ([-459, 7], {"time_unit": "d"}, 466.0, "7"),
        (["0.1", "0.3"], {}, 0.2, "0.3"),
        ([1738281600123456789, 1738281600123456999], {}, 210.0, "1738281600123456999"),
    ],
)
def test_a_time_is_written_in_the_users_own_form(times, options, later, expected, tmp_path):
    panel = panel_of(table(tmp_path / "t.csv", times), time="t", **options)
    assert panel.clock.written([0], [later]) == [expected]


def test_written_times_are_read_back(tmp_path):
    rng = np.random.default_rng(0)
    path = table(
        tmp_path / "t.csv", [f"2025-03-{day:02}T{h:02}:00:00.5" for day in range(1, 9) for h in rng.permutation(24)[:5]]
    )
    panel = panel_of(path, time="t")
    again = panel_of(table(tmp_path / "again.csv", panel.clock.written(panel.series, panel.times)), time="t")
    np.testing.assert_array_equal(panel.times, again.times)
    np.testing.assert_array_equal(panel.clock.origins, again.clock.origins)


@pytest.mark.parametrize(
    ("text", "form", "unit", "expected"),
    [("24h", "date", "s", 86400.0), ("24h", "number", "d", 1.0), ("90 min", "number", "h", 1.5),
     ("7", "number", "d", 7.0),
     (12, "date", "s", 12.0), ("3", "row", "row", 3.0), ("1e3ms", "date", "s", 1.0), ("1y", "number", "d", 365.25)],
)  # fmt: skip
def test_a_span_is_in_the_unit_of_the_times(text, form, unit, expected):
    assert Clock(form, unit, np.zeros(1)).span(text) == expected


@pytest.mark.parametrize(
    ("text", "form", "message"),
    [("24 hours", "date", "horizon is '24 hours': give a number above 0, in s, or with a unit, such as 24h"),
     ("-1h", "date", "give a number above 0"), ("0", "date", "above 0"),
     ("inf", "date", "above 0"), ("", "date", "above 0"),
     ("24h", "row", "the table has no column of times"), ("1e12y", "date", "above 0")],
)  # fmt: skip
def test_what_is_no_span_is_refused(text, form, message):
    with pytest.raises(ConfigError, match=message):
        Clock(form, "s", np.zeros(1)).span(text)


def test_dates_far_ahead_are_written():
    clock = Clock("date", "s", np.array([1_700_000_000_000_000_001]))
    assert clock.written([0, 0], [0.0, clock.span("9000y")]) == [
        "2023-11-14T22:13:20.000000001Z", "11024-01-21T22:13:20.000000001Z",
    ]  # fmt: skip


# ---------------------------------------------------------------------- frames and files


def frame() -> pandas.DataFrame:
    return pandas.DataFrame(
        {
            "id": ["a", "a", "b", "b", "b"],
            "day": [0, 10, 5, 7, 12],
            "sex": pandas.Categorical(["f", "f", "m", "m", "m"]),
            "bili": [1.5, None, 2.5, 3.5, NAN],
            "stage": [2, 3, None, 2, None],
            "hour": [8, 9, 8, 10, 11],
        }
    )


def frames(tmp_path: Path) -> dict:
    made = {
        "pandas": frame(), "nullable": frame().convert_dtypes(), "indexed": frame().set_index(["id", "day"]),
        "kept index": frame().set_index("id", drop=False),
        "filtered": pandas.concat([frame().iloc[:1], frame()]).iloc[1:],
    }  # fmt: skip
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    frame().to_parquet(tmp_path / "visits.parquet")
    frame().set_index("id").to_parquet(tmp_path / "indexed.parquet")
    return made | {"parquet": tmp_path / "visits.parquet", "index in parquet": tmp_path / "indexed.parquet"}


@pytest.mark.parametrize(
    "kind", ["pandas", "nullable", "indexed", "kept index", "filtered", "parquet", "index in parquet", "polars"]
)
def test_every_form_of_a_table_is_the_same_panel(kind, tmp_path):
    if kind == "polars":
        polars = pytest.importorskip("polars", reason="needs polars: pip install polars")
        source = polars.from_pandas(frame())
    else:
        source = frames(tmp_path)[kind]
    expected, encoding = read_panel(SeriesData(**OPTIONS), write(tmp_path / "visits.csv", VISITS))
    panel, same = read_panel(SeriesData(**OPTIONS), source)
    assert_equal(expected, panel, "rows")
    assert same == encoding
    assert panel.rows.tolist() == [1, 2, 3, 4, 5]


def test_whoever_has_to_pandas_is_a_frame():
    class Frame:
        """As polars' and pyarrow's."""

        def to_pandas(self) -> pandas.DataFrame:
            return frame()

    assert_equal(panel_of(Frame(), **OPTIONS), panel_of(frame(), **OPTIONS))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (frame().assign(bili=["x", 1, 2, 3, 4]), r"frame row 1, column 'bili': 'x' is no finite number"),
        (frame().assign(id=["a", None, "b", "b", "b"]), r"frame row 2, column 'id': the group is missing"),
        (frame().iloc[:0], r"frame has no row below the names of its columns"),
        (
            {"id": [1]},
            r"a table is the path of a CSV or Parquet file, or a frame of pandas or polars; got a builtins\.dict",
        ),
        (
            frame().set_index(pandas.DatetimeIndex(["2025-01-01"] * 5)),
            r"the index of frame holds times or several levels",
        ),
        (frame().set_index(["id", "day"]).rename_axis([None, None]), r"has no name: name it, as in frame\.rename_axis"),
        (pandas.concat([frame(), frame()], axis=1), r"frame names the column 'id' more than once"),
    ],
)
def test_mistakes_in_frames_have_their_row(source, message):
    with pytest.raises(DataError, match=message):
        panel_of(source, **OPTIONS)


def test_times_of_frames():
    days = pandas.date_range("2025-03-29", periods=3, freq="D", tz="Europe/Berlin")  # with the hour of summer time
    for times in (days, days.as_unit("s"), pandas.Series(days.strftime("%Y-%m-%dT%H:%M:%S%z"))):
        assert gaps_of(pandas.DataFrame({"t": times, "v": [1, 2, 3]})) == [86400.0, 82800.0]
    bools = pandas.DataFrame({"t": [0.5, 1.0, 2.5], "v": [True, False, True]})
    assert panel_of(bools, time="t").codes.tolist() == [[2], [3], [2]]
    assert gaps_of(bools) == [0.5, 1.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", r"line 3 has 1 value, and line 1 names 2 columns: correct the line, or name another"),
        ("a,b\n1,2,3\n", r"line 2 has 3 values, and line 1 names 2 columns"),
        ('a,b\n"x\ny",2\n1,2,3\n', r"line 4 has 3 values"),
        ('a,b\n1,2\n"3,4\n', r"line 3: not a CSV: unexpected end of data"),
        ("", r"is empty: its first line must name the columns"),
        ("a,b\n", r"has no row below the names of its columns"),
        ("a,a\n1,2\n", r"names the column 'a' more than once"),
    ],
)
def test_a_malformed_csv_is_refused_with_its_line(text, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read_table(write(tmp_path / "t.csv", text))
    with pytest.raises(DataError, match=r"no file .*absent\.csv"):
        read_table(tmp_path / "absent.csv")


def test_bytes_that_are_no_utf8_are_refused(tmp_path):
    (tmp_path / "t.csv").write_bytes("a,b\n1,2\n3,é\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"t\.csv: at byte 10, line 3: a byte that is not UTF-8 .*iconv -f LATIN1"):
        read_table(tmp_path / "t.csv")


def test_places_are_lines_of_the_file(tmp_path):
    """Whatever stands between rows: blank lines, quotes with line ends in them, the ends of lines of Windows."""
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbft,v,"a ""b"", c"\r\n1,2,"x\r\ny"\r\n\r\n2,3, z\r\n3,oops,w\r\n')
    read = read_table(path)
    assert read.places.tolist() == [3, 5, 6]
    assert list(read.columns) == ["t", "v", 'a "b", c']
    with pytest.raises(DataError, match=r"line 6, column 'v': 'oops' is no finite number"):
        panel_of(path, time="t")
    assert panel_of(
        write(tmp_path / "s.csv", "t;v\n1;2,5\n2;3\n").rename(path), time="t", delimiter=";", categorical="v"
    ).codes.tolist()


@pytest.mark.parametrize(
    ("sign", "cells", "numbers"),
    [
        (",", ["957,3", "1.310,1", "-2", "1.234.567", ",5", "1e3"], [957.3, 1310.1, -2.0, 1234567.0, 0.5, 1000.0]),
        (".", ["957.3", "1,310.1", "-2", "1,234,567", ".5", "1e3"], [957.3, 1310.1, -2.0, 1234567.0, 0.5, 1000.0]),
        (",", ["1\u00a0310,5", "1'310,5", "12", "1", "2", "3"], [1310.5, 1310.5, 12.0, 1.0, 2.0, 3.0]),
    ],
)
def test_numbers_with_another_decimal_sign_and_digits_in_groups_are_read_when_that_is_named(
    sign, cells, numbers, tmp_path
):
    days = [f"{day:02}.01.2025 12:00" for day in range(1, 7)]
    path = write(tmp_path / "t.csv", "t;v\n" + "".join(f"{t};{v}\n" for t, v in zip(days, cells, strict=True)))
    options = {"time": "t", "delimiter": ";"}
    assert panel_of(path, **options, decimal=sign).values.ravel().tolist() == numbers
    assert gaps_of(path, **options, decimal=sign) == [86400.0] * 5


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["957,3", "957,3", "1.310,1"], r"957,3: give --data\.decimal , to read that as 957\.3"),
        (["1,310.1", "8.5", "7.5"], r"1,310\.1: give --data\.decimal \. to read that as 1310\.1, or"),
    ],
)
def test_numbers_that_are_written_otherwise_are_no_categories(cells, message, tmp_path):
    path = write(tmp_path / "t.csv", "t;v w\n" + "".join(f"{t};{v}\n" for t, v in enumerate(cells)))
    with pytest.raises(
        DataError, match=rf"t\.csv, column 'v w' holds numbers such as {message}.* --data\.categorical 'v w'"
    ):
        panel_of(path, time="t", delimiter=";")
    assert panel_of(path, time="t", delimiter=";", categorical=["v w"]).codes.shape == (3, 1)


def test_a_cell_that_is_no_number_under_the_decimal_sign_is_an_error(tmp_path):
    path = write(tmp_path / "t.csv", "t;v\n1;2,5\n2;3\n3;1.31\n")
    with pytest.raises(DataError, match=r"line 4, column 'v': '1\.31' is no finite number \(1 of its 3 rows\)"):
        panel_of(path, time="t", delimiter=";", decimal=",")
    times = write(tmp_path / "u.csv", "t;v\n1,5;2\n2,25;3\n1.000,5;4\n")
    assert gaps_of(times, time="t", delimiter=";", decimal=",") == [0.75, 998.25]


@pytest.mark.parametrize("head", ["t;v", "t\tv"])
def test_a_delimiter_that_was_not_named_is_found_in_the_first_line(head, tmp_path):
    with pytest.raises(DataError, match=r"line 1 names a single column, .*between the columns, --data\.delimiter"):
        read_table(write(tmp_path / "t.csv", f"{head}\n1{head[1]}2,5\n"))


def test_a_table_larger_than_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = table(tmp_path / "t.csv", range(40))
    monkeypatch.setattr(reading_tables, "available_bytes", lambda device: 2**12)
    monkeypatch.setattr(reading_tables.csv, "reader", lambda *arguments, **options: pytest.fail("it was read"))
    with pytest.raises(DataError, match=r"t\.csv takes about .* to train on, and 4\.0 KiB of memory are free"):
        read_table(path)


def test_cells_that_hold_several_values_are_texts():
    with pytest.raises(DataError, match=r"frame row 3, column 'v': \[2\] is no finite number \(1 of its 3 rows\)"):
        panel_of(pandas.DataFrame({"t": [1, 2, 3], "v": [1, 2, [2]]}, dtype=object), time="t")


# ---------------------------------------------------------------------- splits


def several(count: int = 10, length: int = 20) -> pandas.DataFrame:
    made = {"id": np.repeat(np.arange(count), length), "t": np.tile(np.arange(length), count)}
    return pandas.DataFrame({**made, "v": np.arange(count * length) % 7, "k": np.repeat(np.arange(count) % 2, length)})


def test_whole_series_are_held_out():
    data = SeriesData(group="id", time="t", columns="v", valid_fraction=0.3)
    panel, _ = read_panel(data, several())
    train, valid = parts(panel, data)
    assert sorted([*train.names, *valid.names], key=int) == panel.names
    assert len(valid.names) == 3
    for part in (train, valid):
        for s, name in enumerate(part.names):
            original = panel.choose([panel.names.index(name)])
            assert_equal(part.choose([s]), original)
        assert part.report[-1] == "held out: 3 of 10 series, chosen by --data.seed 0 (--data.split series)"
    assert parts(panel, SeriesData(seed=1, valid_fraction=0.3))[1].names != valid.names
    with pytest.raises(ConfigError, match=r"data\.valid_fraction 0\.99 holds 10 of 10 series out: lower it"):
        parts(panel, SeriesData(valid_fraction=0.99))


def test_the_end_of_each_series_is_held_out_with_its_history():
    data = SeriesData(group="id", time="t", columns="v", split="future", valid_fraction=0.25)
    panel, _ = read_panel(data, several())
    train, valid = parts(panel, data)
    assert train.lengths.tolist() == [15] * 10
    assert valid.lengths.tolist() == [20] * 10
    assert valid.scored.reshape(10, 20).tolist() == [[False] * 15 + [True] * 5] * 10
    np.testing.assert_array_equal(valid.values.reshape(10, 20)[:, :15].ravel(), train.values.ravel())
    assert valid.report[-1] == "held out: the last 25 % of the steps of each series, 50 in all (--data.split future)"
    alone, held = parts(panel.choose([3]), SeriesData(valid_fraction=0.25))
    assert (len(alone.times), held.scored.sum()) == (15, 5)
    with pytest.raises(ConfigError, match=r"0\.01 of 20 steps cannot be held out: give longer series"):
        parts(panel, SeriesData(split="future", valid_fraction=0.01))
    labelled = panel_of(several(), group="id", time="t", target="k", task="classification")
    with pytest.raises(ConfigError, match=r"these have one label each: use series"):
        parts(labelled, SeriesData(split="future"))
    train, valid = parts(labelled, SeriesData(valid_fraction=0.3))
    assert (len(train.labels), len(valid.labels)) == (7, 3)


def test_what_only_the_held_out_part_has_is_unknown_there():
    made = several().assign(c="x", s="y")
    made.loc[made.id == 9, ["c", "s"]] = "rare"
    panel = panel_of(made, group="id", time="t", columns="v,c", static="s")
    data = next(SeriesData(seed=seed) for seed in range(99) if "9" in parts(panel, SeriesData(seed=seed))[1].names)
    train, valid = parts(panel, data)
    assert np.unique(train.codes).tolist() == np.unique(train.static_codes).tolist() == [2]
    assert np.unique(valid.codes[valid.series == valid.names.index("9")]).tolist() == [1]
    assert np.unique(valid.static_codes).tolist() == [1, 2]
    assert valid.report[-1] == "unknown where held out: 21 values of categories that are not trained on"
    labelled = panel_of(made, group="id", time="t", columns="v", target="c")
    with pytest.raises(
        DataError, match=r"the class of c there is among the held-out ones alone: hold other series out"
    ):
        parts(labelled, SeriesData(target="c", seed=data.seed))


# ---------------------------------------------------------------------- laws


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([NAN, 1.0, 2.0, 3.0])), max_size=20),
    st.sampled_from(["error", "mean", "first", "last"]),
)
def test_cells_are_merged_as_by_hand(cells, how):
    cells = sorted(cells, key=lambda cell: cell[0])
    keys, values = np.array([key for key, _ in cells], int), np.array([value for _, value in cells], float)
    by_key = [[value for key, value in cells if key == each and value == value] for each in range(5)]
    differ = [len(set(found)) > 1 for found in by_key]
    if how == "error" and any(differ):
        with pytest.raises(Clash) as clash:
            merge(values, keys, 5, NAN, how)
        assert keys[clash.value.first] == keys[clash.value.second] == differ.index(True)
        assert values[clash.value.first] != values[clash.value.second]
        return
    made = merge(values, keys, 5, NAN, how)
    take = {"mean": np.mean, "last": lambda found: found[-1]}.get(how, lambda found: found[0])
    np.testing.assert_allclose(made.values, [take(found) if found else NAN for found in by_key])
    assert made.repeated == sum(len(found) > 1 for found in by_key)
    assert made.most == max(map(len, by_key))
    assert made.unequal == sum(differ)


# ---------------------------------------------------------------------- real tables

TIME = Path(os.environ.get("GLISSANDO_DATA") or Path(__file__).parent.parent.parent / "shared" / "data") / "time"


def real(name: str, **options) -> tuple[Panel, Encoding]:
    """A table that `python -m benchmarks.series.fetch` fetches."""
    if not (TIME / name).is_file():
        pytest.skip(f"{name} is not part of the project: python -m benchmarks.series.fetch {TIME}")
    return read_panel(SeriesData(path=str(TIME / name), **options))


@pytest.mark.data
@pytest.mark.slow
def test_the_laboratory_values_of_many_people():
    panel, _ = real(
        "nafld_labs.csv", group="id", time="days", time_unit="d", channel="test", value="value", static="age,male,bmi",
        static_path=str(TIME / "nafld_subjects.csv"),
    )  # fmt: skip
    assert len(panel.names) == 15_666
    assert int((~np.isnan(panel.values)).sum()) == 400_123 - 3_817
    assert not np.isnan(panel.static[:, :2]).any()
    said = "\n".join(panel.report)
    assert "median step 233 d" in said
    assert "merged: 2,270 measurements of one (id, days, test), up to 53 rows each, with equal values" in said
    assert "'chol' equals 'hdl' in all 159,647 steps that have both" in said
    assert "'dbp' equals 'sbp' in all 33,212 steps that have both" in said
    assert "fib4: at most one value a series" in said
    assert "'smoke' alternates" in said


@pytest.mark.data
@pytest.mark.slow
def test_clinic_visits_weather_and_vowels():
    visits, encoding = real("pbc_visits.csv", group="id", time="day", categorical="stage", static="sex,age,trt")
    assert (len(visits.names), len(visits.times), visits.codes.shape[1]) == (312, 1945, 1)
    assert (encoding.static, list(encoding.static_categorical)) == (["age", "trt"], ["sex"])
    weather, _ = real("weather.csv", group="origin", time="time_hour")
    assert weather.names == ["EWR", "JFK", "LGA"]
    assert "median step 3,600 s (1 h)" in weather.report
    assert weather.clock.written([0], [0.0]) == ["2013-01-01T06:00:00Z"]
    vowels, encoding = real("vowels.csv", group="series", time="t", target="label", task="classification")
    assert (encoding.label, len(encoding.classes), len(vowels.labels)) == ("series", 9, 640)


# ---------------------------------------------------------------------- what looks wrong


def warned(made: pandas.DataFrame) -> list[str]:
    return [line.removeprefix("warning: ") for line in panel_of(made, group="id", time="t").report if "warning" in line]


def test_what_looks_wrong_is_said():
    rng = np.random.default_rng(0)
    made = several()[["id", "t"]].assign(good=rng.normal(size=200))
    noise = made.good[::-1].reset_index(drop=True)
    assert warned(made) == []
    odd = made.assign(
        twin=made.good.where(rng.random(200) < 0.5), one=made.id % 3, once=noise.where(made.t == 3) + 1,
        flag=(made.t % 2).astype(float), flat=7, far=noise.where(made.index != 11, 463),
    )  # fmt: skip
    lines = warned(odd)
    assert any(line.startswith("'good' equals 'twin' in all") for line in lines)
    assert "one: the same value throughout each series; name such a column in --data.static, or leave it out" in lines
    assert "once: at most one value a series; name such a column in --data.static, or leave it out" in lines
    assert any(line.startswith("'flag' alternates: 190 of 190 values differ from the one before") for line in lines)
    assert "'flat' has one value wherever it is observed" in lines
    assert any(line.startswith("'far' has 1 value beyond 20 robust") and "463 in row 12" in line for line in lines)
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("text", "decimal", "value"),
    [
        ("1,310", ",", 1.31), ("1.310", ".", 1.31), ("1,310", ".", 1310.0), ("1.310", ",", 1310.0),
        ("1.310,5", ",", 1310.5), ("1\u00a0310.5", ".", 1310.5), ("-1'310'000", ".", -1310000.0),
    ],
)  # fmt: skip
def test_a_decimal_sign_separates_no_thousands(text, decimal, value):
    assert float(as_number(text, decimal)) == value
