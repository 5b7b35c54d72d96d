"""glissando corpora: what there is to train on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from glissando.cli.options import Parser, parse
from glissando.errors import unknown_name


def main(arguments: Sequence[str]) -> None:
    """List the corpora, or describe a generated one and show samples."""
    parser = Parser("corpora", "List the corpora, or show samples of one.", "glissando corpora stories")
    parser.add_argument("name", nargs="?", help="a corpus to show")
    options = parse(parser, arguments)
    from glissando.data.corpora import CORPORA, GeneratedOptions, about, build_corpus

    if options.name is None:
        for name, line in [
            *((name, about(name)) for name in CORPORA),
            *((name, of.about) for name, of in TABLES.items()),
        ]:
            print(f"{name:15} {line}")
        return
    if options.name in TABLES:
        return _show(options.name)
    if options.name not in CORPORA:
        raise unknown_name("corpus", options.name, [*CORPORA, *TABLES])
    if not issubclass(CORPORA.options[options.name], GeneratedOptions):
        print(
            f"{options.name}: {about(options.name)}\noptions: glissando train --help, under data, kind {options.name}"
        )
        return
    corpus = build_corpus(CORPORA.read(options.name))
    for key, value in corpus.describe().items():
        print(f"{key}: {value}")
    texts = corpus.texts("train")
    for _ in range(3):
        print(f"\n{next(texts).strip()}")


class _Table(NamedTuple):
    """A generated table: where it is made, and the command that writes one."""

    about: str
    home: str
    command: str


#: tables of events and values whose likelihood is known exactly
TABLES = {
    "hawkes": _Table(
        "Generated events whose log-likelihood is known exactly",
        "glissando.events.example", "glissando events example --process hawkes5 --out FILE",
    ),
}  # fmt: skip


def _show(name: str) -> None:
    about, home, command = TABLES[name]
    made = import_module(home)
    print(f"about: {about}")
    for key, value in made.describe().items():
        print(f"{key}: {value}")
    print(f"a table: {command}\n")
    print("\n".join(made.sample()))
