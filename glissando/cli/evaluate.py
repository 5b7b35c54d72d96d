"""glissando evaluate: bits per byte, perplexity and accuracy of a run on held-out text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glissando.cli.inference import open_model
from glissando.cli.options import (
    COMPUTING,
    Options,
    Parser,
    choose_threads,
    parse,
    refuse_idle,
    require_empty,
    require_own_held_out,
)
from glissando.config import from_dict, merge, to_dict
from glissando.data.corpora import CORPORA, build_corpus
from glissando.errors import ConfigError
from glissando.pretrained import require_text, without_held_out

if TYPE_CHECKING:
    from glissando.data.base import Corpus
    from glissando.model import LanguageModel

EXAMPLE = "glissando evaluate runs/first --file book.txt"


def main(arguments: Sequence[str]) -> None:
    """Score the run's own held-out text, a file, or another corpus."""
    parser = Parser("evaluate", "Score a run on held-out text.", EXAMPLE)
    add = parser.add_argument
    add("run", "run directory, or one of its checkpoints")
    add("--file", "score every byte of this text file")
    carry = (
        "read the held-out rows as one text, too: bits by position, beside those of rows that start from empty states"
    )
    add("--carry", carry, action="store_true")
    add("--json", "print JSON", action="store_true")
    add("--plots", "directory for a plot of the loss", metavar="DIR")
    add("--diagnostics", "directory for tables and pictures of a liquid model, token by token", metavar="DIR")
    add("--prompt", "the text for --diagnostics; by default the beginning of the held-out text")
    parser.add_shared("weights", *COMPUTING)
    parser.sections = {"data": CORPORA.section()}
    options = parse(parser, arguments)
    refuse_idle(options, {"prompt": "diagnostics"})
    _score(options)


def _score(options: Options) -> None:
    """The run's own text, a file or another corpus, and what else was requested."""
    from glissando.data.textfile import open_files
    from glissando.evaluation.carried import score_carried
    from glissando.evaluation.figures import plot_loss
    from glissando.progress import track
    from glissando.run_files import require_texts
    from glissando.runs import Run

    run = Run.open(options.run)
    if options.file is not None:
        open_files(options.file, "--file")
    trained = from_dict(CORPORA.section(), run.read_config().get("data", {}), "data")
    config = _scored(options, without_held_out(options.run, to_dict(trained, CORPORA.section()), options.given))
    require_text(options.run, to_dict(config, CORPORA.section()))
    if options.file is None:
        require_texts(config, run, options.given, "--file FILE, or another text as --{option} FILE", may_differ=True)
    model = open_model(options, options.run)
    choose_threads(options, config.batch_size * config.seq_len, model.config.hidden_size)
    corpus = build_corpus(config, model.tokenizer)
    kind = CORPORA.kind_of(config)
    _require_places(options, run.path, model)
    # A model that is given labels of each text must not be set beside one that is not, unseen.
    labels = {"labels_given": ", ".join(corpus.control_names)} if corpus.control_names else {}
    if options.carry:
        model.require_constant_state("--carry")
    result = {"corpus": kind} | labels | measure(model, corpus)
    if not options.json:
        print(table(result), flush=True)
    if options.carry:
        total = sum(1 for _ in corpus.batches("valid"))
        batches = track(corpus.batches("valid"), "reading it as one text", total=total, unit="batches")
        carried = score_carried(model, batches)
        result["carried"] = carried.as_dict()
        if not options.json:
            print(carried.table(), flush=True)
    if options.json:
        print(json.dumps(result, indent=2))
    if problems := getattr(corpus, "problems", None):
        print(problems, file=sys.stderr)
    if options.plots:
        require_texts(trained, run, fix="no --plots")
        folder = Path(options.plots).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        floor = build_corpus(trained, model.tokenizer).entropy_floor
        print(f"picture: {plot_loss(run.path, folder / 'loss.png', floor)}", file=sys.stderr)
    if options.diagnostics:
        _diagnostics(model, corpus, options)


def _require_places(options: Options, run: Path, model: LanguageModel) -> None:
    """What will be drawn has something to be drawn from, and a place of its own."""
    from glissando.evaluation.diagnostics import liquid_mixers
    from glissando.evaluation.figures import require_log

    for name in ("plots", "diagnostics"):
        if (folder := getattr(options, name)) is not None:
            require_empty(Path(folder).expanduser(), f"--{name}")
    if options.plots is not None:
        require_log(run)
    if options.diagnostics is not None and not liquid_mixers(model):
        raise ConfigError(f"--diagnostics needs a liquid mixer, and {options.run} has none; leave it out")


def _scored(options: Options, trained: dict[str, Any]) -> Any:
    """The options of the corpus to score: the run's own, changed by those that were given, or every byte of --file.

    Raises ConfigError for those that would deal out a file's held-out batches otherwise than training did.
    """
    requested = options.sections.get("data", {})
    if options.file is not None:
        if lost := sorted({"kind", "path", "valid_path", "valid_fraction", "tokenizer"} & {*requested}):
            raise ConfigError(f"--data.{lost[0]} would do nothing, because all of --file is scored; leave one out")
        # Every byte of the file, whatever part of its own text the run has held out.
        sizes = {name: trained[name] for name in CORPORA.shared if name in trained}
        whole_file = {"kind": "text", "path": options.file, "valid_path": options.file}
        return from_dict(CORPORA.section(), {**sizes, **requested, **whole_file}, "data")
    config = from_dict(CORPORA.section(), merge(CORPORA.section(), trained, requested), "data")
    if config.tokenizer != from_dict(CORPORA.section(), trained, "data").tokenizer:
        raise ConfigError(
            "--data.tokenizer would do nothing, because the run's own tokenizer encodes the text; leave it out"
        )
    now = to_dict(config, CORPORA.section())
    require_own_held_out(options.given, now, trained)
    if now["kind"] == trained["kind"] == "jsonl":
        _require_same_lines(now, trained)
    return config


def _require_same_lines(requested: dict[str, Any], trained: dict[str, Any]) -> None:
    """Raise ConfigError where other lines of the trained file would be held out than training held out."""
    same = ("batch_size", "seq_len", "valid_fraction", "valid_path")
    differing = [name for name in same if requested[name] != trained[name]]
    here, there = (Path(values["path"]).expanduser().resolve() for values in (requested, trained))
    if differing and requested["valid_path"] is None and here == there:
        raise ConfigError(
            f"--data.{differing[0]} would score text that was trained on: which lines of {requested['path']} are held "
            "out follows from it. Leave it out, or name held-out text with --data.valid_path"
        )


def _diagnostics(model: LanguageModel, corpus: Corpus, options: Options) -> None:
    """Every quantity of every token, and what patterns over time do to tau."""
    from glissando.evaluation.diagnostics import LENGTH, compare_patterns, diagnose, pattern_table, signals, write
    from glissando.generation import tokens_left

    assert model.tokenizer is not None
    folder = Path(options.diagnostics).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if options.prompt is None:
        batch = next(iter(corpus.batches("valid")))
        text = (batch.ids.flatten() if batch.mask is None else batch.ids[batch.mask]).tolist()[:_DRAWN]
    else:
        text = model.tokenizer.encode(options.prompt)
    files = write(model, diagnose(model, text), folder)
    rows = compare_patterns(model, signals(model), length=min(LENGTH, tokens_left(model, 1)))
    print(f"in the place of embeddings, with their means and deviations:\n{pattern_table(rows)}", file=sys.stderr)
    for file in files:
        print(f"written: {file}", file=sys.stderr)


#: tokens of the held-out text in the picture
_DRAWN = 160


def measure(model: LanguageModel, corpus: Corpus, pairs: int = 256) -> dict[str, object]:
    """Everything that is measured of `model` on a corpus's held-out part; of pairs so many are answered."""
    from glissando.data.pairs import PairsCorpus
    from glissando.evaluation.pairs import exact_match_rate
    from glissando.evaluation.scoring import score
    from glissando.progress import track

    total = sum(1 for _ in corpus.batches("valid"))
    batches = track(corpus.batches("valid"), "scoring the held-out text", total=total, unit="batches")
    result = {"parameters": model.num_parameters()} | score(model, batches).as_dict()
    if isinstance(corpus, PairsCorpus):
        result |= exact_match_rate(model, corpus.held_out(pairs))
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
