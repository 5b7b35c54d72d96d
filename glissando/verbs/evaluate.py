"""glissando evaluate: bits per byte, perplexity and accuracy of a run on held-out text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from glissando.config import from_dict, to_dict
from glissando.data.corpora import DataConfig, TextOptions, build_corpus
from glissando.errors import ConfigError
from glissando.verbs.options import add_inference_options, explain, flat, inference_overrides, parse, parser_for, plain

if TYPE_CHECKING:
    from glissando.data.base import Corpus
    from glissando.model import LanguageModel

EXAMPLE = "glissando evaluate runs/first --file book.txt"


def main(arguments: Sequence[str]) -> None:
    """Score the run's own held-out text, a file, or another corpus."""
    from glissando.loading import load
    from glissando.runs import Run

    parser = parser_for("evaluate", "Score a run on held-out text.", EXAMPLE)
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--file", help="score every byte of this text file")
    parser.add_argument("--exact_match", type=int, default=256, help="pairs to answer, where the corpus is of pairs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plots", help="directory for pictures of the run")
    add_inference_options(parser)
    parser.add_argument("--data", type=DataConfig, default=DataConfig())
    explain(parser, DataConfig, "data.")
    # Once to know the run, once more with the run's own data as the defaults.
    run = Run.open(parse(parser, arguments).run)
    trained = to_dict(from_dict(DataConfig, run.read_config().get("data", {}), "data"))
    parser.set_defaults(flat({"data": trained}))
    options = parse(parser, arguments)
    if options.exact_match < 1:
        raise ConfigError(f"--exact_match must be at least 1, got {options.exact_match}")
    config = from_dict(DataConfig, plain(options.data), "data")
    if options.file is not None:
        config.corpus, config.text = "text", TextOptions(path=options.file, valid_path=options.file)
    model = load(options.run, inference_overrides(options))
    corpus = build_corpus(config, model.tokenizer)
    result = {"corpus": config.corpus} | measure(model, corpus, options.exact_match)
    print(json.dumps(result, indent=2) if options.json else table(result))
    if problems := getattr(corpus, "problems", None):
        print(problems, file=sys.stderr)
    if options.plots:
        from glissando.evaluation.plots import plot_run

        floor = build_corpus(from_dict(DataConfig, trained, "data"), model.tokenizer).entropy_floor
        for picture in plot_run(run.path, model, options.plots, floor):
            print(f"picture: {picture}", file=sys.stderr)


def measure(model: LanguageModel, corpus: Corpus, exact_match: int) -> dict[str, object]:
    """Everything that is measured of `model` on a corpus's held-out part."""
    from glissando.data.pairs import PairsCorpus
    from glissando.evaluation.pairs import exact_match_rate
    from glissando.evaluation.scoring import score

    result = {"parameters": model.num_parameters()} | score(model, corpus.batches("valid")).as_dict()
    if isinstance(corpus, PairsCorpus):
        result |= exact_match_rate(model, corpus.held_out(exact_match))
    return result


def table(result: dict[str, object]) -> str:
    """The figures, one a line, each with its interval where it has one."""
    lines = []
    for name, value in result.items():
        if name.endswith("_95"):
            continue
        shown = f"{value:.4f}" if isinstance(value, float) else f"{value}"
        interval = result.get(f"{name}_95")
        if isinstance(interval, list):
            shown += f"   (95 %: {interval[0]:.4f} to {interval[1]:.4f})"
        lines.append(f"{name.replace('_', ' '):18} {shown}")
    return "\n".join(lines)
