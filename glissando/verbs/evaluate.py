"""glissando evaluate: bits per byte, perplexity and accuracy of a run on held-out text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glissando.config import flat, from_dict, require_chosen, to_dict
from glissando.data.corpora import CORPORA, DataConfig, TextOptions, build_corpus
from glissando.data.textfile import open_file
from glissando.errors import ConfigError, DataError
from glissando.verbs.options import (
    add_checkpoint_option,
    add_inference_options,
    explain,
    inference_overrides,
    parse,
    parser_for,
    plain,
    require_own_held_out,
    require_writable,
    take_checkpoint,
)

if TYPE_CHECKING:
    from glissando.data.base import Corpus
    from glissando.evaluation.halting import Point
    from glissando.evaluation.steps import StepCurve
    from glissando.model import LanguageModel
    from glissando.runs import Run

EXAMPLE = "glissando evaluate runs/first --file book.txt"


def main(arguments: Sequence[str]) -> None:
    """Score the run's own held-out text, a file, or another corpus."""
    from glissando.runs import Run

    parser = parser_for("evaluate", "Score a run on held-out text.", EXAMPLE)
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--file", help="score every byte of this text file")
    parser.add_argument("--exact_match", type=int, default=256, help="pairs to answer, where the corpus is of pairs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plots", help="directory for pictures: loss, gradients, steps of a flow")
    parser.add_argument("--steps", type=bool, default=False, help="measure every solver and number of steps of a flow")
    parser.add_argument("--diagnostics", help="directory for tables and pictures of a liquid model, token by token")
    parser.add_argument("--prompt", help="that text; if absent, the beginning of the held-out one")
    parser.add_argument("--tasks", help="tasks of lm-eval with commas between, or `list`; glissando_* need no network")
    parser.add_argument("--limit", type=int | None, default=None, help="documents of each of the --tasks")
    add_inference_options(parser)
    add_checkpoint_option(parser)
    parser.add_argument("--data", type=DataConfig, default=DataConfig())
    explain(parser, DataConfig, "data.")
    # Once to know the run, once more with the run's own data as the defaults.
    run = Run.open(take_checkpoint(parse(parser, arguments)).run)
    trained = to_dict(from_dict(DataConfig, run.read_config().get("data", {}), "data"))
    parser.set_defaults(flat({"data": trained}))
    options = take_checkpoint(parse(parser, arguments))
    if options.exact_match < 1:
        raise ConfigError(f"--exact_match must be at least 1, got {options.exact_match}")
    typed = [a.partition("=")[0] for a in arguments if a.startswith("--")]
    _refuse_mixed(options, typed)
    _require_used(options, trained, typed)
    if options.tasks is not None:
        _tasks(options)
        return
    given = {argument.partition("=")[0].removeprefix("--data.text.") for argument in arguments}
    _score(run, trained, options, given)


def _score(run: Run, trained: dict[str, Any], options: Any, given: Set[str]) -> None:
    """The run's own text, a file or another corpus, and what else was asked for; `given`: of --data.text alone."""
    from glissando.loading import load

    config = from_dict(DataConfig, plain(options.data), "data")
    if options.file is not None:
        open_file(options.file, "--file")
        # Every byte of the file, whatever part of its own text the run has held out.
        asked = {name: value for name, value in vars(config.text).items() if name in given}
        config.corpus, config.text = "text", TextOptions(**asked | {"path": options.file, "valid_path": options.file})
    model = load(options.run, inference_overrides(options))
    corpus = build_corpus(config, model.tokenizer)
    _require_pairs(corpus, config.corpus, given)
    _require_flow(model, options)
    _require_liquid(model, options)
    _require_places(options)
    drawn = _held_out(corpus) if options.diagnostics else []
    # A model that is told something of each text must not be set beside one that is not, unseen.
    told = {"labels_told": ", ".join(corpus.control_names)} if corpus.control_names else {}
    result = {"corpus": config.corpus} | told | measure(model, corpus, options.exact_match)
    if not options.json:
        print(table(result), flush=True)
    steps = _steps(run, model, corpus) if options.plots or options.steps else None
    halting = _halting(run, model, corpus) if steps is not None else []
    if options.json and options.steps and steps is not None:
        result |= {"steps": steps.as_dict(), "halting": [asdict(point) for point in halting]}
    elif steps is not None:
        print(steps.table(), file=sys.stderr)
        if halting:
            from glissando.evaluation.halting import halting_table

            print(halting_table(halting), file=sys.stderr)
    if options.json:
        print(json.dumps(result, indent=2))
    if problems := getattr(corpus, "problems", None):
        print(problems, file=sys.stderr)
    if options.plots:
        from glissando.evaluation.plots import plot_run

        floor = build_corpus(from_dict(DataConfig, trained, "data"), model.tokenizer).entropy_floor
        for picture in plot_run(run.path, model, Path(options.plots).expanduser(), floor, steps, halting):
            print(f"picture: {picture}", file=sys.stderr)
    if options.diagnostics:
        _diagnostics(model, drawn, options)


def _require_used(options: Any, trained: dict[str, Any], given: Sequence[str]) -> None:
    """Raise ConfigError for options of a corpus that is not scored, and for those that would deal out a file's held-out
    batches otherwise than training did."""
    if options.file is not None:
        others = {f"--data.{name}" for name in CORPORA if name != "text"}
        for name in given:
            if name in _NOT_OF_A_FILE or name.rpartition(".")[0] in (*others, "--data.tokenizer"):
                raise ConfigError(f"{name} would do nothing: --file is scored as text. Leave one of the two out")
        return
    corpus = options.data.corpus
    for name in given:
        if name.startswith("--data.tokenizer"):
            raise ConfigError(f"{name} would do nothing: a run's own tokenizer reads the text. Leave it out")
        require_chosen(name, "data", CORPORA, [corpus], "data.corpus", corpus)
    names = [name.removeprefix("--") for name in given]
    require_own_held_out(names, flat({"data": plain(options.data)}), flat({"data": trained}))
    if corpus == trained["corpus"] == "jsonl":
        _require_same_lines(flat(plain(options.data)), flat(trained))


#: options that say which text is scored, and what is asked of it, beside which --file says otherwise
_NOT_OF_A_FILE = ("--data.corpus", "--data.text.path", "--data.text.valid_path", "--data.text.valid_fraction")


def _require_same_lines(asked: dict[str, Any], trained: dict[str, Any]) -> None:
    """Raise ConfigError where other lines of the trained file would be held out than training held out."""
    if asked["jsonl.valid_path"] is not None:
        return
    here, there = (Path(values["jsonl.path"]).expanduser().resolve() for values in (asked, trained))
    if here != there:
        return
    for name in ("batch_size", "seq_len", "jsonl.route_every", "jsonl.valid_path"):
        now, then = asked[name], trained[name]
        if now != then:
            raise ConfigError(
                f"--data.{name} {now} would score text that was trained on: which lines of {asked['jsonl.path']} are "
                f"held out follows from it, and training had {then}. Leave it out, or name held-out text with "
                "--data.jsonl.valid_path"
            )


def _refuse_mixed(options: Any, given: Sequence[str]) -> None:
    if options.tasks is None:
        if options.limit is not None:
            raise ConfigError(f"--limit {options.limit} is for --tasks, and none are given; name some or leave it out")
        return
    for name in given:
        if name in ("--file", "--plots", "--steps", "--diagnostics", "--prompt", "--exact_match", "--data") or (
            name.startswith("--data.")
        ):
            raise ConfigError(f"--tasks scores texts of its own, and {name} was given too; leave one of them out")


def _tasks(options: Any) -> None:
    """The tasks of lm-eval in place of the run's own text."""
    from glissando.evaluation.harness import run_tasks, task_names
    from glissando.loading import load

    if options.tasks == "list":
        print("\n".join(task_names()))
        return
    names = [name.strip() for name in options.tasks.split(",")]
    results = run_tasks(load(options.run, inference_overrides(options)), names, options.limit)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for task, metrics in results.items():
        for name, value in metrics.items():
            if name.endswith("_stderr"):
                continue
            error = metrics.get(f"{name}_stderr")
            print(f"{task:24} {name:16} {value:.4f}" + ("" if error is None else f" +- {error:.4f}"))


def _require_pairs(corpus: Corpus, name: str, given: Set[str]) -> None:
    from glissando.data.pairs import PairsCorpus

    if "--exact_match" in given and not isinstance(corpus, PairsCorpus):
        raise ConfigError(f"--exact_match counts answers of pairs, and {name} is not of pairs; leave it out")


def _require_flow(model: LanguageModel, options: Any) -> None:
    from glissando.evaluation.steps import has_flow

    if options.steps and not has_flow(model):
        raise ConfigError(
            f"--steps measures the solver of a flow, and the depth.kind of {options.run} is "
            f"{model.config.depth.kind}; leave it out"
        )


def _require_liquid(model: LanguageModel, options: Any) -> None:
    from glissando.evaluation.time_constants import require_drawable

    if options.prompt == "":
        raise ConfigError("--prompt is an empty text, of which nothing can be drawn; give one, or leave --prompt out")
    if options.prompt is not None and options.diagnostics is None:
        raise ConfigError("--prompt is the text of --diagnostics; give that too, or leave --prompt out")
    if options.diagnostics is None:
        return
    require_diagnostics(model, options.run, options.diagnostics, (TIME_CONSTANTS, PATTERNS))
    if options.prompt is not None and model.tokenizer is not None:
        require_drawable(model.tokenizer.encode(options.prompt))


def require_diagnostics(model: LanguageModel, run: str, folder: str, more: Sequence[str] = ()) -> None:
    """Raise ConfigError for a model without a liquid mixer, and where a file of --diagnostics cannot be written."""
    from glissando.evaluation.diagnostics import PICTURE, TABLE
    from glissando.evaluation.time_constants import liquid_mixers

    if not liquid_mixers(model):
        raise ConfigError(
            f"--diagnostics is of liquid mixers, and {run} has none (its model.mixer is {model.config.mixer}); leave "
            "it out"
        )
    place = Path(folder).expanduser()
    require_writable("--diagnostics", place)
    _require_none("--diagnostics", [place / name for name in (TABLE, PICTURE, *more)])


#: files of --diagnostics beside the table and the picture of all quantities
TIME_CONSTANTS, PATTERNS = "time-constants.png", "patterns.png"


def _require_places(options: Any) -> None:
    """What will be drawn has a place to lie in, where nothing lies yet."""
    from glissando.evaluation.plots import PICTURES

    if options.plots is not None:
        plots = Path(options.plots).expanduser()
        require_writable("--plots", plots)
        _require_none("--plots", [plots / name for name in PICTURES])


def _require_none(option: str, files: Sequence[Path]) -> None:
    if there := next((file for file in files if file.exists()), None):
        raise ConfigError(f"{there} exists; nothing is overwritten: name another {option}, or move it away")


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


def _diagnostics(model: LanguageModel, ids: list[int], options: Any) -> None:
    """Every quantity of every token, and what patterns over time do to tau."""
    import torch

    from glissando.evaluation import time_constants as tau
    from glissando.evaluation.diagnostics import gather, recording, write
    from glissando.generation import computing, room_after

    assert model.tokenizer is not None
    folder, device = Path(options.diagnostics).expanduser(), model.embedding.weight.device
    text = ids[:_DRAWN] if options.prompt is None else model.tokenizer.encode(options.prompt)
    with computing(model), recording(model) as calls:
        model(torch.tensor([text], device=device))
    files = write(model, gather(model, calls), folder)
    files.append(tau.plot_text(model, model.tokenizer.decode(text), folder / TIME_CONSTANTS))
    longest = min(tau.LENGTH, room_after(model, 1))
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


def _steps(run: Run, model: LanguageModel, corpus: Corpus) -> StepCurve | None:
    """Every setting of a flow's solver; None without a flow. The setting to mark is the run's, not that of options."""
    from glissando.evaluation import steps
    from glissando.evaluation.steps import Setting, has_flow, measure_steps
    from glissando.model import ModelConfig

    if not has_flow(model):
        return None
    depth = from_dict(ModelConfig, run.read_config()["model"], "model").depth
    assert depth.n_steps is not None
    print(f"solving the flow in other ways, on about {steps.SAMPLE_BYTES:,} bytes of the text", file=sys.stderr)
    trained = Setting(depth.flow.method, depth.n_steps)
    return measure_steps(model, corpus, trained, sample_bytes=steps.SAMPLE_BYTES)


def _halting(run: Run, model: LanguageModel, corpus: Corpus) -> list[Point]:
    """Tolerances on the run's own grid; [] for the coupled scheme, which cannot halt."""
    from glissando.evaluation.halting import measure_halting
    from glissando.evaluation.steps import SAMPLE_BYTES, sample
    from glissando.loading import load

    if model.config.depth.flow.backward == "reversible":
        return []
    return measure_halting(load(run.checkpoint or run.path), sample(corpus, SAMPLE_BYTES))


def measure(model: LanguageModel, corpus: Corpus, exact_match: int) -> dict[str, object]:
    """Everything that is measured of `model` on a corpus's held-out part."""
    from glissando.data.pairs import PairsCorpus
    from glissando.evaluation.halting import counted
    from glissando.evaluation.pairs import exact_match_rate
    from glissando.evaluation.scoring import score

    with counted(model) as count:
        result = {"parameters": model.num_parameters()} | score(model, corpus.batches("valid")).as_dict()
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
