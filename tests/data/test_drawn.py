"""The compiled hash is the plain one's, whatever the width of its padding."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from glissando.data import drawn, order
from glissando.data.drawn import hashed
from glissando.data.order import random_words
from glissando.kernels import compiled


def plain(strings, key):
    """h = r(key, r(key, r(key, 0), c_1), c_2), column by column."""
    state = random_words(key, np.zeros(len(strings), np.int64))
    for column in strings.T:
        state = np.where(column > 0, random_words(key, state, column), state)
    return state


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (7, 1), (64, 33)])
def test_compiled_and_plain_agree(shape):
    rng = np.random.default_rng(0)
    strings = rng.integers(1, 256, shape, dtype=np.uint8)
    strings[np.arange(shape[1]) >= rng.integers(0, shape[1] + 1, (shape[0], 1))] = 0
    for key in (0, 5, 2**63):
        result = hashed(strings, key)
        assert result.dtype == np.uint64
        np.testing.assert_array_equal(result, plain(strings, key))
        np.testing.assert_array_equal(result, hashed(np.pad(strings, ((0, 0), (0, 9))), key))
        np.testing.assert_array_equal(result[::2], hashed(strings[::2], key))  # rows that are not contiguous


def test_hashes_never_change():
    """Another value would move rows from one side of every split to the other."""
    strings = np.frombuffer(b"ab\0a\0b", np.uint8).reshape(2, 3)  # cannot be written to; a zero between is passed over
    assert hashed(strings, 3).tolist() == [11837784008653983630] * 2


def test_the_kernel_is_compiled_anew_where_its_constants_change(tmp_path):
    """They stand in another file than the kernel, and a kernel on disk would go on with the old ones."""
    for module in (drawn, order):
        shutil.copy(module.__file__, tmp_path)
    before = compiled._kernels_of.__wrapped__(tmp_path)
    file = tmp_path / "order.py"
    file.write_text(file.read_text().replace("0x94D049BB133111EB", "0x94D049BB133111ED"))
    assert compiled._kernels_of.__wrapped__(tmp_path) != before
