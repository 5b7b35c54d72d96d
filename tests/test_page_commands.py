"""Every `glissando` command in a code block of the README and the docs is one that the program takes today."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_parsers import parsing

from glissando.cli import COMMANDS, function_of, installed, options
from glissando.cli import main as glissando

ROOT = Path(__file__).parent.parent
#: dated records, whose commands belong to the commits that they name, and the page that test_troubleshooting.py runs
OTHERS = {"audit.md", "troubleshooting.md"}
GUIDES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in OTHERS)]
PAGES = [
    *GUIDES,
    *(page for folder in ("tutorials", "audit") for page in sorted((ROOT / "docs" / folder).glob("*.md"))),
]
#: a command of a sentence, up to its end or a comma, and one in backquotes, which may be cut short
SAID, QUOTED = re.compile(r"(?<!`)\bglissando [a-z]+ --[^`,;]*"), re.compile(r"`glissando ([a-z]+[^`]*)`")


def commands(page: Path) -> Iterator[str]:
    """Commands of fenced and of indented blocks, continued lines joined and comments cut."""
    fenced = False
    block: list[str] = []
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            block.append(line.strip())
        elif said := SAID.search(line):
            yield said[0].strip()
    for line in "\n".join(block).replace("\\\n", " ").split("\n"):
        for part in re.split(r" \| | && ", line):
            if command := re.match(r"(?:glissando|.* -m glissando) ([a-z]+(?: .*)?)$", part):
                yield "glissando " + re.sub(r"\s+#\s.*$|\s+>.*$|\s*&$", "", command[1]).strip()


#: the command of examples/, which is installed where tests/test_task.py runs it
OWN = "glissando sums "
CASES = sorted(
    {command for page in PAGES for command in commands(page) if not command.endswith("--help") and OWN not in command}
)


QUOTES = sorted({quote for page in PAGES for quote in QUOTED.findall(page.read_text()) if " --" in quote})


class Parsed(Exception):
    """Raised in the place of running a command, with its parser."""


def verb(command: str) -> str:
    return shlex.split(command)[1]


@pytest.mark.parametrize("name", sorted({verb(command) for command in CASES}))
def test_the_commands_of_the_pages_are_understood(name, monkeypatch, tmp_path, capsys):
    """A command line ends as soon as its options are read; `train` goes on to resolve its configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "examples" / "add_a_mixer.py", "my_mixer.py")
    Path("book.yaml").write_text("preset: transformer-nano\n")
    for command in CASES:
        if verb(command) == name:
            with monkeypatch.context() as patch:
                understand(command, patch, capsys)


def understand(command: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "train" and not {"--resume", "--from"} & {word.partition("=")[0] for word in words}:
        status = glissando([*(word for word in words if word != "--print_config"), "--print_config"])
        assert status == 0, f"{command}: {capsys.readouterr().err}"
        return
    command_of, read = function_of(words[0]), options.parse

    def parse(*given):
        read(*given)
        raise Parsed

    patch.setattr(parsing(words[0]), "parse", parse)
    with pytest.raises(Parsed):
        command_of(words[1:])


@pytest.mark.parametrize("name", sorted({quote.split()[0] for quote in QUOTES}))
def test_the_options_of_a_command_in_a_sentence_are_known(name, monkeypatch):
    for quote in QUOTES:
        if quote.split()[0] == name:
            with monkeypatch.context() as patch:
                know_the_options(quote, patch)


def know_the_options(quote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a command may leave out what it needs, as in `glissando train --config`."""
    words = quote.split()
    module = sys.modules[function_of(words[0]).__module__]

    def parse(parser, *_):
        raise Parsed(parser)

    monkeypatch.setattr(parsing(words[0]), "parse", parse)
    monkeypatch.setattr(module, "_refuse_at_once", lambda _: None, raising=False)
    with pytest.raises(Parsed) as parsed:
        module.main(words[1:])
    for word in words:
        if word.startswith("--") and word != "--help":
            options._split(parsed.value.args[0], [word.partition("=")[0], "0"])


def test_there_are_commands_to_check():
    assert len(CASES) > 30
    assert {command.split()[1] for command in CASES} <= {*COMMANDS, *installed()}
