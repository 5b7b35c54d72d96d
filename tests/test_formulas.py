"""The site's converter draws every formula of every page, and reports what it cannot draw."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("latex2mathml", reason="needs latex2mathml, of the extras dev and docs")

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("formulas", ROOT / "docs" / "formulas.py")
converter = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(converter)
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if converter.formulas(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_formula_of_a_page_is_drawn(page):
    for tex, display in converter.formulas(page.read_text()):
        assert converter.mathml(tex, display).startswith("<math")
        assert "\n>" not in tex, "a line that begins so is a quotation, and cuts the formula"


def test_the_pages_have_formulas():
    assert {"continuous-transformer", "liquid", "tauformer", "hybrid-ode", "delta"} <= {page.stem for page in PAGES}


def test_formulas_are_found_outside_code():
    page = "a $x_t$ b `$y$` costs $5 or $6\n\n$$ z\n= 1 $$\n\n```\n$no$\n```\n\n    $no$\n\nand $w$\n"
    assert converter.formulas(page) == [("x_t", False), (" z\n= 1 ", True), ("w", False)]


@pytest.mark.parametrize(
    ("tex", "reason"),
    [
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", "does not know"),
        (r"\big\|", "does not know"),
        (r"\nosuchcommand", "does not know"),
        (r"x \in \mathbb R", "mathvariant='double-struck'"),
        (r"\texttt{name}", "mathvariant='monospace'"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(tex, reason):
    with pytest.raises(converter.FormulaError, match=reason):
        converter.mathml(tex)


def test_letters_in_braces_keep_their_meaning():
    assert "&#x0211D;" in converter.mathml(r"\mathbb{R}")
    assert "&#x02131;" in converter.mathml(r"\mathcal{F}")
