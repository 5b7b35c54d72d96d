"""glissando corpora: what there is to train on."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import Parser, parse
from glissando.errors import unknown_name


def main(arguments: Sequence[str]) -> None:
    """List the corpora, or describe a generated one and show samples."""
    parser = Parser("corpora", "List the corpora, or show samples of one.", "glissando corpora stories")
    parser.add_argument("name", nargs="?", help="a corpus to show")
    options = parse(parser, arguments)
    from glissando.data.corpora import CORPORA, GeneratedOptions, about, build_corpus

    if options.name is None:
        for name, line in ({name: about(name) for name in CORPORA} | {_TABLE: _ABOUT}).items():
            print(f"{name:15} {line}")
        return
    if options.name == _TABLE:
        return _show_table()
    if options.name not in CORPORA:
        raise unknown_name("corpus", options.name, [*CORPORA, _TABLE])
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


#: a generated table, whose likelihood is known exactly
_TABLE, _ABOUT = "hawkes", "Generated events whose log-likelihood is known exactly"


def _show_table() -> None:
    from glissando.events.example import describe, sample

    for key, value in {"about": _ABOUT, **describe()}.items():
        print(f"{key}: {value}")
    print("a table: glissando events example --process hawkes5 --out FILE\n")
    print("\n".join(sample()))
