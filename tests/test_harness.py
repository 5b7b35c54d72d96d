"""lm-eval scores what the library scores, on the bundled tasks and without a network."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from glissando.cli import main
from glissando.data.base import IGNORED, Batch
from glissando.data.tokenizers import train_bpe
from glissando.errors import MissingExtraError
from glissando.evaluation.rows import Row, batches_of
from glissando.evaluation.scoring import score
from glissando.evaluation.tasks import FOLDER, bundled
from glissando.model import LanguageModel
from research.stories.documents import CHOICES, N_ENDINGS, make

LIMIT = 6


def documents(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def model(request) -> LanguageModel:
    torch.manual_seed(1)
    bpe = train_bpe((row["story"] for row in documents("glissando_stories")), 400) if request.param == "bpe" else None
    size = 256 if bpe is None else bpe.vocab_size
    inner = LanguageModel.from_preset("transformer-plus-nano", hidden_size=16, depth={"layers": 1}, vocab_size=size)
    inner.tokenizer = bpe or inner.tokenizer
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return inner.double().eval()


@pytest.fixture(scope="module")
def results(model) -> dict:
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    from glissando.evaluation.harness import run_tasks

    return run_tasks(model, ["glissando_stories", "glissando_endings"], limit=LIMIT, batch_size=4)


def test_the_documents_are_what_the_generator_makes():
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.jsonl")}
    assert written == make()
    assert bundled() == ["glissando_endings", "glissando_stories"]
    rows = documents("glissando_endings")
    assert len(rows) == N_ENDINGS
    assert [sum(row["answer"] == place for row in rows) for place in range(CHOICES)] == [N_ENDINGS // CHOICES] * CHOICES
    assert all(len(set(row["endings"])) == CHOICES for row in rows)


def test_rolling_perplexity_is_our_bits_per_byte(model, results):
    tokenizer = model.tokenizer
    rows, n_bytes = [], 0
    for document in documents("glissando_stories")[:LIMIT]:
        ids = tokenizer.encode(document["story"])
        rows.append(Row([tokenizer.eos_id, *ids[:-1]], ids, len(document["story"].encode())))
        n_bytes += len(document["story"].encode())
    actual = score(model, batches_of(rows))
    assert actual.n_bytes == n_bytes
    got = results["glissando_stories"]
    assert got["bits_per_byte"] == pytest.approx(actual.bits_per_byte, rel=1e-9)
    assert got["byte_perplexity"] == pytest.approx(2**actual.bits_per_byte, rel=1e-9)


def test_multiple_choice_picks_what_our_scores_pick(model, results):
    right, normed = 0, 0
    for document in documents("glissando_endings")[:LIMIT]:
        nats = [ending_nats(model, document["story"], ending) for ending in document["endings"]]
        right += nats.index(min(nats)) == document["answer"]
        shares = [cost / len(ending) for cost, ending in zip(nats, document["endings"], strict=True)]
        normed += shares.index(min(shares)) == document["answer"]
    assert results["glissando_endings"]["acc"] == pytest.approx(right / LIMIT)
    assert results["glissando_endings"]["acc_norm"] == pytest.approx(normed / LIMIT)


def ending_nats(model: LanguageModel, story: str, ending: str) -> float:
    before, whole = model.tokenizer.encode(story), model.tokenizer.encode(story + ending)
    ids = torch.tensor([[model.tokenizer.eos_id, *whole[:-1]]])
    targets = torch.tensor([[IGNORED] * len(before) + whole[len(before) :]])
    return score(model, [Batch(ids, targets, len(ending.encode()))]).nats[0]


def test_log_likelihoods_are_ours_to_the_last_digit(model):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    from lm_eval.api.instance import Instance

    from glissando.evaluation.harness import GlissandoLM

    pairs = [(row["story"], ending) for row in documents("glissando_endings")[:2] for ending in row["endings"]]
    pairs += [("a story ", "that goes on"), ("one", " b")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    got = [value for value, _ in GlissandoLM(model, batch_size=3).loglikelihood(requests, disable_tqdm=True)]
    # A space that ends a context is scored with what follows.
    pairs[-2] = ("a story", " that goes on")
    for value, pair in zip(got, pairs, strict=True):
        assert value == pytest.approx(-ending_nats(model, *pair), rel=1e-9)


def test_generation_stops_and_is_ours(model):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    from lm_eval.api.instance import Instance

    from glissando import generate
    from glissando.evaluation.harness import GlissandoLM

    asked = {"until": ["\x07\x07"], "max_gen_toks": 6, "do_sample": False}
    prompts = [model.tokenizer.decode([model.tokenizer.eos_id]) + "Once upon a time", "The"]
    requests = [Instance("generate_until", {}, (prompt, dict(asked)), n) for n, prompt in enumerate(prompts)]
    got = GlissandoLM(model, batch_size=2).generate_until(requests, disable_tqdm=True)
    assert got == generate(model, prompts, max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "run"
    LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}).save(path)
    return path


@pytest.mark.slow
def test_the_verb_runs_tasks(run, capsys):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    assert main(["evaluate", str(run), "--tasks", "glissando_endings,glissando_stories", "--limit", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert 0 <= shown["glissando_endings"]["acc"] <= 1
    assert shown["glissando_stories"]["bits_per_byte"] == pytest.approx(8, abs=0.5)
    assert math.log2(shown["glissando_stories"]["byte_perplexity"]) == pytest.approx(
        shown["glissando_stories"]["bits_per_byte"]
    )
    assert main(["evaluate", str(run), "--tasks", "glissando_endings", "--limit", "2"]) == 0
    assert "glissando_endings        acc " in capsys.readouterr().out
    for wrong, said in [
        (["--tasks", "glissando_ending"], "Did you mean 'glissando_endings'?"),
        (["--tasks", "glissando_endings", "--limit", "0"], "--limit must be at least 1"),
    ]:
        assert main(["evaluate", str(run), *wrong]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error) < 1000  # and not the names of every task of lm-eval


def test_git_has_no_say_outside_a_checkout(run, tmp_path, monkeypatch, capfd):
    """lm-eval asks it for a commit, and its complaint went to the terminal."""
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert main(["evaluate", str(run), "--tasks", "glissando_endings", "--limit", "1"]) == 0
    assert "fatal" not in capfd.readouterr().err


def test_options_that_do_not_go_together_are_refused(run, capsys):
    for wrong, said in [
        (["--tasks", "glissando_endings", "--file", "x.txt"], "leave out --file"),
        (["--limit", "3"], "--limit has no effect without --tasks"),
    ]:
        assert main(["evaluate", str(run), *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "glissando.evaluation.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtraError, match=r"-e '\.\[eval\]'"):
        import glissando.evaluation.harness  # noqa: F401


def test_the_server_answers_lm_eval_as_the_run_does(model, tmp_path):
    """Through `local-completions`, lm-eval's client of OpenAI's interface."""
    pytest.importorskip("fastapi", reason="needs the [serve] extra")
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from serving import NAME, serving

    from glissando.evaluation.harness import FOLDER, run_tasks
    from glissando.hf import fast_tokenizer

    fast_tokenizer(model.tokenizer).save_pretrained(tmp_path)
    tasks = ["glissando_endings", "glissando_stories"]
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    with serving(model) as (_, url):
        arguments = f"model={NAME},base_url={url}/v1/completions,tokenizer={tmp_path},max_length=8192"
        result = simple_evaluate(
            "local-completions", model_args=arguments, tasks=tasks, task_manager=manager, limit=2, log_samples=False
        )
    expected = run_tasks(model, tasks, limit=2)
    for task, metric in (("glissando_endings", "acc_norm"), ("glissando_stories", "bits_per_byte")):
        assert result["results"][task][f"{metric},none"] == pytest.approx(expected[task][metric], rel=1e-6)
