"""glissando evaluate: bits per byte, perplexity and accuracy of a run on held-out text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glissando.cli.inference import (
    add_checkpoint_option,
    add_inference_options,
    add_weights_option,
    inference_overrides,
    round_as_asked,
    take_checkpoint,
)
from glissando.cli.options import (
    Options,
    add_device_option,
    add_threads_option,
    choose_threads,
    device_of,
    parse,
    parser_for,
    require_own_held_out,
    require_writable,
    whole,
)
from glissando.config import from_dict, merge, to_dict
from glissando.data.corpora import CORPORA, build_corpus
from glissando.errors import ConfigError, DataError, RunError
from glissando.pretrained import require_text, without_held_out

if TYPE_CHECKING:
    from glissando.data.base import Corpus
    from glissando.model import LanguageModel
    from glissando.runs import Run

EXAMPLE = "glissando evaluate runs/first --file book.txt"


def main(arguments: Sequence[str]) -> None:
    """Score the run's own held-out text, a file, or another corpus."""
    parser = parser_for("evaluate", "Score a run on held-out text.", EXAMPLE)
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--file", help="score every byte of this text file")
    parser.add_argument(
        "--exact_match", type=whole, default=256, help="number of pairs to answer, for a corpus of pairs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plots", metavar="DIR", help="directory for plots of the loss and of the mixers")
    parser.add_argument(
        "--diagnostics", metavar="DIR", help="directory for tables and pictures of a liquid model, token by token"
    )
    parser.add_argument("--prompt", help="the text for --diagnostics; by default the beginning of the held-out text")
    parser.add_argument("--tasks", help="tasks of lm-eval, separated by commas, or `list`; glissando_* need no network")
    parser.add_argument("--limit", type=whole, help="number of documents of each task")
    add_weights_option(parser)
    add_inference_options(parser)
    add_checkpoint_option(parser)
    add_device_option(parser)
    add_threads_option(parser)
    parser.add_sections(("data",), lambda: {"data": CORPORA.section()})
    options = take_checkpoint(parse(parser, arguments))
    if options.exact_match < 1:
        raise ConfigError(f"--exact_match must be at least 1, got {options.exact_match}")
    _refuse_mixed(options)
    if options.tasks is not None:
        _tasks(options)
    else:
        _score(options)


def _score(options: Options) -> None:
    """The run's own text, a file or another corpus, and what else was requested."""
    from glissando.data.textfile import open_files
    from glissando.loading import load
    from glissando.run_files import require_texts
    from glissando.runs import Run

    run = Run.open(options.run)
    if options.file is not None:
        open_files(options.file, "--file", "*.txt")
    trained = from_dict(CORPORA.section(), run.read_config().get("data", {}), "data")
    config = _scored(options, without_held_out(options.run, to_dict(trained, CORPORA.section()), options.given))
    require_text(options.run, to_dict(config, CORPORA.section()))
    if options.file is None:
        require_texts(config, run, options.given, "--file FILE, or another text as --{option} FILE", may_differ=True)
    device = device_of(options)
    model = load(options.run, inference_overrides(options, options.run)).to(device)
    round_as_asked(options, model)
    choose_threads(options, config.batch_size * config.seq_len, model.config.hidden_size)
    corpus = build_corpus(config, model.tokenizer)
    kind = CORPORA.kind_of(config)
    _require_pairs(corpus, kind, options)
    _require_liquid(model, options)
    _require_places(options, run)
    drawn = _held_out(corpus) if options.diagnostics else []
    # A model that is given labels of each text must not be set beside one that is not, unseen.
    labels = {"labels_given": ", ".join(corpus.control_names)} if corpus.control_names else {}
    result = {"corpus": kind} | labels | measure(model, corpus, options.exact_match)
    if not options.json:
        print(table(result), flush=True)
    if options.json:
        print(json.dumps(result, indent=2))
    if problems := getattr(corpus, "problems", None):
        print(problems, file=sys.stderr)
    if options.plots:
        from glissando.evaluation.plots import plot_run

        require_texts(trained, run, fix="no --plots")
        floor = build_corpus(trained, model.tokenizer).entropy_floor
        for picture in plot_run(run.path, model, Path(options.plots).expanduser(), floor):
            print(f"picture: {picture}", file=sys.stderr)
    if options.diagnostics:
        _diagnostics(model, drawn, options)


def _scored(options: Options, trained: dict[str, Any]) -> Any:
    """The options of the corpus to score: the run's own, changed by those that were given, or every byte of --file.

    Raises ConfigError for those that would deal out a file's held-out batches otherwise than training did.
    """
    requested = options.sections.get("data", {})
    if options.file is not None:
        if lost := [name for name in requested if name in _NOT_OF_A_FILE]:
            raise ConfigError(
                f"--data.{lost[0]} would do nothing, because all of --file is scored; leave one of them out"
            )
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


#: tokens of a request of lm-eval, for which threads are chosen
_TASK_ROWS = 256
#: options that choose the text and the tokenizer, which --file and the run choose
_NOT_OF_A_FILE = ("kind", "path", "valid_path", "valid_fraction", "tokenizer")


def _require_same_lines(requested: dict[str, Any], trained: dict[str, Any]) -> None:
    """Raise ConfigError where other lines of the trained file would be held out than training held out."""
    if requested["valid_path"] is not None:
        return
    here, there = (Path(values["path"]).expanduser().resolve() for values in (requested, trained))
    if here != there:
        return
    for name in ("batch_size", "seq_len", "route_every", "valid_path"):
        now, then = requested[name], trained[name]
        if now != then:
            raise ConfigError(
                f"--data.{name} {now} would score text that was trained on: which lines of {requested['path']} are "
                f"held out follows from it, and training had {then}. Leave it out, or name held-out text with "
                "--data.valid_path"
            )


def _refuse_mixed(options: Options) -> None:
    """Raise ConfigError for options beside --tasks that it does not use, and for --limit without it."""
    if options.tasks is None:
        if options.limit is not None:
            raise ConfigError(f"--limit {options.limit} is for --tasks, and none are given; name some or leave it out")
        return
    for name in options.given:
        if name in ("file", "plots", "diagnostics", "prompt", "exact_match") or name.startswith("data"):
            raise ConfigError(f"--tasks measures tasks alone, and --{name} was given too; leave one of them out")


def _tasks(options: Options) -> None:
    """The tasks of lm-eval in place of the run's own text."""
    from glissando.evaluation.harness import run_tasks, task_names
    from glissando.loading import load

    if options.tasks == "list":
        print("\n".join(task_names()))
        return
    names = [name.strip() for name in options.tasks.split(",")]
    device = device_of(options)
    model = load(options.run, inference_overrides(options, options.run)).to(device)
    round_as_asked(options, model)
    choose_threads(options, _TASK_ROWS, model.config.hidden_size)
    results = run_tasks(model, names, options.limit)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for task, metrics in results.items():
        for name, value in metrics.items():
            if name.endswith("_stderr"):
                continue
            error = metrics.get(f"{name}_stderr")
            print(f"{task:24} {name:16} {value:.4f}" + ("" if error is None else f" +- {error:.4f}"))


def _require_pairs(corpus: Corpus, name: str, options: Options) -> None:
    from glissando.data.pairs import PairsCorpus

    if "exact_match" in options.given and not isinstance(corpus, PairsCorpus):
        raise ConfigError(f"--exact_match counts answers of pairs, and {name} is not of pairs; leave it out")


def _require_liquid(model: LanguageModel, options: Options) -> None:
    if options.prompt == "":
        raise ConfigError("--prompt is an empty text, which cannot be drawn; give a text, or leave --prompt out")
    if options.prompt is not None and options.diagnostics is None:
        raise ConfigError("--prompt is the text of --diagnostics; give that too, or leave --prompt out")
    if options.diagnostics is None:
        return
    require_diagnostics(model, options.run, options.diagnostics, (PATTERNS,))


def require_diagnostics(model: LanguageModel, run: str, folder: str, more: Sequence[str] = ()) -> None:
    """Raise ConfigError for a model without a liquid mixer, and where a file of --diagnostics cannot be written."""
    from glissando.evaluation.diagnostics import PICTURE, TABLE
    from glissando.evaluation.time_constants import liquid_mixers
    from glissando.mixers import MIXERS

    if not liquid_mixers(model):
        kinds = ", ".join(dict.fromkeys(MIXERS.kind_of(mixer) for mixer in model.config.mixers))
        raise ConfigError(
            f"--diagnostics needs a liquid mixer, and {run} has none (its mixer is {kinds}); leave it out"
        )
    place = Path(folder).expanduser()
    require_writable("--diagnostics", place)
    _require_none("--diagnostics", [place / name for name in (TABLE, PICTURE, *more)])


#: files of --diagnostics beside the table and the picture of all quantities
PATTERNS = "patterns.png"


def _require_places(options: Options, run: Run) -> None:
    """What will be drawn has a log to be drawn from and a place to lie in, where nothing lies yet."""
    from glissando.evaluation.plots import PICTURES, require_log

    if options.plots is not None:
        require_log(run.path)
        plots = Path(options.plots).expanduser()
        require_writable("--plots", plots)
        _require_none("--plots", [plots / name for name in PICTURES])


def _require_none(option: str, files: Sequence[Path]) -> None:
    if there := next((file for file in files if file.exists()), None):
        raise RunError(f"{there} exists; nothing is overwritten: name another {option}, or move it away")


def _held_out(corpus: Corpus) -> list[int]:
    """Ids of held-out text for `--diagnostics`: rows that do not overlap. Raises DataError for too few of them."""
    from glissando.evaluation.time_constants import LENGTH, SEEDS

    ids: list[int] = []
    for batch in corpus.batches("valid"):
        ids += (batch.ids.flatten() if batch.mask is None else batch.ids[batch.mask]).tolist()
        if len(ids) >= SEEDS * LENGTH:
            break
    if len(ids) < SEEDS * _SHORTEST:
        raise DataError(
            f"--diagnostics compares patterns with {SEEDS} rows of text of at least {_SHORTEST} tokens, "
            f"{SEEDS * _SHORTEST} in all, and the text has {len(ids)}; score a longer one (--prompt is what is drawn)"
        )
    return ids


def _diagnostics(model: LanguageModel, ids: list[int], options: Options) -> None:
    """Every quantity of every token, and what patterns over time do to tau."""
    import torch

    from glissando.evaluation import time_constants as tau
    from glissando.evaluation.diagnostics import gather, recording, write
    from glissando.generation import computing, tokens_left

    assert model.tokenizer is not None
    folder, device = Path(options.diagnostics).expanduser(), model.embedding.weight.device
    text = ids[:_DRAWN] if options.prompt is None else model.tokenizer.encode(options.prompt)
    with computing(model), recording(model) as calls:
        model(torch.tensor([text], device=device))
    files = write(model, gather(model, calls), folder)
    longest = min(tau.LENGTH, tokens_left(model, 1))
    tokens, numbers = tau.texts(model, ids), tau.signals(model)
    print(
        tau.pattern_table(tau.compare_patterns(model, tokens, length=min(longest, len(ids) // tau.SEEDS))),
        file=sys.stderr,
    )
    rows = tau.compare_patterns(model, numbers, length=longest)
    print("in the place of embeddings, with their means and deviations:", file=sys.stderr)
    print(tau.pattern_table(rows), file=sys.stderr)
    files.append(tau.plot_patterns(model, numbers, rows, folder / PATTERNS, min(longest, 128)))
    for file in files:
        print(f"written: {file}", file=sys.stderr)


#: tokens of the held-out text in the picture, and the least of a row that is compared
_DRAWN, _SHORTEST = 160, 16


def measure(model: LanguageModel, corpus: Corpus, exact_match: int) -> dict[str, object]:
    """Everything that is measured of `model` on a corpus's held-out part."""
    from glissando.data.pairs import PairsCorpus
    from glissando.evaluation.pairs import exact_match_rate
    from glissando.evaluation.scoring import counted, score
    from glissando.progress import track

    total = sum(1 for _ in corpus.batches("valid"))
    with counted(model) as count:
        batches = track(corpus.batches("valid"), "scoring the held-out text", total=total, unit="batches")
        result = {"parameters": model.num_parameters()} | score(model, batches).as_dict()
    if count.tokens:
        result["evaluations_per_token"] = count.per_token
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
