"""glissando corpora: what there is to train on."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import Parser, parse


def main(arguments: Sequence[str]) -> None:
    """List the corpora, or describe a generated one and show samples."""
    parser = Parser("corpora", "List the corpora, or show samples of one.", "glissando corpora stories")
    parser.add_argument("name", "a corpus to show", nargs="?")
    options = parse(parser, arguments)
    from glissando.data.corpora import CORPORA, GeneratedOptions, about, build_corpus

    if options.name is None:
        for name in CORPORA:
            print(f"{name:15} {about(name)}")
        return
    CORPORA.require(options.name)
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
