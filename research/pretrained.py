"""Train a model of the package, pack its weights as int8, measure what was packed and write its card.

    python -m research.pretrained stories                   # models/stories.yaml -> glissando/pretrained/stories
    python -m research.pretrained dial --run runs/dial      # pack a finished training, or finish an interrupted one
    python -m research.pretrained series                    # the forecaster; its table is generated first
    python -m research.pretrained --quick                   # a moment of training, into a temporary folder

models/NAME.yaml is what `glissando train --config` reads, or `glissando series train --config`; models/NAME.md is the
part of the card that no measurement changes. The packed folder is a run: configuration, weights, tokenizer, manifest
and the card.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

import glissando
from glissando.cli import main as command
from glissando.cli.evaluate import measure
from glissando.data.base import Corpus
from glissando.errors import RunError
from glissando.evaluation.carried import score_carried
from glissando.evaluation.steering import Dials, sweep, trial
from glissando.generation import tokenizer_of
from glissando.metrics import read_metrics
from glissando.presets import preset_names
from glissando.pretrained import CARD
from glissando.pretrained import ROOT as PACKAGED
from glissando.quantisation import reduced
from glissando.runs import METRICS, MODEL, Run
from glissando.series.evaluation import evaluate as evaluate_series
from glissando.storage import write_atomic
from research.runs import corpus_of, options_of

SOURCES = Path(__file__).parent.parent / "models"
LARGEST = 3_000_000  # bytes of a packed model's weights
SERIES = 500  # that the forecaster is trained on

_SAMPLE = "Once upon a time"


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "packed" if options.quick else PACKAGED / options.name
        made = Path(options.run or (Path(folder) / "run" if options.quick else f"runs/models/{options.name}"))
        parts = train(options.name, made, options.quick)
        packed = Path(folder) / options.name
        pack(options.name, parts, packed)
        if out.exists():
            shutil.rmtree(out)
        shutil.copytree(packed, out)
        print((out / CARD).read_text())


def train(name: str, run: Path, quick: bool) -> list[Path]:
    """The runs of the training at `run`, which is begun or finished if need be: one, or one a stage."""
    recipe = yaml.safe_load((SOURCES / f"{name}.yaml").read_text())
    given = ["--config", str(SOURCES / f"{name}.yaml"), "--out", str(run)]
    given = ["--resume", str(run)] if run.exists() and "stages" not in recipe else given
    verb, short = ["train"], ["--training.tokens", "2000"]
    if _is_series(recipe):
        table, series = run.parent / "oscillators.csv", (2, 1) if quick else (SERIES, 1)
        if not table.exists():
            table.parent.mkdir(parents=True, exist_ok=True)
            _run("series", "example", "--out", table, "--count", series[0], "--seed", series[1])
        verb, short = ["series", "train", "--data.path", str(table)], ["--training.steps", "2"]
    stages = sorted(run.glob("*/summary.json"))
    done = [run] if (run / "summary.json").is_file() else [found.parent for found in stages]
    if len(done) < len(recipe.get("stages", [()])):
        _run(*verb, *given, *(short if quick and "--config" in given else []))
        return train(name, run, quick)
    return done


def _is_series(recipe: dict[str, Any]) -> bool:
    return recipe.get("preset") in preset_names("series")


def _run(*arguments: object) -> None:
    if status := command([str(each) for each in arguments]):
        raise RunError(f"`glissando {' '.join(map(str, arguments))}` ended with status {status}")


def pack(name: str, parts: list[Path], out: Path) -> None:
    """The last of the runs, its matrices as int8 if it is a language model, and a card that holds what the packed file
    measures."""
    source = Run.open(parts[-1])
    is_series = _is_series(yaml.safe_load((SOURCES / f"{name}.yaml").read_text()))
    kept = ("kind", "model", "data", "training", "encoding")
    whole = source.read_config(kind="series" if is_series else None)
    config = {key: value for key, value in whole.items() if key in kept}
    for option in ("path", "valid_path"):
        if config["data"].get(option):
            config["data"][option] = Path(config["data"][option]).name  # wherever it lies
    out.mkdir()
    run = Run(out)
    if is_series:
        run.write_model(glissando.SeriesModel.load(source.path).state_dict(), config)
    else:
        original = glissando.load(source.path)
        run.write_tokenizer(tokenizer_of(original))
        run.write_model(reduced(original, "int8"), config)
    size = (out / MODEL).stat().st_size
    if size > LARGEST:
        raise RunError(f"the packed weights have {size:,} bytes, and at most {LARGEST:,} are packaged")
    _, head, body = (SOURCES / f"{name}.md").read_text().split("---\n", 2)
    measured = series_figures(out) if is_series else figures(out, source.path)
    front = yaml.safe_load(head) | measured | {"training": _training(parts, is_series)}
    sections = _series_sections(name, front) if is_series else _sections(out, name, front)
    text = f"---\n{yaml.safe_dump(front, sort_keys=False, width=110)}---\n{body.rstrip()}\n\n{sections}"
    write_atomic(out / CARD, text.encode())


def series_figures(packed: Path) -> dict[str, Any]:
    """Figures of the packed file on the series of `glissando series example`, none of which it was trained on."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "oscillators.csv"
        _run("series", "example", "--out", table)
        found = evaluate_series(packed, str(table))
    rmse = {
        who: {target: round(each[who]["rmse"], 4) for target, each in found.figures.items()}
        for who in ("model", "anchor", "last value", "mean")
    }
    parameters = glissando.SeriesModel.load(packed).num_parameters()
    return {"parameters": parameters, "figures": {"rmse": rmse, "values": found.scored}}


def figures(packed: Path, data_of: Path) -> dict[str, Any]:
    """Figures of the packed file on the held-out text of the run at `data_of`."""
    model = glissando.load(packed)
    corpus = corpus_of(data_of, model)
    result = measure(model, corpus, 1)
    found: dict[str, Any] = {"bits_per_byte": round(float(str(result["bits_per_byte"])), 4)}
    if corpus.entropy_floor is not None:
        found["floor"] = round(corpus.entropy_floor, 4)
    found["held_out_bytes"] = result["bytes"]
    if Run.open(data_of).read_config()["training"].get("carry"):
        found["carried"] = round(score_carried(model, corpus.batches("valid")).bits()["carried"], 4)
    if model.config.controls and corpus.has_oracle:
        found["dials"] = success(model, corpus)
    return {"parameters": model.num_parameters(), "figures": found}


def success(model: glissando.LanguageModel, corpus: Corpus) -> dict[str, dict[str, float]]:
    """The share, for each dial, of 32 held-out prompts whose stories end as asked, at either end."""
    dials, found = Dials(model, trial(corpus, prompts=32, cost_rows=8, max_tokens=400)), {}
    for dial in model.config.controls:
        turned = sweep(dials, dial, (-1.0, 0.0, 1.0)).as_dict()
        found[dial] = {end: round(turned[end], 3) for end in ("success_at_-1", "success_at_+1")}
    return found


def _training(parts: list[Path], is_series: bool) -> dict[str, Any]:
    rows = [read_metrics(part / METRICS)[-1] for part in parts]
    record = Run.open(parts[-1]).read_environment()
    counted = "step" if is_series else "tokens"
    text = {} if counted == "step" else {"megabytes": round(sum(map(_bytes_read, parts)) / 1e6, 1)}
    return {
        "steps" if counted == "step" else counted: int(sum(float(row[counted]) for row in rows)),
        **text,
        "minutes_on_one_core": round(sum(float(row["seconds"]) for row in rows) / 60),
        "commit": record.get("git", {}).get("commit"),
        "date": str(record.get("date", ""))[:10],
    }


def _bytes_read(part: Path) -> float:
    """Bytes of text in training, from the log: nats a token over bits a byte, for the tokens of each row."""
    before = total = 0.0
    for row in read_metrics(part / METRICS):
        tokens = float(row["tokens"])
        total += (tokens - before) * float(row["train_loss"]) / math.log(2) / float(row["train_bits_per_byte"])
        before = tokens
    return total


def _sections(packed: Path, name: str, front: dict[str, Any]) -> str:
    """What is measured, in words, and a text."""
    f = front["figures"]
    floor = f"; the entropy of the text is {f['floor']:.3f}" if "floor" in f else ""
    given = ", each story's labels given as dials" if "dials" in f else ""
    lines = [
        "## Figures",
        "",
        f"Measured with this file, whose matrices are int8: {f['bits_per_byte']:.4f} bits per byte on "
        f"{f['held_out_bytes']:,} held-out bytes{given}{floor}.",
    ]
    if "carried" in f:
        lines.append(f"Read as one text, whose state is never emptied, the same bytes take {f['carried']:.4f}.")
    for dial, rates in f.get("dials", {}).items():
        low, high = rates["success_at_-1"], rates["success_at_+1"]
        lines.append(f"Dial `{dial}`, of 32 held-out prompts: {low:.0%} end as asked at -1, {high:.0%} at +1.")
    t = front["training"]
    lines += [
        "",
        "## Training",
        "",
        f"    python -m research.pretrained {name}",
        "",
        f"Trained as `models/{name}.yaml` says: {t['tokens']:,} tokens ({t['megabytes']} MB of text), "
        f"{t['minutes_on_one_core']} minutes on one core that other programs shared.",
        "",
        "## A text",
        "",
    ]
    model = glissando.load(packed)
    dials = model.config.controls[:1]
    settings: list[dict[str, float] | None] = (
        [dict.fromkeys(dials, value) for value in (-1.0, 1.0)] if dials else [None]
    )
    return "\n".join([*lines, *(line for control in settings for line in _text(model, name, control))])


def _text(model: glissando.LanguageModel, name: str, control: dict[str, float] | None) -> list[str]:
    """A command and what it prints."""
    given = "".join(f" --control {dial}={value:g}" for dial, value in (control or {}).items())
    sample = f"--prompt {json.dumps(_SAMPLE)} --max_tokens 120 --temperature 0.7 --seed 0{given}"
    (written,) = glissando.generate(model, _SAMPLE, max_tokens=120, temperature=0.7, seed=0, control=control)
    quoted = (f"> {line}" for line in (_SAMPLE + written).strip().splitlines())
    return [f"`glissando generate {name} {sample}`:", "", *quoted, ""]


def _series_sections(name: str, front: dict[str, Any]) -> str:
    """What is measured, in words."""
    f, t = front["figures"], front["training"]
    lines = [
        "## Figures",
        "",
        f"Root mean square error of the next value, on the {f['values']:,} values that `glissando series example` "
        "writes, none of which it was trained on:",
        "",
        "| | a | b |",
        "|---|---|---|",
        *(f"| {who} | {each['a']:.3f} | {each['b']:.3f} |" for who, each in f["rmse"].items()),
        "",
        "## Training",
        "",
        f"    python -m research.pretrained {name}",
        "",
        f"Trained as `models/{name}.yaml` says, on {SERIES} series of another seed: {t['steps']:,} steps, "
        f"{t['minutes_on_one_core']} minutes on one core that other programs shared.",
        "",
    ]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = options_of(__doc__)
    names = sorted(file.stem for file in SOURCES.glob("*.yaml"))
    parser.add_argument(
        "name", nargs="?", choices=names, default="stories", help="of a file in models/ (default: stories)"
    )
    parser.add_argument("--run", help="where the training lies, or is to lie; default runs/models/NAME")
    parser.add_argument("--quick", action="store_true", help="train for a moment and keep nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
