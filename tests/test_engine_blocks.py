"""Texts that the compiled step writes many tokens at a time: the same texts, shared prompts, and going back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from engines import model_of, request_for, run_down, submit
from loud import loud

from glissando.decoding.steps import CompiledStep
from glissando.generation import generate
from glissando.model import LanguageModel
from glissando.serving.batches import MARK_EVERY, MARKS, thin_out
from glissando.serving.engine import Engine
from glissando.serving.session import Request

KINDS = ["transformer-nano", "liquid-ssm-nano", "composite-nano", "tauformer-nano"]
PROMPTS = ["Once upon a time", "The", "", "x" * 200, "Ben said: "]


def compiled(preset: str) -> LanguageModel:
    """In float32."""
    return loud(preset, hidden_size=32, depth={"layers": 4 if preset == "composite-nano" else 2}).float()


@pytest.mark.parametrize("preset", KINDS)
def test_texts_of_every_kind_are_those_written_alone(preset):
    """Lengths, stop texts and arrivals fall anywhere in a call; a model that takes long for a token gets few a call."""
    model, rng = compiled(preset), random.Random(0)
    stops = generate(model, "The", max_tokens=40, seed=7)[0]
    seconds = iter([n * (0.03 if n % 5 else 0.001) for n in range(10_000)])
    engine, expected = Engine(model, chunk=97, clock=lambda: next(seconds)), []
    for turn in range(12):
        prompt, count, seed = rng.choice(PROMPTS), rng.randrange(1, 90), rng.randrange(9)
        stop = (stops[17:19],) if turn % 3 == 0 else ()
        request = request_for(model, prompt, count, seed, stop=stop, top=2 if turn % 4 == 1 else None)
        [session], [listener] = submit(engine, request)
        expected.append((session, listener, generate(model, prompt, max_tokens=count, seed=seed, stop=stop)))
        for _ in range(turn % 3):
            engine.step()
    run_down(engine)
    assert isinstance(engine._step(model.init_state(1), False), CompiledStep)
    for session, listener, [text] in expected:
        assert listener.text == text
        assert listener.finish in ("stop", "length")
        if session.request.top:
            tokens = [token for piece in listener.pieces for token in piece.tokens]
            ids = [*session.request.ids, *session.written]
            with torch.no_grad():
                logp = model(torch.tensor([ids]))[0][0, len(session.request.ids) - 1 : -1].log_softmax(-1)
            expected_logp = [float(logp[n, token.id]) for n, token in enumerate(tokens)]
            assert [token.logprob for token in tokens] == pytest.approx(expected_logp, abs=1e-3)


def test_a_call_takes_as_many_tokens_as_there_is_time_for():
    model, now = compiled("liquid-ssm-nano"), [0.0]
    engine = Engine(model, clock=lambda: now[0])
    submit(engine, request_for(model, "Once", 300))
    engine.step()
    write, lengths = engine.batches[0].step.write, []

    def slow(*arguments):
        written = write(*arguments)
        now[0] += 0.01 * written.shape[1]
        lengths.append(written.shape[1])
        return written

    engine.batches[0].step.write = slow
    for _ in range(4):
        engine.step()
    assert lengths[1:] == [5, 5, 5], "50 ms at 10 ms a token"


@pytest.mark.parametrize("preset", ["transformer-nano", "tauformer-nano", "composite-nano"])
def test_the_texts_of_one_request_share_their_prompts_pages(preset):
    model = compiled(preset)
    engine = Engine(model, block=1)
    request = request_for(model, "ab " * 150, 70, seed=3, copies=8)
    _, listeners = submit(engine, request)
    for _ in range(5):
        engine.step()
    pages = engine.batches[0].step.rows.pages
    assert sum(map(len, pages)) == 8 * 8
    assert len({id(page) for each in pages for page in each}) == 7 + 8  # 451 tokens are 7 full pages
    run_down(engine)
    assert [listener.text for listener in listeners] == generate(model, ["ab " * 150] * 8, max_tokens=70, seed=3)


@pytest.mark.parametrize("preset", KINDS)
def test_an_edited_prompt_and_a_text_that_branches_are_read_from_where_they_part(preset):
    model = compiled(preset)
    engine, prompt = Engine(model), "".join(chr(97 + n * n % 23) for n in range(180))
    [session], _ = submit(engine, request_for(model, prompt, 120, seed=2))
    run_down(engine)

    def read(ids: tuple[int, ...]) -> int:
        """Tokens read for a text behind `ids`, which is the text of an engine that knows nothing."""
        before, request = engine.tokens_read, replace(request_for(model, "", 30, seed=5), ids=ids)
        _, [listener] = submit(engine, request)
        run_down(engine)
        fresh = Engine(model, prefix_bytes=0)
        _, [expected] = submit(fresh, request)
        run_down(fresh)
        assert listener.text == expected.text
        return engine.tokens_read - before

    ids = session.request.ids
    assert read(ids) == 0
    assert read((*ids[:-9], 65, 66, 67)) == 32 - 9 + 3, "an edited prompt"
    assert read((*ids[:-31], 65)) == 2
    whole = (*ids, *session.written)
    assert read((*whole, 65)) == 2, "a conversation"
    assert 0 < read((*whole[:-20], 65)) <= 63, "another token in the text"
    assert 0 < read((*ids, *session.written[:60], 65)) <= 63


def test_a_text_that_a_stop_text_ended_is_known_to_its_last_mark():
    model = compiled("composite-nano")
    text = generate(model, "Once", max_tokens=90, seed=1)[0]
    engine = Engine(model)
    [session], [listener] = submit(engine, request_for(model, "Once", 90, seed=1, stop=(text[75:78],)))
    run_down(engine)
    assert listener.finish == "stop"
    before = engine.tokens_read
    again = replace(session.request, ids=(*session.request.ids, *session.written, 65), stop=())
    _, [follows] = submit(engine, again)
    run_down(engine)
    assert engine.tokens_read - before <= 64
    fresh = Engine(model, prefix_bytes=0)
    _, [expected] = submit(fresh, again)
    run_down(fresh)
    assert follows.text == expected.text


def test_a_text_that_its_reader_stopped_goes_on_from_where_it_is():
    model = compiled("liquid-ssm-nano")
    engine = Engine(model)
    [session], _ = submit(engine, request_for(model, "Once", 900))
    for _ in range(4):
        engine.step()
    session.cancel()
    run_down(engine)
    before = engine.tokens_read
    submit(engine, replace(session.request, ids=(*session.request.ids, *session.written), max_tokens=3))
    run_down(engine)
    assert len(session.written) > 4
    assert engine.tokens_read - before == 1


def test_marks_of_a_long_text_are_few_and_gone_with_it():
    model = model_of("liquid-ssm-nano").float()
    engine = Engine(model)
    [session], _ = submit(engine, request_for(model, "Once", 2000))
    while len(session.written) <= 400:
        engine.step()
    assert 4 <= len(session.marks) <= 8
    assert len(session.read) - max(session.marks) <= 64
    run_down(engine)
    assert not session.marks, "what the cache dropped would live until the answer is sent"


@pytest.mark.parametrize(("length", "chunk"), [(1280, 128), (1100, 1024), (1000, 1024)])
def test_a_long_prompt_is_known_to_shortly_before_its_end(length, chunk):
    """However many parts it is read in, and however short the last one is."""
    model = model_of("liquid-ssm-nano").float()
    engine = Engine(model, chunk=chunk)
    request = request_for(model, "".join(chr(97 + n * n % 23) for n in range(length - 1)), 3)
    submit(engine, request)
    run_down(engine)
    before = engine.tokens_read
    submit(engine, replace(request, ids=(*request.ids[:-9], 65)))
    run_down(engine)
    assert engine.tokens_read - before == 32 - 9 + 1


def test_texts_that_are_turned_share_their_prompts_pages_still():
    model = compiled("hybrid-ode-nano")
    engine = Engine(model, block=1)
    sessions, _ = submit(engine, request_for(model, "ab " * 150, 60, seed=3, copies=8))
    for _ in range(3):
        engine.step()
    for session in sessions:
        session.turn((0.2, 0.3))
    engine.step()
    [batch] = engine.batches
    assert batch.together.controlled
    assert len({id(page) for each in batch.step.rows.pages for page in each}) == 7 + 8
    for session in sessions:
        session.cancel()
    run_down(engine)


def test_texts_that_nobody_reads_hold_up_no_other_batch():
    model, now = compiled("hybrid-ode-nano"), [0.0]
    engine, lengths = Engine(model, clock=lambda: now[0]), []
    submit(engine, request_for(model, "Once", 300, streams=False))
    submit(engine, request_for(model, "Once", 300, control=(0.1, 0.2)))
    engine.step()
    engine.step()
    for batch in engine.batches:
        write = batch.step.write

        def slow(*arguments, write=write):
            written = write(*arguments)
            now[0] += 0.01 * written.shape[1]
            lengths.append(written.shape[1])
            return written

        batch.step.write = slow
    for _ in range(3):
        engine.step()
    assert max(lengths[2:]) == 5, "50 ms at 10 ms a token"


def test_tokens_behind_a_stop_text_are_not_written():
    model = compiled("composite-nano")
    text = generate(model, "Once", max_tokens=90, seed=1)[0]
    engine = Engine(model)
    [session], _ = submit(engine, request_for(model, "Once", 90, seed=1, stop=(text[75:78],)))
    run_down(engine)
    assert engine.tokens_written == len(session.written)


def after_a_prompt_of_200() -> tuple[Engine, Request]:
    model = model_of("liquid-ssm-nano").float()
    engine, request = Engine(model), request_for(model, "".join(chr(97 + n * n % 23) for n in range(199)), 3)
    submit(engine, request)
    run_down(engine)
    return engine, request


def test_a_text_goes_whose_mark_was_another_texts_end():
    """In any order: a place that went with the one is missed by nobody."""
    engine, request = after_a_prompt_of_200()
    for ids in (request.ids[:168], (*request.ids, 70)):  # 168 is a mark of the first
        submit(engine, replace(request, ids=ids, max_tokens=1))
        run_down(engine)
    while engine.prefixes.bytes:
        engine.prefixes.shrink(engine.prefixes.bytes - 1)
    assert (len(engine.prefixes), engine.prefixes.longest(request.ids, None)) == (0, None)


def test_the_marks_of_a_prompt_live_as_long_as_a_text_that_has_them():
    engine, request = after_a_prompt_of_200()
    assert len(engine.prefixes) == 2
    engine.prefixes.shrink(engine.prefixes.bytes - 1)
    known = engine.prefixes.longest((*request.ids[:180], 65), None)
    assert (len(engine.prefixes), known.length) == (1, 168)


def test_a_prompt_that_is_what_a_text_has_read_is_read_once():
    model = compiled("liquid-ssm-nano")
    engine = Engine(model, clock=lambda: 0.0)
    [session], _ = submit(engine, request_for(model, "Once", 120, seed=4))
    run_down(engine)
    request, read = replace(session.request, ids=session.read, max_tokens=2), []
    for _ in range(2):
        before = engine.tokens_read
        submit(engine, request)
        run_down(engine)
        read.append(engine.tokens_read - before)
    assert read[0] > 0
    assert read[1] == 0
    edited = engine.prefixes.longest((*session.read[:-1], 65), None)
    assert edited.length > len(session.request.ids), "the text's own marks are known still"


def test_a_text_that_is_marked_is_not_looked_through_again():
    model = compiled("liquid-ssm-nano")
    engine = Engine(model, lookup=8)
    [session], _ = submit(engine, request_for(model, "ab " * 30, 200, temperature=0))
    for _ in range(3):
        engine.step()
    step, marks = engine.batches[0].step, len(session.marks)
    for _ in range(12):
        engine.step()
    assert len(session.marks) > marks
    assert engine.batches[0].step is step


def test_logits_of_a_call_take_a_sixteenth_of_the_memory():
    model = compiled("liquid-ssm-nano")
    engine = Engine(model, memory=2**20, clock=lambda: 0.0)
    submit(engine, request_for(model, "Once", 100, top=2, copies=3))
    engine.step()
    write, sizes = engine.batches[0].step.write, []
    engine.batches[0].step.write = lambda *each: (sizes.append(each[-1].nbytes), write(*each))[1]
    for _ in range(3):
        engine.step()
    assert 0 < max(sizes) <= 2**20 // 16


@pytest.mark.parametrize("longest", [1, 20, 32])
def test_marks_lie_denser_towards_the_end_of_a_text(longest):
    """As docs/serving.md has it: what another token near the end rereads."""
    rng, marks, length = random.Random(longest), {}, 10
    for _ in range(400):
        if length - max(marks, default=-MARK_EVERY) >= MARK_EVERY:
            marks[length] = None
            thin_out(marks)
        assert len(marks) <= MARKS
        for back, most in ((32, 62), (128, 125)):
            if length > 500:
                places = range(length - back, length)
                assert max(place - max(mark for mark in marks if mark <= place) for place in places) <= most
        length += rng.randint(1, longest)
