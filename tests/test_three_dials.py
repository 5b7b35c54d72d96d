"""The labelled notes of examples/three_dials.py: their labels can be read off the text, and splits share no opening."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def three_dials(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return __import__("three_dials")


def written(three_dials: Any, path: Path, split: str, seed: int = 0) -> list[dict[str, Any]]:
    three_dials.write_notes(path, split, 400, seed)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_labels_are_read_back_exactly_from_every_note(three_dials: Any, tmp_path: Path):
    notes = [*written(three_dials, tmp_path / "a", "train"), *written(three_dials, tmp_path / "b", "valid")]
    assert all(three_dials.judge(note["text"]) == note["labels"] for note in notes)
    assert len({tuple(note["labels"].values()) for note in notes}) == 2**3
    assert len({tuple(note["control"].values()) for note in notes}) == 3**3
    assert all(note["control"][name] in (0, label) for note in notes for name, label in note["labels"].items())
    for note in notes:  # an independent reading
        text, labels = note["text"], note["labels"]
        assert (labels["figurative"] > 0) == (" like " in text or " is as " in text)
        things = text.partition(" saw ")[2].partition(".")[0].replace(" and", ",").split(", ")
        assert len(set(things)) == {1: 3, -1: 1}[labels["variety"]]
        assert (labels["formality"] > 0) == (not text.endswith(("!", "later!")))


def test_splits_share_no_opening_and_openings_decide_no_label(three_dials: Any, tmp_path: Path):
    train, valid = (set(three_dials.openings(split)) for split in ("train", "valid"))
    assert not train & valid
    assert len(train | valid) == 20 * 20 * 12
    for split, known in (("train", train), ("valid", valid)):
        for note in written(three_dials, tmp_path / split, split):
            assert f"{note['text'].partition('. ')[0]}." in known
    assert three_dials.judge(min(valid)) == dict.fromkeys(three_dials.DIALS)


def test_notes_follow_from_the_seed(three_dials: Any, tmp_path: Path):
    first = written(three_dials, tmp_path / "a", "train")
    assert written(three_dials, tmp_path / "b", "train") == first
    assert written(three_dials, tmp_path / "c", "train", seed=1) != first
    assert written(three_dials, tmp_path / "d", "valid") != first


def test_a_note_between_two_labels_and_a_text_that_is_none(three_dials: Any):
    note = "A note to Ada about the mill in {}. {} it is cold. I saw a fox, a cart and a {}. {}"
    both = note.format("May", "Kindly note that", "fox", "Cheers!")
    assert three_dials.judge(both) == {"formality": 0.0, "figurative": -1.0, "variety": 0.0}
    for text in (note.format("Spring", "Kindly note that", "fox", "Cheers!"), both[:-1], f"{both} And more."):
        assert three_dials.judge(text) == dict.fromkeys(three_dials.DIALS)
