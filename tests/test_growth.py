"""Growth computes the same function: every preset, mixer and depth, every axis, from weights without structure."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow import slow_where
from subjects import CASES, DISTINCT, KINDS, random_ids
from subjects import build_one_layer as build_anew
from torch import Tensor

from glissando.config import to_dict
from glissando.depth import TiedConfig, TiedDepth
from glissando.errors import ConfigError
from glissando.growth import grow
from glissando.growth.grow import growth_axes
from glissando.mixers import MIXERS, AttentionConfig, SpectralConfig
from glissando.model import LanguageModel
from glissando.series import SeriesModel
from glissando.widening import Grows, Reads, tile

BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}
law = settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: The case's model, one for all tests: growing leaves it as it is.
build = functools.cache(build_anew)
distinct = pytest.mark.parametrize("case", DISTINCT)


def mixers(model: LanguageModel) -> list[str]:
    return [MIXERS.kind_of(options) for options in model.config.mixers]


def has(model: LanguageModel, axis: str) -> bool:
    return any(axis in growth_axes(MIXERS[name]) for name in mixers(model))


def head_size(model: LanguageModel) -> int:
    return next(block.mixer.head_size for block, _ in model.depth.applications())


def axes(model: LanguageModel) -> dict[str, dict[str, Any]]:
    """Each axis that the model has, by itself, by name."""
    c = model.config
    result: dict[str, dict[str, Any]] = {"width 2": {"width": 2}, "width 3": {"width": 3}}
    if c.block.mlp.kind != "none":
        result |= {"ffn": {"ffn": 3}, "width without ffn": {"width": 2, "ffn": 1}}
    if has(model, "heads"):
        result |= {"heads": {"heads": 2}, "width without heads": {"width": 2, "heads": 1}}
    tied = any(isinstance(o, AttentionConfig) and o.keys == "previous" for o in c.mixers)
    if has(model, "head_size") and not tied:
        result |= {"head_size": {"head_size": 2 * head_size(model)}}
    if has(model, "state") and all(o.projections for o in c.mixers if isinstance(o, SpectralConfig)):
        result |= {"state": {"state": 2}}
    result |= {"steps": {"steps": 2}} if isinstance(c.depth, TiedConfig) else {"layers": {"layers": 3}}
    return result | {"vocab": {"vocab": c.vocab_size + 5}}


def together(model: LanguageModel) -> dict[str, Any]:
    """Every axis at once."""
    by: dict[str, Any] = {}
    for one in axes(model).values():
        by |= one
    for name in ("ffn", "heads"):
        if name in by:
            by[name] = 4
    if any(isinstance(o, SpectralConfig) and not o.projections for o in model.config.mixers):
        by.pop("state", None)
    return by


def streamed(model: LanguageModel, ids: Tensor, cuts: list[int]) -> Tensor:
    state, pieces = model.init_state(ids.shape[0]), []
    for a, b in itertools.pairwise([0, *sorted(set(cuts)), ids.shape[1]]):
        if a < b:
            logits, state = model(ids[:, a:b], state)
            pieces.append(logits)
    return torch.cat(pieces, 1)


def own_rounding(model: LanguageModel, ids: Tensor) -> float:
    """How far float32 logits are from float64 ones: at a temperature of 0.01 `tau` magnifies rounding."""
    exact = copy.deepcopy(model).double()
    return float((exact(ids)[0] - model(ids)[0]).abs().max())


class Logits:
    """Those of a model at once, which a grown one is to have for the old vocabulary, at once and streamed."""

    def __init__(self, model: LanguageModel, length: int = 20, seed: int = 0) -> None:
        self.ids = random_ids(model, 2, length, seed)
        with torch.no_grad():
            self.expected = model(self.ids)[0]
            #: relative to 1 or the largest logit
            self.bound = BOUND[self.expected.dtype] * max(1.0, float(self.expected.abs().max()))
            if self.expected.dtype == torch.float32:
                self.bound = max(self.bound, 4 * own_rounding(model, self.ids))

    def assert_of(self, grown: LanguageModel) -> None:
        length, old = self.ids.shape[1], self.expected.shape[-1]
        with torch.no_grad():
            for got in (grown(self.ids)[0], streamed(grown, self.ids, [length // 3, length - 2, length - 1])):
                gap = float((got[..., :old] - self.expected).abs().max())
                assert gap <= self.bound, f"differs by {gap:.1e}, allowed {self.bound:.1e}"


def assert_same(model: LanguageModel, grown: LanguageModel, length: int = 20, seed: int = 0) -> None:
    Logits(model, length, seed).assert_of(grown)


def ways() -> Iterator[Any]:
    """(case, dtype, whether each axis is tried by itself): `make test` tries each axis of each mixer and depth."""
    for case in CASES:
        for dtype, each in ((torch.float64, True), (torch.float64, False), (torch.float32, False)):
            fast = case in KINDS and dtype == torch.float64 and each
            name = f"{case}-{'each axis' if each else str(dtype).removeprefix('torch.')}"
            yield pytest.param(case, dtype, each, marks=() if fast else pytest.mark.slow, id=name)


@pytest.mark.parametrize(("case", "dtype", "each"), list(ways()))
def test_each_axis_by_itself_and_all_together(case: str, dtype: torch.dtype, each: bool):
    """In float32 rounding is all that differs."""
    model = build(case, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits, single = Logits(model), axes(model)
    if not each:
        single = {"width 3": single["width 3"]}
    for name, by in {**single, "together": together(model)}.items():
        grown = grow(model, **by)
        assert grown.num_parameters() > model.num_parameters(), name
        try:
            logits.assert_of(grown)
        except AssertionError as error:
            raise AssertionError(f"{name} {by}: {error}") from None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"growing changed {name} of the old model"


@distinct
@law
@given(data=st.data())
def test_any_growth_is_exact(case: str, data: st.DataObject):
    """Factors of 1 to 3 in any combination, and growing what has grown."""
    model = build(case)
    for seed in range(data.draw(st.integers(1, 2), "growths")):
        # The first draw is the least one: it grows too, and with noise.
        by: dict[str, Any] = {"width": data.draw(st.integers(2 - seed, 3 - seed), "width"), "seed": seed}
        wanted = data.draw(st.sets(st.sampled_from(sorted(together(model))), min_size=1), "axes")
        for name in wanted - {"width"}:
            factor = name in ("heads", "ffn", "state")
            by[name] = data.draw(st.integers(1, 3), name) if factor else together(model)[name]
        grown = grow(model, **by, noise=data.draw(st.sampled_from([0.2, 0.0, 0.9]), "noise"))
        assert_same(model, grown, data.draw(st.integers(3, 12), "length"))
        model = grown


@functools.cache
def grown_together(case: str) -> LanguageModel:
    return grow(build(case), **together(build(case)))


@pytest.mark.parametrize("case", slow_where([case for case in CASES if case not in KINDS], CASES))
def test_a_long_text_and_its_masks(case):
    """Where the fast paths run; padding on the left, where masks are taken."""
    model, grown = build(case), grown_together(case)
    # beyond a block of every kernel; a dense A is applied token by token
    length = 60 if model.position_embedding is not None else 20 if "dense" in case else 70
    assert_same(model, grown, length)
    if "mask" in model.depth.accepts:
        mask = torch.arange(length) >= torch.tensor([[3], [length // 2]])
        ids = random_ids(model, 2, length, 1)
        with torch.no_grad():
            got, expected = grown(ids, mask=mask)[0][..., : model.config.vocab_size], model(ids, mask=mask)[0]
        assert float((got - expected)[mask].abs().max()) < 1e-9


@distinct
def test_a_grown_model_is_what_its_configuration_says(case):
    """What is pinned is in the configuration: a model built from it has the same shapes and, given weights, logits."""
    grown = grown_together(case)
    again = LanguageModel.from_config(to_dict(grown.config)).double().eval()
    again.load_state_dict(grown.state_dict())
    ids = random_ids(build(case), 2, 6, 0)
    with torch.no_grad():
        assert torch.equal(again(ids)[0], grown(ids)[0])


@pytest.mark.parametrize(
    ("case", "by", "why"),
    [
        ("depth:flow", {"steps": 1}, "another approximation of the flow"),
        ("depth:tied", {"layers": 1}, "order of applications in a tied depth"),
        ("depth:discrete", {"steps": 1}, "this one is discrete"),
        ("mixer:spectral-default", {"heads": 2}, "heads 2 was given, and this model's mixer is spectral"),
        ("mixer:attention-default", {"state": 2}, "spectral would"),
        ("preset:continuous-transformer", {"ffn": 2}, "no MLP"),
        ("preset:continuous-transformer", {"state": 2}, "the channels of `spectral` are the width"),
        ("mixer:tau-default", {"head_size": 6}, "multiple of its 4, as keys are tiled"),
        ("mixer:attention-default", {"head_size": 7}, "even with RoPE; got 7"),
        ("mixer:attention-previous", {"head_size": 8}, "cannot grow its head_size 4 to 8"),
        ("mixer:attention-default", {"head_size": 2}, "at least the 4"),
        ("mixer:attention-default", {"vocab": 3}, "at least the 37 tokens"),
        ("mixer:attention-default", {"width": 0}, "width: expected a number of at least 1, got 0"),
        ("mixer:attention-default", {"layers": -1}, "layers: expected a number of at least 0, got -1"),
        ("mixer:attention-default", {"noise": 1.0}, "noise: expected a number less than 1, got 1.0"),
        ("mixer:attention-default", {"noise": "0.2"}, "expected a number, got '0.2'"),
        ("mixer:attention-default", {"noise": None}, "expected a number, got null; leave it out"),
        ("mixer:attention-default", {"width": True}, "a whole number, got True"),
        ("mixer:attention-default", {"layers": 1.5}, "layers: expected a whole number, got 1.5"),
        ("mixer:attention-default", {"layers": None}, "layers: expected a whole number, got null"),
        ("mixer:attention-default", {"head_size": 0}, "at least 1, got 0"),
        ("mixer:attention-default", {"head_size": 6.0}, "whole number, got 6.0"),
        ("mixer:attention-default", {"vocab": 40.0}, "whole number, got 40.0"),
        ("mixer:attention-default", {"seed": 1.5}, "seed: expected a whole number, got 1.5"),
    ],
)
def test_what_cannot_be_exact_says_why(case, by, why):
    with pytest.raises(ConfigError, match=why):
        grow(build(case), **by)


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_noise_is_as_large_as_it_says_and_cancels(copies: int):
    """A deviation of 2 noise / k of the weights', as W / k is, for any number k of copies."""
    generator = torch.Generator().manual_seed(0)
    old = 3 * torch.randn(80, 60, generator=generator, dtype=torch.float64)
    grows = Grows(tile(80, 80), Reads(tile(60, 60 * copies)))
    blank = old.new_zeros(80, 60 * copies)
    noise = grows.value(old, blank, 0.2, generator) - grows.place(old, blank, grows.share)
    assert float(noise.std()) == pytest.approx(2 * 0.2 * float(old.std()) / copies, rel=0.05)
    assert float(noise.view(80, copies, 60).sum(1).abs().max()) < 1e-12


@pytest.mark.parametrize("training", [True, False])
def test_growing_leaves_the_generator_and_the_mode_alone(training: bool):
    model = build_anew("mixer:liquid-default").train(training)
    before = torch.random.get_rng_state()
    assert grow(model, width=2).training == training
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_is_frozen_stays_frozen():
    model = build_anew("preset:transformer-nano", torch.float32)
    model.embedding.requires_grad_(False)
    model.depth.blocks[0].requires_grad_(False)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    grown = grow(model, width=2, layers=1)
    assert {name for name, p in grown.named_parameters() if not p.requires_grad} == frozen


def test_what_is_no_language_model_is_refused():
    model = SeriesModel.from_config({"hidden_size": 8, "inputs": 3, "outputs": 2})
    with pytest.raises(ConfigError, match=r"grow needs a glissando.LanguageModel.*got a SeriesModel"):
        grow(model, width=2)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_dense_state_of_the_published_size_grows():
    """Noise on A would drive the difference of two copies, which is rounding, by exp(22) a token."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "vocab_size": 37, "depth": {"layers": 1}}
    model = LanguageModel.from_preset("liquid-ssm-dense", **size).double().eval()
    assert_same(model, grow(model, width=2), 10)
    assert_same(model, grow(model, state=2, noise=0.9), 10)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_gate_whose_hidden_units_are_no_multiple(width: int):
    """A quarter of the width, rounded down: 10 has 2, and 20, 30 and 50 have 5, 7 and 12."""
    depth = {"layers": 2, "mean_gate": True}
    model = LanguageModel.from_config({"hidden_size": 10, "vocab_size": 37, "mixer": "liquid", "depth": depth}).double()
    assert_same(model, grow(model, width=width))


def test_alternating_mixers_keep_their_places():
    """In a stack new layers go on with the turns; around a flow two more on each side keep them and one does not."""
    options = {"hidden_size": 16, "vocab_size": 37, "mixer": ["attention", "spectral"]}
    stack = LanguageModel.from_config(options | {"depth": {"layers": 3}}).double()
    assert_same(stack, grow(stack, layers=2, width=2))
    flow = {"depth": {"kind": "flow", "layers": 4, "n_steps": 2}}
    model = LanguageModel.from_config(options | flow).double()
    assert_same(model, grow(model, layers=4))
    with pytest.raises(ConfigError, match="add as many layers as keep the order"):
        grow(model, layers=2)


def test_plain_duplication_of_layers_is_not_exact():
    """What the publication speaks of: every block twice."""
    model = build("preset:minimal-transformer")
    twice = LanguageModel.from_config(dict(to_dict(model.config), depth={"layers": 4})).double().eval()
    weights = model.state_dict()
    doubled = {n.replace(f"blocks.{i}.", f"blocks.{2 * i + j}."): w for i in (0, 1) for j in (0, 1) for n, w in
               weights.items() if f"blocks.{i}." in n}  # fmt: skip
    twice.load_state_dict({**weights, **doubled})
    ids = random_ids(model, 4, 20, 0)
    with torch.no_grad():
        assert float((twice(ids)[0] - model(ids)[0]).abs().max()) > 0.1


@pytest.mark.parametrize("case", [*KINDS, "depth:discrete-mean-gate", "depth:discrete-shortcuts", "depth:flow-heun"])
def test_gradients_reach_every_new_layer(case):
    """A layer that starts as the identity trains: its last projections or its a at once, all of it after a step."""
    model = build(case)
    deeper = {"steps": 2} if isinstance(model.depth, TiedDepth) else {"layers": 2}
    grown = grow(model, **deeper)
    fresh = [(n, p) for n, p in grown.named_parameters() if n not in model.state_dict() and p.requires_grad]
    ids = random_ids(model, 2, 8, 0)
    optimizer = torch.optim.SGD(grown.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(grown(ids)[0].flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    assert fresh
    assert [n for n, p in fresh if p.grad is None or not p.grad.abs().any()] == []
