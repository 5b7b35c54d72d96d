"""Reading ahead: the text is the same, token by token, and what was read too far is undone."""

from __future__ import annotations

import pytest
import torch
from engines import PRESETS, Listener, alone, model_of, request_for, run_down, submit
from slow import slow_where
from subjects import DISTINCT, build
from tolerances import assert_close

from glissando.decoding import decoder_of, step_from
from glissando.decoding.lookup import Draft, LookupStep
from glissando.errors import ConfigError
from glissando.generation import Continuation, Sampling, generate, stream
from glissando.serving.engine import Engine
from glissando.state_files import StreamState

#: a state of one size, one that grows, and one whose positions end
QUICK = {"liquid-ssm-nano", "transformer-nano", "minimal-transformer"}
AGAIN = "one two three, one two three, one two "


def test_a_draft_is_what_followed_the_same_tokens():
    draft = Draft([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], most=5)
    assert draft.propose() == []  # nothing was right yet
    draft.push(4)
    assert draft.propose() == [5, 6]
    draft.push(5)
    draft.push(6)
    assert draft.propose() == [7, 8, 1, 2, 3]
    draft.push(9)
    assert draft.propose() == []


def test_the_latest_place_counts_and_the_end_begins_anew():
    draft = Draft([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 8], most=9)
    assert draft.propose() == [1, 2]
    assert Draft([1, 2, 1, 2, 1, 2, 1], most=3).propose() == [2, 1, 2]


@pytest.mark.parametrize("case", DISTINCT)
@torch.no_grad()
def test_several_tokens_in_a_call_are_several_calls_to_the_last_bit(case):
    model = build(case, torch.float32)
    control = torch.randn(2, len(model.config.controls)) if model.config.controls else None
    if isinstance(decoder_of(model, "auto", control is not None), str):
        pytest.skip("no compiled step")
    ids, begun = torch.randint(0, 37, (2, 13)), model.init_state(2)
    single, block = (step_from(model, begun, "compiled", control is not None) for _ in range(2))
    one_by_one = torch.stack([single(ids[:, t], control).clone() for t in range(13)], 1)
    together = torch.cat([block(ids[:, a:b], control).clone() for a, b in ((0, 5), (5, 6), (6, 13))], 1)
    assert torch.equal(one_by_one, together)


@pytest.mark.parametrize("kind", ["compiled", "plain"])
@torch.no_grad()
def test_a_block_is_undone(kind):
    model = model_of("transformer-nano").float()
    ids = torch.randint(0, 256, (1, 90))
    step = step_from(model, model.init_state(1), kind, False)
    step(ids[:, :60], None)
    step(ids[:, 60:90], None)  # caches grow within it
    step.rewind(20)
    expected = model(ids[:, :71], model.init_state(1))[0][:, -1]
    assert_close(step(ids[:, 70], None), expected, "logits behind a rewound block")


@pytest.mark.parametrize("preset", slow_where(PRESETS.keys() - QUICK, PRESETS))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_text_is_the_same(preset, temperature):
    model = model_of(preset).float()
    most = 40 if preset != "minimal-transformer" else 60  # longer than its positions
    for seed in range(2 if temperature else 1):
        expected = generate(model, AGAIN, max_tokens=most, temperature=temperature, seed=seed)
        assert generate(model, AGAIN, max_tokens=most, temperature=temperature, seed=seed, lookup=6) == expected
    if not temperature:
        plain = generate(model, AGAIN, max_tokens=most, temperature=0, step="plain")
        assert generate(model, AGAIN, max_tokens=most, temperature=0, step="plain", lookup=6) == plain
    several = generate(model, [AGAIN, "ab"], max_tokens=9, temperature=temperature)
    assert generate(model, [AGAIN, "ab"], max_tokens=9, temperature=temperature, lookup=3) == several


def test_fewer_calls_where_the_text_repeats_itself():
    """A model that always writes what it has read: every draft is right, and is kept."""
    model = model_of("liquid-ssm-nano").float()
    bias = {7: 1e4}
    run = Continuation(model, [[1, 2, 3]], 60, Sampling(0, logit_bias=tuple(bias.items())), lookup=8)
    assert [ids for [ids] in run] == [7] * 60
    assert isinstance(run._step, LookupStep)
    assert run._step.calls < 16


def test_a_state_is_that_of_the_tokens_read():
    """What was read ahead is undone before a state is looked at or gone on from."""
    model = model_of("liquid-ssm-nano").float()
    pieces = stream(model, AGAIN, max_tokens=30, temperature=0.5, resumable=True, lookup=5)
    begun = "".join(next(pieces) for _ in range(4))
    state = pieces.state
    assert isinstance(state, StreamState)
    rest = "".join(stream(model, max_tokens=20, temperature=0.5, state=state, resumable=True, lookup=5))
    whole = "".join(stream(model, AGAIN, max_tokens=200, temperature=0.5, resumable=True))
    assert whole.startswith(begun + rest)


def test_a_dial_that_turns_ends_a_draft():
    model = model_of("hybrid-ode-nano").float()
    model.config.depth.control_trained = True

    def texts(lookup: int) -> str:
        turns = iter([{"mood": -1.0}] * 12 + [{"mood": 1.0}] * 60)
        return "".join(stream(model, AGAIN, max_tokens=40, temperature=0, control=lambda: next(turns), lookup=lookup))

    assert texts(6) == texts(0)


def test_the_server_reads_ahead_in_a_text_alone():
    model = model_of("liquid-ssm-nano").float()
    one, other = request_for(model, AGAIN, 40, temperature=0.3), request_for(model, "and", 9, seed=4)
    engine = Engine(model, prefix_bytes=0, lookup=6, block=1)
    _, [first] = submit(engine, one)
    for _ in range(6):
        engine.step()
    assert isinstance(engine.batches[0].step, LookupStep)
    _, [second] = submit(engine, other)
    engine.step()
    assert not isinstance(engine.batches[0].step, LookupStep)
    while second.finish is None:
        engine.step()
    engine.step()
    assert isinstance(engine.batches[0].step, LookupStep)  # alone again
    run_down(engine)
    assert [first.text, second.text] == [alone(model, one)[0].text, alone(model, other)[0].text]
    assert isinstance(first, Listener)


def test_mistakes():
    model = model_of("liquid-ssm-nano").float()
    for lookup in (-1, True):
        with pytest.raises(ConfigError, match=rf"lookup must be a whole number from 0, .* to 64, got {lookup}"):
            generate(model, "a", lookup=lookup)
    with pytest.raises(ConfigError, match="in one text, and there are 2"):
        Continuation(model, [[1], [2]], 3, Sampling(), lookup=2)
