"""A report of made-up results: many models, one, failures, ties, and texts near the floor."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest

from glissando.compare.plan import Amount, Comparison, Job
from glissando.compare.report import entries, extent, headline, write_report
from glissando.compare.results import Finished, ModelResult, difference, estimate, sums
from glissando.presets import preset_names

PROVENANCE = {
    "machine": "a machine", "threads": 1, "cores": 2, "commit": "0" * 40, "torch": "2", "modified": False, "resumed": 0,
    "date": "2026-01-01T00:00:00+00:00",
}  # fmt: skip
ROWS = np.random.default_rng(0).uniform(80, 120, 40)


def result(
    name: str, out: Path, bits: float | None, first: ModelResult | None, text: str, rows: int = 40
) -> ModelResult:
    """A model with so many bits per byte, give or take what a row does, or one whose training has failed."""
    job = Job("run", name, 0, 1e-3)
    found = ModelResult(name, 1000, 1e-3)
    if bits is None:
        failed = {"failed": "the loss is nan", "provenance": PROVENANCE}
        found.runs = [Finished(job, job.path(out), failed)]
        return found
    noise = 1 + 0.02 * np.random.default_rng(len(name)).standard_normal(rows)
    nats = (bits * noise * ROWS[:rows] * math.log(2)).tolist()
    held = {"nats": nats, "bytes": ROWS[:rows].tolist(), "floor_bits": None, "digest": "d",
            "correct": [1] * rows, "targets": [2] * rows}  # fmt: skip
    figures: dict[str, Any] = {
        "held_out": held, "sample": {"prompt": "Once <b>", "text": text}, "provenance": PROVENANCE,
        "spent": {"step": 5, "tokens": 100, "flops": 1e9, "seconds": 2.0}, "tokens_per_second": 50.0,
    }  # fmt: skip
    found.runs = [Finished(job, job.path(out), figures)]
    mine = sums(found.runs, "nats", "bytes", slice(None))
    found.bits, found.floor = estimate(mine[0] / math.log(2), mine[1]), 0.3
    if first is not None and first.bits is not None:
        theirs = sums(first.runs, "nats", "bytes", slice(None))
        found.against_first = difference((mine[0] / math.log(2), mine[1]), (theirs[0] / math.log(2), theirs[1]))
    found.curves = [
        [{"tokens": 10.0 * i, "seconds": i, "flops": 1e6 * i, "train_bits_per_byte": 2 + bits / i,
          "valid_bits_per_byte": bits + 3 / i} for i in range(1, 11)]
    ]  # fmt: skip
    return found


def made(tmp_path: Path, bits: list[float | None], text: str = "there was a hare", rows: int = 40):
    names = preset_names()[: len(bits)]
    small = {"model": {"hidden_size": 16, "depth.layers": 1}, "allow_unequal": True}
    plan = Comparison(list(names), tmp_path / "out", Amount("steps", 4), **small)
    results: list[ModelResult] = []
    for name, of in zip(names, bits, strict=True):
        results.append(result(name, plan.out, of, results[0] if results else None, text, rows))
    return plan, results


def page(tmp_path: Path, *given: Any, **options: Any) -> tuple[str, list[ModelResult]]:
    plan, results = made(tmp_path, *given, **options)
    plan.out.mkdir(parents=True)
    return write_report(plan, results).read_text(), results


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.slow
def test_models_are_ranked_and_each_curve_has_its_name(tmp_path, count):
    bits = [1.0 + 0.1 * ((5 * i) % 12) for i in range(count)]
    text, results = page(tmp_path, bits)
    ranked = re.findall(r"<h3>(\d+)\. ([\w-]+)</h3>", text)
    by_bits = sorted(results, key=lambda each: each.bits.value if each.bits else 0.0)
    assert ranked == [(str(i), each.model) for i, each in enumerate(by_bits, 1)]
    tokens = re.search(r"Against tokens</figcaption>(.*?)</svg>", text, re.DOTALL)
    assert tokens is not None
    assert all(tokens[1].count(f">{each.model}<") == 1 for each in results), "each curve's name is in the legend once"


def test_a_headline_names_the_best_or_says_that_none_is(tmp_path):
    assert re.fullmatch(r"\S+ predicts the held-out text best after 4 steps: 1\.\d{3} bits per byte",
                        headline(*made(tmp_path, [1.0, 1.5])))  # fmt: skip
    plan, results = made(tmp_path, [1.0, 1.0, 1.0005])
    said = headline(plan, results)
    assert "; not significantly different: " in said
    assert all(each.model in said for each in results)
    assert re.fullmatch(
        r"\S+ predicts the held-out text best after 4 steps: 1\.\d{3} bits per byte", headline(*made(tmp_path, [1.0]))
    )
    assert headline(*made(tmp_path, [None, None])) == "No training of 2 models has ended well"


def test_failures_are_no_part_of_the_ranking_and_are_named(tmp_path):
    text, _ = page(tmp_path, [1.0, None])
    assert text.count('<div class="place">') == 1
    assert ", learning rate 0.001 failed: the loss is nan" in text


def test_without_any_result_there_is_a_report(tmp_path):
    text, _ = page(tmp_path, [None, None])
    assert "<h1>No training of 2 models has ended well</h1>" in text
    assert '<div class="place">' not in text


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> str:
    """A page of two models, whose samples are no HTML."""
    folder = tmp_path_factory.mktemp("two")
    return page(folder, [1.0, 1.2], "<script>alert(1)</script> " + "and so on " * 60)[0]


def test_a_sample_is_text(two):
    text = two
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "Once &lt;b&gt;" in text


def test_the_axis_begins_at_the_floor_or_the_best(tmp_path):
    plan, results = made(tmp_path, [0.28, 0.29], "")
    assert plan.names
    (best, other) = entries(results)
    assert 0 < best.at < other.at < 100  # the floor, 0.3, is the last
    plan, results = made(tmp_path, [0.5, 1.0], "")
    first, last = extent(results)
    (best, other) = entries(results)
    assert first == 0.3
    assert best.at == pytest.approx(100 * (results[0].bits.value - 0.3) / (last - 0.3))
    assert best.text == ""


def test_one_row_has_no_interval_and_a_dash_its_reason(tmp_path):
    plan, results = made(tmp_path, [1.0, 1.2], rows=1)
    results[1].runs[0].figures["spent"]["flops"] = None
    plan.out.mkdir(parents=True)
    text = write_report(plan, results).read_text()
    assert "FLOPs —: not counted for this kind of model." in text
    assert text.count('<div class="bits">') == 2
    assert "not significantly different" in text


def test_every_figure_has_its_unit(two):
    text = two
    assert len(re.findall(r'<div class="bits">1\.\d{3} <small>bits per byte</small>', text)) == 2
    assert text.count("lower is better") == 2
    assert "bits per byte, held out" not in text  # an axis of training curves as well
    assert "not counted" not in text


@pytest.mark.skipif(pages.BROWSER is None, reason=pages.NO_BROWSER)
@pytest.mark.slow
def test_on_paper_no_table_is_wider_than_the_page_and_on_a_phone_charts_can_be_read(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    bits = [1.0 + 0.05 * i for i in range(8)]
    page(tmp_path, bits)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=pages.BROWSER, args=["--no-sandbox"])
        paper = browser.new_page(viewport={"width": 703, "height": 1000})  # A4 within its margins
        paper.goto((tmp_path / "out" / "report.html").as_uri())
        paper.emulate_media(media="print")
        paper.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        widths = paper.locator("table").evaluate_all("all => all.map(each => each.scrollWidth)")
        assert len(widths) == 3
        assert max(widths) <= 703
        paper.emulate_media(media="screen")
        paper.set_viewport_size({"width": 375, "height": 700})
        heights = paper.locator(".chart text").evaluate_all("all => all.map(e => e.getBoundingClientRect().height)")
        assert min(heights) > 8
        browser.close()
