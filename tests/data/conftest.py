"""What the tests of corpora share: sample data where there is some, a cache each, and the order laws."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch

from glissando.data.base import IGNORED, WHOLE, Batch, Corpus, Shard

ROOT = Path(__file__).resolve().parents[2]
TENSORS = ("ids", "targets", "mask", "control")


@pytest.fixture
def sample_data() -> Path:
    """The directory of sample corpora: $GLISSANDO_DATA, or shared/data beside the repository."""
    path = Path(os.environ.get("GLISSANDO_DATA") or ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"no sample corpora at {path}; name their directory in GLISSANDO_DATA")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache directory of its own."""
    monkeypatch.setenv("GLISSANDO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def order_laws() -> Callable[[Corpus], None]:
    """Resuming is skipping; shards make up the global batch, and score each held-out target once."""

    def check(corpus: Corpus) -> None:
        whole = _take(corpus, 9)
        for start in (1, 3, 7):
            for resumed, skipped in zip(_take(corpus, 2, start=start), whole[start:], strict=False):
                _assert_same(resumed, skipped)
        for world in (2, 4):
            shards = [_take(corpus, 4, shard=Shard(rank, world)) for rank in range(world)]
            for step, parts in enumerate(zip(*shards, strict=True)):
                _assert_union(parts, whole[step])
            _check_held_out(corpus, world)

    return check


def _take(corpus: Corpus, n: int, *, start: int = 0, shard: Shard = WHOLE) -> list[Batch]:
    return list(islice(corpus.batches("train", start=start, shard=shard), n))


def _assert_same(a: Batch, b: Batch) -> None:
    assert a.n_bytes == b.n_bytes
    for name in TENSORS:
        left, right = getattr(a, name), getattr(b, name)
        assert left is right is None or torch.equal(left, right)


def _assert_union(parts: tuple[Batch, ...], whole: Batch) -> None:
    """The shards' rows, interleaved, are the global batch; a part without padding may leave out its mask."""
    assert sum(part.n_bytes for part in parts) == whole.n_bytes
    for name in TENSORS:
        expected = getattr(whole, name)
        for rank, part in enumerate(parts):
            result = getattr(part, name)
            if name == "mask" and result is None:
                assert expected is None or expected[rank :: len(parts)].all()
            else:
                assert result is expected is None or torch.equal(result, expected[rank :: len(parts)])


def _check_held_out(corpus: Corpus, world: int) -> None:
    whole = list(corpus.batches("valid"))
    shards = [list(corpus.batches("valid", shard=Shard(rank, world))) for rank in range(world)]
    # As many batches everywhere, so that collectives stay in step.
    assert {len(shard) for shard in shards} == {len(whole)}
    parts = [batch for shard in shards for batch in shard]
    assert all(len(batch.ids) for batch in parts)
    assert sum(batch.n_bytes for batch in parts) == sum(batch.n_bytes for batch in whole)
    assert torch.equal(_scored(parts), _scored(whole))
    for resumed, skipped in zip(corpus.batches("valid", start=1), whole[1:], strict=True):
        _assert_same(resumed, skipped)


def _scored(batches: list[Batch]) -> torch.Tensor:
    """All scored targets with what was read just before each, in an order that forgets the batches."""
    result = [torch.stack([b.ids[b.targets != IGNORED], b.targets[b.targets != IGNORED]]).T for b in batches]
    pairs = torch.cat(result)
    return (pairs[:, 0] * (1 << 32) + pairs[:, 1]).sort().values
