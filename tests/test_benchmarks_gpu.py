"""The bench for a GPU: every part of it on a CPU, at sizes that mean nothing, and what it says of its bars."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu
from benchmarks.__main__ import main
from benchmarks.cards import CARDS
from glissando.flops import training_flops
from glissando.model import LanguageModel
from glissando.presets import preset_note


def test_every_part_runs_and_is_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.Bench, "seconds", lambda self, call, rounds=None: (call(), 0.5)[1])
    out = tmp_path / "gpu.md"
    assert main(["gpu", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    text = out.read_text()
    assert text.replace("\n\n", "\n").strip() == capsys.readouterr().out.replace("\n\n", "\n").strip()
    assert "unknown to benchmarks/cards.py" in text
    assert "no figure of it means anything" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for name in ("scan, real", "scan and gradients, complex", "T 64 and gradients", "T 128", gpu.PLAIN, *gpu.MODELS):
        rows = [line.split("|")[2:-2] for line in lines if line.startswith(f"| {name} |")]
        assert rows, name
        assert all(any(cell.strip() for cell in row) for row in rows)
    assert "failed" not in text
    assert "MISSED" not in text
    # 2 rows of 16 tokens in half a second, one step.
    assert f"| {gpu.PLAIN} | 33,792 | 64 |" in text


def test_the_clock_counts_what_is_called(monkeypatch):
    bench = gpu.Bench(torch.device("cpu"), gpu.Sizes(rounds=3))
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now) ** 2))
    calls: list[int] = []
    # Two calls of 1 - 0 and 9 - 4 seconds: the first warms up, and the second has taken more than is left.
    assert bench.seconds(lambda: calls.append(1)) == 5
    assert len(calls) == 2
    bench, now = gpu.Bench(torch.device("cpu"), gpu.Sizes(rounds=3, seconds=100.0)), iter(range(100))
    # Both warm up where calls are short; of 25 - 16, 49 - 36 and 81 - 64 the median counts.
    assert bench.seconds(lambda: calls.append(1)) == 13
    assert len(calls) == 7


def test_bars_are_judged_only_where_they_can_be(monkeypatch):
    bench = gpu.Bench(torch.device("cpu"), gpu.Sizes())
    assert bench.card is None
    assert [bench.bar(value, 0.7) for value in (0.71, 0.69, None, "failed")] == [
        "met", "MISSED", "not measured", "MISSED (failed)",
    ]  # fmt: skip
    assert bench.bar(9.0, 1.0, only_h100=True) == "is for an H100 or better"
    monkeypatch.setattr(gpu.Bench, "name", "NVIDIA H100 80GB HBM3")
    assert bench.bar(9.0, 1.0, only_h100=True) == "met"
    assert gpu.Bench(torch.device("cpu"), gpu.QUICK).bar(0.9, 0.7) == "not measured"


def test_a_figure_that_fails_is_reported_and_costs_no_other(monkeypatch, capsys):
    def fails(bench):
        raise ArithmeticError("no such number")

    def full(bench):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu, "PARTS", {"a": lambda b: str(b.attempt("a", lambda: fails(b))), "b": lambda b: "part b"})
    assert gpu.main(["--quick", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "part b" in printed
    assert "failed: a: ArithmeticError: no such number" in printed
    assert gpu.Bench(torch.device("cpu"), gpu.QUICK).attempt("x", lambda: full(None)) == "out of memory"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["scna"], "there is no part 'scna'"),
        (["--device", "cpu"], "no GPU to measure"),
        (["--device", "hpu"], "--device hpu is not available here"),
        (["--quick", "--out", __file__], "nothing is overwritten"),
    ],
)
def test_mistakes(given, said, capsys):
    with pytest.raises(SystemExit):
        gpu.main(given)
    assert said in capsys.readouterr().err


def test_the_plain_gpt_is_of_the_size_of_the_presets_and_counted_alike():
    bench = gpu.Bench(torch.device("meta"), gpu.Sizes())
    with torch.device("meta"):
        plain = gpu.plain_gpt(bench)
        actual = LanguageModel.from_preset("transformer-124m")
    count = sum(p.numel() for p in plain.parameters())
    sizes = [preset_note(name, "parameters") for name in gpu.MODELS]
    assert max(count, *sizes) <= 1.02 * min(count, *sizes)
    assert plain.training_flops(1024) == pytest.approx(training_flops(actual, 1024), rel=0.02)
    assert all(100 < card.bandwidth < 10_000 and 50 < card.tflops < 3000 for card in CARDS.values())
