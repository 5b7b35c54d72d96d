"""One text's end, failure or departure is no matter of the others: of a batch, of a queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import model_of, request_for, run_down, submit
from slow import slow_where

from glissando.data.tokenizers import ByteTokenizer
from glissando.generation import generate
from glissando.mixers.tau.layer import TauState
from glissando.model import LanguageModel
from glissando.serving.engine import BusyError, Engine
from glissando.state import Slotted, State, fit_room, state_bytes


@pytest.fixture(scope="module")
def model():
    return model_of("liquid-ssm-nano")


def test_a_token_that_the_tokenizer_does_not_know_ends_its_text_alone(model, monkeypatch):
    engine = Engine(model)
    [unlucky], [ill] = submit(engine, request_for(model, "Once", 30))
    _, [listener] = submit(engine, request_for(model, "The", 30, seed=1))
    for _ in range(4):
        engine.step()

    def unknown(tokens: list[int]) -> str:
        raise IndexError(f"no token {tokens}")

    monkeypatch.setattr(unlucky.text, "push_all", unknown)
    run_down(engine)
    assert [isinstance(piece.error, IndexError) for piece in ill.pieces] == [False] * 5 + [True]
    assert listener.error is None
    assert [listener.text] == generate(model, ["The"], max_tokens=30, seed=1)


def test_ids_beyond_the_tokenizer_are_neither_drawn_nor_reported():
    torch.manual_seed(0)
    grown = LanguageModel.from_preset("transformer-nano", vocab_size=400, hidden_size=32, depth={"layers": 1}).eval()
    grown.tokenizer = ByteTokenizer()
    engine = Engine(grown)
    asked = [request_for(grown, "hello", temperature=t, top=20, echo=True) for t in (0, 5.0)]
    listeners = [submit(engine, request)[1][0] for request in asked]
    run_down(engine)
    for listener in listeners:
        tokens = [token for piece in listener.pieces for token in piece.tokens]
        assert listener.error is None
        assert tokens
        assert len(tokens) > 6, "the prompt's tokens too"
        assert all(token.id < 256 and all(i < 256 for i, _ in token.top) for token in tokens)


def test_who_failed_gets_one_error_though_the_batch_fails_after_it(model, monkeypatch):
    engine = Engine(model)
    [unlucky], [ill] = submit(engine, request_for(model, "Once", 30))
    _, [ends] = submit(engine, request_for(model, "Once", 2))
    monkeypatch.setattr(unlucky.text, "push_all", lambda tokens: [][len(tokens)])
    monkeypatch.setattr(engine, "_remember", lambda batch, row: 1 / 0)
    engine.step()
    assert [type(piece.error) for piece in ill.pieces] == [IndexError]
    assert ends.finish == "length"


def test_who_leaves_while_waiting_gives_the_place_up(model):
    engine = Engine(model, max_sessions=1, max_waiting=3)
    submit(engine, request_for(model, "Once", 500))
    engine.step()
    queued = [submit(engine, request_for(model, "The", 5))[0][0] for _ in range(3)]
    with pytest.raises(BusyError, match="3 texts wait already"):
        submit(engine, request_for(model, "a", 5))
    for session in queued:
        session.cancel()
    assert engine.waiting == 0
    submit(engine, request_for(model, "a", 5))
    engine.step()
    assert engine.waiting == 1
    assert len(engine._waiting) == 1, "what was given up is still held"


def test_of_several_texts_those_that_stay_keep_their_place(model):
    engine = Engine(model, max_sessions=2)
    [first], _ = submit(engine, request_for(model, "Once", 500))
    engine.step()
    two, [_, listener] = submit(engine, replace(request_for(model, "The", 5), copies=2))
    two[0].cancel()
    engine.step()
    assert (engine.running, engine.waiting) == (2, 0), "there is room for the one that stays"
    first.cancel()
    run_down(engine)
    assert [listener.text] == generate(model, ["The"], max_tokens=5, seed=1)


# ---------------------------------------------------------------------- room


CACHED = ("transformer-nano", "tauformer-nano")


def most_room(state: State) -> int:
    """Slots of the layer that has most of them."""
    if isinstance(state, Slotted):
        return state.capacity
    return max(map(most_room, state), default=0) if isinstance(state, tuple) else 0


@pytest.mark.parametrize("preset", slow_where(["tauformer-nano"], CACHED))
def test_what_is_kept_of_a_short_text_is_short_beside_a_long_one(preset):
    """Its prompt's state and its own, in one batch with a long text and in one reading with a long prompt."""
    model, sizes = model_of(preset), []
    for prompt in ("x", "x" * 300):
        engine = Engine(model, chunk=256)
        submit(engine, request_for(model, prompt, 40))
        engine.step()
        submit(engine, request_for(model, "Ben said", 8, seed=1))
        run_down(engine)
        texts = [text for text in engine.prefixes._texts.values() if 5 < text.length < 40]
        sizes.append([(text.length, state_bytes(text.step.state)) for text in texts])
        assert [most_room(text.step.state) for text in texts] == [text.length for text in texts]
    assert len(sizes[0]) == 2
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("preset", CACHED)
@pytest.mark.slow
def test_a_batch_that_a_long_text_has_left_is_as_small_as_those_that_stay(preset):
    model = model_of(preset)
    engine = Engine(model)
    [long], _ = submit(engine, request_for(model, "x" * 600, 500))
    _, [listener] = submit(engine, request_for(model, "Once", 120))
    for _ in range(30):
        engine.step()
    assert most_room(engine.batches[0].step.state) > 600
    long.cancel()
    engine.step()
    assert most_room(engine.batches[0].step.state) == 64
    run_down(engine)
    assert [listener.text] == generate(model, ["Once"], max_tokens=120)


@pytest.mark.parametrize(
    ("filled", "room", "left"),
    [(30, 60, 60), (30, 64, 64), (30, 65, 64), (64, 200, 64), (65, 129, 129), (65, 131, 128), (300, 601, 512)],
)  # fmt: skip
def test_room_to_grow_stays(filled, room, left):
    k, v, position = torch.zeros(2, 1, room), torch.zeros(2, 1, room, 4), torch.tensor([filled, filled // 2])
    [layer, _] = fit_room((TauState(k, v, None, None, None, position, position), None), spare=True)
    assert layer.capacity == layer.v.shape[2] == left
