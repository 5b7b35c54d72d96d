"""glissando evaluate: bits per byte, perplexity and accuracy of a run on held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from glissando.config import from_dict, merge, to_dict
from glissando.data.corpora import DataConfig, build_corpus
from glissando.verbs.options import flat, parse, parser_for, plain

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
    parser.add_argument("--data", type=DataConfig, default=DataConfig())
    path = next((a for a in arguments if not a.startswith("-")), None)
    trained = Run.open(path).read_config().get("data", {}) if path else {}
    parser.set_defaults(flat({"data": to_dict(from_dict(DataConfig, trained, "data"))}))
    options = parse(parser, arguments)
    model = load(options.run)
    data = plain(options.data)
    if options.file is not None:
        data = merge(data, {"corpus": "text", "text": {"path": options.file, "valid_path": options.file}})
    result = measure(model, from_dict(DataConfig, data, "data"), options.exact_match)
    print(json.dumps(result, indent=2) if options.json else table(result))
    if options.plots:
        from glissando.evaluation.plots import plot_run

        for picture in plot_run(Run.open(options.run).path, options.plots):
            print(f"picture: {picture}")


def measure(model: Any, config: DataConfig, exact_match: int) -> dict[str, object]:
    """Everything that is measured of `model` on a corpus's held-out part."""
    from glissando.data.pairs import PairsCorpus
    from glissando.evaluation.pairs import exact_match_rate
    from glissando.evaluation.scoring import score

    corpus = build_corpus(config, model.tokenizer)
    result = score(model, corpus.batches("valid")).as_dict()
    if isinstance(corpus, PairsCorpus):
        result |= exact_match_rate(model, corpus.held_out(exact_match))
    return {"corpus": config.corpus, "parameters": model.num_parameters()} | result


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
