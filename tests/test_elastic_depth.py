"""A flow that was trained with a random number of steps: what it draws, and what is read."""

from __future__ import annotations

import csv
import importlib
import math
from typing import Any

import pytest
import torch
from tolerances import assert_close

from glissando.config import from_dict
from glissando.data.stories.stories import generate
from glissando.data.tokenizers import ByteTokenizer
from glissando.depth import register_depth
from glissando.model import LanguageModel, ModelConfig
from research.stories.costs import byte_costs
from research.where_bits_go import stories

FLOW: dict[str, Any] = {"kind": "flow", "layers": 2, "n_steps": 4, "shortcuts": True}
IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def elastic() -> Any:
    """The program, whose depth is registered for this test alone."""
    module = importlib.import_module("research.elastic_depth")
    register_depth("elastic", module.ElasticConfig)(module.ElasticDepth)
    return module


def small(**depth: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = from_dict(ModelConfig, {"hidden_size": 16, "vocab_size": 256, "depth": FLOW | depth}, "model")
    model = LanguageModel(config, ByteTokenizer()).double().eval()
    with torch.no_grad():
        for parameter in model.depth.time.parameters():
            parameter.normal_()
        model.depth.alpha.fill_(0.5)
    return model


def test_an_elastic_flow_that_ignores_its_number_of_steps_is_a_flow(elastic):
    flow, model = small(), small(kind="elastic")
    weights = flow.state_dict()
    weights["depth.time.0.weight"] = torch.cat([weights["depth.time.0.weight"], torch.zeros(16, 1)], 1)
    model.load_state_dict(weights)
    for n in elastic.STEPS:
        setting = elastic.Setting("euler", n)
        assert_close(*(elastic.solved_with(m, setting)(IDS)[0] for m in (model, flow)))


@pytest.mark.parametrize("drawn", [1, 8])
def test_consistency_adds_the_gradient_of_the_distance_from_the_most_steps(elastic, drawn, monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor([1, 8].index(drawn)))
    models = [small(kind="elastic", loops=True, drawn=[1, 8], consistency=c).train() for c in (0.0, 0.5)]
    ends: list[torch.Tensor] = []
    for model in models:
        integrated = model.depth.solve
        monkeypatch.setattr(model.depth, "solve", lambda *args, solve=integrated: ends.append(solve(*args)) or ends[-1])
        model(IDS)[0].logsumexp(-1).mean().backward()
    weights = [list(model.depth.field.parameters()) for model in models]
    added = [(b.grad - a.grad) for a, b in zip(*weights, strict=True)]
    assert_close(ends[0], ends[1])
    if drawn == 8:
        assert all(float(gradient.abs().max()) < 1e-12 for gradient in added)
        return
    model = models[0]
    monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor(1))
    model(IDS)
    monkeypatch.setattr(torch, "randint", lambda *_: torch.tensor(0))
    model(IDS)
    apart = 1 - torch.nn.functional.cosine_similarity(ends[-1], ends[-2].detach(), dim=-1).mean()
    expected = torch.autograd.grad(0.5 * apart, weights[0], allow_unused=True)
    for gradient, value in zip(expected, added, strict=True):
        assert_close(torch.zeros_like(value) if gradient is None else gradient, value)


def test_the_number_of_steps_reaches_the_field(elastic):
    model = small(kind="elastic")
    flat = small(kind="elastic")
    flat.load_state_dict(model.state_dict())
    with torch.no_grad():  # what log2 of four steps adds, added to all
        flat.depth.time[0].bias += 2 * flat.depth.time[0].weight[:, 1]
        flat.depth.time[0].weight[:, 1] = 0
    assert_close(model(IDS)[0], flat(IDS)[0])
    two = elastic.Setting("euler", 2)
    assert not torch.allclose(elastic.solved_with(model, two)(IDS)[0], elastic.solved_with(flat, two)(IDS)[0])


def test_loops_add_the_field_whole(elastic):
    loops, flow = small(kind="elastic", loops=True, n_steps=3), small(kind="elastic", n_steps=3)
    flow.load_state_dict(loops.state_dict())
    with torch.no_grad():
        flow.depth.alpha.mul_(3)
    assert_close(loops(IDS)[0], flow(IDS)[0])


def test_training_draws_each_number_and_reading_none(elastic):
    model = small(kind="elastic", drawn=[1, 3]).train()
    drawn = set()
    for _ in range(20):
        model(IDS)
        drawn.add(model.depth.time.steps)
    assert drawn == {1, 3}
    state = torch.get_rng_state()
    model.eval()(IDS)
    assert model.depth.time.steps == 4
    assert torch.equal(state, torch.get_rng_state())


def test_tokens_cost_what_their_stories_do_and_a_flow_that_stands_still_needs_one_step(elastic):
    model = small()
    with torch.no_grad():
        model.depth.alpha.fill_(30)
        model.norm.weight.mul_(100)
    table = elastic.read(model, list(stories(2)))
    for number in range(2):
        cost = table[table.story == number].cost.sum()
        assert math.isclose(cost, sum(byte_costs(generate(0, "valid", number).text)), rel_tol=1e-9)
    assert (table.steps[table.moved > elastic.TOLERANCE] > 1).all()
    assert set(table.steps) == {1, 2, 4, 8}
    still = small()
    with torch.no_grad():
        still.depth.alpha.zero_()
    table = elastic.read(still, list(stories(1)))
    assert (table.steps == 1).all()
    assert (table.bits_1 == table.bits_8).all()
    rows = elastic.summary(table).set_index("group")
    ranges = rows.loc[["certain", "up to 1 bit", "1 to 3 bits", "above 3 bits"]]
    assert ranges.tokens.sum() == rows.tokens["all"] == len(table)
    assert math.isclose(ranges.bits_4.sum(), rows.bits_4["all"])
    assert math.isnan(rows.rank_cost["all"])  # nothing moves


@pytest.mark.slow
def test_the_program(tmp_path, elastic):
    for models in (["fixed-4", "looped"], ["looped"]):  # the second reads the run again
        elastic.main(["--quick", "--out", str(tmp_path), "--models", *models, "--seeds", "3"])
    rows = list(csv.DictReader((tmp_path / "elastic.csv").read_text().splitlines()))
    assert {(row["model"], row["seed"]) for row in rows} == {("fixed-4", "3"), ("looped", "3")}
    assert len({(row["model"], row["group"]) for row in rows}) == len(rows)
