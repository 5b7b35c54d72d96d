"""The page at / in a real browser: what it writes, colours and turns, and what it says where something fails."""

from __future__ import annotations

import itertools
import json
import math
import re

import pages
import pytest

pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser with playwright")
from playground import ask, begun, ended, met, refused, served
from playwright.sync_api import expect

from glissando.generation import generate, stream

pytestmark = pytest.mark.skipif(pages.BROWSER is None, reason=pages.NO_BROWSER)


# ---------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    ("kind", "answer", "look"),
    [("liquid", "liquid over time, ordinary layers", "Time constants"),
     ("hybrid", "attention over time, depth is an ODE", "Speed over depth")],
)  # fmt: skip
def test_text_streams_as_the_library_writes_it(kind, answer, look, visit, request):
    served = request.getfixturevalue(kind)
    page = met(visit(served))
    page.select_option("#preset", "Bold")
    ask(page, max_tokens=40, seed=2)
    line = ended(page)
    expected = generate(served.model, ["The fox"], max_tokens=40, seed=2, temperature=1.1, top_p=0.95)[0]
    assert page.text_content("#written") == expected
    assert page.text_content("#given") == "The fox"
    assert line.startswith("40 tokens, ")
    assert line.endswith("; at its limit of tokens. Seed 2.")
    assert f"tiny · {served.model.num_parameters():,} parameters · {answer}" in page.text_content("#about")
    figure = page.locator("figure", has_text=look)
    expect(figure.locator("canvas")).to_have_attribute("aria-label", re.compile("at least .*, median .*, at most"))
    expect(figure).to_contain_text(f"the last {pages.looked_at(page)} tokens")
    assert len(pages.colours(figure.locator("canvas"))) > 8
    expect(page.locator("#looks-error")).to_be_hidden()
    assert page.complaints == []
    assert {asked.url.startswith(served.url) for asked in page.requests} == {True}


def test_every_token_is_coloured_by_its_surprise(liquid, visit):
    body = {"model": "tiny", "prompt": "A hen", "max_tokens": 60, "seed": 3, "temperature": 0.8, "logprobs": 0}
    answer = liquid.post("v1/completions", body)["choices"][0]["logprobs"]
    surprise = [-value / math.log(2) for value in answer["token_logprobs"]]
    page = met(visit(liquid))
    ask(page, "A hen", max_tokens=60, seed=3)
    mean = sum(surprise) / len(surprise)
    assert f"{mean:.2f} bits per token" in ended(page)
    legend = pages.legend(page)
    assert mean * 2 < legend[-1] < mean * 8  # it is scaled to the model
    assert legend != [0, 0.5, 1, 2, 3, 4, 6, 8]
    wanted = [
        (text, "token" + " newline" * (text == "\n") + f" bits-{pages.level(bits, legend)}", pages.title(bits, count))
        for text, bits, count in pages.released(answer["tokens"], surprise)
    ]
    assert len(wanted) > 20
    assert pages.spans(page) == wanted
    page.locator("#written .token").nth(4).hover()
    assert page.text_content("#readout").endswith(f": {wanted[4][2]}")


def test_characters_of_several_tokens_have_their_mean(liquid, visit):
    euro = {"bytes:\\xe2": 6, "bytes:\\x82": 1.5, "bytes:\\xac": 0}
    shown = [("", euro), ("€", {}), ("<b>", {"<b>": 9}), ("", {" é": 1, "bytes:\\xc3": 3})]
    last = pages.event(" éßok", {"bytes:\\x9f": 5, "o": 2, "k": 7}, "stop")
    answer = "".join(pages.event(*one) for one in shown) + last + "data: [DONE]\n\n"
    page = met(visit(liquid, {"v1/completions": lambda route: route.fulfill(body=answer)}))
    ask(page, "")
    assert ended(page).startswith("9 tokens, ")
    spans = [("€", 3, 2.5, 3), ("<b>", 7, 9, 1), (" é", 2, 1, 1), ("ß", 5, 4, 2), ("o", 3, 2, 1), ("k", 6, 7, 1)]
    assert pages.spans(page) == [(text, f"token bits-{n}", pages.title(*rest)) for text, n, *rest in spans]
    assert "the model ended it" in page.text_content("#ending")


def test_events_come_whole_wherever_the_network_cuts(liquid, visit):
    sent = [
        ": a comment",
        'data: {"text": "€ und ß"}',
        "data: two\ndata: lines",
        "event: x\ndata:tight",
        "data: [DONE]",
    ]
    script = """async (pieces) => {
      const { events } = await import("/client.js");
      const found = [];
      const body = new ReadableStream({ start(to) {
        pieces.forEach(piece => to.enqueue(new Uint8Array(piece)));
        to.close();
      } });
      for await (const data of events(body)) found.push(data);
      return found;
    }"""
    page = visit(liquid)
    for newline, size in itertools.product(("\n", "\r\n"), (1, 2, 7, 1000)):
        raw = "".join(one + "\n\n" for one in [*sent, ""]).replace("\n", newline).encode() + b"data: cut off"
        pieces = [list(raw[at : at + size]) for at in range(0, len(raw), size)]
        assert page.evaluate(script, pieces) == ['{"text": "€ und ß"}', "two\nlines", "tight", "[DONE]"]


def test_what_the_model_was_trained_on_is_said_before_it_writes(visit):
    about = {"trained_on": "the built-in children's stories"}
    served = pages.Served(pages.model_of("liquid-ssm-nano"), about={"tiny": about})
    try:
        page = met(visit(served))
        expect(page.locator("#empty")).to_have_text(
            "Trained on the built-in children's stories. Nothing is written yet."
        )
    finally:
        served.stop()


def test_the_page_begins_with_a_story_and_a_link_does_not(visit):
    served = pages.Served(pages.model_of("liquid-ssm-nano"), about={"tiny": {"prompts": pages.PROMPTS[1:]}})
    try:
        linked = met(visit(served, at="#prompt=The+fox&seed=3"))
        for place in ("#shared", ".column p:visible >> nth=0"):  # the second is what a telephone shows
            expect(linked.locator(place)).to_have_text("This link holds a text. Press Write to generate it.")
        before = served.engine.tokens_written
        page = visit(served, color_scheme="light")
        expect(page.locator("#given")).to_have_text(pages.PROMPTS[1])
        expect(page.locator("#written .token").first).to_be_attached()
        assert before == 0
        assert linked.locator("#text").is_hidden()
        page.keyboard.press("Escape")  # where the text has not ended yet
        page.click("#examples button >> nth=1")
        expect(page.locator("#given")).to_have_text(pages.PROMPTS[2])
    finally:
        served.stop()


def test_a_text_ends_with_the_sentence_that_ends_in_the_last_part_of_its_limit(liquid, visit):
    texts = [('A. B. "C. D." E. F. G.', 10, 'A. B. "C. D."'), ("Up, Mrs. D. Fox. Mr. Owl", 8, "Up, Mrs. D. Fox.")]
    events = ["".join(pages.event(letter, {letter: 1}) for letter in text) for text, *_ in texts]
    answers = iter([f"{each}data: [DONE]\n\n" for each in events])
    page = met(visit(liquid, {"v1/completions": lambda route: route.fulfill(body=next(answers))}))
    for seed, (_, limit, shown) in enumerate(texts):
        ask(page, "", max_tokens=limit, seed=seed)
        line = ended(page, f"Seed {seed}")
        assert page.text_content("#written") == shown
        assert "; at the last sentence within its limit of tokens." in line
        assert page.locator("#error").is_hidden()


# ---------------------------------------------------------------------- dials and stops


def test_a_dial_turned_while_text_streams_changes_what_follows(hybrid, visit):
    model, seed = hybrid.model, 1
    page = met(visit(hybrid))
    page.get_by_label("speech, as a number").fill("0.5")
    begun(page, hybrid, 6, max_tokens=30, seed=seed)
    with page.expect_response("**/control") as turned:
        page.get_by_label("mood", exact=True).press("End")
    hybrid.gate.allow(pages.EVER)
    assert turned.value.json()["control"] == {"mood": 1.0, "speech": 0.5}
    expect(page.get_by_label("mood, as a number")).to_have_value("1")
    ended(page)
    asked = itertools.count()
    # The prompt and six tokens were read before the dial was turned.
    expected = stream(model, "The fox", max_tokens=30, seed=seed, control=lambda: [float(next(asked) > 6), 0.5])
    written = page.text_content("#written")
    assert written == "".join(expected)
    assert written != generate(model, ["The fox"], max_tokens=30, seed=seed, control=[0.0, 0.5])[0]
    assert page.complaints == []


def test_dials_at_zero_are_not_sent_and_a_turned_one_is(hybrid, visit):
    page, bodies = met(visit(hybrid)), []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("/completions") else None)
    ask(page, max_tokens=5, seed=1)
    ended(page)
    page.get_by_label("speech, as a number").fill("2.5")
    beyond = page.locator(".beyond", has_text="speech=2.5 is outside -1 to 1, where this model was trained.")
    expect(beyond).to_be_visible()
    expect(page.locator(".beyond:visible")).to_have_count(1)
    ask(page, max_tokens=5, seed=2)
    ended(page, "Seed 2")
    assert "control" not in bodies[0]
    assert bodies[1]["control"] == {"mood": 0, "speech": 2.5}
    page.get_by_label("mood, as a number").fill("")
    page.click("#write")
    expect(page.locator("#error")).to_have_text("The dial mood is not a number; give one, such as 0.7.")
    assert len(bodies) == 2


def test_a_model_of_which_nothing_is_to_be_seen_has_no_pictures(liquid, visit):
    nothing = {"tokens": ["a"], "looks": []}
    page = met(visit(liquid, {"v1/glissando/look": lambda route: route.fulfill(json=nothing)}))
    for seed in (1, 2):
        ask(page, max_tokens=5, seed=seed)
        ended(page, f"Seed {seed}")
    page.wait_for_timeout(150)  # three times the pause between looks
    expect(page.locator("#looks")).to_be_hidden()
    assert sum(asked.url.endswith("/look") for asked in page.requests) == 1


def test_stop_stops_at_once_and_frees_the_slot(liquid, visit):
    page = met(visit(liquid))
    whole = generate(liquid.model, ["The fox"], max_tokens=6, seed=3)[0]
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        before = begun(page, liquid, 5, max_tokens=2000, seed=3)
        stop()
        assert "; stopped by you." in ended(page, "Seed 3")
        pages.until(lambda: not liquid.server.groups)
        liquid.gate.allow(pages.EVER)
        pages.until(lambda: liquid.engine.running == 0)
        assert liquid.engine.tokens_written == before + 6
        assert page.text_content("#written")
        assert whole.startswith(page.text_content("#written"))
        ask(page, max_tokens=3, seed=7)
        assert "Seed 7" in ended(page, "Seed 7")


def test_dials_back_at_zero_draw_the_picture_without_them(hybrid, visit):
    page = met(visit(hybrid))
    ask(page, max_tokens=5)
    ended(page)
    expect(page.locator("figure")).to_be_visible()
    page.get_by_label("mood, as a number").fill("1")
    asked = []
    page.on("request", lambda request: asked.append(request.post_data) if request.url.endswith("look") else None)
    page.get_by_label("mood, as a number").fill("0")
    pages.until(lambda: page.wait_for_timeout(50) or any("mood" not in body for body in asked))


def test_presets_set_the_fields_and_the_fields_name_the_preset(liquid, visit):
    page = met(visit(liquid))
    expect(page.locator("#dials")).to_be_hidden()  # of a model that has none
    for name, temperature, top_p in [("Greedy", "0", ""), ("Bold", "1.1", "0.95"), ("Careful", "0.3", "")]:
        page.select_option("#preset", name)
        assert (page.input_value("#temperature"), page.input_value("#top_p")) == (temperature, top_p)
    page.fill("#temperature", "0.8")
    expect(page.locator("#preset")).to_have_value("Balanced")
    page.fill("#top_k", "3")
    expect(page.locator("#preset")).to_have_value("Your own")


@pytest.mark.slow
def test_the_pace_is_slow_where_there_are_dials_and_changes_while_it_writes(hybrid, liquid, visit):
    page = visit(hybrid)
    expect(page.get_by_role("radio", name="15", exact=True)).to_be_checked()
    expect(visit(liquid).get_by_role("radio", name="fastest")).to_be_checked()
    seed = 1
    with page.expect_request("**/completions") as asked:
        ask(page, max_tokens=60, seed=seed)
    assert asked.value.post_data_json["pace"] == 15
    expect(page.locator("#written .token").first).to_be_attached()
    with page.expect_response("**/control") as changed:
        page.locator("label", has_text="fastest").click()
    assert changed.value.json()["pace"] is None
    assert "; at its limit of tokens" in ended(page)
    assert page.text_content("#written") == generate(hybrid.model, ["The fox"], max_tokens=60, seed=seed)[0]


# ---------------------------------------------------------------------- errors


def test_what_the_server_refuses_is_said_and_what_is_written_stays(liquid, visit):
    page = met(visit(liquid))
    ask(page, max_tokens=20, seed=2)
    line, written = ended(page), page.text_content("#written")
    ask(page, "word " * 30)
    answer = refused(page)
    assert "the prompt has 151 tokens" in answer.lower()
    assert answer.endswith("Shorten the prompt, then write again.")
    expect(page.locator("#prompt")).to_have_attribute("aria-invalid", "true")
    ask(page, "word " * 1000)
    expect(page.locator("#error")).to_have_text("The request has more than 4,000 bytes; send a shorter one.")
    expect(page.locator("#prompt")).to_have_attribute("aria-invalid", "false")
    ask(page, top_p=2)
    expect(page.locator("#error")).to_contain_text("Top_p: input should be less than or equal to 1")
    expect(page.locator("#top_p")).to_have_attribute("aria-invalid", "true")
    assert (page.text_content("#ending"), page.text_content("#written")) == (line, written)
    ask(page, top_p=1, seed=8)
    ended(page, "Seed 8")
    expect(page.locator("#error")).to_be_hidden()
    assert all("Failed to load resource" in complaint for complaint in page.complaints)


def test_a_wrong_control_is_said(hybrid, visit):
    answer = {"model": "tiny", "parameters": 1, "mixers": ["x"], "depth": "flow", "controls": ["moood"],
            "trained_on": None, "max_length": None}  # fmt: skip
    about = json.dumps({"models": [answer], "max_tokens": 9, "max_prompt": 9})
    page = met(visit(hybrid, {"v1/glissando": lambda route: route.fulfill(body=about)}))
    page.get_by_label("moood", exact=True).press("Home")
    ask(page)
    assert "'moood'" in refused(page)
    assert "mood" in refused(page).replace("'moood'", "")


def test_a_busy_server_and_a_failing_one_are_said(liquid, visit):
    answers = iter([
        {"status": 429, "json": {"error": {"message": "7 texts wait already, and 7 may", "code": "too_many_texts"}}},
        {"status": 500, "json": {"error": {"message": "the model failed on this text: X", "code": "model_failed"}}},
        {"status": 502, "body": "<h1>Bad gateway</h1>"},
        {"body": pages.event("ab", {"a": 1, "b": 1})},
        {"body": pages.event("c", {"c": 1}) + 'data: {"error": {"message": "the server is stopping"}}\n\n'},
    ])  # fmt: skip
    page = met(visit(liquid, {"v1/completions": lambda route: route.fulfill(**next(answers))}))
    for answer in (
        "7 texts wait already, and 7 may. Write again in a moment.",
        "The model failed on this text: X. Try again; the server's own output says more.",
        "<h1>Bad gateway</h1>. Try again; the server's own output says more.",
        "The text broke off: the server ended it without saying that it was done. See that glissando serve still runs "
        "and can be reached, then write again.",
        "The server is stopping. Try again; the server's own output says more.",
    ):
        ask(page)
        expect(page.locator("#error")).to_have_text(answer)
    expect(page.locator("#written")).to_have_text("c")
    expect(page.locator("#ending")).to_contain_text("1 token, 1.00 bits per token; broken off.")
    assert not [complaint for complaint in page.complaints if "Failed to load resource" not in complaint]


@pytest.fixture
def guarded():
    with served("liquid-ssm-nano", api_key=pages.KEY) as guarded:
        yield guarded


@pytest.mark.slow
def test_a_key_is_asked_for_and_a_server_that_goes_is_reported(guarded, visit):
    page = visit(guarded)
    expect(page.locator("#error")).to_have_text("This server asks for a key. Type it above.")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#error")).to_have_text("The server does not take this key. Try another.")
    page.fill("#key", pages.KEY)
    page.click("text=Use key")
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#prompt")).to_be_focused()
    page.reload()
    met(page)
    expect(page.locator("#key-form")).to_be_hidden()
    begun(page, guarded, 5, max_tokens=500, seed=1)
    guarded.drop_connections()
    expect(page.locator("#error")).to_contain_text("The connection to the server was lost. See that glissando serve")
    written = page.text_content("#written")
    assert "; broken off." in ended(page)
    guarded.stop()
    ask(page)
    expect(page.locator("#error")).to_contain_text("The server does not answer. See that glissando serve still runs")
    assert page.text_content("#written") == written != ""
