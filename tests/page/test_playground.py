"""The page at / in a real browser: what it writes, colours, turns, shares and compares, and what it says of errors.

One file, whose tests share a browser and two servers."""

from __future__ import annotations

import itertools
import json
import math
import re

import pages
import pytest

pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser with playwright")
from playground import ask, begun, ended, leave, met, refused, served
from playwright.sync_api import expect

from glissando.export import web
from glissando.generation import generate, stream

pytestmark = pytest.mark.skipif(pages.BROWSER is None, reason=pages.NO_BROWSER)


# ---------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    ("kind", "answer", "look"),
    [("liquid", "liquid over time, ordinary layers", "Time constants"),
     pytest.param("hybrid", "attention over time, depth is an ODE", "Speed over depth", marks=pytest.mark.slow)],
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


def test_the_page_begins_with_a_story_and_a_link_does_not(visit):
    about = {"prompts": pages.PROMPTS[1:], "trained_on": "tales"}
    served = pages.Served(pages.model_of("liquid-ssm-nano"), about={"tiny": about})
    try:
        linked = met(visit(served, at="#prompt=The+fox&seed=3"))
        for place in ("#shared", ".column p:visible >> nth=0"):  # the second is what a telephone shows
            expect(linked.locator(place)).to_have_text("This link holds a text. Press Write to generate it.")
        assert " · trained on tales · " in linked.text_content("#about")
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


def test_the_end_of_a_text_is_followed_until_one_scrolls_away(liquid, visit):
    page = met(visit(liquid))
    page.set_viewport_size({"width": 800, "height": 200})
    page.locator("#text").evaluate("node => { node.style.fontSize = '50px' }")  # higher than the window
    begun(page, liquid, 60, max_tokens=70, seed=1)
    page.wait_for_function("document.querySelector('#written').children.length > 30")  # some are parts of characters
    assert page.locator("#text").evaluate("node => node.scrollHeight === node.clientHeight")  # nothing scrolls within
    expect(page.locator("#ending")).to_be_in_viewport()
    assert page.evaluate("window.scrollY") > 0
    page.evaluate("window.scrollTo(0, 0)")
    expect(page.locator("#ending")).not_to_be_in_viewport()
    liquid.gate.allow(pages.EVER)
    ended(page)
    assert page.evaluate("window.scrollY") == 0


# ---------------------------------------------------------------------- dials and stops


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
    asked = []
    page.on("request", lambda request: asked.append(request.post_data) if request.url.endswith("look") else None)
    page.get_by_label("mood, as a number").fill("1")
    page.get_by_label("speech, as a number").fill("0")
    pages.until(lambda: page.wait_for_timeout(10) or any("mood" in body for body in asked))
    page.get_by_label("mood, as a number").fill("0")
    pages.until(lambda: page.wait_for_timeout(10) or "mood" not in asked[-1])


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


# ---------------------------------------------------------------------- marks and links


def test_a_mark_stands_where_a_dial_was_moved_and_the_link_writes_it_again(hybrid, visit):
    page, seed = met(visit(hybrid)), 1
    page.get_by_label("speech, as a number").fill("0.5")
    begun(page, hybrid, 6, max_tokens=20, seed=seed)
    with page.expect_response("**/control") as turned:
        page.get_by_label("mood", exact=True).press("End")
    hybrid.gate.allow(pages.EVER)
    assert turned.value.json()["control"] == {"mood": 1.0, "speech": 0.5}
    expect(page.get_by_label("mood, as a number")).to_have_value("1")
    ended(page)
    asked = itertools.count()
    # The prompt and six tokens were read before the dial was turned.
    turn = {"control": lambda: [float(next(asked) > 6), 0.5]}
    expected = "".join(stream(hybrid.model, "The fox", max_tokens=20, seed=seed, **turn))
    unturned = "".join(stream(hybrid.model, "The fox", max_tokens=20, seed=seed, control=[0.0, 0.5]))
    mark = page.locator("#written .mark")
    assert mark.get_attribute("aria-label") == "Dials moved here: happy 1"
    script = "node => { let t = ''; while (node = node.previousSibling) t = node.textContent + t; return t }"
    before = mark.evaluate(script)
    drawn = "".join(stream(hybrid.model, "The fox", max_tokens=7, seed=seed, control=[0.0, 0.5]))
    assert drawn.startswith(before)
    assert len(before) >= len(drawn) - 1  # a token may be part of a character
    written, spans = page.text_content("#written"), pages.spans(page)
    assert written == expected != unturned
    page.wait_for_function("location.hash.includes('turns=7,mood:1,speech:0.5')")
    other = visit(hybrid, at=page.url.removeprefix(hybrid.url))
    before = hybrid.engine.tokens_written
    expect(other.locator("#shared")).to_have_text("This link holds a text. Press Write to generate it.")
    assert other.locator("#text").is_hidden()
    assert hybrid.engine.tokens_written == before, "a link generates nothing by itself"
    other.click("#write")
    assert "; at its limit of tokens" in ended(other)
    assert (other.text_content("#written"), pages.spans(other)) == (written, spans)
    assert other.input_value("#seed") == str(seed)
    expect(other.get_by_label("mood, as a number")).to_have_value("1")  # it moved there by itself
    assert page.complaints == other.complaints == []


def test_a_link_says_what_is_wrong_with_it(liquid, visit):
    page = met(visit(liquid))
    for link, answer in (
        ("prompt=The+fox&seed=many", 'This link is damaged: its seed has "many" in the place of a number.'),
        ("prompt=The+fox&dials=%25zz:1", 'This link is damaged: its dials has "%zz" in the place of a name.'),
        ("promt=The+fox", "This link holds no text of the playground."),
        ("prompt=The+fox&model=stories&top_k=3", re.compile("is for the model stories, and this server has tiny.")),
    ):
        page.evaluate("link => { location.hash = link }", link)
        expect(page.locator("#error")).to_have_text(answer)
    assert page.locator("#text").is_hidden()
    assert (page.input_value("#prompt"), page.input_value("#top_k")) == ("Once upon a time", "")


def test_links_hold_every_part_of_a_recipe(liquid, visit):
    shared = {"seed": "7", "max_tokens": "20", "top_p": "0.9", "top_k": "", "pace": "5"}
    one = {"model": "dial & co", "temperature": "0.8", "start": " a=b#\n\u20ac", "control": {"mood": -1, "a:b,c": 0.25},
           "turns": [{"at": 3, "control": {"mood": 1}}, {"at": 9, "control": {"mood": 0, "a:b,c": -1}}]}  # fmt: skip
    other = {"model": "stories", "temperature": "1.1", "start": "", "control": None, "turns": []}
    script = """async (recipe) => {
      const { toFragment, fromFragment } = await import("/recipe.js");
      return [fromFragment("#" + toFragment(recipe)), fromFragment("#top"), fromFragment("")];
    }"""
    recipe = {"prompt": "Who? \u00abMe\u00bb & +1%", **shared, "columns": [one, other]}
    assert visit(liquid).evaluate(script, recipe) == [recipe, None, None]


# ---------------------------------------------------------------------- other ways


@pytest.mark.slow
def test_a_token_has_alternatives_and_the_text_branches_there(liquid, visit):
    body = {"model": "tiny", "prompt": "A hen", "max_tokens": 30, "seed": 3, "temperature": 0.8, "logprobs": 5}
    answer = liquid.post("v1/completions", body)["choices"][0]["logprobs"]
    place = next(n for n, token in enumerate(answer["tokens"]) if n > 3 and _choosable(answer, n))
    page = met(visit(liquid))
    ask(page, "A hen", max_tokens=30, seed=3)
    ended(page)
    first = page.text_content("#written")
    spans = page.locator("#written .token")
    at = len(pages.released(answer["tokens"][:place], [0.0] * place))  # which part of the text it begins
    spans.nth(at).hover()
    panel = page.locator("#alternatives")
    expect(panel).to_be_visible()
    shares = panel.locator(".share").all_text_contents()
    likely = sorted((math.exp(value) for value in answer["top_logprobs"][place].values()), reverse=True)
    assert [float(share.strip("<%")) / 100 for share in shares[:5]] == pytest.approx(likely, abs=0.0051)
    choice = panel.locator("button[aria-disabled=false]").first
    token = json.loads(choice.get_attribute("aria-label").split(", ")[0])
    kept = "".join(spans.nth(n).text_content() for n in range(at))
    choice.click()
    expect(page.locator("#written .chosen")).to_have_text(token)
    expect(page.locator("#ending")).to_contain_text("at its limit")
    page.wait_for_function("kept => document.querySelector('#written').textContent.length > kept", arg=len(kept) + 1)
    branched = page.text_content("#written")
    assert branched.startswith(kept + token)
    clean = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", "A hen" + kept + token)
    assert branched == kept + token + generate(liquid.model, [clean], max_tokens=30, seed=3)[0]
    page.click("#undo")
    assert page.text_content("#written") == first
    expect(page.locator("#undo")).to_have_attribute("aria-disabled", "true")
    page.click("#redo")
    assert page.text_content("#written") == branched
    assert page.complaints == []


def _choosable(answer: dict, place: int) -> bool:
    others = [token for token in answer["top_logprobs"][place] if token != answer["tokens"][place]]
    whole = not answer["tokens"][place].startswith("bytes:")
    return whole and any(token.isprintable() and not token.startswith("bytes:") for token in others)


# ---------------------------------------------------------------------- side by side


@pytest.mark.slow
def test_two_columns_write_with_one_seed_and_are_linked(hybrid, visit):
    page = met(visit(hybrid))
    seed = 1
    page.fill("#prompt", "The fox")
    page.fill("#max_tokens", "15")
    page.fill("#seed", str(seed))
    page.get_by_role("button", name="Sad and happy, side by side").click()
    ended(page)
    expect(page.locator("#ending-b")).to_contain_text(f"Seed {seed}")
    texts = [page.text_content(which) for which in ("#written", "#written-b")]
    assert texts == [_under(hybrid, mood, seed) for mood in (-1.0, 1.0)]
    assert texts[0] != texts[1]
    other = visit(hybrid, at=page.url.removeprefix(hybrid.url))
    other.click("#write")
    expect(other.locator("#ending-b")).to_contain_text(f"Seed {seed}")
    ended(other)
    assert [other.text_content(which) for which in ("#written", "#written-b")] == texts
    expect(page.locator("#looks-title")).to_have_text(re.compile("Inside the model: (first|second) text, tiny"))
    page.get_by_role("button", name="One text").click()
    expect(page.locator("#written-b")).to_have_count(0)
    page.click("#undo")
    assert [page.text_content(which) for which in ("#written", "#written-b")] == texts
    assert page.complaints == other.complaints == []


@pytest.mark.slow
def test_a_branch_waits_for_its_own_column_alone(hybrid, visit):
    page = met(visit(hybrid))
    hybrid.gate.allow(8)
    page.fill("#prompt", "The fox")
    page.fill("#max_tokens", "15")
    page.fill("#seed", "1")
    page.get_by_role("button", name="Sad and happy, side by side").click()
    for which in ("#written", "#written-b"):
        expect(page.locator(f"{which} .token").nth(2)).to_be_attached()
    expect(page.locator("#ending-b")).to_have_text("Writing.")
    choices = page.locator("#alternatives button[aria-disabled=false]")
    for token in page.locator("#written .token").all():  # to the first one in whose place other characters can stand
        token.click()
        if choices.count():
            break
    with page.expect_request("**/completions"):  # while no token of the other text can come
        choices.first.click()
    expect(page.locator("#ending-b")).to_have_text("Writing.")
    expect(page.locator("#stop")).to_have_attribute("aria-disabled", "false")
    hybrid.gate.allow(pages.EVER)
    expect(page.locator("#ending-b")).to_contain_text("Seed")
    ended(page)
    expect(page.locator("#stop")).to_have_attribute("aria-disabled", "true")
    assert page.locator("#written .chosen").count() == 1
    seed = int(page.input_value("#seed"))
    assert page.text_content("#written-b") == _under(hybrid, 1.0, seed)
    assert page.complaints == []


@pytest.mark.slow
def test_undo_brings_back_the_pace(liquid, visit):
    page = met(visit(liquid))
    ask(page, max_tokens=3, seed=1)
    ended(page, "Seed 1")
    page.locator("label", has_text="15").click()
    ask(page, max_tokens=3, seed=2)
    ended(page, "Seed 2")
    page.click("#undo")
    expect(page.get_by_role("radio", name="fastest")).to_be_checked()
    assert page.input_value("#seed") == "1"
    page.click("#redo")
    expect(page.get_by_role("radio", name="15", exact=True)).to_be_checked()


def _under(served: pages.Served, mood: float, seed: int) -> str:
    return generate(served.model, ["The fox"], max_tokens=15, seed=seed, control=[mood, 0.0])[0]


def test_two_models_are_compared_and_chosen(visit):
    served = pages.Served(pages.model_of("hybrid-ode-nano"), {"stories": pages.model_of("liquid-ssm-nano")})
    try:
        page = met(visit(served))
        expect(page.locator("#about")).to_have_text("tiny, stories")
        expect(page.locator("#model-about")).to_contain_text("tiny · ")
        page.select_option("#model", "stories")
        expect(page.locator("#dials")).to_be_hidden()
        expect(page.locator("#model-about")).to_contain_text("ordinary layers")
        ask(page, max_tokens=8, seed=4)
        ended(page)
        stories = served.server.served["stories"].engine.model
        assert page.text_content("#written") == generate(stories, ["The fox"], max_tokens=8, seed=4)[0]
        page.get_by_role("button", name="Two models").click()
        expect(page.locator("#model-b")).to_have_value("tiny")
        expect(page.locator("#model-about-b")).to_contain_text("depth is an ODE")
        expect(page.locator("#ending-b")).to_contain_text("Seed 4")
        assert page.text_content("#written-b") == generate(served.model, ["The fox"], max_tokens=8, seed=4)[0]
        assert page.complaints == []
    finally:
        served.stop()


# ---------------------------------------------------------------------- what is done with a text


def test_a_text_goes_on_again_and_elsewhere(liquid, visit):
    page = met(visit(liquid))
    seed = 1
    ask(page, max_tokens=8, seed=seed)
    ended(page)
    first = page.text_content("#written")
    page.click("#continue")
    expect(page.locator("#written")).not_to_have_text(first)
    ended(page)
    clean = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", "The fox" + first)
    page.wait_for_function("document.querySelector('#write').getAttribute('aria-disabled') === 'false'")
    whole = first + generate(liquid.model, [clean], max_tokens=8, seed=seed)[0]
    assert page.text_content("#written") == whole
    with page.expect_download() as saved:
        page.click("#save-json")
    answer = json.loads(saved.value.path().read_text())
    assert answer["link"] == page.url
    text = answer["texts"][0]
    assert (text["prompt"], text["seed"], text["start"], text["text"]) == (
        "The fox",
        str(seed),
        first,
        "The fox" + whole,
    )
    assert all(len(token["top"]) == 5 for span in text["tokens"] for token in span["tokens"])
    with page.expect_download() as saved:
        page.click("#save-text")
    assert saved.value.path().read_bytes().decode() == "The fox" + whole
    page.click("#again")
    ended(page, f"Seed {seed + 1}")
    assert page.text_content("#written") == generate(liquid.model, ["The fox"], max_tokens=8, seed=seed + 1)[0]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy-link")
    expect(page.locator("#shared")).to_have_text("Link copied.")
    assert page.evaluate("navigator.clipboard.readText()") == page.url


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


def test_what_it_was_trained_on_and_a_wrong_control_are_said(hybrid, visit):
    answer = {"model": "tiny", "parameters": 1, "mixers": ["x"], "depth": "flow", "controls": ["moood"],
            "trained_on": "old tales", "max_length": None}  # fmt: skip
    about = json.dumps({"models": [answer], "max_tokens": 9, "max_prompt": 9})
    page = met(visit(hybrid, {"v1/glissando": lambda route: route.fulfill(body=about)}))
    expect(page.locator("#empty")).to_have_text("Trained on old tales. Nothing is written yet.")
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


def test_files_of_an_exported_page_that_are_missing_are_reported(first_page, tmp_path):
    """Without the runtime there is no worker, without a model nothing to run: both are said on the page."""
    for path in web.page_files():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    files = pages.Files(tmp_path)
    first_page.goto(files.url)
    expect(first_page.locator("#error")).to_contain_text("The model cannot be loaded")
    leave(first_page)
    files.stop()


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
