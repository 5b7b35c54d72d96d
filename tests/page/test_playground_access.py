"""The playground works by keyboard, on a phone, and in light and dark; its pictures can be read cell by cell."""

from __future__ import annotations

import itertools
import math
import re

import pages
import pytest

pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser with playwright")
from playground import ask, ended, met, refused, visiting
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.skipif(pages.BROWSER is None, reason=pages.NO_BROWSER)]


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
    chips = [f"#ways button:nth-of-type({n})" for n in (1, 2, 3)]
    for focused in ("#write", "#stop", "#beside .large", *chips, "#dial-0"):
        page.keyboard.press("Tab")
        expect(page.locator(focused)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("mood, as a number")).to_have_value("0.05")
    page.keyboard.press("Escape")
    hybrid.gate.allow(pages.EVER)
    assert "stopped by you" in ended(page)
    page.locator("#text").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#written .token").first).to_be_focused()
    assert page.text_content("#readout").endswith(pages.spans(page)[0][2])


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


def test_a_phone_needs_no_scrolling_sideways(hybrid, visit):
    page = met(visit(hybrid, viewport={"width": 360, "height": 640}, has_touch=True))
    assert page.locator("#sampling").get_attribute("open") is None
    assert page.locator("#empty").bounding_box()["y"] < 360  # the text is what one sees
    page.evaluate("document.querySelector('#max_tokens').value = 30")
    ask(page, "w" * 58)
    ended(page)
    expect(page.locator("figure")).to_be_visible()
    page.evaluate("document.querySelector('#error').hidden = false")
    page.locator("#error").evaluate("(node, text) => { node.textContent = text }", "w" * 400)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    for control in page.locator("button:visible, input[type=range]:visible").all():
        assert control.bounding_box()["height"] >= 32


def test_an_error_on_a_phone_comes_into_sight(liquid, visit):
    """It stood below the fold, and the field in a closed section: the button seemed to do nothing."""
    sizes = [{"width": 360, "height": 640}, {"width": 375, "height": 667}]
    page = met(visit(liquid, viewport=sizes[0], has_touch=True))
    for size in sizes:
        page.set_viewport_size(size)
        page.evaluate("document.querySelector('#sampling').open = false")
        page.evaluate("document.querySelector('#temperature').value = -1")
        ask(page)
        expect(page.locator("#error")).to_contain_text("Temperature")
        expect(page.locator("#error")).to_be_in_viewport(ratio=0.9)
        expect(page.locator("#temperature")).to_be_visible()
        page.evaluate("document.querySelector('#temperature').value = 0.8")
    page.click("#sampling summary")
    ask(page, max_tokens=0)
    expect(page.locator("#error")).to_contain_text("Max tokens must be at least 1")


def test_every_text_stands_out_from_what_is_behind_it(liquid, visit):
    page = met(visit(liquid, color_scheme="light"))
    ask(page, "word " * 30)
    refused(page)
    ask(page, max_tokens=20)
    ended(page)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        _stands_out(page, scheme)


def _stands_out(page, scheme: str) -> None:
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


# ---------------------------------------------------------------------- pictures


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


@pytest.fixture(scope="module")
def pictured(first_page, liquid):
    """A page with a text and its picture, that tests leave as it was."""
    with visiting(first_page) as visit:
        page = met(visit(liquid, viewport={"width": 1280, "height": 720}))
        ask(page, max_tokens=20, seed=1)
        ended(page)
        labelled = re.compile(f" {pages.looked_at(page)} tokens")
        expect(page.locator("figure canvas").first).to_have_attribute("aria-label", labelled)
        yield page


def test_the_cells_of_a_picture_are_read_by_keys(pictured):
    """From the newest token of the first row, and no further than the ends; the pointer's text for the same cell."""
    page = pictured
    figure = page.locator("figure").first
    canvas, readout = figure.locator("canvas"), figure.locator(".readout")
    resting, plain = readout.text_content(), pages.colours(canvas)
    canvas.focus()
    page.keyboard.press("ArrowLeft")
    newest = readout.text_content()
    assert re.fullmatch(r'".+", .+: .+', newest)
    assert pages.colours(canvas) - plain  # a border
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert readout.text_content() == newest
    page.keyboard.press("ArrowUp")
    above = readout.text_content()
    assert above.split(", ")[0] == newest.split(", ")[0]
    assert above != newest
    page.keyboard.press("Home")
    first = readout.text_content()
    page.keyboard.press("ArrowLeft")
    assert readout.text_content() == first != above
    page.keyboard.press("End")
    assert readout.text_content() == above
    canvas.hover(position={"x": 150, "y": 2})
    expect(readout).not_to_have_text(above)
    assert re.fullmatch(r'".+", .+: .+', readout.text_content())
    page.mouse.move(0, 0)
    expect(readout).to_have_text(above)  # whose border is still there
    canvas.blur()
    assert readout.text_content() == resting
    assert pages.colours(canvas) == plain


def test_text_and_picture_point_at_each_other(pictured):
    page = pictured
    canvas = page.locator("figure canvas").first
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
    canvas.blur()
