"""lm-eval scores what the library scores, through the server, on the tasks of examples/lm_eval."""

from __future__ import annotations

import json

import pytest
import torch

from glissando.data.base import IGNORED, Batch
from glissando.data.tokenizers import train_bpe
from glissando.evaluation.rows import Row, batches_of
from glissando.evaluation.scoring import score
from glissando.model import LanguageModel
from research.stories.documents import CHOICES, FOLDER, N_ENDINGS, make

LIMIT = 2


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


def test_the_documents_are_what_the_generator_makes():
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.jsonl")}
    assert written == make()
    rows = documents("glissando_endings")
    assert len(rows) == N_ENDINGS
    assert [sum(row["answer"] == place for row in rows) for place in range(CHOICES)] == [N_ENDINGS // CHOICES] * CHOICES
    assert all(len(set(row["endings"])) == CHOICES for row in rows)


def ending_nats(model: LanguageModel, story: str, ending: str) -> float:
    before, whole = model.tokenizer.encode(story), model.tokenizer.encode(story + ending)
    ids = torch.tensor([[model.tokenizer.eos_id, *whole[:-1]]])
    targets = torch.tensor([[IGNORED] * len(before) + whole[len(before) :]])
    return score(model, [Batch(ids, targets, len(ending.encode()))]).nats[0]


@pytest.mark.slow
def test_the_server_answers_lm_eval_as_the_library_scores(model, tmp_path):
    """Through `local-completions`, lm-eval's client of OpenAI's interface."""
    pytest.importorskip("starlette", reason="needs the [serve] extra")
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install -e '.[eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from serving import NAME, serving

    from glissando.hf import fast_tokenizer

    fast_tokenizer(model.tokenizer).save_pretrained(tmp_path)
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    with serving(model) as (_, url):
        arguments = f"model={NAME},base_url={url}/v1/completions,tokenizer={tmp_path},max_length=8192"
        found = simple_evaluate(
            "local-completions", model_args=arguments, tasks=["glissando_endings", "glissando_stories"],
            task_manager=manager, limit=LIMIT, log_samples=False,
        )["results"]  # fmt: skip
    right = [0, 0]
    for document in documents("glissando_endings")[:LIMIT]:
        nats = [ending_nats(model, document["story"], ending) for ending in document["endings"]]
        shares = [cost / len(ending) for cost, ending in zip(nats, document["endings"], strict=True)]
        for kind, costs in enumerate((nats, shares)):
            right[kind] += costs.index(min(costs)) == document["answer"]
    assert found["glissando_endings"]["acc,none"] == pytest.approx(right[0] / LIMIT)
    assert found["glissando_endings"]["acc_norm,none"] == pytest.approx(right[1] / LIMIT)
    rows = []
    for document in documents("glissando_stories")[:LIMIT]:
        ids = model.tokenizer.encode(document["story"])
        rows.append(Row([model.tokenizer.eos_id, *ids[:-1]], ids, len(document["story"].encode())))
    expected = score(model, batches_of(rows)).bits_per_byte
    assert found["glissando_stories"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-6)
