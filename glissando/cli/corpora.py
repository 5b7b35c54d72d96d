"""glissando corpora: what there is to train on."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import parse, parser_for, whole
from glissando.errors import ConfigError


def main(arguments: Sequence[str]) -> None:
    """List the corpora, or describe a generated one and show samples."""
    parser = parser_for("corpora", "List the corpora, or show samples of one.", "glissando corpora stories")
    parser.add_argument("name", nargs="?", help="a corpus to show")
    parser.add_argument("--samples", type=whole, default=3, help="how many to show")
    options = parse(parser, arguments)
    from glissando.data.corpora import CORPORA, about, build_corpus

    if options.samples < 0:
        raise ConfigError(f"--samples must be at least 0, got {options.samples}")
    if options.name is None:
        for name in CORPORA:
            print(f"{name:14} {about(name)}")
        return
    CORPORA.require(options.name)
    if options.name not in GENERATED:
        print(
            f"{options.name}: {about(options.name)}\noptions: glissando train --help, under data, kind {options.name}"
        )
        return
    corpus = build_corpus(CORPORA.read(options.name))
    for key, value in corpus.describe().items():
        print(f"{key}: {value}")
    texts = corpus.texts("train")
    for _ in range(options.samples):
        print(f"\n{next(texts).strip()}")


#: corpora that need no file, so that samples can be shown without options
GENERATED = ("stories", "shift", "recall", "mqar", "parity", "tracking", "copy", "selective_copy", "induction")
