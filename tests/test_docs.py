"""The documents: links lead somewhere, the site has every page, the README is short and its Python runs."""

from __future__ import annotations

import fnmatch
import importlib.util
import posixpath
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "research" / "README.md",
    *sorted((ROOT / "log").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    """Without code, in which brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def settings() -> dict:
    """mkdocs.yml without its hooks."""
    return yaml.safe_load(re.sub(r"^hooks.*$", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))


EXCLUDED = settings()["exclude_docs"].split()


@cache
def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub and the site make them, and those that are written."""
    written = set(re.findall(r'<a id="([^"]+)">', page.read_text()))
    titles = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return written | {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_links_lead_somewhere():
    links = [(page, link) for page in PAGES for link in LINK.findall(text_of(page))]
    for page, link in links:
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if target.is_relative_to(ROOT / "docs") and page.is_relative_to(ROOT / "docs"):
            name = target.relative_to(ROOT / "docs").as_posix()
            assert not any(fnmatch.fnmatch(name, pattern) for pattern in EXCLUDED), (
                f"{page.name}: {link} is not on the site"
            )
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}; there are {sorted(anchors(target))}"


def test_every_fault_of_the_table_has_its_test():
    """The tests that tests/FAULTS.md names are there, once each, and `make test` runs them."""
    named = re.findall(r"\| `([\w/]+\.py)::(\w+)` \|$", (ROOT / "tests/FAULTS.md").read_text(), re.MULTILINE)
    assert len(named) == len(set(named)) > 150
    texts = {file: (ROOT / "tests" / file).read_text() for file, _ in named}
    for file, name in named:
        before, found, _ = texts[file].partition(f"\ndef {name}(")
        assert found, f"{file} has no {name}: name the test that finds the fault now"
        decorators = f"{before}\n".rpartition("\n\n\n")[2].splitlines()
        assert "@pytest.mark.slow" not in decorators, f"{file}::{name} is slow: keep a fast test of the fault"


def test_the_site_has_every_page():
    def pages(section):
        for each in section:
            for below in each.values():
                yield from [below] if isinstance(below, str) else pages(below)

    listed = [*pages(settings()["nav"])]
    generated = {
        f"{name}.md" for name in ("index", "api", "cli", "contributing", "changelog", "code_of_conduct", "security")
    }
    written = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert written | generated == set(listed), "a page of docs/ has its line in `nav` of mkdocs.yml, and no other"


@pytest.fixture
def hooks(monkeypatch) -> ModuleType:
    """docs/site.py, which mkdocs runs."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_of_a_page_is_one_that_the_site_knows(hooks):
    """`make docs` is strict: a link to a file that is not on the site ends it."""
    docs = ROOT / "docs"
    pages = {f"{page}.md": hooks._of_the_root(name) for name, page in hooks.PAGES.items()}
    pages |= {page.relative_to(docs).as_posix(): page.read_text() for page in docs.rglob("*.md")}
    files = {file.relative_to(docs).as_posix() for file in docs.rglob("*")}
    known = {name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in EXCLUDED)}
    known |= {*pages, "api.md", "cli.md"}
    for name, text in pages.items():
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name), ancestors=(), meta={})
        on_site = hooks.on_page_markdown(text, page)
        for link in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", on_site, flags=re.DOTALL)):
            path = link.partition("#")[0]
            if path and not re.match(r"\w+:", path):
                assert posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) in known, f"{name}: {link}"


def test_the_readme_is_short():
    words = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL).split()
    assert len(words) <= 700


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    before, chosen, after = code.partition('time="when"')
    code = f"{before}{chosen}, options={{'training.steps': 2}}{after}"
    lines = [f"{name},2024-01-{1 + hour // 24:02}T{hour % 24:02}:30,{hour % 7}" for name in "ab" for hour in range(90)]
    (tmp_path / "sensors.csv").write_text("\n".join(["sensor,when,celsius", *lines]) + "\n")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert len(capsys.readouterr().out) > 50


class Links(HTMLParser):
    """What a page of the site links to or shows, and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]


def dead_links(site: Path) -> list[str]:
    """Links within the site to files or places that are not there."""
    pages = {page: Links(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    dead = []
    for page, result in pages.items():
        for link in result.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            there = target.exists() and (not anchor or target not in pages or anchor in pages[target].ids)
            dead += [] if there else [f"{page.relative_to(site)}: {link}"]
    return dead


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text(
        '<h1 id="there">x</h1><a href="../runs.csv">x</a><a href="https://b/c">x</a>'
    )
    (tmp_path / "index.html").write_text('<a href="a/#there">x</a><a href="a/#gone">x</a><img src="b.png">')
    assert sorted(dead_links(tmp_path)) == ["a/index.html: ../runs.csv", "index.html: a/#gone", "index.html: b.png"]


def test_the_first_screen_and_the_sections_of_the_command_line(hooks):
    home = hooks._of_the_root("README").split("\n## ")[0]
    assert [home.index(text) for text in ("md-button", "![", "* **")] == sorted(
        home.index(text) for text in ("md-button", "![", "* **")
    )
    assert home.count(".md-button }") + home.count(".md-button--primary }") == len(hooks.BUTTONS) == 3
    shown = hooks.commands()
    for heading in ("## glissando train", "### train: model.mixer, kind attention", "### train: training.optimizer"):
        assert f"\n{heading}\n" in shown
    assert "\n```text\n  --training.optimizer.learning_rate" in shown
    headings = re.findall("^##.*", shown, re.MULTILINE)
    assert len(headings) == len(set(headings)) > 50


def test_formulas_beside_each_other_are_parts_and_comments_stand_above_their_lines(hooks):
    tex = r"a = \frac{1 \quad 2}{3} \quad b \leftarrow \left( x \quad y \right), \qquad c"
    assert hooks.formula_parts(tex) == [r"a = \frac{1 \quad 2}{3}", r"b \leftarrow \left( x \quad y \right),", "c"]
    page = SimpleNamespace(
        file=SimpleNamespace(src_uri="data.md"), ancestors=(SimpleNamespace(title="Guides"),), meta={}
    )
    text = "a # b\n\n```python\nif x:\n    f(x)  # why\n```\n\n```text\nf(x)  # why\n```\n"
    above = "a # b\n\n```python\nif x:\n    # why\n    f(x)\n```\n\n```text\nf(x)  # why\n```\n"
    assert hooks.on_page_markdown(text, page) == above
    assert page.meta["search"]["boost"] > 1


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml")),
    reason="needs the extra docs, which `make docs` installs",
)
@pytest.mark.timeout(900)
def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site" / "liquid" / "index.html").read_text()
    assert "<math" in home
    assert "arithmatex" not in home
    served = "".join(page.read_text() for page in (tmp_path / "site").rglob("*.html"))
    assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?://(?!example)[^"]*\.(?:js|css)', served)
    assert dead_links(tmp_path / "site") == []
    formulas = re.findall(r"<math.*?</math>", served, re.DOTALL)
    assert len(formulas) > 500
    assert not [formula for formula in formulas if "\\" in formula or "<mi>&" in formula.replace("<mi>&#", "")]
    api = (tmp_path / "site/api/index.html").read_text()
    names = ("init_state", "save", "num_parameters", "from_preset")
    for name in (*(f"model.LanguageModel.{each}" for each in names), "series.estimators.Forecaster.fit"):
        assert f'id="glissando.{name}"' in api
    for name in ("register_mixer", "register_depth", "register_corpus", "register_probe", "LanguageModel", "load"):
        assert re.search(
            rf'<h2 id="[^"]+"[^>]*>(?:\s|<[^>]+>)*glissando\.{name}\b', (tmp_path / "site/api/index.html").read_text()
        )
