"""Drawing: the compiled form and the tensor form take the same token at the same number, always."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glissando.errors import ConfigError
from glissando.kernels.drawing import NOT_FINITE
from glissando.sampling import RowSampler, Sampler, Sampling

#: logits that coincide, that differ in the last bit, and that no float32 exponential tells apart
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -3.0, 88.0, -1e4, 3e38, -3e38]), st.floats(-9, 9, width=32)
)


def sampler(sampling: Sampling, rows: int, known: int) -> Sampler:
    every = [RowSampler(sampling, torch.Generator().manual_seed(seed)) for seed in range(rows)]
    return Sampler(every, known)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_both_forms_draw_the_same_token(data):
    """Every option, ties, masks, penalties that count what was drawn before, logits of no token behind the others."""
    known = data.draw(st.integers(1, 12))
    logits = torch.tensor([data.draw(st.lists(VALUES, min_size=known + 2, max_size=known + 2)) for _ in range(3)])
    forbidden = data.draw(st.lists(st.integers(0, known - 1), max_size=known - 1))
    left = sorted({*range(known)} - {*forbidden})
    among = st.sets(st.integers(0, known - 1)).map(lambda ids: (*ids, left[0]))
    sampling = Sampling(
        data.draw(st.sampled_from([0.0, 5e-324, 1e-30, 0.3, 0.8, 1.0, 7.0, 1e300])),
        data.draw(st.none() | st.integers(1, known + 1)),
        data.draw(st.none() | st.sampled_from([5e-324, 0.25, 0.5, 0.75, 0.9, 1.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.1, -2.0])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.7])),
        logit_bias=tuple((token, -math.inf) for token in forbidden[: known - 1]) + ((0, 0.3),) * (known % 2),
        min_p=data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.5])),
        allowed=data.draw(st.none() | among),
    )
    compiled, tensors = sampler(sampling, 3, known), sampler(sampling, 3, known)
    for _ in range(6):
        ids = compiled.draw(logits)
        assert ids.tolist() == tensors.draw(logits.double()).tolist()
        assert not set(ids[:, 0].tolist()) & set(forbidden)
        assert sampling.allowed is None or set(ids[:, 0].tolist()) <= set(sampling.allowed)
    for one, other in zip(compiled.rows, tensors.rows, strict=True):
        assert torch.equal(one.generator.get_state(), other.generator.get_state())


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02, "top_k": 99, "top_p": 0.8}])
def test_both_forms_draw_the_same_token_of_a_vocabulary(options):
    """Sums of thousands of weights are rounded alike."""
    torch.manual_seed(0)
    compiled, tensors = (sampler(Sampling(0.9, **options), 4, 5000) for _ in range(2))
    drawn = set()
    for _ in range(30):
        logits = 3 * torch.randn(4, 5000)
        ids = compiled.draw(logits)
        assert ids.tolist() == tensors.draw(logits.double()).tolist()
        drawn |= set(ids[:, 0].tolist())
    assert len(drawn) > 60


def test_the_definition_by_hand():
    """Weights e^-1, 1, e^-2 in the order of the ids; the number 0.999 is above the first two alone."""
    z, e = torch.tensor([[1.0, 2.0, 0.0]]), math.exp(-1)
    total = e + 1 + e * e
    edges = [0.0, e / total, (e + 1) / total, 1.0]
    for token, (low, high) in enumerate(itertools.pairwise(edges)):
        for u in (low + 1e-12, high - 1e-12):
            assert Sampling(1.0).draw(z, torch.tensor([u], dtype=torch.float64)).tolist() == [token]
    weights = Sampling(1.0).weights(z)[0]
    assert torch.allclose(weights, torch.tensor([e, 1.0, e * e], dtype=torch.float64), rtol=1e-15, atol=0)
    assert (Sampling(1.0, min_p=0.3).weights(z) > 0).tolist() == [[True, True, False]]
    shifted = Sampling(repetition_penalty=2.0, allowed=(0, 1)).shifted(torch.tensor([1.0, -1.0, 3.0]), torch.ones(3))
    assert shifted.tolist() == [0.5, -2.0, -math.inf]


def test_the_exponential_is_one_to_rounding():
    x = torch.linspace(-700, 0, 20011, dtype=torch.float64).unsqueeze(0)
    relative = Sampling(1.0).weights(x) / x.exp() - 1
    assert relative.abs().max() < 4e-16


def test_numbers_do_not_depend_on_how_many_are_asked_for():
    """Also where a generator is taken up behind those that were used."""
    expected = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).tolist()
    row, actual = RowSampler(Sampling(), torch.Generator().manual_seed(5)), []
    for number, count in enumerate([1, 2, 63, 64, 65, 1, 100] + [1] * 4):
        actual += row.numbers(count).tolist()
        row.use(count)
        if number % 3 == 1:
            row = RowSampler(Sampling(), row.generator)
    assert actual == expected


def test_a_row_draws_alone_what_it_draws_among_others():
    torch.manual_seed(1)
    kinds = [Sampling(0.7, seed=0), Sampling(0.0, frequency_penalty=3.0), Sampling(1.2, 7, logit_bias=((3, 9.0),))]
    steps = [torch.randn(3, 50) for _ in range(9)]

    def drawn(rows: list[int]) -> Any:
        sampler = Sampler([RowSampler(kinds[r], torch.Generator().manual_seed(r)) for r in rows], 50)
        return np.concatenate([sampler.draw(logits[rows]) for logits in steps], 1)

    assert drawn([0, 1, 2]).tolist() == [drawn([r])[0].tolist() for r in range(3)]
    assert len(set(drawn([1])[0].tolist())) > 3


def test_counts_go_on_in_another_batch():
    z = torch.tensor([[5.0, 4.0, 3.0, 2.0]] * 2)
    whole = sampler(Sampling(0, presence_penalty=50.0), 2, 4)
    first = whole.draw(z)
    assert np.concatenate([first, *(whole.keep([1, 0]).draw(z) for _ in range(3))], 1).tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_numbers_is_reported_alone(dtype, value):
    z = torch.zeros(2, 5, dtype=dtype)
    z[1, 4] = value  # of no token
    ids = sampler(Sampling(), 2, 4).draw(z)
    assert ids[1] == NOT_FINITE != ids[0]


@pytest.mark.parametrize(
    "options",
    [{f"{name}_penalty": size} for name in ("frequency", "presence") for size in (1e100, -1e100)]
    + [{"repetition_penalty": size} for size in (1e100, 1e-100)]
    + [{"logit_bias": ((2, 1e100), (2, 1e100), (1, -1e100))}, {"top_k": 10**30}],
)
def test_the_largest_values_do_not_overflow(options):
    """Where a logit overflowed, the last token was drawn, or one behind it, whatever was allowed."""
    for dtype in (torch.float32, torch.float64):
        draws = sampler(Sampling(**options, allowed=(1, 2)), 3, 4)
        z = torch.tensor([[1.0, 3e38, -3e38, 0.5]] * 3, dtype=dtype)
        assert {token for _ in range(9) for [token] in draws.draw(z).tolist()} <= {1, 2}, dtype


def test_impossible_values_are_refused():
    for size in (2e100, -math.inf, math.nan, 10**400):
        with pytest.raises(ConfigError, match=r"frequency_penalty must be a number from -1e\+100 to 1e\+100"):
            Sampling(frequency_penalty=size)
    with pytest.raises(ConfigError, match=r"logit_bias must be numbers from .*, got 7: 2e\+100"):
        Sampling(logit_bias=((7, 2e100),))
    for token in (1.0, "1", True):
        with pytest.raises(ConfigError, match=f"allowed must be token ids, .*, got {token!r}"):
            Sampling(allowed=(token,))
    with pytest.raises(ConfigError, match=r"min_p must be a number from 0 to 1, such as 0.05, got 1.5"):
        Sampling(min_p=1.5)
    with pytest.raises(ConfigError, match=r"repetition_penalty must be a number from 1e-100 to 1e\+100"):
        Sampling(repetition_penalty=0.0)
    for nothing in ({"logit_bias": tuple((v, -math.inf) for v in range(4))}, {"allowed": ()}):
        with pytest.raises(ConfigError, match="no token is left to draw"):
            sampler(Sampling(**nothing), 1, 4)
    with pytest.raises(ConfigError, match="allowed has the token 4, outside the vocabulary of 4"):
        sampler(Sampling(allowed=(1, 4)), 1, 4)
