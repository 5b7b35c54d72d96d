"""What the site is made of beside docs/*.md: the README as its first page, and pages of the program and of Python.

mkdocs calls these functions, see mkdocs.yml.
"""

from __future__ import annotations

import contextlib
import io
import re
from html import unescape
from pathlib import Path
from typing import Any

from formulas import mathml
from mkdocs.structure.files import File, Files

import glissando
from glissando.cli import COMMANDS, main, usage

ROOT = Path(__file__).resolve().parent.parent
#: a link upwards: to a page of another folder, or to a file of the repository that is no page
_UPWARDS = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")
#: what arithmatex makes of $...$ and $$...$$
_FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are generated."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    readme = re.sub(r"\[([^\]]*)\]\(([A-Z]+\.md|CITATION\.cff|LICENSE)\)", r"`\2`", readme)
    pages = {"index.md": readme, "cli.md": commands(), "api.md": names()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw without a script."""

    def drawn(found: re.Match[str]) -> str:
        return mathml(unescape(found[2]), display=found[1] == "div")

    return _FORMULA.sub(drawn, html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name a file of the repository in place of a link that leads out of the site."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def named(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        return f"{found[1]} (`{target.relative_to(ROOT)}` in the repository)"

    return _UPWARDS.sub(named, markdown)


def commands() -> str:
    """The help of the program and of each command."""
    text = ["# Command line", "", "```", usage().rstrip(), "```", ""]
    for name in COMMANDS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([name, "--help"])
        text += [f"## glissando {name}", "", "```", said.getvalue().rstrip(), "```", ""]
    return "\n".join(text)


def names() -> str:
    """The docstrings of the public names, and of what an extension registers and tests with."""
    public = [f"glissando.{name}" for name in glissando.__all__ if name != "__version__"]
    public += ["glissando.testing.check_mixer", "glissando.testing.check_depth"]
    return "# Python\n\n" + "\n".join(f"::: {_home(name)}\n" for name in public)


def _home(name: str) -> str:
    """The module that defines a public name, which `glissando` imports late."""
    module, _, attribute = name.rpartition(".")
    value = getattr(__import__(module, fromlist=[attribute]), attribute)
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else name
