"""Continuous batching: every text as it would be alone, whoever joins and leaves."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from engines import PRESETS, alone, model_of, request_for, run_down, submit
from slow import slow_where

from glissando.decoding.steps import PlainStep
from glissando.errors import InputError
from glissando.generation import generate
from glissando.model import LanguageModel, ModelState
from glissando.sampling import RowSampler, Sampler
from glissando.serving.engine import BusyError, Engine, TooLargeError
from glissando.serving.prefixes import Prefixes
from glissando.serving.session import Piece, Request
from glissando.state import state_bytes

#: a state that grows, and one of one size
QUICK = {"transformer-nano", "liquid-ssm-nano"}
PROMPTS = ["Once upon a time", "The", "", "A fox and a hen went to the market to buy a blue hat, and", "Ben said: "]


@pytest.fixture(scope="module")
def model():
    return model_of("liquid-ssm-nano")


@pytest.mark.parametrize("preset", slow_where(PRESETS.keys() - QUICK, PRESETS))
def test_texts_that_join_and_leave_are_those_written_alone(preset):
    model = model_of(preset)
    engine = Engine(model, chunk=7)
    rng, listener = random.Random(0), []
    for turn in range(8):
        prompt, count, seed = rng.choice(PROMPTS), rng.randrange(1, 12), rng.randrange(99)
        listener.append((prompt, count, seed, submit(engine, request_for(model, prompt, count, seed))[1][0]))
        for _ in range(turn % 4):
            engine.step()
    run_down(engine)
    for prompt, count, seed, one in listener:
        assert [one.text] == generate(model, [prompt], max_tokens=count, seed=seed)
        assert one.finish in ("stop", "length")


# ---------------------------------------------------------------------- what is read


@pytest.mark.parametrize("preset", slow_where(PRESETS.keys() - QUICK, PRESETS))
def test_a_known_beginning_is_not_read_again(preset):
    model = model_of(preset)
    engine = Engine(model)
    first = request_for(model, "Once upon", 5)
    [writer], _ = submit(engine, first)
    run_down(engine)
    assert engine.tokens_read == 10
    again = request_for(model, "Once upon", 5, seed=3)
    longer = request_for(model, "Once upon a time", 5)
    goes_on = replace(first, ids=(*first.ids, *writer.written, 65))
    for request, read in ((again, 0), (longer, 7), (goes_on, 2)):
        before = engine.tokens_read
        [listener] = submit(engine, request)[1]
        run_down(engine)
        assert engine.tokens_read - before == read
        assert [listener.text] == [each.text for each in alone(model, request)]


def test_states_kept_stay_within_their_bytes(model):
    limit = 40_000
    engine = Engine(model, prefix_bytes=limit)
    for n in range(30):
        submit(engine, request_for(model, f"{n} hens", 2))
        run_down(engine)
        kept = engine.prefixes
        texts = list(kept._texts.values())
        assert sum(state_bytes(text.step.state) for text in texts) < kept.bytes <= limit
        assert kept.bytes == sum(text.size for text in texts)
    assert 1 <= len(kept) < 30
    assert sum(kept._lengths.values()) == len(kept._places) == len(kept)
    before = engine.tokens_reused
    submit(engine, request_for(model, "0 hens", 2))  # the oldest has gone
    run_down(engine)
    assert engine.tokens_reused - before < 7


def test_what_is_used_stays(model):
    """One of two states is asked for again and outlives the other."""
    engine = Engine(model)
    for prompt in ("Ben", "Ada"):
        submit(engine, request_for(model, prompt, 1))
        run_down(engine)
    engine.prefixes.limit = engine.prefixes.bytes  # two states and no more
    for prompt in ("Ben", "Eve"):
        submit(engine, request_for(model, prompt, 1))
        run_down(engine)
    for prompt, known in (("Ada", 0), ("Ben", 4), ("Eve", 4)):
        found = engine.prefixes.longest(request_for(model, prompt, 1).ids, None)
        assert (0 if found is None else found.length) == known


def test_the_longest_known_beginning_is_found():
    kept, ids = Prefixes(2**30), list(range(3000))
    for text in (*([9999, *ids[:length]] for length in range(1, 1000, 7)), ids[:300], ids[:700]):
        state = ModelState(torch.tensor([len(text)]), None)
        kept.keep(text, None, PlainStep(None, state), torch.zeros(1))
    known = kept.longest(ids, None)
    assert known is not None
    assert known.length == 700
    assert kept.longest(ids, (0.5,)) is None
    assert kept.longest(ids, None, owner=1) is None


def test_padding_stays_within_the_chunk(model, monkeypatch):
    engine, shapes = Engine(model, chunk=64), []
    features = model.features
    monkeypatch.setattr(
        model, "features", lambda ids, *args, **kw: (shapes.append(ids.shape), features(ids, *args, **kw))[1]
    )
    for length in (50, 1, 1, 30, 30, 2, 3, 100):
        submit(engine, request_for(model, "x" * length, 1, seed=length))
    run_down(engine)
    read = [rows * columns for rows, columns in shapes if columns > 1]
    assert max(read) <= 64
    assert max(rows for rows, _ in shapes) >= 2


@pytest.mark.slow
def test_another_control_is_another_state():
    model = model_of("hybrid-ode-nano")
    engine = Engine(model)
    texts = {}
    for control in (None, (0.0, 0.0), (1.0, 1.0), (0.0, 0.0)):
        request = request_for(model, "Once upon", 20, control=control)
        [listener] = submit(engine, request)[1]
        run_down(engine)
        assert listener.text == alone(model, request)[0].text
        texts[control] = listener.text
    assert engine.tokens_reused == 10  # (0, 0) again
    assert len(set(texts.values())) == 3


def test_a_long_prompt_holds_up_neither_texts_nor_short_prompts(model):
    engine = Engine(model, chunk=8)
    _, [under_way] = submit(engine, request_for(model, "The", 200))
    engine.step()
    submit(engine, request_for(model, "x" * 200, 5))
    _, [short] = submit(engine, request_for(model, "Ben", 5))
    for _ in range(8):
        engine.step()
    assert len(under_way.pieces) == 10
    assert short.pieces, "a short prompt waits for all of a long one"


def test_log_probabilities_of_prompt_and_text(model):
    """Against one forward over the whole text."""
    request = request_for(model, "Once upon a time, there was", 9, top=3, echo=True)
    engine = Engine(model, chunk=10)
    _, [listeners] = submit(engine, request)
    run_down(engine)
    tokens = [token for piece in listeners.pieces for token in piece.tokens]
    ids = [*request.ids, *(token.id for token in tokens[len(request.ids) - 1 :])]
    assert [token.id for token in tokens] == ids[1:]
    with torch.no_grad():
        logp = model(torch.tensor([ids]))[0][0, :-1].log_softmax(-1)
    for token, at in zip(tokens, logp, strict=True):
        assert token.logprob == pytest.approx(float(at[token.id]), abs=1e-9)
        best = at.topk(3)
        assert [i for i, _ in token.top] == best.indices.tolist()
        assert [v for _, v in token.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_a_text_of_no_tokens_is_its_prompt(model):
    engine = Engine(model)
    _, [listeners] = submit(engine, request_for(model, "Once", 0, top=0, echo=True))
    _, [silent] = submit(engine, request_for(model, "Once", 0))
    run_down(engine)
    assert [piece.finish for piece in listeners.pieces] == ["length"]
    assert bytes(token.id for token in listeners.pieces[0].tokens) == b"Once"
    assert silent.pieces == [Piece(finish="length")]
    assert engine.tokens_written == 0


# ---------------------------------------------------------------------- several texts


def test_copies_are_drawn_with_seeds_of_their_own(model):
    engine = Engine(model)
    _, listeners = submit(engine, request_for(model, "Once upon", 12, seed=5, copies=3))
    run_down(engine)
    assert engine.tokens_read == 10
    for number, one in enumerate(listeners):
        assert [one.text] == generate(model, ["Once upon"], max_tokens=12, seed=5 + number)
    assert len({one.text for one in listeners}) == 3


def test_sampling_is_each_texts_own(model):
    kinds = [{"temperature": 0}, {"temperature": 1.5}, {"temperature": 0.3}]
    requests = [request_for(model, "The", 15, seed=1, **kind) for kind in kinds]
    engine = Engine(model)
    listeners = [submit(engine, request)[1][0] for request in requests]
    run_down(engine)
    for kind, one in zip(kinds, listeners, strict=True):
        assert [one.text] == generate(model, ["The"], max_tokens=15, seed=1, **kind)


def test_a_top_k_beyond_every_vocabulary_ends_no_text(model):
    """JSON has numbers of any size; with such a one all texts of the batch failed."""
    engine, huge = Engine(model), request_for(model, "the", 4)
    _, [beside] = submit(engine, request_for(model, "and", 9))
    submit(engine, replace(huge, sampling=replace(huge.sampling, top_k=10**30)))
    run_down(engine)
    assert beside.finish == "length"
    assert beside.text == alone(model, request_for(model, "and", 9))[0].text


def test_a_stop_text_ends_one_and_no_other(model):
    plain = request_for(model, "Once", 40)
    [whole] = alone(model, plain)
    stop = whole.text[10:12]
    engine = Engine(model)
    _, [other] = submit(engine, plain)
    _, [stopped] = submit(engine, request_for(model, "Once", 40, stop=(stop,)))
    run_down(engine)
    assert other.text == whole.text
    assert stopped.text == whole.text[: whole.text.find(stop)]
    assert stopped.finish == "stop"


def test_more_than_fit_wait_their_turn(model):
    engine = Engine(model, max_sessions=2, max_waiting=3)
    listeners = [submit(engine, request_for(model, "a", 4, seed=n))[1][0] for n in range(5)]
    with pytest.raises(BusyError, match="3 texts wait already, and 3 may"):
        submit(engine, request_for(model, "a", 4))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 3)
    run_down(engine)
    assert all(one.finish for one in listeners)


def test_who_is_given_up_leaves_before_the_next_token(model):
    engine = Engine(model)
    [gone], [listener] = submit(engine, request_for(model, "Once", 100))
    _, [stays] = submit(engine, request_for(model, "Once", 30, seed=2))
    for _ in range(5):
        engine.step()
    written = len(gone.written)
    gone.cancel()
    engine.step()
    assert engine.running == 1
    assert len(gone.written) == written
    assert listener.finish is None
    run_down(engine)
    assert [stays.text] == generate(model, ["Once"], max_tokens=30, seed=2)


def test_who_is_given_up_while_waiting_or_read_for_costs_nothing(model):
    engine = Engine(model, max_sessions=1, chunk=4)
    [first], _ = submit(engine, request_for(model, "x" * 30, 5))
    [second], _ = submit(engine, request_for(model, "Once", 5))
    engine.step()
    read = engine.tokens_read
    first.cancel()
    second.cancel()
    run_down(engine)
    assert engine.tokens_read == read
    assert not first.written + second.written


def test_a_dial_turned_on_the_way():
    """As `generate` does with a control that changes, from the very token on; the others' texts stay theirs."""
    model = model_of("hybrid-ode-nano")
    engine = Engine(model)
    request = request_for(model, "Once upon", 16)
    [turned], [listener] = submit(engine, request)
    _, [other] = submit(engine, request)
    for _ in range(9):
        engine.step()
    turned.turn((1.0, -1.0))
    run_down(engine)
    assert other.text == alone(model, request)[0].text
    # Without a control first and with one then is what no single call of `generate` says; here by hand.
    ids, sampler = list(request.ids), Sampler([RowSampler(request.sampling, torch.Generator().manual_seed(0))], 256)
    control = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    with torch.no_grad():
        logits, state = model(torch.tensor([ids]), model.init_state(1))
        for n in range(16):
            token = torch.from_numpy(sampler.draw(logits[:, -1]))
            ids.append(int(token))
            # The step that follows the turn reads the token drawn before it.
            logits, state = model(token.view(1, 1), state, control=control if n >= 9 else None)
    assert turned.written == ids[len(request.ids) :][: len(turned.written)]
    reused = engine.tokens_reused
    submit(engine, replace(request, ids=(*request.ids, *turned.written)))
    run_down(engine)
    assert engine.tokens_reused - reused == len(request.ids), "its state was read under two controls"
    assert listener.text != other.text


# ---------------------------------------------------------------------- what goes wrong


def test_a_model_that_fails_ends_the_texts_it_failed_for(model, monkeypatch):
    engine = Engine(model)
    _, [listener] = submit(engine, request_for(model, "Once", 50))
    engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine, "_write", lambda batch: torch.full((1,), torch.nan).multinomial(1))
        engine.step()
    assert isinstance(listener.error, RuntimeError)
    assert engine.running == 0
    _, [after] = submit(engine, request_for(model, "Once", 5))
    run_down(engine)
    assert [after.text] == generate(model, ["Once"], max_tokens=5)


@pytest.mark.parametrize("options", [{}, {"top": 2, "echo": True}, {"max_tokens": 0, "top": 2, "echo": True}])
def test_a_text_whose_numbers_overflow_ends_alone(options):
    """A draw fails for its whole batch, and a client may turn a dial to any number."""
    model = model_of("hybrid-ode-nano")
    good = replace(request_for(model, "Once", 9), control=(0.5, 0.0))
    bad = replace(good, control=(1e308, 0.0), **options)
    engine = Engine(model)
    _, [listener] = submit(engine, good)
    for _ in range(4):
        engine.step()
    [[ill], [later]] = [submit(engine, bad)[1], submit(engine, good)[1]]
    run_down(engine)
    assert isinstance(ill.pieces[-1].error, FloatingPointError)
    assert "are not finite, under the control (1e+308, 0.0)" in str(ill.pieces[-1].error)
    assert listener.text == later.text == alone(model, good)[0].text


def test_a_text_whose_numbers_overflow_when_it_is_turned_ends_alone():
    model = model_of("hybrid-ode-nano")
    engine, good = Engine(model), replace(request_for(model, "Once", 9), control=(0.5, 0.0))
    _, [listener] = submit(engine, good)
    [turned], [ill] = submit(engine, good)
    for _ in range(4):
        engine.step()
    turned.turn((1e308, 0.0))
    run_down(engine)
    assert isinstance(ill.pieces[-1].error, FloatingPointError)
    assert listener.text == alone(model, good)[0].text


def test_an_engine_that_breaks_leaves_nobody_waiting(model, monkeypatch):
    def breaks() -> None:
        raise MemoryError("no room for a row")

    engine = Engine(model)
    _, [listener] = submit(engine, request_for(model, "Once", 30))
    monkeypatch.setattr(engine, "_admit", breaks)
    with pytest.raises(MemoryError):
        engine.runner.run()
    assert isinstance(listener.pieces[-1].error, BusyError)
    with pytest.raises(BusyError, match="stopping"):
        submit(engine, request_for(model, "Once", 30))


def test_for_whom_there_is_room_need_not_be_allowed_to_wait(model):
    engine = Engine(model, max_sessions=4, max_waiting=0)
    four = replace(request_for(model, "Once", 3), copies=4)
    with pytest.raises(TooLargeError, match=r"5 texts behind a prompt .* for all texts, 4 at a time"):
        submit(engine, replace(four, copies=5))
    submit(engine, four)
    with pytest.raises(BusyError):
        submit(engine, request_for(model, "Once", 3))
    engine.step()
    with pytest.raises(BusyError):
        submit(engine, request_for(model, "Once", 3))
    run_down(engine)
    submit(engine, four)


def test_who_ended_before_the_model_failed_gets_no_error(model, monkeypatch):
    engine = Engine(model)
    _, [ends] = submit(engine, request_for(model, "Once", 2))
    _, [goes_on] = submit(engine, request_for(model, "Once", 9))
    with monkeypatch.context() as broken:
        broken.setattr(engine, "_remember", lambda batch, row: 1 / 0)
        engine.step()
    assert (ends.finish, ends.error) == ("length", None)
    assert isinstance(goes_on.error, ZeroDivisionError)


def test_a_prompt_that_fails_ends_alone(model):
    engine = Engine(model)
    _, [fine] = submit(engine, request_for(model, "Once", 10))
    engine.step()
    _, [bad] = submit(engine, Request((0, 999), 5))
    run_down(engine)
    assert isinstance(bad.error, InputError)
    assert [fine.text] == generate(model, ["Once"], max_tokens=10)


def test_closing_tells_everyone(model):
    engine = Engine(model, max_sessions=1)
    listeners = [submit(engine, request_for(model, "Once", 10**6, seed=n))[1][0] for n in range(3)]
    thread = threading.Thread(target=engine.runner.run)
    thread.start()
    while not listeners[0].pieces:
        time.sleep(0.01)
    engine.runner.close()
    thread.join(10)
    assert not thread.is_alive()
    assert all(isinstance(one.error, BusyError) for one in listeners)
    with pytest.raises(BusyError, match="stopping"):
        submit(engine, request_for(model, "Once", 1))


def test_learned_positions_end_a_text():
    model = LanguageModel.from_preset("transformer-nano", **PRESETS["transformer-nano"], max_length=12).double()
    engine = Engine(model)
    _, [listener] = submit(engine, request_for(model, "Once", 8, temperature=0))
    run_down(engine)
    assert [listener.text] == generate(model, ["Once"], max_tokens=99, temperature=0)
