"""The compiled hash is the plain one's, whatever the width of its padding."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from glissando.data import hashing, order
from glissando.data.hashing import hashed
from glissando.data.order import random_words
from glissando.errors import UnknownNameError
from glissando.kernels import compiled


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (7, 1), (64, 33)])
def test_compiled_and_plain_agree(shape):
    rng = np.random.default_rng(0)
    strings = rng.integers(1, 256, shape, dtype=np.uint8)
    strings[np.arange(shape[1]) >= rng.integers(0, shape[1] + 1, (shape[0], 1))] = 0
    for key in (0, 5, 2**63):
        result = hashed(strings, key)
        assert result.dtype == np.uint64
        np.testing.assert_array_equal(result, hashed(strings, key, backend="reference"))
        np.testing.assert_array_equal(result, hashed(np.pad(strings, ((0, 0), (0, 9))), key))
        np.testing.assert_array_equal(result[::2], hashed(strings[::2], key))  # rows that are not contiguous


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_hashes_never_change(backend):
    """Another value would move rows from one side of every split to the other."""
    strings = np.frombuffer(b"ab\0a\0b", np.uint8).reshape(2, 3)  # cannot be written to; a zero between is passed over
    assert hashed(strings, 3, backend=backend).tolist() == [11837784008653983630] * 2


def test_it_is_one_word_after_the_other():
    """h = r(key, r(key, r(key, 0), c_1), c_2), written out."""
    words = random_words(3, random_words(3, random_words(3, 0), 97), 98)
    assert hashed(np.array([[97, 98, 0]], np.uint8), 3).tolist() == words.tolist()
    assert hashed(np.array([[98, 97, 0]], np.uint8), 3).tolist() != words.tolist()


def test_the_kernel_is_compiled_anew_where_its_constants_change(tmp_path):
    """They stand in another file than the kernel, and a kernel on disk would go on with the old ones."""
    for module in (hashing, order):
        shutil.copy(module.__file__, tmp_path)
    before = compiled._kernels_of.__wrapped__(tmp_path)
    file = tmp_path / "order.py"
    file.write_text(file.read_text().replace("0x94D049BB133111EB", "0x94D049BB133111ED"))
    assert compiled._kernels_of.__wrapped__(tmp_path) != before


def test_mistakes():
    with pytest.raises(ValueError, match="characters must be uint8, got int64"):
        hashed(np.array([[1, -1]]), 0)
    with pytest.raises(UnknownNameError, match=r"'fast'.*auto, reference"):
        hashed(np.zeros((1, 1), np.uint8), 0, backend="fast")
