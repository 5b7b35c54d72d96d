"""Rows of one compiled step: each has the numbers that it has alone, and registers keep nothing between steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from subjects import DISTINCT, random_ids
from subjects import build_one_layer as build

from glissando.decoding import NotCompiled
from glissando.decoding.decoder import Decoder
from glissando.kernels.products import GROUP, LANES, SUMS, grouped, linear


def product(stored, w, x, outputs, scales=-1, bias=-1, function=linear):
    """W x of each row of x (B, in), W (outputs, in) by groups behind 64 numbers of another matrix."""
    size, out = x.shape[1], np.empty(SUMS, np.float32)
    regs = np.concatenate([x, np.full((len(x), outputs + 1), 7, np.float32)], 1)
    function(stored, w, regs, GROUP, scales, size, outputs, 0, size, bias, 0, len(x), out)
    assert (regs[:, -1] == 7).all()
    return regs[:, size:-1]


@pytest.mark.parametrize("outputs", [1, LANES, GROUP, GROUP + 1, 2 * GROUP + 3 * LANES])
@pytest.mark.parametrize("kind", ["float32", "bf16", "int8"])
def test_a_product_is_its_plain_form_and_a_row_does_not_depend_on_others(outputs, kind):
    generator = np.random.default_rng(outputs)
    matrix, x = generator.standard_normal((outputs, 37)).astype(np.float32), generator.standard_normal((9, 37))
    x, scales, w = x.astype(np.float32), -1, generator.standard_normal(2 * outputs).astype(np.float32)
    stored = matrix
    if kind == "bf16":
        stored = (matrix.view(np.uint32) >> 16).astype(np.uint16)
        matrix = (stored.astype(np.uint32) << 16).view(np.float32)
    elif kind == "int8":
        stored, scales = np.round(40 * matrix).clip(-127, 127).astype(np.int8), outputs
        matrix = stored * w[outputs:, None]
    stored = np.concatenate([np.zeros(GROUP, stored.dtype), grouped(stored)])
    found = product(stored, w, x, outputs, scales, 0)
    expected = x.astype(np.float64) @ matrix.T.astype(np.float64) + w[:outputs]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    plain = product(stored, w, x, outputs, scales, 0, linear.py_func)
    np.testing.assert_allclose(plain, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for rows in (1, 2, 5):
        np.testing.assert_array_equal(product(stored, w, x[:rows], outputs, scales, 0), found[:rows])


@pytest.mark.parametrize("case", DISTINCT)
@torch.no_grad()
def test_a_row_is_the_same_among_others_to_the_last_bit(case):
    model = build(case, torch.float32)
    try:
        decoder = Decoder(model)
    except NotCompiled:
        pytest.skip("no compiled step")
    ids = random_ids(model, 7, 4, seed=1)
    together = decoder.rows(model.init_state(7))
    alone = [decoder.rows(model.init_state(1)) for _ in range(7)]
    for t in range(4):
        together.registers[:] = np.nan  # what a step reads there, it has written
        found, together = decoder.step(ids[:, t], together)
        expected = torch.cat([decoder.step(ids[[row], t], rows)[0] for row, rows in enumerate(alone)])
        assert torch.equal(found, expected)
