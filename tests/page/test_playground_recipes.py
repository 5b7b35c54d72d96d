"""A text of the playground is shared as a link, branched, compared with another, undone, carried on and saved."""

from __future__ import annotations

import json
import math
import re

import pages
import pytest

pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser with playwright")
from playground import ask, begun, ended, met
from playwright.sync_api import expect

from glissando.generation import generate, stream

pytestmark = pytest.mark.skipif(pages.BROWSER is None, reason=pages.NO_BROWSER)


# ---------------------------------------------------------------------- marks and links


def test_a_mark_stands_where_a_dial_was_moved_and_the_link_writes_it_again(hybrid, visit):
    page, seed = met(visit(hybrid)), 1
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
    page = visit(liquid)
    for link, answer in (
        ("prompt=The+fox&seed=many", 'This link is damaged: its seed has "many" in the place of a number.'),
        ("prompt=The+fox&dials=%25zz:1", 'This link is damaged: its dials has "%zz" in the place of a name.'),
        ("promt=The+fox", "This link holds no text of the playground."),
        ("prompt=The+fox&model=stories&top_k=3", re.compile("is for the model stories, and this server has tiny.")),
    ):
        page.goto("about:blank")
        page.goto(f"{liquid.url}#{link}")
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
