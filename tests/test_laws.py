"""The laws of the contract, on every registered mixer, every depth and every preset."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow import slow_where
from subjects import (
    CASES,
    DISTINCT,
    KINDS,
    PRESETS,
    SHARED,
    STATES,
    accepts,
    ragged,
    random_ids,
    weigh,
)
from subjects import build_one_layer as build_anew
from tolerances import assert_close, assert_tensors_close
from torch import Tensor

from glissando.block import ShortConv
from glissando.mixers import Mixer
from glissando.model import LanguageModel
from glissando.state import fit_room, join_rows, leaves, map_state, select_rows, state_bytes

LIMIT = 60  # below every learned position table
law = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: The case's model, one for all tests that leave it as it is.
build = functools.cache(build_anew)
distinct = pytest.mark.parametrize("case", DISTINCT)
states = pytest.mark.parametrize("case", STATES)


def taking(signal: str):
    """The cases whose models take the signal; presets and what shares the code of another are slow."""
    slow = [*PRESETS, *SHARED]
    return pytest.mark.parametrize("case", slow_where(slow, [case for case in CASES if signal in accepts(case)]))


def at_length(case: str, model: LanguageModel, length: int) -> int:
    """The length, or as many tokens as the model has positions for; a dense A is applied token by token."""
    return 40 if "dense" in case else length if model.position_embedding is None else min(length, LIMIT)


def in_pieces(
    model: LanguageModel,
    ids: Tensor,
    cuts: list[int],
    mask: Tensor | None = None,
    donate: bool = False,
    control: Tensor | None = None,
    dt: Tensor | None = None,
):
    """The logits of the pieces between `cuts`, joined, and the final state."""
    state, pieces = model.init_state(ids.shape[0]), []
    edges = [0, *sorted(set(cuts)), ids.shape[1]]
    for a, b in itertools.pairwise(edges):
        if a < b:
            here = None if mask is None else mask[:, a:b]
            dial = control if control is None or control.ndim == 2 else control[:, a:b]
            time = None if dt is None else dt[:, a:b]
            logits, state = model(ids[:, a:b], state, mask=here, control=dial, dt=time, donate=donate)
            pieces.append(logits)
    return torch.cat(pieces, 1), state


def gradients(model: LanguageModel, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def check_split(model: LanguageModel, ids: Tensor, cuts: list[int], mask: Tensor | None = None) -> None:
    """Values at real positions, and the gradients of every parameter, are those of the unsplit forward."""
    whole = model(ids, mask=mask)[0]
    pieces, state = in_pieces(model, ids, cuts, mask)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    assert_close(pieces[real], whole[real], "values")
    assert state.position.tolist() == real.sum(1).tolist()
    assert_tensors_close(gradients(model, weigh(pieces, mask)), gradients(model, weigh(whole, mask)), "gradient of")


def test_a_state_of_nothing_is_none():
    model = build("preset:transformer-nano")
    assert model(random_ids(model, 1, 3, 0))[1] is None


@distinct
@law
@given(data=st.data())
def test_split_law(case: str, data: st.DataObject):
    """forward(ab) = forward(a), forward(b, state), cut anywhere, without a mask or with any, also of empty rows:
    values and the gradients of every parameter."""
    model = build(case)
    # The first draw is the least one: it has rows, tokens and a cut too.
    batch, length = data.draw(st.integers(2, 3), "batch"), data.draw(st.integers(4, 12), "length")
    mask = None
    if "mask" in accepts(case) and data.draw(st.booleans(), "masked"):
        real = data.draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length), "mask")
        mask = torch.tensor(real).view(batch, length)
    cuts = data.draw(st.lists(st.integers(1, length - 1), min_size=1, max_size=4), "cuts")
    check_split(model, random_ids(model, batch, length, seed=length), cuts, mask)


@distinct
def test_split_law_at_length(case: str):
    """Where the fast paths run: a long prompt in uneven chunks, then single tokens. Values and gradients behind
    padding where masks are taken, and values without a mask."""
    model = build(case)
    length = at_length(case, model, 110)
    ids = random_ids(model, 4, length, seed=5)
    mask = ragged(*ids.shape, seed=5) if "mask" in accepts(case) else None
    check_split(model, ids, [length // 5, length // 4, length - 1], mask)
    length = at_length(case, model, 200)
    ids = random_ids(model, 2, length, seed=5)
    with torch.no_grad():
        pieces, _ = in_pieces(model, ids, [length // 3, length // 2, length - 2, length - 1])
        assert_close(pieces, model(ids)[0], "values")


@taking("control")
@pytest.mark.parametrize("per_token", [False, True], ids=["row", "token"])
def test_split_law_with_control(case: str, per_token: bool):
    """Values, and the gradients of every parameter and of the control, for a dial that stands or turns."""
    masked = per_token == ("heun" in case)
    model = build(case)
    ids, size = random_ids(model, 4, 13, seed=5), model.depth.control.in_features
    mask = ragged(4, 13, seed=2) if masked else None
    generator = torch.Generator().manual_seed(3)
    shape = (4, 13, size) if per_token else (4, size)
    control = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    outcomes = []
    for cuts in ([], [4, 5, 9]):
        logits = (
            in_pieces(model, ids, cuts, mask, control=control)[0] if cuts else model(ids, mask=mask, control=control)[0]
        )
        control.grad = None
        grads = gradients(model, weigh(logits, mask))
        assert control.grad.abs().max() > 0
        outcomes.append(
            {"values": logits.detach()[mask] if masked else logits.detach(), "control": control.grad, **grads}
        )
    assert_tensors_close(outcomes[1], outcomes[0])
    with torch.no_grad():
        assert not torch.equal(model(ids, control=control)[0], model(ids, control=-control)[0])


no_time = pytest.mark.filterwarnings("ignore:dt is 0 at some steps")


@no_time
@taking("dt")
def test_split_law_with_time_steps(case: str):
    """Values, and the gradients of every parameter and of the steps, some of which take no time."""
    model, masked = build(case), not case.endswith("default")
    ids, mask = random_ids(model, 4, 13, seed=5), ragged(4, 13, seed=2) if masked else None
    dt = (3 * torch.rand(4, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 1).relu()
    dt.requires_grad_()
    outcomes = []
    for cuts in ([], [4, 5, 9]):
        logits = in_pieces(model, ids, cuts, mask, dt=dt)[0] if cuts else model(ids, mask=mask, dt=dt)[0]
        dt.grad = None
        grads = gradients(model, weigh(logits, mask))
        assert dt.grad.abs().max() > 0
        outcomes.append({"values": logits.detach()[mask] if masked else logits.detach(), "dt": dt.grad, **grads})
    assert_tensors_close(outcomes[1], outcomes[0])
    with torch.no_grad():
        assert_close(model(ids, dt=torch.ones_like(dt))[0], model(ids)[0], "dt is 1 by default")


@no_time
@taking("dt")
def test_a_step_that_takes_no_time(case: str):
    """Leaves the state alone where all inputs are held over it; changes it where one is an impulse."""
    model = build(case)
    ids, more = random_ids(model, 2, 9, seed=5), random_ids(model, 2, 4, seed=6)
    with torch.no_grad():
        _, state = model(ids, model.init_state(2))
        _, after = model(more, state, dt=torch.zeros(2, 4, dtype=torch.float64))
        parts = list(model.modules())
        counts_tokens = any(isinstance(part, ShortConv) for part in parts)
        if not counts_tokens and all(part.input == "held" for part in parts if isinstance(part, Mixer)):
            for before, now in zip(leaves(state.depth), leaves(after.depth), strict=True):
                assert_close(now, before, "state", 1e-12)
        else:
            pairs = zip(leaves(state.depth), leaves(after.depth), strict=True)
            assert any(one.shape != other.shape or not torch.allclose(one, other) for one, other in pairs)


@taking("dt")
def test_a_later_time_leaves_every_earlier_output_alone(case: str):
    """dt of a token is the time since the token before it."""
    model = build(case)
    ids, dt = random_ids(model, 2, 9, seed=5), torch.full((2, 9), 1.5, dtype=torch.float64)
    later = dt.clone()
    later[:, 6:] = 40.0
    with torch.no_grad():
        before, after = model(ids, dt=dt)[0], model(ids, dt=later)[0]
    assert_close(after[:, :6], before[:, :6], "earlier outputs")
    if not case.endswith("window-1"):  # a window of one token has no past
        assert not torch.allclose(after[:, 6:], before[:, 6:])


@taking("dt")
def test_answers_depend_on_differences_of_times(case: str):
    """Where inputs are impulses, an empty past has no time: that of the first token changes nothing."""
    model = build(case)
    if any(part.input == "held" for part in model.modules() if isinstance(part, Mixer)):
        pytest.skip("a held input is held over the first token's dt")
    ids, dt = random_ids(model, 2, 9, seed=5), torch.full((2, 9), 1.5, dtype=torch.float64)
    later = dt.clone()
    later[:, 0] = 40.0
    with torch.no_grad():
        assert_close(model(ids, dt=later)[0], model(ids, dt=dt)[0], "outputs")


@distinct
def test_donated_states_compute_the_same(case: str):
    """A prompt in chunks, then token by token; ragged, some rows pausing, where masks are taken."""
    model = build(case)
    ids = random_ids(model, 4, 24, seed=6)
    mask = ragged(4, 24, seed=6) if "mask" in accepts(case) else None
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    with torch.no_grad():
        whole = model(ids, mask=mask)[0]
        pieces, state = in_pieces(model, ids, [7, 8, *range(21, 24)], mask, donate=True)
        assert_close(pieces[real], whole[real], "values")
        _, kept = in_pieces(model, ids, [7, 8, *range(21, 24)], mask)
        more = random_ids(model, 4, 2, seed=7)
        assert_close(model(more, state)[0], model(more, kept)[0], "continuation")


@distinct
def test_states_are_never_changed_in_place(case: str):
    model = build(case)
    ids = random_ids(model, 2, 9, seed=7)
    with torch.no_grad():
        _, state = model(ids, model.init_state(2))
        before = map_state(Tensor.clone, state)
        first, _ = model(ids, state)
        again, _ = model(ids, state)
    assert all(torch.equal(a, b) for a, b in zip(leaves(before), leaves(state), strict=True))
    assert torch.equal(first, again)


@distinct
@law
@given(data=st.data())
def test_causality(case: str, data: st.DataObject):
    """Changing a token leaves every earlier logit exactly where it was in exact arithmetic."""
    model = build(case)
    length = data.draw(st.integers(2, 20), "length")
    at = data.draw(st.integers(1, length - 1), "changed")
    ids = random_ids(model, 1, length, seed=at)
    other = ids.clone()
    other[0, at] = (ids[0, at] + 1) % model.config.vocab_size
    with torch.no_grad():
        a, b = model(ids)[0], model(other)[0]
    assert_close(b[:, :at], a[:, :at], "logits before the change", 1e-12)
    assert not torch.equal(a[:, at], b[:, at])


@taking("mask")
@law
@given(data=st.data())
def test_batch_law(case: str, data: st.DataObject):
    """A row alone equals that row in a batch with padding anywhere, without and with a state, cut anywhere."""
    model = build(case)
    batch, length = data.draw(st.integers(2, 3), "batch"), data.draw(st.integers(4, 12), "length")
    size = batch * length
    real = data.draw(st.lists(st.sampled_from([True, False]), min_size=size, max_size=size), "mask")
    mask = torch.tensor(real).view(batch, length)
    ids = random_ids(model, batch, length, seed=batch)
    cut = data.draw(st.integers(1, length - 1), "cut")
    tail = random_ids(model, batch, 3, seed=9)
    with torch.no_grad():
        together = model(ids, mask=mask)[0]
        streamed, state = in_pieces(model, ids, [cut], mask)
        after = model(tail, state)[0]
        for row in range(batch):
            own = ids[row : row + 1, mask[row]]
            alone_state = model.init_state(1)
            if own.shape[1]:
                alone, alone_state = model(own, alone_state)
                assert_close(together[row : row + 1, mask[row]], alone, "row in a batch")
                assert_close(streamed[row : row + 1, mask[row]], alone, "row in a streamed batch")
            assert int(state.position[row]) == own.shape[1]
            expected = model(tail[row : row + 1], alone_state)[0]
            assert_close(after[row : row + 1], expected, "continuation")


@states
def test_no_rows_go_on_as_no_rows(case: str):
    model = build(case)
    with torch.no_grad():
        logits, state = model(random_ids(model, 1, 4, seed=1)[:0], model.init_state(0))
        logits, state = model(random_ids(model, 1, 2, seed=1)[:0], state)
    assert logits.shape[:2] == (0, 2)


@states
def test_rows_of_different_states_join(case: str):
    """Rows that have read 9, 3 and 14 tokens go on together as each goes on alone, and so do some of them in another
    order."""
    model = build(case)
    ids = random_ids(model, 3, 20, seed=5)
    with torch.no_grad():
        alone = [model(ids[row : row + 1, :n], model.init_state(1)) for row, n in enumerate((9, 3, 14))]
        together = join_rows(*[state for _, state in alone])
        for step in range(14, 17):
            got, together = model(ids[:, step : step + 1], together, donate=step > 14)
            alone = [model(ids[row : row + 1, step : step + 1], state) for row, (_, state) in enumerate(alone)]
            assert_close(got, torch.cat([logits for logits, _ in alone]), "joined")
        rows = torch.tensor([2, 0])
        expected = model(ids[:, 17:19], together)[0][rows]
        assert_close(model(ids[rows, 17:19], select_rows(together, rows))[0], expected, "taken")


@states
def test_room_that_is_cut_is_of_no_value(case: str):
    """A row of 3 tokens that stood beside one of 40 takes what it takes alone, and goes on as it would."""
    model = build(case)
    ids = random_ids(model, 2, 40, seed=5)
    with torch.no_grad():
        alone, long = (model(ids[row : row + 1, :n], model.init_state(1))[1] for row, n in ((0, 3), (1, 40)))
        fitted = fit_room(select_rows(join_rows(alone, long), torch.tensor([0])))
        kept = sum(leaf.untyped_storage().nbytes() for leaf in leaves(fitted))
        assert kept == state_bytes(fitted) == state_bytes(alone)
        for step in range(3, 6):
            expected, alone = model(ids[:1, step : step + 1], alone)
            got, fitted = model(ids[:1, step : step + 1], fitted, donate=True)
            assert_close(got, expected, "in less room")


@distinct
def test_every_parameter_gets_gradient(case: str):
    model = build_anew(case)
    model.train()
    torch.manual_seed(0)
    control = torch.ones(4, model.depth.control.in_features).double() if "control" in model.depth.accepts else None
    grads = gradients(model, weigh(model(random_ids(model, 4, 12, seed=4), control=control)[0]))
    dead = [n for n, g in grads.items() if not torch.isfinite(g).all() or g.abs().max() == 0]
    assert not dead, f"no gradient: {dead}"


@pytest.mark.parametrize("case", [*KINDS, "depth:discrete-mean-gate", "depth:discrete-shortcuts", "depth:flow-heun"])
def test_computing_again_in_the_backward_pass_changes_nothing(case: str):
    model = build_anew(case)
    ids = random_ids(model, 2, 9, seed=4)
    for cuts in ([], [4, 8]):  # without and with a state, through which gradients flow
        outcomes = []
        for on in (True, False):
            model.depth.gradient_checkpointing = on
            outcomes.append(gradients(model, weigh(in_pieces(model, ids, cuts)[0] if cuts else model(ids)[0])))
        assert_tensors_close(*outcomes, "gradient of")


def test_a_state_is_computed_again_too():
    """With a state as without, gradient checkpointing keeps a block's input alone for the backward pass."""
    model = build_anew("preset:transformer-nano")
    ids, kept = random_ids(model, 2, 30, seed=4), []
    for model.depth.gradient_checkpointing in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            model(ids, model.init_state(2))
        kept.append(sum(sizes))
    assert kept[1] < 0.5 * kept[0]


@states
def test_runs_in_bfloat16(case: str):
    model = build_anew(case, torch.float32)
    ids = random_ids(model, 2, 12, seed=8)
    expected = model(ids)[0]
    half = model.to(torch.bfloat16)
    with torch.no_grad():
        got, state = half(ids, half.init_state(2))
    assert got.dtype == torch.bfloat16
    assert torch.isfinite(got).all()
    assert torch.nn.functional.cosine_similarity(got.float().flatten(), expected.flatten(), 0) > 0.98
    kept = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves(state)}
    assert 0 < sum(kept.values()) <= state_bytes(state), "a view keeps what it is of alive"


@pytest.mark.parametrize(("how", "donate"), [("autocast", True), ("state", False), ("fine state", True)])
@pytest.mark.parametrize("case", [c for c in STATES if c.startswith("mixer:")])
def test_a_state_keeps_its_own_type(case: str, how: str, donate: bool):
    """Under autocast, or in a type that was asked for: through ragged calls, to about what float32 computes."""
    model = build(case, torch.float32)
    ids, mask = random_ids(model, 4, 12, seed=1), ragged(4, 12, seed=1)
    dtype = {"autocast": None, "state": torch.bfloat16, "fine state": torch.float64}[how]
    with torch.no_grad():
        expected, pieces, state = model(ids, mask=mask)[0], [], model.init_state(4, dtype=dtype)
        types = [leaf.dtype for leaf in leaves(state)]
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            for part in (slice(0, 5), slice(5, 6), slice(6, 10), slice(10, 12)):
                logits, state = model(ids[:, part], state, mask=mask[:, part], donate=donate)
                pieces.append(logits.float())
    assert [leaf.dtype for leaf in leaves(state)] == types
    got = torch.cat(pieces, 1)[mask]
    assert torch.nn.functional.cosine_similarity(got.flatten(), expected[mask].flatten(), 0) > 0.99
