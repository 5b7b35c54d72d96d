"""One text's end, failure or departure is no matter of the others: of a batch, of a queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import model_of, request_for, run_down, submit

from glissando.generation import generate
from glissando.serving.engine import BusyError, Engine


@pytest.fixture(scope="module")
def model():
    return model_of("liquid-ssm-nano")


def test_a_token_that_the_tokenizer_does_not_know_ends_its_text_alone(model, monkeypatch):
    engine = Engine(model)
    [unlucky], [ill] = submit(engine, request_for(model, "Once", 30))
    _, [heard] = submit(engine, request_for(model, "The", 30, seed=1))
    for _ in range(4):
        engine.step()

    def unknown(token: int) -> str:
        raise IndexError(f"no token {token}")

    monkeypatch.setattr(unlucky.text, "push", unknown)
    run_down(engine)
    assert [isinstance(piece.error, IndexError) for piece in ill.pieces] == [False] * 4 + [True]
    assert heard.error is None
    assert [heard.text] == generate(model, ["The"], max_tokens=30, seed=1)


def test_who_failed_is_told_once_though_the_batch_fails_after_it(model, monkeypatch):
    engine = Engine(model)
    [unlucky], [ill] = submit(engine, request_for(model, "Once", 30))
    _, [ends] = submit(engine, request_for(model, "Once", 1))
    monkeypatch.setattr(unlucky.text, "push", lambda token: [][token])
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
    two, [_, heard] = submit(engine, replace(request_for(model, "The", 5), copies=2))
    two[0].cancel()
    engine.step()
    assert (engine.running, engine.waiting) == (2, 0), "there is room for the one that stays"
    first.cancel()
    run_down(engine)
    assert [heard.text] == generate(model, ["The"], max_tokens=5, seed=1)
