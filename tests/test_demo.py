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
    # Timing takes longer than all else; test_compare.py has it.
    monkeypatch.setattr(compare, "measure_speed", lambda runs, *_: dict.fromkeys(runs, TIMED))
    monkeypatch.setattr(corpora, "TOKENIZER_TEXT_BYTES", 20_000)
    monkeypatch.setattr(demo, "TOKENS", 2000)
    out = tmp_path / "demo"
    assert demo.main(["--presets", ",".join(TWO), "--out", str(out)]) == 0
    printed, shown = capsys.readouterr()
    budgets = [Run(path).read_config()["training"]["tokens"] for path in out.glob("runs/*/*")]
    assert budgets == [2000, 2000]
    assert re.search(r"^What a trained model writes .*:\n\n   Once upon a time\w*\W.{150}", printed, re.M | re.DOTALL)
    assert printed.index("What a trained model") < printed.index("Held-out stories in bits per byte")
    ranked = re.findall(r"^(\d)\. ([\w-]+) +(\d\.\d{3}) \(95 %: .*\)\n   (\S.*)", printed, re.M)
    assert [place for place, *_ in ranked] == ["1", "2"]
    assert {name for _, name, *_ in ranked} == set(TWO)
    assert float(ranked[0][2]) <= float(ranked[1][2])
    assert printed.splitlines()[-1] == f"report: {out / 'report.html'}"
    assert len(re.findall(r"^[\w-]+, run, seed 0, .*: trained in ", shown, re.M)) == 2
    page = (out / "report.html").read_text()
    assert re.search(rf"<h1>({'|'.join(TWO)}) .* after 2,000 tokens.*</h1>", page)
    assert "One seed a model" in page
    assert "interrupted" not in page
    # Going on takes its models and its tokens from there.
    monkeypatch.setattr(demo, "TOKENS", 99)
    again = demo._comparison(demo._options(["--out", str(out)]), out)
    assert (again.names, again.budget) == (TWO, ("tokens", 2000))
    assert "2 models learn" in capsys.readouterr().out


def test_a_mistake_is_told(tmp_path, capsys):
    assert demo.main(["--presets", "transformer-nan", "--out", str(tmp_path / "demo")]) == 2
    assert "Did you mean 'transformer-nano'" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
