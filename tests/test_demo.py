"""The demo: two of its models learn for a moment, and the report is there."""

from __future__ import annotations

import re

import pytest

from glissando import demo
from glissando.compare import run as compare
from glissando.data import corpora
from glissando.runs import Run

TIMED = {"decode": {}, "state": {}, "train": {"median": 1.0, "low": 1.0, "high": 1.0}, "memory_mib": 1.0}
TWO = ["transformer-nano", "minimal-transformer-nano"]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_two_models_for_a_moment(tmp_path, monkeypatch, capsys):
    """On a machine on which the planned tokens would take 800 s both learn from three quarters of them."""
    # Timing takes longer than all else; test_compare.py has it.
    monkeypatch.setattr(compare, "measure_speed", lambda runs, *_: dict.fromkeys(runs, TIMED))
    monkeypatch.setattr(corpora, "TOKENIZER_TEXT_BYTES", 20_000)
    monkeypatch.setattr(demo, "TOKENS", 2000)
    rates = dict.fromkeys(TWO, 2 * 2000 * demo._WHOLE / 800)
    monkeypatch.setattr(demo, "_rates", lambda comparison: rates)
    out = tmp_path / "demo"
    assert demo.main(["--presets", ",".join(TWO), "--out", str(out)]) == 0
    printed, shown = capsys.readouterr()
    assert "2,000 tokens would take about 13:20 minutes; each reads 1,500 tokens: about 10:00" in printed
    budgets = [Run(path).read_config()["training"]["tokens"] for path in out.glob("runs/*/*")]
    assert budgets == [1500, 1500]
    assert re.search(r"^What a trained model writes .*:\n\n   Once upon a time\w*\W.{150}", printed, re.M | re.DOTALL)
    assert printed.index("What a trained model") < printed.index("Held-out stories in bits per byte")
    ranked = re.findall(r"^(\d)\. ([\w-]+) +(\d\.\d{3}) \(95 %: .*\)\n   (\S.*)", printed, re.M)
    assert [place for place, *_ in ranked] == ["1", "2"]
    assert {name for _, name, *_ in ranked} == set(TWO)
    assert float(ranked[0][2]) <= float(ranked[1][2])
    assert printed.splitlines()[-1] == f"report: {out / 'report.html'}"
    assert len(re.findall(r"^[\w-]+, run, seed 0, .*: trained in ", shown, re.M)) == 2
    page = (out / "report.html").read_text()
    assert re.search(rf"<h1>({'|'.join(TWO)}) .* after 1,500 tokens.*</h1>", page)
    assert "One seed a model" in page
    assert "interrupted" not in page
    # Going on takes its models and its tokens from there, whatever this machine is worth now.
    rates.clear()
    again = demo._comparison(demo._options(["--out", str(out)]), out)
    assert (again.names, again.budget) == (TWO, ("tokens", 1500))
    assert "2 models learn" in capsys.readouterr().out


def test_a_slow_machine_shortens_the_budget_and_no_less_than_half(monkeypatch):
    rate = 2 * 1000 * demo._WHOLE  # of two models: 1,000 tokens of each in a second
    planned = 300_000
    monkeypatch.setattr(demo, "LONGEST", 400.0)
    for slowness, tokens, line in (
        (1, planned, "each reads 300,000 tokens: about 5:00 minutes on this machine"),
        (4 / 3, planned, "each reads 300,000 tokens: about 6:40 minutes on this machine"),
        (1.35, planned, "each reads 300,000 tokens: about 6:45 minutes on this machine"),
        (2, 200_000, "300,000 tokens would take about 10:00 minutes; each reads 200,000 tokens: about 6:40"),
        (4, 150_000, "about 10:00 minutes on this machine; from fewer they would learn too little to see"),
    ):
        given, printed = demo.affordable(planned, {"a": rate / slowness, "b": rate / slowness})
        assert given == tokens
        assert line in printed
        assert ("would take" in printed) == (tokens < planned)


def test_a_mistake_is_reported(tmp_path, capsys):
    assert demo.main(["--presets", "transformer-nan", "--out", str(tmp_path / "demo")]) == 2
    assert "Did you mean 'transformer-nano'" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
