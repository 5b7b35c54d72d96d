"""The demo: two of its models learn for a moment, and the report is there."""

from __future__ import annotations

import pytest

from glissando import demo
from glissando.compare import run as compare

TIMED = {"decode": {}, "state": {}, "train": {"median": 1.0, "low": 1.0, "high": 1.0}, "memory_mib": 1.0}


@pytest.mark.timeout(600)
def test_two_models_for_a_moment(tmp_path, monkeypatch, capsys):
    # Timing takes longer than all else; test_compare.py has it.
    monkeypatch.setattr(compare, "measure_speed", lambda runs, *_: dict.fromkeys(runs, TIMED))
    out = tmp_path / "demo"
    arguments = ["--seconds", "0.5", "--presets", "transformer-nano,minimal-transformer-nano", "--out", str(out)]
    assert demo.main(arguments) == 0
    told = capsys.readouterr().out
    assert "2 models learn the built-in stories, 0.5 s each" in told
    for name in ("transformer-nano", "minimal-transformer-nano", "entropy floor"):
        assert f"\n{name} " in told
    assert told.splitlines()[-1] == f"report: {out / 'report.html'}"
    page = (out / "report.html").read_text()
    assert "2 models, 0.5 seconds each" in page
    assert "One seed a model" in page


def test_a_mistake_is_told(tmp_path, capsys):
    assert demo.main(["--presets", "transformer-nan", "--out", str(tmp_path / "demo")]) == 2
    assert "Did you mean 'transformer-nano'" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
