"""Three dials trained from labels: formality, figurative or literal, and variety of words.

Writes short notes with their labels to train.jsonl and valid.jsonl, trains a Hybrid ODE Transformer on them in two
stages (as examples/steer.yaml), turns each dial over held-out openings, and has the texts judged by the notes' grammar.

    python examples/three_dials.py --out runs/three-dials       # under ten minutes on one core
    python examples/three_dials.py --quick

A note, of formality 1, figurative -1 and variety 1:

    A note to Ada about the mill in May. Kindly note that it is rather cold. I saw a fox, a cart and a kite. With
    kind regards.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import glissando
from glissando.cli import main as glissando_command
from glissando.cli.steer import table
from glissando.config import from_dict, merge
from glissando.data.jsonl import JsonlCorpus
from glissando.evaluation.figures import plot_dial
from glissando.evaluation.steering import VALUES, Dials, sweep, trial
from glissando.loading import load_base
from glissando.presets import load_preset
from glissando.stages import train_stages
from glissando.training.config import RunConfig

words = str.split
DIALS = ("formality", "figurative", "variety")
NAMES = words("Ada Ben Carl Dora Emil Fay Gus Hedy Ivo June Karl Lena Milo Nora Otto Pia Rolf Sara Timo Vera")
PLACES = words("mill barn shop lake road farm pier well yard cafe hall park port dam pond gate wood hill camp tower")
MONTHS = words("January February March April May June July August September October November December")
LEADS = {
    1: ("Kindly note that", "I am pleased to report that", "Permit me to say that", "It is my duty to state that"),
    -1: ("Guess what,", "Hey, turns out", "Just so you know,", "Well, you know,"),
}
ENDS = {
    1: ("With kind regards.", "I remain yours faithfully.", "With great respect.", "Your obedient servant."),
    -1: ("See you!", "Cheers!", "Bye for now!", "Catch you later!"),
}
QUALITIES = words("cold calm dark loud slow wild bright quiet empty grey")
IMAGES = ("a stone", "an old song", "the sea", "a sleeping cat", "a lost letter", "the moon", "a broken clock", "snow")
REMARKS = {1: ("as {0} as {1}", "{0} like {1}"), -1: ("{0}", "very {0}", "rather {0}", "quite {0}")}
#: how often a label is told: a dial must have been at 0 beside others that are not, to be turned alone
TOLD = 2 / 3
SEEN = [f"a {thing}" for thing in words("fox cart kite boat dog hat drum rose lamp bell goat coin")]


def openings(split: str) -> list[str]:
    """How notes begin, which decides no label: every tenth is held out, by its hash."""
    every = (f"A note to {name} about the {place} in {month}." for name, place, month in product(NAMES, PLACES, MONTHS))
    return [opening for opening in every if (crc32(opening.encode()) % 10 == 0) == (split == "valid")]


def note(draw: Random, opening: str) -> dict[str, Any]:
    """A note that goes on from `opening`, with its labels; `control` has 0 for those that training is not told."""
    labels = {name: draw.choice((-1, 1)) for name in DIALS}
    remark = draw.choice(REMARKS[labels["figurative"]]).format(draw.choice(QUALITIES), draw.choice(IMAGES))
    seen = draw.sample(SEEN, 3) if labels["variety"] > 0 else [draw.choice(SEEN)] * 3
    lead, end = (draw.choice(said[labels["formality"]]) for said in (LEADS, ENDS))
    text = f"{opening} {lead} it is {remark}. I saw {seen[0]}, {seen[1]} and {seen[2]}. {end}"
    told = {name: label if draw.random() < TOLD else 0 for name, label in labels.items()}
    return {"text": text, "labels": labels, "control": told}


def write_notes(path: Path, split: str, n: int, seed: int) -> None:
    draw, begin = Random(f"{split} {seed}"), openings(split)
    path.write_text("".join(json.dumps(note(draw, draw.choice(begin))) + "\n" for _ in range(n)))


def _one_of(choices: Any) -> str:
    return "(" + "|".join(map(re.escape, choices)) + ")"


_REMARKS = {
    sign: "|".join(form.format(_one_of(QUALITIES), _one_of(IMAGES)) for form in forms)
    for sign, forms in REMARKS.items()
}
GRAMMAR = re.compile(
    rf"A note to {_one_of(NAMES)} about the {_one_of(PLACES)} in {_one_of(MONTHS)}\. "
    rf"(?P<lead>{_one_of(LEADS[1])}|{_one_of(LEADS[-1])}) it is "
    rf"(?:(?P<figurative>{_REMARKS[1]})|{_REMARKS[-1]})\. "
    rf"I saw (?P<a>{_one_of(SEEN)}), (?P<b>{_one_of(SEEN)}) and (?P<c>{_one_of(SEEN)})\. "
    rf"(?P<end>{_one_of(ENDS[1])}|{_one_of(ENDS[-1])})"
)


def judge(text: str) -> dict[str, float | None]:
    """The labels of a note; None of any other text. 0 where the beginning and the end differ in formality, or of three
    things two are the same."""
    found = GRAMMAR.fullmatch(text.strip())
    if found is None:
        return dict.fromkeys(DIALS)
    formal = [found["lead"] in LEADS[1], found["end"] in ENDS[1]]
    return {
        "formality": float(sum(formal) - 1),
        "figurative": 1.0 if found["figurative"] else -1.0,
        "variety": float(len({found["a"], found["b"], found["c"]}) - 2),
    }


class Notes(JsonlCorpus):
    """The notes of a file, with an oracle."""

    def judge(self, text: str) -> dict[str, float | None]:
        return judge(text)


def configuration(folder: Path, options: argparse.Namespace) -> RunConfig:
    """Two stages: the notes without labels, then with them and at u = 0 tied to the model before."""
    preset = load_preset("hybrid-ode-nano")
    files = {"path": str(folder / "train.jsonl"), "valid_path": str(folder / "valid.jsonl")}
    shared = {
        "model": {"hidden_size": options.width, "depth": {"control": list(DIALS)}},
        "data": {"kind": "jsonl", "seq_len": 64, "batch_size": 8, "seed": options.seed, **files},
        "training": {"seed": options.seed, "sample_every": 10**9 if options.quick else None},
    }
    tokenizer = {"kind": "bpe", "vocab_size": 512}
    stages = [
        {"name": "pretrain", "model": {"depth": {"control": []}}, "training": {"tokens": options.tokens}},
        {
            "name": "steer",
            "data": {"control_names": list(DIALS)},
            "training": {
                "tokens": options.tokens,
                "neutral_kl": 0.5,
                "optimizer": {"learning_rate": 1e-3},
                "schedule": {"warmup_steps": 50},
            },
        },
    ]
    return from_dict(RunConfig, merge(RunConfig, preset, shared, {"data": {"tokenizer": tokenizer}, "stages": stages}))


def report(options: argparse.Namespace, folder: Path) -> None:
    for split, n in (("train", options.notes), ("valid", options.notes // 20)):
        write_notes(folder / f"{split}.jsonl", split, n, options.seed)
    config = configuration(folder, options)
    run = folder / "run" / "2-steer"
    if not run.exists():
        train_stages(config, folder / "run")
    model = glissando.load(run)
    data, sizes = config.data, {"seq_len": config.data.seq_len, "batch_size": config.data.batch_size}
    notes = Notes(model.tokenizer, path=data.path, valid_path=data.valid_path, control_names=DIALS, **sizes)
    prompts = Random(options.seed).sample(openings("valid"), options.prompts)
    task = trial(notes, prompts=prompts, cost_rows=options.rows, max_tokens=options.max_tokens, seed=options.seed)
    dials, base = Dials(model, task), task.read(load_base(run))
    for name in DIALS:
        result = sweep(dials, name, options.values, base)
        print(table(result.as_dict()), flush=True)
        for u in (1.0, -1.0):
            print(f"  at {u:+.0f}  {dials.texts({name: u})[0]}")
        plot_dial(result, folder / f"{name}.png")
    by_words(options, folder, run, prompts)


def by_words(options: argparse.Namespace, folder: Path, run: Path, prompts: list[str]) -> None:
    """The same dial without an oracle: P(formal lead) and P(casual lead) behind the openings, by the command."""
    for name, lines in (("formal", LEADS[1]), ("casual", LEADS[-1]), ("openings", prompts)):
        (folder / f"{name}.txt").write_text("\n".join(lines))
    formal, casual, begin = (str(folder / f"{name}.txt") for name in ("formal", "casual", "openings"))
    out = folder / "words"
    shutil.rmtree(out, ignore_errors=True)
    command = ["steer", str(run), "--dials", "formality", "--words", formal, casual, "--prompts", begin]
    values = ["--values", str(list(options.values)), "--cost_rows", str(options.rows), "--out", str(out)]
    if glissando_command([*command, *values]):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="directory for the notes, the runs and the pictures; a temporary one if none")
    parser.add_argument("--notes", type=int, default=20000, help="notes to train on")
    parser.add_argument("--tokens", type=int, default=350000, help="of each stage")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=96, help="held-out openings, the same at every value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model: shows that it runs")
    options = parser.parse_args()
    options.rows, options.max_tokens, options.values = 64, 60, VALUES
    if options.quick:
        options.notes, options.tokens, options.width, options.prompts = 400, 600, 16, 2
        options.rows, options.max_tokens, options.values = 2, 4, (-1.0, 0.0, 1.0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.out or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report(options, folder)


if __name__ == "__main__":
    main()
