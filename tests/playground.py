"""The playground in a browser, for tests: a page that is visited, asked for texts and waited for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import pages
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

expect.set_options(timeout=20_000)

WINDOW = ViewportSize(width=1280, height=720)  # playwright's own
#: The page looks into the model twice a second at most. Tests wait for a look more often than they count them.
SOONER = """const wait = window.setTimeout.bind(window);
window.setTimeout = (work, ms, ...rest) => wait(work, ms >= 500 && ms < 1000 ? ms / 10 : ms, ...rest);"""


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    """A page of a browser of its own, which computes nothing on a graphics processor that is not there."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=pages.BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield listened(browser.new_page())
        browser.close()


def listened(page: Page) -> Page:
    """What it complains of is in `complaints`, what it asks for in `requests`."""
    page.set_default_timeout(20_000)
    page.add_init_script(SOONER)
    page.complaints, page.requests = [], []
    page.on("console", lambda message: page.complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda asked: page.requests.append(asked))
    return page


@contextlib.contextmanager
def served(preset: str, **options) -> Iterator[pages.Served]:
    served = pages.Served(pages.model_of(preset), **options)
    yield served
    served.stop()


@contextlib.contextmanager
def visiting(first: Page) -> Iterator[Callable[..., Page]]:
    """Opens a page: where it can, the one that is there, as a new one starts a process; that is left as it was."""
    used, gates = [], []

    def opened(served: pages.Served, routes: dict | None = None, at: str = "", **options) -> Page:
        fresh = options or first in used
        page = listened(first.context.browser.new_context(**options).new_page()) if fresh else first
        used.append(page)
        gates.append(served.gate)
        for path, answer in (routes or {}).items():
            page.route(served.url + path, answer)
        page.goto(served.url + at)
        return page

    yield opened
    for page in used:
        if page is first:
            leave(page)
        else:
            page.context.close()
    for gate in gates:
        gate.allow(pages.EVER)


def leave(page: Page) -> None:
    """Nothing of the visit is kept."""
    page.evaluate("localStorage.clear(), sessionStorage.clear()")
    page.goto("about:blank")
    page.mouse.move(0, 0)
    page.set_viewport_size(WINDOW)
    page.unroute_all()
    page.context.clear_permissions()
    page.complaints, page.requests = [], []


def met(page: Page) -> Page:
    """The page, once it knows its model, at full speed."""
    expect(page.locator("#about")).not_to_have_text(re.compile("Asking the server|not known yet"))
    page.locator("input[name=pace][value='']").evaluate("radio => { radio.checked = true }")
    return page


def ask(page: Page, prompt: str = "The fox", **numbers) -> None:
    page.fill("#prompt", prompt)
    for name, value in numbers.items():
        page.fill(f"#{name}", str(value))
    page.click("#write")


def ended(page: Page, how: str = "Seed") -> str:
    expect(page.locator("#ending")).to_contain_text(how)
    return page.text_content("#ending")


def begun(page: Page, served: pages.Served, tokens: int, **numbers) -> int:
    """So many tokens of a text stand on the page, and no more are written until the gate opens; tokens before."""
    before = served.engine.tokens_written
    served.gate.allow(tokens)  # the step that reads the prompt writes two
    ask(page, **numbers)
    pages.until(lambda: served.engine.tokens_written >= before + tokens)
    expect(page.locator("#written .token").first).to_be_attached()  # it may be a character without a width
    return before


def refused(page: Page) -> str:
    expect(page.locator("#error")).to_be_visible()
    assert page.locator("#error").get_attribute("role") == "alert"
    return page.text_content("#error")
