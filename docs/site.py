"""What the site is made of beside docs/*.md: the README as its first page, and pages of the program and of Python.

mkdocs calls these functions, see mkdocs.yml.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formulas import mathml

import glissando
from glissando.cli import COMMANDS, installed, main, usage

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
#: files of the repository's root that are pages
PAGES = {
    "README": "index",
    **{name: name.lower() for name in ("CONTRIBUTING", "CHANGELOG", "CODE_OF_CONDUCT", "SECURITY")},
}
#: of the first screen: the words, and where in docs/ they lead
BUTTONS = (("Try it", "docs/tour.md"), ("Use it in Python", "#in-python"), ("Time series", "docs/series.md"))
#: sections of mkdocs.yml whose pages come first among results of a search, and pages that come last
FIRST, LAST = {"Start", "Guides"}, {"changelog.md", "cli.md", "audit.md"}
#: a picture that stands alone, and the line below it
_PICTURE = re.compile(r"^!\[[^\]]*\]\([^)]+\)\n\n\*[^\n]+\*\n\n", re.MULTILINE)
#: code of which comments are moved, and a line of it that ends with one
_CODE = re.compile(r"^```(?:python|bash|sh|)\n.*?^```$|(?:^    [^\n]*\n)+", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^( *)(\S.*?) +# (.*)$", re.MULTILINE)
#: the heading of a section of options: its name, what it says, and the options
_SECTION = re.compile(
    r"^(?P<title>[a-z_]+(?:\.[a-z_]+)*(?:, kind [\w-]+)?)(?::(?P<about>.*?))?\n(?=  --[a-z_]+\.)", re.DOTALL
)
#: where a displayed formula may continue on another line
_WIDE = re.compile(r"\\q?quad\b")
#: brackets that belong together
_PAIR = re.compile(r"\\(left|right)(?![a-z])")
#: a link of a file of the root to another file
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
#: a link upwards: to a page of another folder, or to a file of the repository that is no page
_UPWARDS = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")
#: what arithmatex makes of $...$ and $$...$$
_FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
#: what the functions register, and what a name that is registered can be used for
EXTENSIONS = {
    "register_mixer": "Registers a class as a mixer, the part of a block that moves information along time.",
    "register_depth": "Registers a class as a depth, which decides how the blocks follow each other.",
    "register_corpus": "Registers a class as a corpus, which a model is trained on with `--data.kind NAME`.",
    "register_probe": "Registers a corpus with its options as a probe for `glissando compare --probes NAME`.",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are generated."""
    from mkdocs.structure.files import File

    pages = {f"{page}.md": _of_the_root(name) for name, page in PAGES.items()}
    for name, text in (pages | {"cli.md": commands(), "api.md": names()}).items():
        files.append(File.generated(config, name, content=text))
    return files


def _of_the_root(name: str) -> str:
    """A file of the repository's root, with its links as they are on the site."""

    def on_the_site(found: re.Match[str]) -> str:
        text, path, anchor = found.groups(default="")
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        return _outside(text, path, anchor) if (ROOT / path).exists() else found[0]

    text = (ROOT / f"{name}.md").read_text()
    return _LINK.sub(on_the_site, _first_screen(text) if name == "README" else text)


def _first_screen(text: str) -> str:
    """The README with three buttons and its picture behind the first paragraph."""
    title, paragraph, rest = text.split("\n\n", 2)
    picture = _PICTURE.search(rest)
    assert picture is not None, "README.md has no picture with a line below it"
    rest = rest.replace(picture[0], "")
    buttons = [
        f"[{name}]({page}){{ .md-button{' .md-button--primary' * (not place)} }}"
        for place, (name, page) in enumerate(BUTTONS)
    ]
    return "\n\n".join([title, paragraph, " ".join(buttons), picture[0].rstrip(), rest])


def _outside(text: str, name: str, anchor: str, up: str = "") -> str:
    """What stands on the site for a link to a file outside docs/: a link to its page, or else the file's name."""
    page = PAGES.get(name.removesuffix(".md"))
    if page is not None:
        return f"[{text}]({up}{page}.md{anchor})"
    return f"`{name}`" if text == name else f"{text} (`{name}` in the repository)"


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw without a script."""

    def drawn(found: re.Match[str]) -> str:
        if found[1] == "span":
            return mathml(unescape(found[2]))
        parts = "".join(mathml(part, display=True) for part in formula_parts(unescape(found[2])))
        return f'<div class="formula">{parts}</div>'

    return _FORMULA.sub(drawn, html)


def formula_parts(tex: str) -> list[str]:
    """The formulas that stand beside each other in one: a phone shows them below each other."""
    parts, start = [], 0
    for gap in _WIDE.finditer(tex):
        before = tex[start : gap.start()]
        if before.count("{") == before.count("}") and not sum(map({"left": 1, "right": -1}.get, _PAIR.findall(before))):
            parts.append(before)
            start = gap.end()
    return [part.strip() for part in (*parts, tex[start:]) if part.strip()]


def _comments_above(code: re.Match[str]) -> str:
    """Code with each comment above its line, where a narrow screen shows it."""
    return _COMMENT.sub(r"\1# \3\n\1\2", code[0])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/: to the page of the file if there is one, and otherwise its name in their place."""
    section = next((above.title for above in reversed(page.ancestors)), None)
    if page.file.src_uri in LAST or section in FIRST:
        page.meta["search"] = {"boost": 0.5 if page.file.src_uri in LAST else 2}
    markdown = _CODE.sub(_comments_above, markdown)
    folder = (ROOT / "docs" / page.file.src_uri).parent
    up = "../" * page.file.src_uri.count("/")

    def named(found: re.Match[str]) -> str:
        text, path, anchor = found.groups(default="")
        target = (folder / path).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return found[0]
        return _outside(text, target.relative_to(ROOT).as_posix(), anchor, up)

    return _UPWARDS.sub(named, markdown)


def commands() -> str:
    """The help of the program and of each command, a heading a section of options."""
    text = ["# Command line", "", "```text", usage().rstrip(), "```", ""]
    for name in [*COMMANDS, *installed()]:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            main([name, "--help", "all"])
        text += [f"## glissando {name}", ""]
        blocks: list[str] = []
        for block in shown.getvalue().strip().split("\n\n"):
            if section := _SECTION.match(block):
                text += _code(blocks)
                about = " ".join((section["about"] or "").split())
                heading = f"### {name}: {section['title']}"
                text += [heading, ""] if heading not in text else []
                text += [about, ""] if about else []
                blocks = [block[section.end() :]]
            else:
                blocks.append(block)
        text += _code(blocks)
    return "\n".join(text)


def _code(blocks: list[str]) -> list[str]:
    return ["```text", "\n\n".join(blocks).rstrip(), "```", ""]


def names() -> str:
    """The docstrings of the public names, under these names, and of what an extension registers and tests with."""
    public = [name for name in glissando.__all__ if name not in ("__version__", *EXTENSIONS)]
    text = [
        "# Python",
        "",
        "What `glissando`, `glissando.series` and `glissando.events` offer. [Add your own](extending.md) has examples.",
    ]
    shown = {f"glissando.{name}" for name in public}
    text += [_documented(name) for name in sorted(shown)]
    homes = {_home(name) for name in shown}
    for module in ("glissando.series", "glissando.events"):
        offered = (f"{module}.{name}" for name in import_module(module).__all__)
        text += [_documented(name) for name in offered if _home(name) not in homes]
    text += [_extension(name, about) for name, about in EXTENSIONS.items()]
    text += [_documented(f"glissando.testing.{name}") for name in ("check_mixer", "check_depth", "check_corpus")]
    return "\n\n".join(text) + "\n"


def _documented(name: str) -> str:
    """The docstring of a public name; its heading is this name, and not that of the module which defines it."""
    options = {"heading": name, "toc_label": name, "separate_signature": "true"}
    return "\n      ".join([f"::: {_home(name)}\n    options:", *(f"{key}: {value}" for key, value in options.items())])


def _home(name: str) -> str:
    """The module that defines a public name, which `glissando` imports late."""
    module, _, attribute = name.rpartition(".")
    value = getattr(__import__(module, fromlist=[attribute]), attribute)
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else name


def _extension(name: str, about: str) -> str:
    """What a function registers, its signature, its docstring and its example of docs/extending.md."""
    function = getattr(glissando, name)
    example = next(
        code for code in re.findall(r"```python\n.*?```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
        if f"glissando.{name}(" in code
    )  # fmt: skip
    signature = f"```python\nglissando.{name}{inspect.signature(function)}\n```"
    return "\n\n".join(
        [
            f"## `glissando.{name}` {{#glissando.{name}}}",
            about,
            signature,
            inspect.getdoc(function) or "",
            "Example:",
            example,
        ]
    )
