"""glissando corpora: what there is to train on."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import parse, parser_for
from glissando.errors import ConfigError, unknown_name


def main(arguments: Sequence[str]) -> None:
    """List the corpora, or describe a generated one and show samples."""
    parser = parser_for("corpora", "List the corpora, or show samples of one.", "glissando corpora stories")
    parser.add_argument("name", nargs="?", help="a corpus to show")
    parser.add_argument("--samples", type=int, default=3)
    options = parse(parser, arguments)
    from glissando.data.corpora import CORPORA, DataConfig, build_corpus

    if options.samples < 0:
        raise ConfigError(f"--samples must be at least 0, got {options.samples}")
    if options.name is None:
        for name, entry in CORPORA.items():
            print(f"{name:14} {entry.about}")
        return
    if options.name not in CORPORA:
        raise unknown_name("corpus", options.name, CORPORA)
    if options.name not in GENERATED:
        print(
            f"{options.name}: {CORPORA[options.name].about}\noptions: glissando train --help, under data.{options.name}"
        )
        return
    corpus = build_corpus(DataConfig(corpus=options.name))
    for key, value in corpus.describe().items():
        print(f"{key}: {value}")
    texts = corpus.texts("train")
    for _ in range(options.samples):
        print(f"\n{next(texts).strip()}")


#: corpora that need no file, so that samples can be shown without options
GENERATED = ("stories", "shift", "recall", "parity", "tracking", "copy", "selective_copy", "induction")
