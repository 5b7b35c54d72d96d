"""The documents: links lead somewhere, the site has every page, the README is short and its Python runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "research" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    """Without code, in which brackets are no links."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(text_of(page)) if not link.startswith(("http:", "https:", "mailto:"))]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}; there are {sorted(anchors(target))}"


def test_the_site_has_every_page():
    read = re.sub(r"^hooks.*$", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    listed = [page for section in yaml.safe_load(read)["nav"] for pages in section.values() for each in pages
              for page in each.values()]  # fmt: skip
    written = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert written | {"index.md", "api.md", "cli.md"} == set(listed)


def test_the_readme_is_short():
    words = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL).split()
    assert len(words) <= 900


def test_the_readmes_python_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 50


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs, which `make docs` installs"
)
def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site" / "liquid" / "index.html").read_text()
    assert "<math" in home
    assert "arithmatex" not in home
    served = "".join(page.read_text() for page in (tmp_path / "site").rglob("*.html"))
    assert not re.search(r'<(?:script|link)[^>]+(?:src|href)="https?://(?!example)[^"]*\.(?:js|css)', served)
