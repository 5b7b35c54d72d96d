"""The documents' figures follow their records; and the program that sees to it, on records made up."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "docs" / "figures.py"
RECORDS = {
    "run": {"a": {"bits": 0.36677, "seeds": [0.379, 0.3455, 0.3758], "n": 3}, "b-nano": {"bits": 1234.5}},
    "gap": [-0.0914, 0.04797],
    "share": 0.96875,
    "word": "never",
}


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("figures", None)


@pytest.fixture
def made_up(figures, monkeypatch):
    monkeypatch.setattr(figures, "RECORDS", {name: lambda name=name: RECORDS[name] for name in RECORDS})
    return figures


def test_every_marked_figure_of_the_documents_is_that_of_its_record(figures):
    result = {page.name: figures.settle_page(page)[2] for page in figures.PAGES}
    assert not (wrong := {page: problems for page, problems in result.items() if problems}), (
        f"{wrong}; `python docs/figures.py --write` writes what the records say"
    )
    for page, least in {"README.md": 8, "results.md": 15, "speed.md": 10, "comparison.md": 30}.items():
        assert len(figures.marks()[page]) > least


def test_every_figure_that_is_kept_stands_on_a_page(figures):
    """Where a page no longer has a figure, docs/figures.yaml does not keep it."""
    marks = [mark for page in figures.marks().values() for mark in page.values()]
    paths = [path.strip().partition("*")[0].split("/") for mark in marks for path in re.split("[|;]", mark)]

    def leaves(node, *above):
        for key, value in node.items():
            yield from leaves(value, *above, str(key)) if isinstance(value, dict) else [(*above, str(key))]

    def stands(leaf):
        if leaf[0] == "runs":  # of a model's seeds, in their mean or in a difference of two models
            return any(
                {path[0]} < {"runs", "gap", ""} and [*leaf[1:3]] == path[1:3] and {leaf[3], "{}"} & {*path[3:5]}
                for path in paths
            )
        pairs = (zip(leaf, path[1:], strict=False) for path in paths if path[0] == "kept")
        return any(all(name in (key, "{}") for key, name in pair) for pair in pairs)

    assert [leaf for leaf in leaves(figures.kept()) if not stands(leaf)] == []


def test_the_pages_have_no_marks(figures):
    """They are read as they are: what `--write` does to them is done."""
    assert [page.name for page in figures.PAGES if figures.MARK.search(page.read_text())] == []


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("at <!--= run/a/bits-->0.367", "0.367"),
        ("at <!--= run/a/bits-->**0.360** (3)", "**0.367** (3)"),
        ("at <!--= run/a/seeds-->0.1, 0.2 and 0.3", "0.4, 0.3 and 0.4"),
        ("at <!--= run/a/seeds/mean-->0.00", "0.37"),
        ("at <!--= run/a/n; run/a/seeds/1-->2 (0.300)", "3 (0.345)"),
        ("by <!--= gap-->+0.1 +- 0.2", "-0.1 +- 0.0"),
        ("in <!--= share*100-->90.0 %", "96.9 %"),
        ("is <!--= run/b-nano/bits-->999.0", "1,234.5"),
        ("is <!--= run/b-nano/bits-->1.10e+03", "1.23e+03"),
    ],
)
def test_a_figure_takes_the_value_of_its_record_in_the_form_that_it_has(made_up, written, kept):
    text, problems = made_up.settle(written)
    assert text.split("-->")[1] == kept
    assert bool(problems) == (text != written)
    assert made_up.settle(text) == (text, [])


def test_marks_move_into_a_file_and_back(made_up):
    page = (
        "at <!--= run/a/bits-->0.111 of\n\n<!--= run/{}/bits | -->\n| m | bits |\n|---|---|\n| `a` | 0.222 |\n\n"
        "and <!--= run/a/n-->5 of"
    )
    plain, anchors = made_up.unmarked(page)
    assert plain == "at 0.111 of\n\n| m | bits |\n|---|---|\n| `a` | 0.222 |\n\nand 5 of"
    assert list(anchors.values()) == ["run/a/bits", "run/{}/bits |", "run/a/n"]
    back, problems = made_up.marked(plain, anchors)
    assert problems == []
    assert made_up.unmarked(made_up.settle(back)[0])[0] == made_up.unmarked(made_up.settle(page)[0])[0]
    assert made_up.unmarked(made_up.settle(back)[0])[0].startswith("at 0.367 of\n\n| m | bits |")
    assert "not stand in the page once, but 2 times" in made_up.marked("of 3 of 4", {"of ": "run/a/n"})[1][0]


def test_columns_of_a_table_follow_the_records_of_their_rows(made_up):
    table = "<!--= run/{}/bits; run/{}/n | -->\n| m | bits | rate |\n|---|---|---|\n%s\nafter 5 | 6"
    text, problems = made_up.settle(table % "| `a`, the first | 0.111 (1) | 7 |\n| b-nano | | 8 |")
    assert "| `a`, the first | 0.367 (3) | 7 |\n| b-nano | | 8 |\nafter 5 | 6" in text
    assert len(problems) == 2
    assert "no 'c'" in made_up.settle(table % "| c | 0.5 (1) | 9 |")[1][0]
    assert made_up.settle("<!--= run/{}/bits | -->\ntext")[1] == ["<!--= run/{}/bits | -->: no table stands under it"]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("at <!--= run/c-->1", "no 'c', but a, b-nano"),
        ("at <!--= what/c-->1", "no record 'what'"),
        ("at <!--= run/a-->1", "no number, but bits, seeds, n"),
        ("at <!--= word-->1", "no number, but 'never'"),
        ("at <!--= run/a/seeds/3-->1", "no '3'"),
        ("at <!--= run/a/bits--> many words, then 0.367", "no number follows"),
        ("at <!--= run/a/seeds-->0.379", "no number follows"),
        ("<!--= run/a/n-->3", "begins a line"),
    ],
)
def test_a_mark_without_a_record_or_a_number_is_reported(made_up, written, problem):
    problems = made_up.settle(written)[1]
    assert len(problems) == 1
    assert problem in problems[0]


def test_a_difference_of_seeds_is_students(figures):
    """Differences 1, 2, 3: mean 2, deviation 1, and 4.3027 of two degrees of freedom over the root of 3."""
    mine, yours = ({"0": 2, "1": 4, "2": 6, "seeds": [2, 4, 6], "count": 3}), {"seeds": [1, 2, 3], "count": 3}
    assert figures._gap(mine, yours | {"0": 1, "1": 2, "2": 3}) == pytest.approx([2, 4.3027 / 3**0.5])
    assert figures._gap(mine, yours | {"0": 1, "1": 2, "3": 3}) == []


def test_the_share_above_the_floor_is_of_runs_measured_on_the_floors_text(figures, monkeypatch):
    """Not of a model with a run that other held-out text was measured on."""
    floor = {"held_out": 0.25, "held_out_bytes": 100}
    columns = ("corpus", "bytes", "model", "seed", "bits_per_byte", "held_out_bytes")
    rows = [
        ("stories", "2000000", "a", "0", "0.3", "100"),
        ("stories", "2000000", "a", "1", "0.4", "100"),
        ("stories", "2000000", "b", "0", "0.3", "200"),
        ("stories", "4000000", "c", "0", "0.3", "100"),
        ("stories", "4000000", "c", "1", "0.3", "200"),
        ("other", "2000000", "d", "0", "0.3", "100"),
    ]
    made = [dict(zip(columns, row, strict=True)) | {"labels_told": ""} for row in rows]
    monkeypatch.setattr(figures, "_rows", lambda name: iter(made))
    monkeypatch.setattr(figures, "floor", lambda: floor)
    figures.recipe.cache_clear()
    try:
        result = figures.recipe()
    finally:
        figures.recipe.cache_clear()
    assert result["stories"]["2M"]["a"]["above_floor"] == pytest.approx(40)
    others = (result["stories"]["2M"]["b"], result["stories"]["4M"]["c"], result["other"]["2M"]["d"])
    assert not any("above_floor" in of for of in others)
