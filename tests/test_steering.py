"""The dial's figures against cases whose answer is known, and the verb as a user meets it."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from training_runs import configuration

from glissando.cli import main
from glissando.data.stories import StoriesCorpus
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import ConfigError
from glissando.evaluation.scoring import score
from glissando.evaluation.steering import Cost, Dials, Sweep, Trial, crossing_point, sweep, trial
from glissando.generation import generate
from glissando.model import LanguageModel
from glissando.training.fit import train
from research.steering.pairs import PairGrid, pair_grids

U = (-1.0, 0.0, 1.0)
COSTS = [Cost(1.0, 2.0), Cost(0.9, 1.8), Cost(1.1, 2.2)]
FLOW = {"kind": "flow", "layers": 0, "n_steps": 1, "control": ["mood", "speech"]}


def made(labels: list[list[float]], base: Cost | None = None) -> Sweep:
    texts = [["x"] * len(row) for row in labels]
    return Sweep("mood", U, np.array(labels, dtype=float), texts, COSTS, Cost(0.9, 1.9), base)


def small_model() -> LanguageModel:
    return LanguageModel.from_config({"hidden_size": 16, "depth": FLOW}).eval()


def small_trial(model: LanguageModel, **options: int) -> Trial:
    corpus = StoriesCorpus(ByteTokenizer(10), seq_len=64, batch_size=2, valid_rows=3, labelled=True)
    model.tokenizer = corpus.tokenizer
    return trial(corpus, **{"prompts": 3, "max_tokens": 8, **options})


def test_a_dial_that_works():
    dial = made([[-1, -1, -0.5, -1], [0, 0.5, -0.5, 0], [1, 1, 0.5, 1]])
    assert dial.success(1.0) == dial.success(-1.0) == (4, 4)
    assert dial.anti_steerable() == 0
    assert dial.rank_correlation() == pytest.approx(1)
    at, low, high = dial.crossing()
    assert at == pytest.approx(0)
    assert low <= at <= high


def test_a_dial_that_is_mounted_backward():
    dial = made([[1, 1, 1], [0, 0, 0], [-1, -1, -1]])
    assert dial.success(1.0) == (0, 3)
    assert dial.anti_steerable() == 1
    assert dial.rank_correlation() == pytest.approx(-1)
    assert math.isnan(dial.crossing()[0])


def test_no_evidence_is_no_success():
    dial = made([[math.nan, -1], [0, 0], [math.nan, 1]])
    assert dial.success(1.0) == (1, 2)
    assert dial.as_dict()["evidence"] == [0.5, 1.0, 0.5]


def test_spearman_shares_the_ranks_of_equals():
    """By hand: ranks 0, 1, 2 and 0.5, 0.5, 2 correlate by 1.5 / sqrt(2 * 1.5)."""
    assert made([[0.5], [0.5], [1]]).rank_correlation() == pytest.approx(1.5 / math.sqrt(2 * 1.5))
    assert math.isnan(made([[0.5], [0.5], [0.5]]).rank_correlation())


def test_the_crossing_is_that_of_the_rising_curve_nearest_to_the_means():
    assert crossing_point(np.array([-1.0, 0, 1]), np.array([-1.0, 1, 3])) == pytest.approx(-0.5)
    # 1 and -2 become -0.5 and -0.5: a dip is not a second crossing to choose from
    assert crossing_point(np.array([-1.0, -0.5, 0, 1]), np.array([-1.0, 1, -2, 1])) == pytest.approx(1 / 3)
    assert crossing_point(np.array([-1.0, -0.5, 0.5, 1]), np.array([-1.0, 0, 0, 1])) == 0
    assert math.isnan(crossing_point(np.array([-1.0, 1]), np.array([1.0, 2])))
    assert math.isnan(crossing_point(np.array([-1.0, 1]), np.array([1.0, -1])))


def test_the_cost_is_a_ratio_of_perplexities():
    """By hand: e^2.2 against e^1.9 and against e^1.8."""
    figures = made([[-1], [0], [1]], base=Cost(0.9, 1.8)).as_dict()
    assert figures["perplexity"] == pytest.approx([math.exp(2.0), math.exp(1.8), math.exp(2.2)])
    assert figures["perplexity_against_uncontrolled"][2] == pytest.approx(math.exp(0.3))
    assert figures["perplexity_against_base"][2] == pytest.approx(math.exp(0.4))
    assert figures["perplexity_at_0_against_base"] == pytest.approx(1.0)
    assert made([[-1], [0], [1]]).as_dict()["perplexity_against_base"] is None


def test_a_trial_reads_and_writes_as_evaluate_and_generate_do():
    model = small_model()
    task = small_trial(model, cost_rows=0)
    control = {"speech": 1.0}
    said = generate(model, task.prompts, max_tokens=8, control=control)
    assert task.write(model, control) == [a + b for a, b in zip(task.prompts, said, strict=True)]
    whole = score(model, (batch._replace(control=None) for batch in task.corpus.batches("valid")))
    cost = task.read(model)
    assert (cost.bits_per_byte, cost.nats) == (pytest.approx(whole.bits_per_byte), pytest.approx(whole.loss))
    steered = score(model, (b._replace(control=torch.tensor([[0.0, 1.0]] * len(b.ids))) for b in _valid(task)))
    assert task.read(model, control).nats == pytest.approx(steered.loss)
    assert steered.loss != whole.loss
    assert len(small_trial(model, cost_rows=2).held_out) == 2


def _valid(task: Trial) -> list:
    return list(task.corpus.batches("valid"))


def test_what_was_written_at_a_setting_is_not_written_again():
    model = small_model()
    dials = Dials(model, small_trial(model))
    swept = sweep(dials, "mood", U)
    assert swept.labels.shape == (3, 3)
    pairs = pair_grids(dials, ["mood", "speech"])
    assert [pair.names for pair in pairs] == [("mood", "speech")]
    assert pairs[0].labels.shape == (2, 3, 3, 3)
    assert swept.texts[0] is dials.texts({"mood": -1.0, "speech": 0.0})
    assert np.array_equal(pairs[0].labels[0, :, 1], swept.labels, equal_nan=True)


def test_in_a_pair_each_dial_is_turned_to_its_own_value():
    def judge(texts: list[str], name: str) -> np.ndarray:
        return np.array([json.loads(text)[name] for text in texts])

    dials = SimpleNamespace(texts=lambda control: [json.dumps(control)] * 3, trial=SimpleNamespace(judge=judge))
    (grid,) = pair_grids(dials, ["mood", "speech"])
    for i, u in enumerate((-1.0, 0.0, 1.0)):
        assert (grid.labels[0, i] == u).all()
        assert (grid.labels[1, :, i] == u).all()


def test_both_dials_of_a_pair_must_obey():
    """Prompts (columns): one whose text obeys both dials everywhere, one that obeys the first alone, one silent."""
    u = np.array(U)
    first = np.stack([np.tile(u[:, None], 3), np.tile(u[:, None], 3), np.full((3, 3), math.nan)], -1)
    second = np.stack([np.tile(u[None], (3, 1)), np.full((3, 3), -1.0), np.full((3, 3), math.nan)], -1)
    grid = PairGrid(("mood", "speech"), U, np.stack([first, second]))
    assert grid.means()[0, :, 0] == pytest.approx([-2 / 3, 0, 2 / 3])
    third = 1 / 3
    expected = [[2 * third, 2 * third, third], [2 * third, math.nan, third], [2 * third, 2 * third, third]]
    assert grid.success() == pytest.approx(np.array(expected), nan_ok=True)
    assert grid.as_dict()["mean_speech"][0] == pytest.approx([-2 / 3, -1 / 3, 0])


@pytest.mark.parametrize("values", [[0.0, 1.0], [-1.0, 0.0], [-1.0, math.inf], []])
def test_a_pair_needs_both_sides(values: list[float]):
    model = small_model()
    with pytest.raises(ConfigError, match="below 0 and one above"):
        pair_grids(Dials(model, small_trial(model)), ["mood", "speech"], values)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"prompts": 1}, "2 prompts"), ({"max_tokens": 0}, "max_tokens"), ({"cost_rows": -1}, "cost_rows")],
)
def test_a_trial_that_makes_no_sense(options: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        small_trial(small_model(), **options)


def trained(folder, **stories: object):
    data = {"data": {"kind": "stories", "seq_len": 64, "batch_size": 2}}
    labelled = {"data": {"labelled": True, "valid_rows": 2, **stories}}
    return train(configuration(folder, data, labelled, {"model.depth": FLOW, "training": {"steps": 2}}), folder / "run")


def recorded(out) -> dict:
    """steering.json, which is strict JSON: no NaN."""

    def refuse(name: str):
        raise AssertionError(name)

    return json.loads((out / "steering.json").read_text(), parse_constant=refuse)


COMMAND = ["--prompts", "2", "--max_tokens", "8", "--cost_rows", "2", "--values", "[-1, 0, 1]"]


@pytest.mark.slow
def test_the_verb_writes_tables_texts_and_pictures(tmp_path, capsys):
    trained(tmp_path)
    out, command = tmp_path / "dial", ["steer", str(tmp_path / "run"), *COMMAND]
    assert main([*command, "--out", str(out)]) == 0
    figures = recorded(out)
    assert [dial["dial"] for dial in figures["dials"]] == ["mood", "speech"]
    assert figures["dials"][0]["bits_per_byte_uncontrolled"] > 0
    assert figures["perplexity_at_0_against_base"] is None
    assert len((out / "texts.jsonl").read_text().splitlines()) == 2 * 3 * 2
    for picture in ("mood.png", "speech.png"):
        assert (out / picture).read_bytes()[:4] == b"\x89PNG"
    assert "success at +1" in capsys.readouterr().out


def test_mistakes_are_reported_before_anything_is_written(tmp_path, capsys):
    trained(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    shutil.copytree(tmp_path / "run", tmp_path / "run" / "base")
    command, new = ["steer", str(tmp_path / "run"), "--prompts", "2"], ["--out", str(tmp_path / "b")]
    for wrong, message in (
        (["--out", str(tmp_path / "full")], "nothing is overwritten"),
        ([], "--out is missing"),
        ([*new, "--values", "[0, 1]"], "needs the values -1, 0 and 1"),
        ([*new, "--dials", "mod"], "Did you mean 'mood'"),
        ([*new, "--cost_rows", "-1"], "at least 0 (0: all), got -1"),
    ):
        assert main([*command, *wrong]) == (1 if message.endswith("not empty") or "overwritten" in message else 2)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_pairs_and_baselines_are_measured_by_the_program_of_research(tmp_path, capsys, monkeypatch):
    from research.steering.__main__ import main as measure

    monkeypatch.setattr("research.steering.baselines.TEXTS", 3)
    trained(tmp_path, valid_rows=6)
    command = [str(tmp_path / "run"), *COMMAND]
    for wrong, message in (
        (["--pair_values", "[1]"], "below 0 and one above"),
        (["--strengths", "[0]"], "positive numbers"),
    ):
        with pytest.raises(ConfigError, match=message):
            measure([*command, *wrong, "--out", str(tmp_path / "a")])
    measure([*command, "--out", str(tmp_path / "a")])
    assert recorded(tmp_path / "a")["comparisons"] == []
    assert recorded(tmp_path / "a")["pairs"][0]["dials"] == ["mood", "speech"]
    printed = capsys.readouterr().out
    assert "turned at once" in printed
    assert "they need the uncontrolled base" in printed
    shutil.copytree(tmp_path / "run", tmp_path / "run" / "base")
    with pytest.raises(ConfigError, match="selection_prompts must be at least 2"):
        measure([*command, "--selection_prompts", "1", "--out", str(tmp_path / "b")])
    command += ["--selection_prompts", "2", "--strengths", "[1]"]
    measure([*command, "--dials", "mood", "--out", str(tmp_path / "b")])
    (comparison,) = recorded(tmp_path / "b")["comparisons"]
    assert [baseline["name"] for baseline in comparison["baselines"]] == ["prompt-prefixing", "activation addition"]
    assert "beside steering without one" in capsys.readouterr().out


def test_a_model_without_dials_is_reported(tmp_path, capsys):
    train(configuration(tmp_path, {"training": {"steps": 1}}), tmp_path / "run")
    assert main(["steer", str(tmp_path / "run"), "--out", str(tmp_path / "b")]) == 2
    assert "has no dials" in capsys.readouterr().err
