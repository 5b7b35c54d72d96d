"""What long measurements show while they run."""

from __future__ import annotations

import io
import itertools
import sys
import threading
import time

import pytest

from glissando import progress
from glissando.progress import elapsed_and_left, minutes, never_silent, phases, track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_a_line_comes_only_after_a_while(monkeypatch):
    """Items of 8 seconds: a line at 24, 48 and 72, each with what is done, elapsed and left."""
    clock = itertools.count(0, 8.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    file = io.StringIO()
    assert list(track(range(10), "reading", unit="rows", file=file)) == list(range(10))
    assert file.getvalue().splitlines() == [
        "reading: 2 of 10 rows, 0:24 elapsed, about 1:36 left",
        "reading: 5 of 10 rows, 0:48 elapsed, about 0:48 left",
        "reading: 8 of 10 rows, 1:12 elapsed, about 0:18 left",
    ]


def test_what_is_quick_says_nothing_there():
    file = io.StringIO()
    assert list(track(iter("abc"), "reading", file=file)) == ["a", "b", "c"]
    assert file.getvalue() == ""


def test_a_terminal_has_a_bar():
    file = Terminal()
    assert list(track(iter("abc"), "reading", total=3, unit="rows", file=file)) == ["a", "b", "c"]
    assert "reading:   0%" in file.getvalue()
    assert "0/3" in file.getvalue()
    assert file.getvalue().endswith("\r")  # and leaves nothing behind


def test_phases_are_a_bar_on_a_terminal_and_lines_elsewhere():
    terminal, log = Terminal(), io.StringIO()
    for file in (terminal, log):
        with phases(2, file) as begin:
            begin("tracing")
            begin("checking")
    assert log.getvalue() == "tracing\nchecking\n"
    frames = [frame.strip() for frame in terminal.getvalue().split("\r") if frame.strip()]
    assert [frame.split(":")[0] for frame in frames if frame[0] in "tc"] == ["tracing", "checking"]
    assert frames[0].endswith("| 0/2")
    assert frames[-1].startswith("checking")
    assert frames[-1].endswith("| 1/2")
    assert terminal.getvalue().endswith("\r")  # and leaves nothing behind


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (7265, "2:01:05")])
def test_minutes(seconds, text):
    assert minutes(seconds) == text


def test_nothing_is_left_where_nothing_is_known():
    assert elapsed_and_left(5, 0) == "0:05 elapsed"
    assert elapsed_and_left(30, 0.25) == "0:30 elapsed, about 1:30 left"


def test_a_silent_terminal_shows_the_time_and_clears_it_before_the_next_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with never_silent(0.02):
        while "working" not in terminal.getvalue():
            time.sleep(0.005)
        print("done", file=sys.stderr)
    assert sys.stderr is terminal
    assert "working, 0:00\r\x1b[Kdone\n" in terminal.getvalue()


def test_the_time_never_stands_in_a_line_that_is_being_written(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", Terminal())
    with never_silent(0.02):
        print("Once upon", end="")
        before = terminal.getvalue()
        time.sleep(0.2)
        assert terminal.getvalue() == before


def test_the_time_follows_a_bar_that_stands_still_until_it_moves(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with never_silent(0.02):
        print("\r 50%| step 3", end="", file=sys.stderr)
        deadline = time.monotonic() + 10
        while "working" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
        print("\r 60%| step 4", end="", file=sys.stderr)
        moved = terminal.getvalue()
    assert moved.startswith("\r 50%| step 3\r\x1b[K50%| step 3, working, 0:00")
    assert moved.endswith("working, 0:00\r\x1b[K50%| step 3\r 60%| step 4")


@pytest.mark.parametrize("shown", ["bar", "text in a file"])
def test_the_time_is_shown_behind_a_bar_that_has_ended_and_beside_a_text_that_goes_into_a_file(monkeypatch, shown):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with never_silent(0.02):
        if shown == "bar":
            assert list(track("abc", "reading")) == ["a", "b", "c"]
        else:
            print("Once upon", end="")
        deadline = time.monotonic() + 10
        while "working" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
    assert "working, 0:00" in terminal.getvalue()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_of_processes_that_train_together_the_first_alone_shows_the_time(monkeypatch, name):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv(name, "1")
    with never_silent(0.02):
        time.sleep(0.2)
    assert terminal.getvalue() == ""


def test_what_is_written_while_a_line_is_written_waits_for_nothing(monkeypatch):
    """As a warning of what is finalized then."""

    class Interrupted(Terminal):
        def write(self, text: str) -> int:
            if text == "line":
                print("a warning", file=sys.stderr)
            return super().write(text)

    terminal = Interrupted()
    monkeypatch.setattr(sys, "stderr", terminal)
    with never_silent():
        writer = threading.Thread(target=lambda: print("line", file=sys.stderr), daemon=True)
        writer.start()
        writer.join(10)
        assert not writer.is_alive()
    assert terminal.getvalue() == "a warning\nline\n"


def test_a_file_is_left_as_it_is(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with never_silent(0.0):
        assert sys.stderr is file
