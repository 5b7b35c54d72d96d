"""glissando steer: turn a model's dials over held-out prompts, judge the texts, write the tables and the pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glissando.cli.inference import inference_overrides, open_model
from glissando.cli.options import (
    COMPUTING,
    Options,
    Parser,
    choose_threads,
    number,
    numbers,
    parse,
    require_empty,
    require_out,
    whole,
    words,
)
from glissando.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from glissando.evaluation.steering import Cost, Sweep, Trial
    from glissando.model import LanguageModel

EXAMPLE = "glissando steer runs/steered --out runs/steered-dial --prompts 64"


def main(arguments: Sequence[str]) -> None:
    """Sweep every dial, or those of --dials; with --words also by the probabilities of two sets of words.

    Writes DIR/steering.json, DIR/texts.jsonl and a picture of each dial.
    """
    options = parse(steer_parser(), arguments)
    require_out(options, "name the directory to make, such as --out runs/steered-dial")
    out = Path(options.out).expanduser()
    require_empty(out)
    report = Report()
    for _ in _measure(options, report):
        # After every part, so that one which fails or is ended loses no other.
        _write(out, report)
    from glissando.evaluation.figures import plot_dial

    for swept, ending in ((report.sweeps, ""), (report.words, "-words")):
        for result in swept:
            print(f"picture: {plot_dial(result, out / f'{result.name}{ending}.png')}", file=sys.stderr)


def steer_parser(usage: str = "glissando steer RUN --out DIR [options]") -> Parser:
    """The options of a trial, which research.steering has, too."""
    parser = Parser("steer", "Turn a model's dials and judge what it writes.", EXAMPLE, usage)
    add = parser.add_argument
    add("run", "run directory, or one of its checkpoints")
    add("--out", "directory to create for tables, texts and plots", metavar="DIR")
    add("--dials", "dials, separated by commas; by default all", metavar="NAMES")
    add("--values", "values of u; by default -1.5 to 1.5 in quarters", numbers, [])
    add("--prompts", "number of held-out beginnings, or a file with one prompt a line", default="32")
    add("--words", "two files with one word or phrase a line, to measure P(set | prompt)", default=[], nargs="+")
    add("--cost_rows", "number of held-out rows for the cost of each value; 0: all", whole, 32)
    add("--max_tokens", "largest number of tokens of each text", whole, 700)
    add("--temperature", "temperature of sampling", number, 0.8)
    add("--seed", "seed of prompts and of sampling", whole, 0)
    parser.add_shared("weights", *COMPUTING)
    return parser


@dataclass
class Report:
    """What has been measured so far."""

    base: Cost | None = None
    sweeps: list[Sweep] = field(default_factory=list)
    words: list[Sweep] = field(default_factory=list)
    cost_rows: int = 0

    def as_dict(self) -> dict[str, Any]:
        swept = [*self.sweeps, *self.words]
        dials = [sweep.as_dict() for sweep in swept]
        return {
            "perplexity_at_0_against_base": dials[0]["perplexity_at_0_against_base"] if dials else None,
            "perplexity_base": None if self.base is None else self.base.perplexity,
            "perplexity_uncontrolled": swept[0].uncontrolled.perplexity if swept else None,
            "cost_rows": self.cost_rows,
            "dials": dials[: len(self.sweeps)],
            "words": dials[len(self.sweeps) :],
        }


def _measure(options: Options, report: Report) -> Any:
    """Fill `report` and print it part by part, yielding after each."""
    from glissando.evaluation.steering import Dials, read_word_sets, sweep, word_rows, word_sweep
    from glissando.loading import load_base

    model = open_model(options, options.run)
    choose_threads(options, 32, model.config.hidden_size)
    names, values = dials_and_values(options, model)
    sets = read_word_sets(options.words) if options.words else None
    trial = trial_of(options, model)
    if sets is not None:
        word_rows(trial.corpus.tokenizer, trial.prompts, [word for each in sets for word in each.words])
    elif not trial.corpus.has_oracle:
        raise ConfigError(
            f"{type(trial.corpus).__name__} has no oracle to judge texts by: give two files of words whose "
            "probabilities a dial should move, --words good.txt bad.txt"
        )
    base = load_base(options.run, inference_overrides(options))
    dials = Dials(model, trial)
    report.base = None if base is None else trial.read(base.to(model.embedding.weight.device))
    report.cost_rows = len(trial.held_out)
    yield  # a place that cannot be written to shows before minutes are spent
    for name in names if sets is not None else []:
        assert sets is not None
        report.words.append(word_sweep(dials, name, sets, values, report.base))
        print(table(report.words[-1].as_dict()), flush=True)
        yield
    if not trial.corpus.has_oracle:
        print("no texts are written: the corpus has no oracle to judge them by")
        return
    for name in names:
        report.sweeps.append(sweep(dials, name, values, report.base))
        print(table(report.sweeps[-1].as_dict()), flush=True)
        yield


def dials_and_values(options: Options, model: LanguageModel) -> tuple[list[str], Any]:
    """The dials, and the values of --values: mistakes show before anything runs."""
    from glissando.evaluation.steering import VALUES, check_values
    from glissando.generation import control_values

    names = model.config.controls
    if not names:
        raise ConfigError(
            f"the model of {options.run} has no dials: use `dial` of the package, or train one whose "
            "depth.control names them"
        )
    control_values(model, dict.fromkeys(names, 0.0))  # raises where they were not trained
    chosen = list(dict.fromkeys(words(options.dials)))
    for name in chosen:
        if name not in names:
            raise unknown_name("dial", name, names)
    return chosen or names, check_values(options.values or VALUES)


def trial_of(options: Options, model: LanguageModel) -> Trial:
    """Prompts, held-out rows and sampling as the options and the run's own data say."""
    from glissando.config import from_dict
    from glissando.data.corpora import CORPORA, build_corpus
    from glissando.evaluation.steering import read_lines, trial
    from glissando.run_files import require_texts
    from glissando.runs import Run

    run = Run.open(options.run)
    data = from_dict(CORPORA.section(), run.read_config().get("data", {}), "data")
    require_texts(data, run, fix="the file to the training of another run, with --{option} FILE")
    chosen = {k: getattr(options, k) for k in ("prompts", "cost_rows", "max_tokens", "temperature", "seed")}
    number = options.prompts
    chosen["prompts"] = int(number) if number.isdigit() else read_lines(number, "--prompts")
    return trial(build_corpus(data, model.tokenizer), **chosen)


def table(figures: dict[str, Any]) -> str:
    """The figures of one dial, one a line, and the sweep."""
    import pandas

    f = figures

    def share(name: str) -> str:
        low, high = f[f"{name}_95"]
        return f"{f[name]:.1%}   (95 %: {low:.1%} to {high:.1%})"

    at_0 = f["perplexity_at_0_against_base"]
    lines = [
        f"dial {f['dial']}, {f['prompts']} prompts" + (f", label {f['measure']}" if "sets" in f else ""),
        f"  success at +1      {share('success_at_+1')}",
        f"  success at -1      {share('success_at_-1')}",
        f"  Spearman           {f['spearman']:.3f}",
        f"  crossing           {f['crossing']:.3f}   (95 %: {f['crossing_95'][0]:.3f} to {f['crossing_95'][1]:.3f})",
        f"  anti-steerable     {f['anti_steerable']:.1%}",
        f"  no control  {f['bits_per_byte_uncontrolled']:.4f} bits a byte ({f['bits_per_byte_at_0']:.4f} at 0)",
        *([f"  perplexity at 0    {at_0:.4f} of the base's"] if at_0 is not None else []),
    ]
    columns = {
        "u": f["u"], "mean label": f["mean_label"], "evidence": f["evidence"], "bits per byte": f["bits_per_byte"],
        "perplexity / no control": f["perplexity_against_uncontrolled"],
    }  # fmt: skip
    tables = [columns | ({} if at_0 is None else {"perplexity / the base": f["perplexity_against_base"]})]
    if "sets" in f:
        tables.append({"u": f["u"]} | {f"P({each['name']})": each["probability"] for each in f["sets"]})
    lines += [pandas.DataFrame(each).to_string(index=False, float_format="{:.4g}".format) for each in tables]
    return "\n".join(lines)


def _write(out: Path, report: Report) -> None:
    from glissando.storage import write_atomic

    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "steering.json", (json.dumps(without_nan(report.as_dict()), indent=2) + "\n").encode())
    lines = [
        json.dumps({"dial": result.name, "u": u, "text": text}) + "\n"
        for result in report.sweeps
        for u, texts in zip(result.values, result.texts, strict=True)
        for text in texts
    ]
    write_atomic(out / "texts.jsonl", "".join(lines).encode())


def without_nan(value: Any) -> Any:
    """`value` with NaN, which JSON does not know, as null."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
