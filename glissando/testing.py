"""The laws of the contract, for anybody's mixer or depth, and those of a corpus (`check_corpus`).

    glissando.testing.check_mixer(Average, AverageConfig(decay=0.8))

runs every law on the class in float64 and raises LawError, an AssertionError, that names the law which is broken:

    shapes      x (B, T, D) -> y (B, T, D) for any T >= 1; without a state none is returned
    split law   forward(ab) equals forward(a) followed by forward(b, state): values, and the gradients of x and of every
                parameter; cut anywhere, single tokens among the pieces
    batch law   a row alone equals that row in a batch, padded or not (where `mask` is accepted)
    state       a tree of batch-first tensors, never changed in place, of the requested dtype or wider, which it keeps
    time        where `dt` is accepted: dt = 1 is the default; dt = 0 leaves the state alone where a mixer's `input` is
                `held`; where it is `impulse`, a token with dt = 0 changes what follows, and the time before the first
                token changes nothing. The split law and the batch law hold with uneven dt, and for its gradient
    parameters  every parameter gets a gradient; a model's state_dict restores the function
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import Any, get_args

import torch
from torch import Tensor, nn

from glissando.config import to_dict
from glissando.data.base import IGNORED, WHOLE, Batch, Corpus, Shard
from glissando.depth import DEPTHS, Depth
from glissando.errors import ConfigError
from glissando.mixers import Context, Mixer, Signal
from glissando.model import LanguageModel, ModelConfig
from glissando.state import State, leaves, map_state, select_rows

#: largest difference allowed, relative to the largest expected magnitude (at least 1)
TOLERANCE = 1e-9


class LawError(AssertionError):
    """A law of the contract that a mixer, a depth or a corpus does not obey."""


def check_mixer(mixer: type[Mixer] | Mixer, config: Any = None, *, hidden_size: int = 16, seed: int = 0) -> None:
    """Test the laws of the contract on a mixer.

    Args:
        mixer: A class, built as mixer(hidden_size, config), or an instance.
        config: Options of the class; None: its defaults.
        hidden_size: D, the width of the input.
        seed: Seed of weights and inputs.

    Raises:
        LawError: The mixer does not obey a law; the message names the first one.
    """
    torch.manual_seed(seed)
    if isinstance(mixer, type):
        mixer = mixer(hidden_size, config) if config is not None else mixer(hidden_size)
    unknown = set(mixer.accepts) - set(get_args(Signal))
    _require(not unknown, "accepts", f"{sorted(unknown)} are no signals; known: {', '.join(get_args(Signal))}")
    _perturbed(mixer)
    x = torch.randn(3, 11, hidden_size, dtype=torch.float64)
    _check(mixer, mixer, mixer.init_state, mixer.accepts, x)
    if "control" not in mixer.accepts:
        _check_dtypes(mixer, mixer.init_state, x)


def check_depth(depth: type[Depth], config: Any = None, *, hidden_size: int = 16, seed: int = 0) -> None:
    """Test the laws of the contract on a registered depth, with attention in its blocks.

    Args:
        depth: The class.
        config: Its options; None: the defaults.
        hidden_size: D, the width of the input.
        seed: Seed of weights and inputs.

    Raises:
        LawError: The depth does not obey a law; the message names the first one.
        ConfigError: The class is not registered.
    """
    torch.manual_seed(seed)
    kind = next((name for name in DEPTHS if DEPTHS[name] is depth), None)
    if kind is None:
        raise ConfigError(
            f"{depth.__name__} is no registered depth; put @glissando.register_depth(name, Options) on it"
        )
    options = DEPTHS.read({"kind": kind}) if config is None else config
    model = LanguageModel(ModelConfig(vocab_size=11, hidden_size=hidden_size, depth=options))
    _perturbed(model)
    x = torch.randn(3, 11, hidden_size, dtype=torch.float64)
    part = model.depth
    _check(part, part, part.init_state, part.accepts, x)
    again = LanguageModel(
        ModelConfig(vocab_size=11, hidden_size=hidden_size, depth=DEPTHS.read(to_dict(options, DEPTHS.section())))
    )
    again.double().load_state_dict(model.state_dict())
    ids = torch.randint(0, 11, (2, 7))
    _require_close(again.eval()(ids)[0], model(ids)[0], "parameters", "state_dict restores the function")


def check_corpus(corpus: Corpus) -> None:
    """Test the laws of a corpus, by which a training resumes exactly and several processes train as one:

        shapes    ids and targets (B, T) int64, targets from 0 on or -100; a mask is bool of that shape
        order     `batches("train")` has no end, and with `start=k` yields what it yields after k batches
        shards    the rows of 2 and of 4 processes make up the batch; n_bytes add up
        held out  every process gets as many batches, none empty, and together they score each target of `valid` once

    Args:
        corpus: Its batch_size is a multiple of 4.

    Raises:
        LawError: The corpus does not obey a law; the message names the first one.
    """
    size = corpus.batch_size
    _require(size % 4 == 0, "shards", f"four processes share a batch: batch_size must be a multiple of 4, got {size}")
    whole, held_out = _train(corpus, 9), list(corpus.batches("valid"))
    _require(bool(held_out), "held out", "`valid` has no batch")
    for batch in (*whole, *held_out):
        shape, targets = tuple(batch.ids.shape), tuple(batch.targets.shape)
        fits = len(shape) == 2 and shape == targets and {batch.ids.dtype, batch.targets.dtype} == {torch.int64}
        _require(fits, "shapes", f"ids {shape} {batch.ids.dtype}, targets {targets} {batch.targets.dtype}")
        are_tokens = bool(((batch.targets >= 0) | (batch.targets == IGNORED)).all())
        _require(are_tokens, "shapes", f"a target is neither a token nor {IGNORED}: {int(batch.targets.min())}")
        fits = batch.mask is None or (batch.mask.shape == shape and batch.mask.dtype == torch.bool)
        _require(fits, "shapes", "the mask is not bool (B, T)")
    for start in (1, 3, 7):
        for got, expected in zip(_train(corpus, 2, start), whole[start : start + 2], strict=True):
            _require_rows([got], expected, "order", f"batches('train', start={start})")
    for world in (2, 4):
        shards = [Shard(rank, world) for rank in range(world)]
        steps = zip(*(_train(corpus, 4, 0, each) for each in shards), strict=True)
        for step, expected in zip(steps, whole[:4], strict=True):
            _require_rows(step, expected, "shards", f"{world} processes")
        valid = [list(corpus.batches("valid", shard=each)) for each in shards]
        _require({*map(len, valid)} == {len(held_out)}, "held out", f"{world} processes get unequal numbers of batches")
        parts = [batch for part in valid for batch in part]
        _require(all(len(batch.ids) for batch in parts), "held out", f"{world} processes get a batch without rows")
        same = torch.equal(_scored(parts), _scored(held_out))
        same &= sum(batch.n_bytes for batch in parts) == sum(batch.n_bytes for batch in held_out)
        _require(same, "held out", f"{world} processes score other targets than one")
    rest = list(corpus.batches("valid", start=1))
    _require(len(rest) == len(held_out) - 1, "order", f"batches('valid', start=1) yields {len(rest)} batches")
    for got, expected in zip(rest, held_out[1:], strict=True):
        _require_rows([got], expected, "order", "batches('valid', start=1)")


def _train(corpus: Corpus, count: int, start: int = 0, shard: Shard = WHOLE) -> list[Batch]:
    """`count` batches. Raises LawError where a training ends before."""
    batches = list(islice(corpus.batches("train", start=start, shard=shard), count))
    where = f"batches('train', start={start}) of process {shard.rank} of {shard.world}"
    _require(len(batches) == count, "order", f"{where} ends after {len(batches)}; a training takes batches without end")
    return batches


def _require_rows(parts: Sequence[Batch], whole: Batch, law: str, how: str) -> None:
    """The rows of the parts, in turn, are those of the whole; a part without padding may leave out its mask."""
    _require(sum(part.n_bytes for part in parts) == whole.n_bytes, law, f"{how}: n_bytes differ")
    for name in ("ids", "targets", "mask", "control"):
        for rank, part in enumerate(parts):
            got, rows = getattr(part, name), getattr(whole, name)
            rows = None if rows is None else rows[rank :: len(parts)]
            if name == "mask" and got is None:
                same = rows is None or bool(rows.all())
            else:
                same = got is rows is None or (got is not None and rows is not None and torch.equal(got, rows))
            _require(same, law, f"{how}: {name} differ")


def _scored(batches: Sequence[Batch]) -> Tensor:
    """All scored targets with what was read just before each, in an order that forgets the batches."""
    chosen = [batch.targets != IGNORED for batch in batches]
    pairs = [torch.stack([b.ids[at], b.targets[at]]).T for b, at in zip(batches, chosen, strict=True)]
    both = torch.cat(pairs)
    return (both[:, 0] * (1 << 32) + both[:, 1]).sort().values


Forward = Callable[[Tensor, State, Context], tuple[Tensor, State]]


def _check(
    forward: Forward, module: nn.Module, init_state: Callable[..., State], accepts: frozenset[Signal], x: Tensor
) -> None:
    rows, length, _ = x.shape
    whole, none = forward(x, None, Context())
    _require(none is None, "shapes", "a call without a state must return None as the state")
    _require(whole.shape == x.shape, "shapes", f"x {tuple(x.shape)} gave y {tuple(whole.shape)}")
    _check_state(forward, init_state, x)
    uneven = (3 * torch.rand(x.shape[:2], dtype=x.dtype) - 1).relu()  # some take no time
    for dt in (None, uneven) if "dt" in accepts else (None,):
        timed = "" if dt is None else ", with dt"
        for cuts in ([], [4], [1, 2, 3, 10], [length - 1]):
            _check_split(forward, module, init_state, x, dt, cuts, f"cut at {cuts or 'nothing'}{timed}")
        together = forward(x, None, Context(dt=dt))[0]
        for row in range(rows):
            alone = forward(x[row : row + 1], None, _rows(dt, row))[0]
            _require_close(alone, together[row : row + 1], "batch law", f"row {row}{timed}")
        if "mask" in accepts:
            _check_padding(forward, init_state, x, dt)
    if "dt" in accepts:
        _check_time(forward, init_state, x, uneven, getattr(module, "input", None))
    dead = [name for name, gradient in _gradients(module, whole).items() if not bool(gradient.abs().max() > 0)]
    _require(not dead, "parameters", f"{', '.join(dead)} got no gradient")


def _rows(dt: Tensor | None, row: int, length: int | None = None) -> Context:
    return Context(dt=None if dt is None else dt[row : row + 1, :length])


def _check_split(
    forward: Forward, module: nn.Module, init_state: Callable[..., State], x: Tensor, dt: Tensor | None,
    cuts: list[int], how: str,
) -> None:  # fmt: skip
    outcomes: list[dict[str, Any]] = []
    for pieces in ([0, x.shape[1]], [0, *cuts, x.shape[1]]):
        leaf, state, parts = x.clone().requires_grad_(), init_state(len(x)), []
        time = None if dt is None else dt.clone().requires_grad_()
        for a, b in pairwise(pieces):
            y, state = forward(leaf[:, a:b], state, Context(dt=None if time is None else time[:, a:b]))
            parts.append(y)
        y = torch.cat(parts, 1) if cuts or len(outcomes) else forward(leaf, None, Context(dt=time))[0]
        outcomes.append({"y": y.detach(), **_gradients(module, y), "x": leaf.grad})
        if time is not None and time.grad is not None:
            outcomes[-1]["dt"] = time.grad
    for name, expected in outcomes[0].items():
        what = "values" if name == "y" else f"the gradient of {name}"
        _require_close(outcomes[1][name], expected, "split law", f"{what}, {how}")


def _check_state(forward: Forward, init_state: Callable[..., State], x: Tensor) -> None:
    with torch.no_grad():
        _, state = forward(x[:, :5], init_state(len(x)), Context())
        for leaf in leaves(state):
            _require(leaf.shape[:1] == x.shape[:1], "state", f"a leaf of shape {tuple(leaf.shape)} is not batch-first")
        before = map_state(Tensor.clone, state)
        y, after = forward(x[:, 5:], state, Context())
        for was, now in zip(leaves(before), leaves(state), strict=True):
            _require(torch.equal(was, now), "state", "a call without donate=True changed the state that it was given")
        _require(after is not None, "state", "a call with a state must return the state after it")
        rows = torch.tensor([2, 0])
        alone, _ = forward(x[rows, 5:], select_rows(state, rows), Context())
        _require_close(alone, y[rows], "batch law", "rows of a state, selected")


def _check_dtypes(forward: Forward, init_state: Callable[..., State], x: Tensor) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        state = init_state(len(x), dtype=dtype)
        for leaf in leaves(state):
            wide = not leaf.is_floating_point() or torch.promote_types(leaf.dtype, dtype) == leaf.dtype
            _require(wide, "state", f"init_state(dtype={dtype}) has a leaf of {leaf.dtype}")
        with torch.no_grad():
            after = forward(x, state, Context())[1]
        for was, now in zip(leaves(state), leaves(after), strict=True):
            _require(now.dtype == was.dtype, "state", f"a leaf of {was.dtype} came back as {now.dtype}, x is {x.dtype}")
    with torch.device("meta"):
        _require(
            all(leaf.device.type == "meta" for leaf in leaves(init_state(2, device=torch.device("meta")))),
            "state", "init_state(device=...) has a leaf on another device",
        )  # fmt: skip


def _check_padding(forward: Forward, init_state: Callable[..., State], x: Tensor, dt: Tensor | None) -> None:
    """Packed rows of all lengths, nothing among them: real tokens are as without padding, and the state too."""
    counts = torch.tensor([0, 4, x.shape[1]])
    mask = torch.arange(x.shape[1]) < counts.unsqueeze(1)
    for state in (None, init_state(len(x))):
        y, after = forward(x, state, Context(mask=mask, dt=dt))
        for row, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            initial = None if state is None else init_state(1)
            alone, last = forward(x[row : row + 1, :count], initial, _rows(dt, row, count))
            _require_close(y[row : row + 1, :count], alone, "batch law", f"a row of {count} tokens, padded")
            if last is not None:
                rest = x[row : row + 1, :3]
                padded = forward(rest, select_rows(after, torch.tensor([row])), Context())[0]
                _require_close(padded, forward(rest, last, Context())[0], "batch law", "the state after padding")


def _check_time(
    forward: Forward, init_state: Callable[..., State], x: Tensor, dt: Tensor, kind: str | None
) -> None:  # fmt: skip
    ones = torch.ones(x.shape[:2], dtype=torch.float64)
    y, state = forward(x, init_state(len(x)), Context(dt=ones))
    _require_close(y, forward(x, None, Context())[0], "time", "dt = 1 is the default")
    still = forward(x[:, :3], state, Context(dt=0 * ones[:, :3]))[1]
    if kind == "held":
        for was, now in zip(leaves(state), leaves(still), strict=True):
            if was.is_floating_point():
                _require_close(now, was, "time", "dt = 0 leaves the state alone")
    elif kind == "impulse":
        change = forward(x[:, 3:], still, Context())[0] - forward(x[:, 3:], state, Context())[0]
        _require(
            bool(change.abs().max() > 0), "time", "a token with dt = 0 changes what follows, as input is `impulse`"
        )
        later = torch.cat([dt[:, :1] + 40, dt[:, 1:]], 1)
        y, _ = forward(x, None, Context(dt=dt))
        _require_close(forward(x, None, Context(dt=later))[0], y, "time", "the time before the first token")


def _perturbed(module: nn.Module) -> None:
    """Brought into float64 and evaluation mode, with weights far enough from their start for every path to matter."""
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def _gradients(module: nn.Module, y: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    generator = torch.Generator().manual_seed(1)
    (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum().backward(retain_graph=True)
    trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained}


def _require(holds: bool, law: str, message: str) -> None:
    if not holds:
        raise LawError(f"{law}: {message}")


def _require_close(got: Any, expected: Any, law: str, what: str) -> None:
    _require(got.shape == expected.shape, law, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    got, expected = got.detach(), expected.detach()
    gap = float((got - expected).abs().max()) if got.numel() else 0.0
    bound = TOLERANCE * max(1.0, float(expected.abs().max()) if got.numel() else 1.0)
    _require(gap <= bound, law, f"{what}: differs by {gap:.3g}, allowed {bound:.3g}")
