"""A worker of a comparison at a URL, without Ray: it goes on from what is there, and copies there what it makes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comparisons_at_urls import (
    URL,
    Killed,
    cache_of_a_test,
    empty,
    nothing_is_trained,
    on_another_machine,
    stored,
    text,
    toy,
    trained,
)
from training_runs import assert_same_tensors, crash_in

from glissando import remote
from glissando.compare import run as compare
from glissando.compare import worker
from glissando.compare.measure import read_measured
from glissando.compare.plan import Job
from glissando.compare.worker import Order, carry_out
from glissando.errors import RunError
from glissando.runs import Run

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    return cache_of_a_test(tmp_path, monkeypatch)


@pytest.fixture
def _signals_as_they_were() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def order(cache, tmp_path, monkeypatch, _signals_as_they_were) -> Order:
    """Of the training of `toy`, from a command on another machine, which has another cache."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = toy(URL, data=text(tmp_path))
    asked.check()
    asked.write_plan()
    copy = asked.copy
    assert copy is not None
    copy.push_plan()
    job = Job("run", "transformer-nano", 0, 2e-3)
    config, out, seal = asked.config(job).as_dict(), asked.directory, copy.seal
    on_another_machine(cache)
    elsewhere = out.with_name("elsewhere")
    config["data"]["tokenizer"]["path"] = str(elsewhere / "tokenizer.json")
    return Order(job, config, elsewhere, seal, os.getcwd(), [], ["glissando"], 1, False, url=URL)


def send(stop_after: int | None = None) -> Callable[[list[Any]], bool]:
    reports: list[Any] = []

    def take(events: list[Any]) -> bool:
        reports.append(events)
        return stop_after is not None and len(reports) >= stop_after

    return take


def test_a_worker_goes_on_where_one_elsewhere_was_killed(order, cache, tmp_path, monkeypatch):
    compare.compare(whole := toy(tmp_path / "whole", data=text(tmp_path)))
    with monkeypatch.context() as patched:
        crash_in(patched, 4, Killed())
        with pytest.raises(Killed):
            carry_out(order, send())
    on_another_machine(cache)
    figures = carry_out(order, send())
    assert isinstance(figures, dict)
    assert figures["provenance"]["resumed"] == 1
    assert json.loads(stored()["compared/runs/transformer-nano/lr-0.002-seed-0/measured.json"]) == figures
    on_another_machine(cache)
    asked = toy(URL, data=text(tmp_path))
    nothing_is_trained(monkeypatch)
    compare.compare(asked)
    assert_same_tensors(trained(asked.directory), trained(whole.out))


def test_a_worker_that_is_asked_to_stop_has_copied_what_it_saved(order, cache, monkeypatch):
    monkeypatch.setattr(worker, "EVERY", 0.0)
    order.config["training"]["save_every"] = 100
    assert carry_out(order, send(stop_after=4)) is None
    steps = {name.split("/")[5] for name in stored() if "/checkpoints/step-" in name}
    assert len(steps) == 1
    on_another_machine(cache)
    assert isinstance(figures := carry_out(order, send()), dict)
    assert figures["provenance"]["resumed"] == 1


def test_a_worker_that_sees_another_storage_says_so(order):
    empty()
    error = carry_out(order, send())
    assert isinstance(error, RunError)
    assert "does not see the comparison at memory://bucket/compared" in str(error)
    changed = dataclasses.replace(order, seal="another")
    assert "does not see the comparison" in str(carry_out(changed, send()))


def test_a_worker_takes_no_run_of_another_comparison(order, cache, tmp_path):
    """As where URL and command's directory were deleted, and a worker's machine still has what it trained then."""
    carry_out(order, send())
    empty()
    shutil.move(cache, cache.with_name("worker"))
    asked = toy(URL, data=text(tmp_path) | {"seq_len": 16})
    asked.check()
    asked.write_plan()
    assert asked.copy is not None
    asked.copy.push_plan()
    config, seal = asked.config(order.job).as_dict(), asked.copy.seal
    on_another_machine(cache)
    shutil.move(cache.with_name("worker"), cache)
    config["data"]["tokenizer"]["path"] = order.config["data"]["tokenizer"]["path"]
    assert isinstance(carry_out(dataclasses.replace(order, config=config, seal=seal), send()), dict)
    run = order.job.path(asked.directory)
    assert Run.open(run).read_config()["data"]["seq_len"] == 16
    assert list(asked.directory.parent.glob(f"{asked.directory.name}.1/runs/*/*/measured.json"))


def test_a_worker_reports_a_copy_that_fails(order, monkeypatch):
    original, events = remote.Place._write, list[Any]()

    def refuse(self: Any, name: str, source: Any) -> None:
        if "/runs/" in self.root:
            raise PermissionError("access denied")
        original(self, name, source)

    monkeypatch.setattr(remote.Place, "_write", refuse)
    error = carry_out(order, lambda new: bool(events.extend(new)))
    assert isinstance(error, RunError)
    assert "access denied" in str(error)
    assert any(event[0] == "print" and "the next save tries again" in event[1] for event in events)


def test_what_a_worker_has_finished_elsewhere_is_fetched(order, cache, tmp_path):
    figures = carry_out(order, send())
    on_another_machine(cache)
    asked = toy(URL, data=text(tmp_path))
    copy = asked.copy
    assert copy is not None
    run = order.job.path(asked.directory)
    copy.fetch_run(run)
    assert read_measured(run) == figures
    assert Run.open(run).read_environment()["command"] == ["glissando"]
