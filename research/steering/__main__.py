"""Two dials turned at once, and a dial beside what can be done without one: prompt prefixes and activation addition.

    python -m research.steering RUN --out DIR

The options are those of `glissando steer`; --pair_values, --strengths and --selection_prompts come on top. Writes
DIR/steering.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glissando.cli.inference import inference_overrides, open_model
from glissando.cli.options import Options, numbers, parse, require_empty, require_out, whole
from glissando.cli.steer import dials_and_values, steer_parser, trial_of, without_nan
from glissando.errors import GlissandoError
from glissando.evaluation.steering import Dials, Trial
from glissando.loading import load_base
from glissando.storage import write_atomic
from research.steering.baselines import STRENGTHS, check_strengths, compare, selection_trial
from research.steering.pairs import PAIR_VALUES, check_pair_values, pair_grids
from research.steering.rows import labelled_texts

NO_BASE = (
    "no baselines: they need the uncontrolled base that the run was steered from. Train one, then steer from it: "
    "glissando train --from BASE --training.neutral_kl 1.0 --data.labelled true --out RUN"
)


def main(arguments: Sequence[str]) -> None:
    """Measure pairs of dials; where the run holds the base that it was steered from, baselines, too."""
    parser = steer_parser("python -m research.steering RUN --out DIR [options]")
    pairs_of = "values of two dials turned at once; by default -1, 0, 1"
    parser.add_argument("--pair_values", pairs_of, numbers, [])
    strengths_of = "strengths of activation addition; by default 2, 4, ..., 64"
    parser.add_argument("--strengths", strengths_of, numbers, [])
    selection_of = "number of other beginnings, to choose baselines' options"
    parser.add_argument("--selection_prompts", selection_of, whole, 12)
    options = parse(parser, arguments)
    require_out(options, "name the directory to make, such as --out runs/steered-baselines")
    out = Path(options.out).expanduser()
    require_empty(out)
    model = open_model(options, options.run)
    names, _ = dials_and_values(options, model)
    pair_values = check_pair_values(options.pair_values or PAIR_VALUES)
    strengths = check_strengths(options.strengths or STRENGTHS)
    trial = trial_of(options, model)
    base = load_base(options.run, inference_overrides(options))
    selection = None if base is None else _selection(options, trial, names)
    dials = Dials(model, trial)
    out.mkdir(parents=True)
    pairs = pair_grids(dials, names, pair_values)
    for pair in pairs:
        print(pair_table(pair.as_dict()), flush=True)
    comparisons = []
    if base is None or selection is None:
        print(NO_BASE)
    else:
        base = base.to(model.embedding.weight.device)
        for name in names:
            comparisons.append(compare(dials, base, name, selection, strengths))
            print(comparison_table(comparisons[-1].as_dict()), flush=True)
    figures = {"pairs": [each.as_dict() for each in pairs], "comparisons": [each.as_dict() for each in comparisons]}
    write_atomic(out / "steering.json", (json.dumps(without_nan(figures), indent=2) + "\n").encode())


def _selection(options: Options, trial: Trial, names: Sequence[str]) -> Trial:
    for name in names:
        labelled_texts(trial.corpus, name, 1)  # a missing label shows now, not after the sweeps
    return selection_trial(trial, options.selection_prompts)


def pair_table(figures: dict[str, Any]) -> str:
    """Mean labels of both dials and joint success, one setting a line."""
    first, second = figures["dials"]
    lines = [
        f"dials {first} and {second} turned at once, {figures['prompts']} held-out prompts",
        f"  {first + ', u':>12} {second + ', u':>12} {'mean ' + first:>14} {'mean ' + second:>14}     success",
    ]
    columns = (figures[f"mean_{first}"], figures[f"mean_{second}"], figures["joint_success"])
    for i, u in enumerate(figures["u"]):
        for j, v in enumerate(figures["u"]):
            a, b, joint = (column[i][j] for column in columns)
            success = "-" if math.isnan(joint) else f"{joint:.1%}"
            lines.append(f"  {u:12.2f} {v:12.2f} {a:14.3f} {b:14.3f}   {success:>9}")
    return "\n".join(lines)


def comparison_table(figures: dict[str, Any]) -> str:
    """Success and cost of the dial and of what can be done without one, one a line."""
    f = figures
    lines = [
        f"dial {f['dial']} beside steering without one; options chosen on {f['chosen_on_other_prompts']} other prompts",
        f"  {'':64} {'at -1':>7} {'at +1':>7} {'both':>7}   perplexity / the base's",
        _outcome("no steering", f["unsteered"]),
        _outcome("dial", f["outcome"]),
    ]
    for baseline in f["baselines"]:
        cheap, best = baseline["as_cheap_as_the_dial"], baseline["best_at_any_cost"]
        if best is None:
            lines.append(f"  {baseline['name']}: not measured, {baseline['note']}")
            continue
        if cheap is None:
            lines.append(f"  {baseline['name']}: none is within the dial's cost or 1 %")
        else:
            lines.append(_outcome(f"{cheap['way']} (within the dial's cost or 1 %)", cheap))
        lines.append(_outcome(f"{best['way']} (at any cost)", best))
    above = f["dial_above_baselines_as_cheap"]
    if above is not None:
        than = "higher" if above else "not higher"
        lines.append(f"  the dial's success is {than} than that of every baseline within its cost or 1 %")
    return "\n".join(lines)


def _outcome(name: str, f: dict[str, Any]) -> str:
    shares = " ".join(f"{f[key]:7.1%}" for key in ("success_at_-1", "success_at_+1", "success"))
    return f"  {name:64} {shares}   {f['perplexity_against_base']:.4f}"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except GlissandoError as error:
        sys.exit(str(error))
