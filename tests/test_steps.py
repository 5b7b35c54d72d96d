"""A flow solved otherwise than it was trained: the orders of the solvers, the same weights, the ends of the flow."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_close
from training_runs import configuration

import glissando
from glissando.data.corpora import build_corpus
from glissando.depth.solvers import TABLEAUS
from glissando.model import LanguageModel
from glissando.training.fit import train
from research.flow_steps import Setting, distances, flow_ends, one_text, sample, solved_with
from research.steering.activation_addition import changed, places

FLOW = {"kind": "flow", "layers": 2, "n_steps": 3, "control": ["mood", "speech"], "alpha": 1.0}
TEXT = {"model.depth": FLOW, "training": {"steps": 3, "log_every": 1}}
STORIES = {"data": {"kind": "stories", "labelled": True, "valid_rows": 6}}


def flowing(**depth: object) -> LanguageModel:
    """With weights of a size at which the solvers differ."""
    model = LanguageModel.from_config({"hidden_size": 16, "init": "torch", "depth": FLOW | depth})
    return model.eval()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Labelled stories."""
    return build_corpus(configuration(tmp_path_factory.mktemp("stories"), STORIES).data)


def test_distances_fall_by_the_order_of_each_method(tmp_path):
    row = one_text(sample(build_corpus(configuration(tmp_path).data), 50)[0])
    for method, tableau in TABLEAUS.items():
        few, many = (Setting(method, n) for n in ((2, 4) if tableau.order == 4 else (4, 8)))
        gap = distances(flowing(), [few, many], row)
        assert gap[few] / gap[many] == pytest.approx(2**tableau.order, rel=0.35), method
        assert 1e-9 < gap[many] < 0.2, method


def test_another_setting_has_the_same_weights_and_computes_what_a_model_loaded_so_does(tmp_path):
    run = train(configuration(tmp_path, TEXT), tmp_path / "run")
    model, other = glissando.load(run.path), glissando.load(run.path, {"depth.n_steps": 2, "depth.method": "heun"})
    variant = solved_with(model, Setting("heun", 2))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(variant(ids)[0], other(ids)[0])
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(model.parameters(), variant.parameters(), strict=True))


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_ends_of_the_flow(layers: int, corpus):
    """H(0) is what the blocks before it leave, and the blocks after it make the logits of H(1)."""
    model = flowing(layers=layers).double()
    batch = sample(corpus, 200)[0]
    start, end = flow_ends(solved_with(model, Setting("euler", 3)), batch)
    ids, depth = batch.ids[:, :128], model.depth
    with torch.no_grad():
        x = model.embedding(ids)
        for block in depth.before:
            x, _ = block(x)
        assert_close(start, x, "H(0)")
        for block in depth.after:
            end, _ = block(end)
        assert_close(model.logits(model.norm(end)), model(ids, control=batch.control.double())[0], "logits")


@pytest.mark.parametrize("layers", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_shortcut_behind_the_flow_is_not_its_end(layers: int, corpus):
    """A flow of speed 0 ends where it starts, whatever the embedding adds before and after it."""
    model = flowing(layers=layers, shortcuts=True).double()
    with torch.no_grad():
        model.depth.alpha.zero_()
        model.depth.shortcuts.normal_()
    batch = sample(corpus, 200)[0]
    start, end = flow_ends(solved_with(model, Setting("euler", 3)), batch)
    assert torch.equal(start, end)
    assert all(math.isnan(gap) for gap in distances(model, [Setting("euler", 3)], batch).values())
    (place,) = [place for name, place in places(model).items() if name == "flow"]
    seen: list[torch.Tensor] = []
    with changed(place, lambda x: seen.append(x) or x):
        model(batch.ids[:, :128], control=batch.control.double())
    assert_close(seen[0], end, "the place `flow`")


def test_a_sample_is_spread_and_counts_its_bytes(corpus):
    whole = list(corpus.batches("valid"))
    every = sample(corpus, 10**6)
    assert [batch.n_bytes for batch in every] == [batch.n_bytes for batch in whole]
    few = sample(corpus, whole[1].n_bytes)
    assert sum(batch.n_bytes for batch in few) <= 2 * whole[1].n_bytes
    assert len(few[0].ids) < 2 or len(few) == 1
    for batch in few:
        assert batch.n_bytes == int((batch.targets >= 0).sum())
        assert len(batch.ids) == len(batch.mask) == len(batch.control)
