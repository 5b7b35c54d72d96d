"""Drawing the next token in compiled code: glissando.sampling.Sampling has the definition, and the same in tensors."""

from __future__ import annotations

import math

import numpy as np

from glissando.kernels.compiled import exact_kernel
from glissando.kernels.exponentials import exp64

# Kernels are compiled anew where this file changes: see glissando.kernels.compiled.
#: in the place of an id where logits are not finite numbers, and of a row that had ended
NOT_FINITE, ENDED = -1, -2


@exact_kernel
def draw_row(logits, known, numbers, top_k, counts, biases, uniform, z, w, order):
    """The id drawn from logits (V,), of which `known` belong to tokens; or NOT_FINITE.

    numbers (6,): temperature, top_p, min_p, frequency_penalty, presence_penalty, repetition_penalty
    counts (known,) int64, to which the token is added, and biases (known,): either may be empty
    z (known,), w (known,), order (known,): memory
    """
    for v in range(len(logits)):
        if not math.isfinite(logits[v]):
            return NOT_FINITE
    best = 0
    for v in range(known):
        z[v] = logits[v]
        if len(counts):
            if counts[v]:
                z[v] = z[v] / numbers[5] if z[v] > 0 else z[v] * numbers[5]
            z[v] -= numbers[3] * counts[v] + (numbers[4] if counts[v] else 0.0)
        if len(biases):
            z[v] += biases[v]
        if z[v] > z[best]:
            best = v
    if numbers[0] > 0:
        highest = z[best]
        for v in range(known):
            w[v] = exp64((z[v] - highest) / numbers[0])
        if top_k < known or numbers[1] < 1 or numbers[2] > 0:
            _cut(z, w, known, top_k, numbers[1], numbers[2], order)
        best = _inverse(w, known, _total(w, known) * uniform)
    if len(counts):
        counts[best] += 1
    return best


@exact_kernel
def _total(w, known):
    total = 0.0
    for v in range(known):
        total += w[v]
    return total


@exact_kernel
def _inverse(w, known, threshold):
    """The first index whose cumulative weight is above the threshold."""
    total = 0.0
    for v in range(known):
        total += w[v]
        if total > threshold:
            return v
    return known - 1


@exact_kernel
def _cut(z, w, known, top_k, top_p, min_p, order):
    """Set the weights that top_k, top_p and min_p leave out to 0."""
    size = known  # order: a heap of `size` indices, and behind it those that were popped, the latest first
    for v in range(known):
        order[v] = v
    for at in range(known // 2 - 1, -1, -1):
        _sift(z, order, at, size)
    if top_k < known:
        for _ in range(top_k):
            size = _pop(z, order, size)
        for at in range(size):
            w[order[at]] = 0.0
    threshold, before, rank = top_p * _total(w, known), 0.0, 0
    while rank < min(top_k, known):
        if size == known - rank:
            size = _pop(z, order, size)
        likely = order[known - 1 - rank]
        if not (before < threshold and w[likely] >= min_p):
            break
        before += w[likely]
        rank += 1
    for at in range(known - rank):
        w[order[at]] = 0.0


@exact_kernel
def _pop(z, order, size):
    """Move the heap's first index behind it; its new size."""
    order[0], order[size - 1] = order[size - 1], order[0]
    _sift(z, order, 0, size - 1)
    return size - 1


@exact_kernel
def _sift(z, order, at, size):
    """Let the index at `at` sink in a heap whose first is the likeliest, of equal ones the least."""
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _precedes(z, order[child + 1], order[child]):
            child += 1
        if not _precedes(z, order[child], order[at]):
            return
        order[at], order[child] = order[child], order[at]
        at = child


@exact_kernel
def _precedes(z, a, b):
    return z[a] > z[b] or (z[a] == z[b] and a < b)


@exact_kernel
def draw_rows(logits, known, numbers, top_k, counts, biases, uniforms, written):
    """logits (B, V) float32 -> written (B, 1): `draw_row` of each row, uniforms (B, 1) or empty."""
    z, w, order = np.empty(known), np.empty(known), np.empty(known, np.int64)
    for row in range(len(logits)):
        uniform = uniforms[row, 0] if uniforms.size else 0.0
        written[row, 0] = draw_row(
            logits[row], known, numbers[row], top_k[row], counts[row], biases[row], uniform, z, w, order
        )


@exact_kernel
def draw_next(
    logits, known, numbers, top_k, counts, biases, uniforms, end, limits, kept, written, row, n, ids, filled, z, w,
    order,
):  # fmt: skip
    """Token n of a row (B rows as in `draw_rows`, written (B, N)): the next that its text reads, unless it has ended;
    then `written` is ENDED. kept (B, N, V) gets the logits, or is empty."""
    if has_ended(end, limits, written, row, n):
        written[row, n] = ENDED
        return
    filled[row] += 1
    if kept.size:
        for v in range(logits.shape[0]):
            kept[row, n, v] = logits[v]
    uniform = uniforms[row, n] if uniforms.size else 0.0
    token = draw_row(logits, known, numbers[row], top_k[row], counts[row], biases[row], uniform, z, w, order)
    written[row, n] = token
    if token >= 0:
        ids[row] = token


@exact_kernel
def has_ended(end, limits, written, row, n):
    """Whether a row ended before its token n: by its limit (B,), by the id `end` or by logits that are not finite."""
    return n >= limits[row] or (n > 0 and (written[row, n - 1] < 0 or written[row, n - 1] == end))


@exact_kernel
def all_ended(end, limits, written, n, first, last):
    """Whether each row from `first` to `last` has ended with token n; then no more tokens of them are written."""
    for row in range(first, last):
        if not has_ended(end, limits, written, row, n + 1):
            return False
    written[first:last, n + 1 :] = ENDED
    return True
