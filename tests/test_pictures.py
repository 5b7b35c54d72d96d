"""The documents' pictures are what their records say, and each stands on a page."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from glissando.data.stories import generate

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def loaded():
    """docs/pictures.py, which imports files beside it."""
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(DOCS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DOCS))
    return module


pictures = loaded()
drawing = sys.modules["drawing"]


def test_pictures_are_what_their_records_say():
    """`python docs/pictures.py --write` draws them."""
    drawn = {name: draw() for name, draw in pictures.PICTURES.items()}
    assert [name for name in drawn if drawn[name] != (pictures.FOLDER / f"{name}.svg").read_text()] == []


def test_pictures_are_described_and_legible():
    texts = []
    for name in pictures.PICTURES:
        svg = ET.parse(pictures.FOLDER / f"{name}.svg").getroot()
        assert svg.findtext(f"{SVG}title"), name
        assert svg.findtext(f"{SVG}desc"), name
        texts += svg.iter(f"{SVG}text")
    for text in texts:  # legible, and within the picture: 6.8 pixels a letter are the widest font's
        assert "font-size" not in text.attrib
        width, x = 6.8 * len(text.text), float(text.get("x"))
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "start")]
        assert left > -8, text.text
        assert left + width < drawing.WIDTH + 12, text.text


def test_the_floor_is_that_of_the_held_out_stories():
    stories = [generate(0, "valid", index) for index in range(128)]
    floor = sum(story.bits for story in stories) / sum(len(story.text.encode()) for story in stories)
    assert floor == pytest.approx(pictures.FLOOR, abs=5e-5)


def test_every_picture_stands_on_a_page():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(ROOT / "log").glob("*.md")]
    shown = {
        (page.parent / path).resolve()
        for page in pages
        for path in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    }
    drawn = {path for kind in ("png", "svg") for path in DOCS.rglob(f"*.{kind}")}
    assert sorted(drawn - shown) == []


def test_colours_stand_out_from_the_paper():
    """Contrast of text of 4.5 at least, WCAG's, in both schemes."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.05 + sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    for name, pair in drawing.COLOURS.items():
        for colour, paper in zip(pair, drawing.COLOURS["paper"], strict=True):
            ratio = light(colour) / light(paper)
            assert name in ("paper", "line") or max(ratio, 1 / ratio) >= 4.5, (name, colour)
