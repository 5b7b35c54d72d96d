"""The liquid benchmarks, on small models in the place of those that they measure."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import liquid as bench
from benchmarks.rows import ROWS, select
from glissando.errors import GlissandoError
from glissando.model import LanguageModel
from research.published.liquid_ssm import PublishedLiquid

NANO = "continuous-transformer-nano"


def test_rows():
    training = [f"liquid-training-{case}" for case in ("512", "8192", "nano-512", "nano-8192")]
    rows = ["liquid-published", "liquid-dense", *training, "liquid-memory", "liquid-cfc"]
    assert select(["liquid"]) == rows
    assert set(rows) <= set(ROWS)


@pytest.mark.parametrize(("goal", "met", "verdict"), [(1e9, False, "1e+09x: MISSED"), (1e-9, True, "1e-09x: met")])
def test_beside_the_published_form(goal, met, verdict):
    form = PublishedLiquid(256, 16, 8, layers=1, length=32)
    row = bench.beside_published(NANO, form, 24, 1, goal)
    assert row.ratio == pytest.approx(row.ours / row.peer)
    assert row.met is met
    assert verdict in row.line()
    assert "T 24" in row.line()
    assert "published form, T 16" in row.line()


def test_the_dense_dynamics_have_no_goal():
    row = bench.beside_published(NANO, PublishedLiquid(256, 16, 8, layers=1, length=32), 16, 1)
    assert (row.goal, row.met) == ("none", True)


@pytest.mark.parametrize("shape", [{}, {"vocab_size": 1000, "tied_head": True, "depth": {"layers": 5}}])
def test_a_transformer_of_the_same_size(shape):
    actual = LanguageModel.from_preset("tauformer-nano", **shape)
    peer = bench.of_the_size(actual, "transformer-nano")
    assert abs(peer.num_parameters() / actual.num_parameters() - 1) < 0.01
    assert peer.config.vocab_size == actual.config.vocab_size
    assert peer.config.tied_head == actual.config.tied_head
    assert peer.depth.blocks[0].mlp.down.weight.shape[1] % 8 == 0
    assert peer.embedding.weight.device.type == "cpu"


def test_a_transformer_that_cannot_be_so_small_is_reported():
    actual = LanguageModel.from_preset("transformer-nano", depth={"layers": 1})
    with pytest.raises(GlissandoError, match=r"cannot have the 2\d\d,\d\d\d parameters of its peer"):
        bench.of_the_size(actual, "transformer-nano")


@pytest.mark.slow
def test_beside_attention():
    row = bench.beside_attention(bench.Pair(NANO, "transformer-nano", 64, 1e-9), rounds=1)
    assert row.met
    assert row.ratio == pytest.approx(row.ours / row.peer)
    assert "parameters; ours" in row.peer_name


def test_memory_is_linear_or_it_is_reported(capsys):
    """With 10 MB at any length, which no difference contains."""
    linear = bench.growth_of_memory(NANO, (1000, 2000, 4000), lambda name, length: 10**7 + 2048 * length)
    assert (linear.ours, linear.peer, linear.ratio, linear.met) == (2, 2, 1, True)
    assert "at T 4,000" in capsys.readouterr().out
    square = bench.growth_of_memory(NANO, (1000, 2000, 4000), lambda name, length: 10**7 + length**2)
    assert square.ratio == pytest.approx(2)
    assert not square.met


@pytest.mark.serial
@pytest.mark.slow
def test_a_peak_is_that_of_a_process_of_its_own():
    """A step keeps at least its logits, and what its loss makes of them."""
    length = 2048
    kept = len(b"1" * 2**30)  # by the process that asks, and not to be counted
    peak = bench.peak_in_a_process(NANO, length)
    assert kept
    assert 2 * 4 * 256 * length < peak < 2**30


def test_beside_cfc():
    pytest.importorskip("ncps")
    mixer = LanguageModel.from_preset(NANO).depth.blocks[0].mixer
    row = bench.beside_cfc(mixer, 128, 16, rounds=1)
    assert row.ratio == pytest.approx(row.ours / row.peer)
    assert row.met is (row.ratio >= 3)
    assert "CfC (" in row.line()


def test_the_layer_beside_cfc_has_been_started(monkeypatch):
    pytest.importorskip("ncps")
    kept = []
    monkeypatch.setattr(bench, "beside_cfc", lambda mixer, *sizes: kept.append(mixer))
    bench.cfc(1)
    y = kept[0](torch.randn(2, 8, 256))[0].detach()
    assert y.isfinite().all()
    assert 0 < float(y.abs().max()) < 100


def test_a_layer_is_trained():
    mixer = LanguageModel.from_preset(NANO).depth.blocks[0].mixer
    before = {name: p.detach().clone() for name, p in mixer.named_parameters()}
    assert bench.layer_trainer(mixer, torch.randn(2, 8, 128))() > 0
    assert any(not torch.equal(before[name], p) for name, p in mixer.named_parameters())


def test_a_missing_peer_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "ncps", None)
    monkeypatch.setitem(sys.modules, "ncps.torch", None)
    with pytest.raises(GlissandoError, match="pip install ncps"):
        bench.cfc_class()
