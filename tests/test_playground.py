"""The page at / in a real browser: what it writes, colours, turns, draws and says."""

from __future__ import annotations

import itertools
import json
import math
import re

import pages
import pytest

from glissando.generation import generate, stream

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser with playwright")
expect = playwright.expect
expect.set_options(timeout=20_000)
pytestmark = pytest.mark.skipif(pages.BROWSER is None, reason=pages.NO_BROWSER)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=pages.BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def _served(preset: str, **options):
    served = pages.Served(pages.model_of(preset), **options)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def liquid():
    yield from _served("liquid-ssm-nano")


@pytest.fixture(scope="module")
def hybrid():
    yield from _served("hybrid-ode-nano")


@pytest.fixture
def visit(browser):
    """Opens a page; whatever it complains of is in its `complaints`, what it asks for in `requests`."""
    contexts, gates = [], []

    def opened(served: pages.Served, routes: dict | None = None, at: str = "", **options):
        contexts.append(browser.new_context(**options))
        gates.append(served.gate)
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.complaints, page.requests = [], []
        page.on("console", lambda message: page.complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda asked: page.requests.append(asked))
        for path, answer in (routes or {}).items():
            page.route(served.url + path, answer)
        page.goto(served.url + at)
        return page

    yield opened
    for context in contexts:
        context.close()
    for gate in gates:
        gate.allow(pages.EVER)


def met(page):
    """The page, once it knows its model, at full speed."""
    expect(page.locator("#about")).not_to_have_text(re.compile("Asking the server|not known yet"))
    page.get_by_role("radio", name="fastest").evaluate("radio => { radio.checked = true }")
    return page


def ask(page, prompt: str = "The fox", **numbers) -> None:
    page.fill("#prompt", prompt)
    for name, value in numbers.items():
        page.fill(f"#{name}", str(value))
    page.click("#write")


def ended(page, how: str = "Seed") -> str:
    expect(page.locator("#ending")).to_contain_text(how)
    return page.text_content("#ending")


def begun(page, served: pages.Served, tokens: int, **numbers) -> int:
    """So many tokens of a text stand on the page, and no more are written until the gate opens; tokens before."""
    before = served.engine.tokens_written
    served.gate.allow(tokens)
    ask(page, **numbers)
    pages.until(lambda: served.engine.tokens_written == before + tokens)
    expect(page.locator("#written .token").first).to_be_attached()  # it may be a character without a width
    return before


# ---------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    ("kind", "told", "look"),
    [("liquid", "liquid over time, ordinary layers", "Time constants"),
     ("hybrid", "attention over time, depth is an ODE", "Speed over depth")],
)  # fmt: skip
def test_text_streams_as_the_library_writes_it(kind, told, look, visit, request):
    served = request.getfixturevalue(kind)
    page = met(visit(served))
    seed = pages.lasting_seed(served.model, "The fox", 40, temperature=1.1, top_p=0.95)
    page.select_option("#preset", "Bold")
    ask(page, max_tokens=40, seed=seed)
    line = ended(page)
    expected = generate(served.model, ["The fox"], max_tokens=40, seed=seed, temperature=1.1, top_p=0.95)[0]
    assert page.text_content("#written") == expected
    assert page.text_content("#given") == "The fox"
    assert line.startswith("40 tokens, ")
    assert line.endswith(f"; at its limit of tokens. Seed {seed}.")
    assert f"tiny · {served.model.num_parameters():,} parameters · {told}" in page.text_content("#about")
    figure = page.locator("figure", has_text=look)
    expect(figure.locator("canvas")).to_have_attribute("aria-label", re.compile("at least .*, median .*, at most"))
    expect(figure).to_contain_text(f"the last {pages.looked_at(page)} tokens")
    assert len(pages.colours(figure.locator("canvas"))) > 8
    expect(page.locator("#looks-error")).to_be_hidden()
    assert page.complaints == []
    assert {asked.url.startswith(served.url) for asked in page.requests} == {True}


def test_every_token_is_coloured_by_its_surprise(liquid, visit):
    body = {"model": "tiny", "prompt": "A hen", "max_tokens": 60, "seed": 3, "temperature": 0.8, "logprobs": 0}
    told = liquid.post("v1/completions", body)["choices"][0]["logprobs"]
    surprise = [-value / math.log(2) for value in told["token_logprobs"]]
    page = met(visit(liquid))
    ask(page, "A hen", max_tokens=60, seed=3)
    assert f"{sum(surprise) / len(surprise):.2f} bits per token" in ended(page)
    wanted = [
        (text, "token" + " newline" * (text == "\n") + f" bits-{pages.level(bits)}", pages.title(bits, count))
        for text, bits, count in pages.released(told["tokens"], surprise)
    ]
    assert len(wanted) > 20
    assert pages.spans(page) == wanted
    page.locator("#written .token").nth(4).hover()
    assert page.text_content("#readout").endswith(f": {wanted[4][2]}")


def test_characters_of_several_tokens_have_their_mean(liquid, visit):
    euro = {"bytes:\\xe2": 6, "bytes:\\x82": 1.5, "bytes:\\xac": 0}
    told = [("", euro), ("€", {}), ("<b>", {"<b>": 9}), ("", {" é": 1, "bytes:\\xc3": 3})]
    last = pages.event(" éßok", {"bytes:\\x9f": 5, "o": 2, "k": 7}, "stop")
    answer = "".join(pages.event(*one) for one in told) + last + "data: [DONE]\n\n"
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


# ---------------------------------------------------------------------- dials and stops


def test_a_dial_turned_while_text_streams_changes_what_follows(hybrid, visit):
    model, seed = hybrid.model, pages.lasting_seed(hybrid.model, "The fox", 30)
    page = met(visit(hybrid))
    page.check("#use-dials")
    begun(page, hybrid, 6, max_tokens=30, seed=seed)
    with page.expect_response("**/control") as turned:
        page.get_by_label("mood", exact=True).press("End")
    hybrid.gate.allow(pages.EVER)
    assert turned.value.json()["control"] == {"mood": 1.0, "speech": 0.0}
    expect(page.get_by_label("mood, as a number")).to_have_value("1")
    ended(page)
    asked = itertools.count()
    # The prompt and six tokens were read before the dial was turned.
    expected = stream(model, "The fox", max_tokens=30, seed=seed, control=lambda: [float(next(asked) > 6), 0.0])
    written = page.text_content("#written")
    assert written == "".join(expected)
    assert written != generate(model, ["The fox"], max_tokens=30, seed=seed, control=[0.0, 0.0])[0]
    assert page.complaints == []


def test_dials_that_are_not_used_are_not_sent(hybrid, visit):
    page, bodies = met(visit(hybrid)), []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("/completions") else None)
    ask(page, max_tokens=5, seed=1)
    ended(page)
    page.get_by_label("speech, as a number").fill("2.5")
    beyond = page.locator(".beyond", has_text="speech=2.5 is outside -1 to 1, where this model was trained.")
    expect(beyond).to_be_visible()
    expect(page.locator(".beyond:visible")).to_have_count(1)
    expect(page.locator("#use-dials")).to_be_checked()
    ask(page, max_tokens=5, seed=2)
    ended(page, "Seed 2")
    assert "control" not in bodies[0]
    assert bodies[1]["control"] == {"mood": 0, "speech": 2.5}
    page.get_by_label("mood, as a number").fill("")
    page.click("#write")
    expect(page.locator("#error")).to_have_text("The dial mood is not a number; give one, such as 0.7.")
    assert len(bodies) == 2


def test_a_model_without_dials_shows_none(liquid, visit):
    expect(met(visit(liquid)).locator("#dials")).to_be_hidden()


def test_a_model_of_which_nothing_is_to_be_seen_has_no_pictures(liquid, visit):
    nothing = {"tokens": ["a"], "looks": []}
    page = met(visit(liquid, {"v1/glissando/look": lambda route: route.fulfill(json=nothing)}))
    for seed in (1, 2):
        ask(page, max_tokens=5, seed=seed)
        ended(page, f"Seed {seed}")
    page.wait_for_timeout(600)
    expect(page.locator("#looks")).to_be_hidden()
    assert sum(asked.url.endswith("/look") for asked in page.requests) == 1


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_stops_at_once_and_frees_the_slot(how, liquid, visit):
    page = met(visit(liquid))
    seed = pages.lasting_seed(liquid.model, "The fox", 10)
    left = liquid.metric("glissando_disconnects_total")
    before = begun(page, liquid, 5, max_tokens=2000, seed=seed)
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    assert "; stopped by you." in ended(page)
    pages.until(lambda: liquid.metric("glissando_disconnects_total") == left + 1)
    liquid.gate.allow(pages.EVER)
    pages.until(lambda: liquid.metric("glissando_texts_running") == 0)
    assert liquid.engine.tokens_written == before + 5
    whole = generate(liquid.model, ["The fox"], max_tokens=5, seed=seed)[0]
    assert page.text_content("#written")
    assert whole.startswith(page.text_content("#written"))
    ask(page, max_tokens=3, seed=7)
    assert "Seed 7" in ended(page, "Seed 7")


# ---------------------------------------------------------------------- errors


def refused(page) -> str:
    expect(page.locator("#error")).to_be_visible()
    assert page.locator("#error").get_attribute("role") == "alert"
    return page.text_content("#error")


def test_what_the_server_refuses_is_said_and_what_is_written_stays(liquid, visit):
    page = met(visit(liquid))
    ask(page, max_tokens=20, seed=2)
    line, written = ended(page), page.text_content("#written")
    ask(page, "word " * 30)
    told = refused(page)
    assert "the prompt has 151 tokens" in told.lower()
    assert told.endswith("Shorten the prompt, then write again.")
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
    told = {"model": "tiny", "parameters": 1, "mixers": ["x"], "depth": "flow", "controls": ["moood"],
            "trained_on": None, "max_length": None}  # fmt: skip
    about = json.dumps({"models": [told], "max_tokens": 9, "max_prompt": 9})
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
    for told in (
        "7 texts wait already, and 7 may. Write again in a moment.",
        "The model failed on this text: X. Try again; the server's own output says more.",
        "<h1>Bad gateway</h1>. Try again; the server's own output says more.",
        "The text broke off: the server ended it without saying that it was done. See that glissando serve still runs "
        "and can be reached, then write again.",
        "The server is stopping. Try again; the server's own output says more.",
    ):
        ask(page)
        expect(page.locator("#error")).to_have_text(told)
    expect(page.locator("#written")).to_have_text("c")
    expect(page.locator("#ending")).to_contain_text("1 token, 1.00 bits per token; broken off.")
    assert not [complaint for complaint in page.complaints if "Failed to load resource" not in complaint]


@pytest.fixture
def guarded():
    yield from _served("liquid-ssm-nano", api_key=pages.KEY)


def test_a_key_is_asked_for_and_a_server_that_goes_is_told(guarded, visit):
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
    begun(page, guarded, 5, max_tokens=500, seed=pages.lasting_seed(guarded.model, "The fox", 10))
    guarded.drop_connections()
    expect(page.locator("#error")).to_contain_text("The connection to the server was lost. See that glissando serve")
    written = page.text_content("#written")
    assert "; broken off." in ended(page)
    guarded.stop()
    ask(page)
    expect(page.locator("#error")).to_contain_text("The server does not answer. See that glissando serve still runs")
    assert page.text_content("#written") == written != ""


# ---------------------------------------------------------------------- for everybody


def test_the_keyboard_is_enough(hybrid, visit):
    page = met(visit(hybrid))
    page.keyboard.press("Tab")
    expect(page.locator("#prompt")).to_be_focused()
    assert page.locator("#prompt").evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("Control+a")
    page.keyboard.type("The fox")
    hybrid.gate.allow(3)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#written .token").first).to_be_attached()  # it may be a character without a width
    chips = [f"#examples button:nth-of-type({n})" for n in (1, 2, 3, 4)]
    for focused in ("#write", "#stop", "input[name=pace]:checked", "#compare", *chips, "#use-dials", "#dial-0"):
        page.keyboard.press("Tab")
        expect(page.locator(focused)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("mood, as a number")).to_have_value("0.05")
    expect(page.locator("#use-dials")).to_be_checked()
    page.keyboard.press("Escape")
    hybrid.gate.allow(pages.EVER)
    assert "stopped by you" in ended(page)
    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#written .token").first).to_be_focused()
    assert page.text_content("#readout").endswith(pages.spans(page)[0][2])


def test_presets_set_the_fields_and_the_fields_name_the_preset(liquid, visit):
    page = met(visit(liquid))
    for name, temperature, top_p in [("Greedy", "0", ""), ("Bold", "1.1", "0.95"), ("Careful", "0.3", "")]:
        page.select_option("#preset", name)
        assert (page.input_value("#temperature"), page.input_value("#top_p")) == (temperature, top_p)
    page.fill("#temperature", "0.8")
    expect(page.locator("#preset")).to_have_value("Balanced")
    page.fill("#top_k", "3")
    expect(page.locator("#preset")).to_have_value("Your own")


def test_a_phone_needs_no_scrolling_sideways(hybrid, visit):
    page = met(visit(hybrid, viewport={"width": 360, "height": 640}, has_touch=True))
    assert page.locator("#sampling").get_attribute("open") is None
    page.evaluate("document.querySelector('#max_tokens').value = 30")
    ask(page, "w" * 58)
    ended(page)
    expect(page.locator("figure")).to_be_visible()
    page.evaluate("document.querySelector('#error').hidden = false")
    page.locator("#error").evaluate("(node, text) => { node.textContent = text }", "w" * 400)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for control in page.locator("button:visible, input[type=range]:visible").all():
        assert control.bounding_box()["height"] >= 32


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(scheme, liquid, visit):
    page = met(visit(liquid, color_scheme=scheme))
    ask(page, "word " * 30)
    refused(page)
    ask(page, max_tokens=20)
    ended(page)
    backgrounds = [pages.colour(page, f"#legend .bits-{n}", "backgroundColor") for n in range(8)]
    for n, background in enumerate(backgrounds):
        assert pages.contrast(background, pages.colour(page, f"#legend .bits-{n}", "color")) >= 4.5
        assert pages.contrast(background, pages.colour(page, "#written .token", "color")) >= 4.5
    steps = [pages.contrast(a, b) for a, b in itertools.pairwise(backgrounds)]
    assert min(steps) > 1.1  # by lightness alone
    assert pages.contrast(backgrounds[0], backgrounds[-1]) == pytest.approx(math.prod(steps))
    paper, card = pages.colour(page, "body", "backgroundColor"), pages.colour(page, "#text", "backgroundColor")
    assert pages.contrast(paper, card) < 1.2
    assert (pages.luminance(paper) > 0.5) == (scheme == "light")
    for soft in ("#about", "#given", "#ending", "figure p", ".scale"):
        assert min(pages.contrast(pages.colour(page, soft, "color"), behind) for behind in (paper, card)) >= 4.5
    for alone in ("#error", "#write"):
        assert pages.contrast(pages.colour(page, alone, "color"), pages.colour(page, alone, "backgroundColor")) >= 4.5


def test_a_picture_is_drawn_anew_in_the_other_scheme_and_size(liquid, visit):
    page = met(visit(liquid, color_scheme="light"))
    ask(page, max_tokens=20, seed=1)
    ended(page)
    canvas = page.locator("canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile(f" {pages.looked_at(page)} tokens"))
    light, wide = pages.colours(canvas), canvas.evaluate("c => c.width")
    page.emulate_media(color_scheme="dark")
    assert not light & pages.colours(canvas) - {0}
    page.set_viewport_size({"width": 500, "height": 700})
    page.wait_for_timeout(100)
    narrow = canvas.evaluate("c => c.width")
    assert narrow == canvas.evaluate("c => c.clientWidth") < wide


def test_the_cells_of_a_picture_are_read_by_keys(liquid, visit):
    """From the newest token of the first row, and no further than the ends; the pointer's text for the same cell."""
    page = met(visit(liquid))
    ask(page, max_tokens=20, seed=1)
    ended(page)
    figure = page.locator("figure").first
    canvas, told = figure.locator("canvas"), figure.locator(".readout")
    expect(canvas).to_have_attribute("aria-label", re.compile(f" {pages.looked_at(page)} tokens"))
    resting, plain = told.text_content(), pages.colours(canvas)
    canvas.focus()
    page.keyboard.press("ArrowLeft")
    newest = told.text_content()
    assert re.fullmatch(r'".+", .+: .+', newest)
    assert pages.colours(canvas) - plain  # a border
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert told.text_content() == newest
    page.keyboard.press("ArrowUp")
    above = told.text_content()
    assert above.split(", ")[0] == newest.split(", ")[0]
    assert above != newest
    page.keyboard.press("Home")
    first = told.text_content()
    page.keyboard.press("ArrowLeft")
    assert told.text_content() == first != above
    page.keyboard.press("End")
    assert told.text_content() == above
    canvas.hover(position={"x": 150, "y": 2})
    expect(told).not_to_have_text(above)
    assert re.fullmatch(r'".+", .+: .+', told.text_content())
    page.mouse.move(0, 0)
    expect(told).to_have_text(above)  # whose border is still there
    canvas.blur()
    assert told.text_content() == resting
    assert pages.colours(canvas) == plain


@pytest.mark.parametrize("size", [(360, 640), (375, 667)])
def test_an_error_on_a_phone_comes_into_sight(liquid, visit, size):
    """It stood below the fold, and the field in a closed section: the button seemed to do nothing."""
    page = met(visit(liquid, viewport=dict(zip(("width", "height"), size, strict=True)), has_touch=True))
    page.evaluate("document.querySelector('#temperature').value = -1")
    ask(page)
    refused(page)
    expect(page.locator("#error")).to_be_in_viewport(ratio=0.9)
    expect(page.locator("#temperature")).to_be_visible()
    page.evaluate("document.querySelector('#temperature').value = 0.8")
    page.click("#sampling summary")
    ask(page, max_tokens=0)
    assert "Max tokens must be at least 1" in refused(page)


def test_putting_the_dials_away_draws_the_picture_without_them(hybrid, visit):
    page = met(visit(hybrid))
    ask(page, max_tokens=5)
    ended(page)
    expect(page.locator("figure")).to_be_visible()
    page.check("#use-dials")
    asked = []
    page.on("request", lambda request: asked.append(request.post_data) if request.url.endswith("look") else None)
    page.uncheck("#use-dials")
    pages.until(lambda: page.wait_for_timeout(50) or any("mood" not in body for body in asked))


# ---------------------------------------------------------------------- pace, marks and links


def test_the_pace_is_slow_where_there_are_dials_and_changes_while_it_writes(hybrid, liquid, visit):
    page = visit(hybrid)
    expect(page.get_by_role("radio", name="5", exact=True)).to_be_checked()
    expect(visit(liquid).get_by_role("radio", name="fastest")).to_be_checked()
    seed = pages.lasting_seed(hybrid.model, "The fox", 60)
    with page.expect_request("**/completions") as asked:
        ask(page, max_tokens=60, seed=seed)
    assert asked.value.post_data_json["pace"] == 5
    expect(page.locator("#written .token").first).to_be_attached()
    with page.expect_response("**/control") as changed:
        page.locator("label", has_text="fastest").click()
    assert changed.value.json()["pace"] is None
    assert "; at its limit of tokens" in ended(page)
    assert page.text_content("#written") == generate(hybrid.model, ["The fox"], max_tokens=60, seed=seed)[0]


def test_a_mark_stands_where_a_dial_was_moved_and_the_link_writes_it_again(hybrid, visit):
    page, seed = met(visit(hybrid)), pages.lasting_seed(hybrid.model, "The fox", 30)
    begun(page, hybrid, 6, max_tokens=30, seed=seed)
    with page.expect_response("**/control"):
        page.get_by_label("mood", exact=True).press("End")
    hybrid.gate.allow(pages.EVER)
    ended(page)
    mark = page.locator("#written .mark")
    assert mark.get_attribute("aria-label") == "Dials moved here: happy 1"
    script = "node => { let t = ''; while (node = node.previousSibling) t = node.textContent + t; return t }"
    before = mark.evaluate(script)
    drawn = "".join(stream(hybrid.model, "The fox", max_tokens=7, seed=seed, control=None))
    assert drawn.startswith(before)
    assert len(before) >= len(drawn) - 1  # a token may be part of a character
    written, spans = page.text_content("#written"), pages.spans(page)
    page.wait_for_function("location.hash.includes('turns=7,mood:1,speech:0')")
    other = visit(hybrid, at=page.url.removeprefix(hybrid.url))
    assert "; at its limit of tokens" in ended(other)
    assert (other.text_content("#written"), pages.spans(other)) == (written, spans)
    assert other.input_value("#seed") == str(seed)
    expect(other.get_by_label("mood, as a number")).to_have_value("1")  # it moved there by itself
    assert page.complaints == other.complaints == []


def test_a_link_says_what_is_wrong_with_it(liquid, visit):
    page = visit(liquid, at="#prompt=The+fox&seed=many")
    told = 'This link is damaged: its seed has "many" in the place of a number.'
    expect(page.locator("#error")).to_have_text(told)
    page = visit(liquid, at="#prompt=The+fox&dials=%25zz:1")
    expect(page.locator("#error")).to_have_text('This link is damaged: its dials has "%zz" in the place of a name.')
    page = visit(liquid, at="#promt=The+fox")
    expect(page.locator("#error")).to_have_text("This link holds no text of the playground.")
    page = visit(liquid, at="#prompt=The+fox&model=stories&top_k=3")
    expect(page.locator("#error")).to_contain_text("This is for the model stories, and this server has tiny.")
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
    recipe = {"prompt": "Who? \u00abMe\u00bb & +1%", **shared, "compare": "dial a:b", "columns": [one, other]}
    assert visit(liquid).evaluate(script, recipe) == [recipe, None, None]


# ---------------------------------------------------------------------- other ways


def test_a_token_has_alternatives_and_the_text_branches_there(liquid, visit):
    body = {"model": "tiny", "prompt": "A hen", "max_tokens": 30, "seed": 3, "temperature": 0.8, "logprobs": 5}
    told = liquid.post("v1/completions", body)["choices"][0]["logprobs"]
    place = next(n for n, token in enumerate(told["tokens"]) if n > 3 and _choosable(told, n))
    page = met(visit(liquid))
    ask(page, "A hen", max_tokens=30, seed=3)
    ended(page)
    first = page.text_content("#written")
    spans = page.locator("#written .token")
    at = len(pages.released(told["tokens"][:place], [0.0] * place))  # which part of the text it begins
    spans.nth(at).hover()
    panel = page.locator("#alternatives")
    expect(panel).to_be_visible()
    shares = panel.locator(".share").all_text_contents()
    likely = sorted((math.exp(value) for value in told["top_logprobs"][place].values()), reverse=True)
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


def _choosable(told: dict, place: int) -> bool:
    others = [token for token in told["top_logprobs"][place] if token != told["tokens"][place]]
    whole = not told["tokens"][place].startswith("bytes:")
    return whole and any(token.isprintable() and not token.startswith("bytes:") for token in others)


def test_alternatives_by_keyboard(liquid, visit):
    page = met(visit(liquid))
    ask(page, "A hen", max_tokens=10, seed=3)
    ended(page)
    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    buttons = page.locator("#alternatives button")
    expect(buttons.first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(buttons.nth(1)).to_be_focused()
    assert re.fullmatch(
        r'".*", <?[\d.]+%, (as written|go on from here|not text .*)', buttons.nth(1).get_attribute("aria-label")
    )
    page.keyboard.press("Escape")
    expect(page.locator("#alternatives")).to_be_hidden()
    expect(page.locator("#written .token").first).to_be_focused()


# ---------------------------------------------------------------------- side by side


def test_two_columns_write_with_one_seed_and_are_linked(hybrid, visit):
    page = met(visit(hybrid))
    seed = next(s for s in range(99) if all(len(_under(hybrid, mood, s)) > 12 for mood in (-1.0, 1.0)))
    page.select_option("#compare", label="sad and happy (mood)")
    ask(page, max_tokens=15, seed=seed)
    ended(page)
    expect(page.locator("#ending-b")).to_contain_text(f"Seed {seed}")
    texts = [page.text_content(which) for which in ("#written", "#written-b")]
    assert texts == [_under(hybrid, mood, seed) for mood in (-1.0, 1.0)]
    assert texts[0] != texts[1]
    other = visit(hybrid, at=page.url.removeprefix(hybrid.url))
    expect(other.locator("#ending-b")).to_contain_text(f"Seed {seed}")
    ended(other)
    assert [other.text_content(which) for which in ("#written", "#written-b")] == texts
    assert other.locator("#compare option:checked").text_content() == "sad and happy (mood)"
    expect(page.locator("#looks-title")).to_have_text(re.compile("Inside the model: (first|second) text, tiny"))
    page.select_option("#compare", "one")
    expect(page.locator("#written-b")).to_have_count(0)
    page.click("#undo")
    assert [page.text_content(which) for which in ("#written", "#written-b")] == texts
    expect(page.locator("#compare")).to_have_value("dial mood")
    assert page.complaints == other.complaints == []


def test_a_branch_waits_for_its_own_column_alone(hybrid, visit):
    page = met(visit(hybrid))
    page.select_option("#compare", label="sad and happy (mood)")
    hybrid.gate.allow(8)
    ask(page, max_tokens=15, seed=next(s for s in range(99) if len(_under(hybrid, 1.0, s)) > 12))
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
        expect(page.locator("#examples button")).to_have_text(pages.PROMPTS)
        page.select_option("#model", "stories")
        expect(page.locator("#dials")).to_be_hidden()
        expect(page.locator("#model-about")).to_contain_text("ordinary layers")
        expect(page.locator("#examples")).to_be_hidden()  # none are known for this one
        ask(page, max_tokens=8, seed=4)
        ended(page)
        stories = served.server.served["stories"].engine.model
        assert page.text_content("#written") == generate(stories, ["The fox"], max_tokens=8, seed=4)[0]
        page.select_option("#compare", "models")
        expect(page.locator("#model-b")).to_have_value("tiny")
        expect(page.locator("#model-about-b")).to_contain_text("depth is an ODE")
        page.click("#write")
        expect(page.locator("#ending-b")).to_contain_text("Seed 4")
        assert page.text_content("#written-b") == generate(served.model, ["The fox"], max_tokens=8, seed=4)[0]
        assert page.complaints == []
    finally:
        served.stop()


# ---------------------------------------------------------------------- what is done with a text


def test_a_text_goes_on_again_and_elsewhere(liquid, visit):
    page = met(visit(liquid))
    seed = pages.lasting_seed(liquid.model, "The fox", 8)
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
    told = json.loads(saved.value.path().read_text())
    assert told["link"] == page.url
    text = told["texts"][0]
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
    page.click("#examples button >> nth=1")
    expect(page.locator("#given")).to_have_text("One morning the little fox")


def test_text_and_picture_point_at_each_other(liquid, visit):
    page = met(visit(liquid))
    ask(page, max_tokens=20, seed=1)
    ended(page)
    canvas = page.locator("figure canvas").first
    expect(canvas).to_have_attribute("aria-label", re.compile(f" {pages.looked_at(page)} tokens"))
    plain = pages.colours(canvas)
    page.locator("#written .token").last.hover()
    assert pages.colours(canvas) - plain
    page.mouse.move(0, 0)
    expect(page.locator("#alternatives")).to_be_hidden()
    assert pages.colours(canvas) == plain
    canvas.focus()
    page.keyboard.press("End")
    expect(page.locator("#written .token.pointed")).to_have_count(1)
    assert page.locator("#written .token").last.evaluate("node => node.classList.contains('pointed')")
    page.keyboard.press("Home")  # before the text
    expect(page.locator("#written .token.pointed")).to_have_count(0)


def test_the_end_of_a_text_is_followed_until_one_scrolls_away(liquid, visit):
    page = met(visit(liquid, viewport={"width": 800, "height": 200}))
    begun(page, liquid, 400, max_tokens=450, seed=pages.lasting_seed(liquid.model, "The fox", 450))
    box = page.locator("#text")
    page.wait_for_function("document.querySelector('#written').children.length > 250")  # some are parts of characters
    assert box.evaluate("node => node.scrollHeight > 1.2 * node.clientHeight")
    assert box.evaluate("node => node.scrollHeight - node.scrollTop - node.clientHeight") < 40
    box.evaluate("node => { node.scrollTop = 0 }")
    liquid.gate.allow(pages.EVER)
    ended(page)
    assert box.evaluate("node => node.scrollTop") == 0


def test_what_the_model_was_trained_on_is_said_before_it_writes(visit):
    served = pages.Served(pages.model_of("liquid-ssm-nano"), trained_on={"tiny": "the built-in children's stories"})
    try:
        page = met(visit(served))
        expect(page.locator("#empty")).to_have_text(
            "Trained on the built-in children's stories. Nothing is written yet."
        )
    finally:
        served.stop()
