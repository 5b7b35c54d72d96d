"""glissando steer: turn a model's dials over held-out prompts, judge the texts, write the table and the picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glissando.errors import ConfigError, unknown_name
from glissando.verbs.options import add_inference_options, inference_overrides, parse, parser_for

EXAMPLE = "glissando steer runs/steered --out runs/steered-dial --prompts 64"


def main(arguments: Sequence[str]) -> None:
    """Sweep every dial, or those of --dials, and write DIR/steering.json, DIR/texts.jsonl and a picture of each."""
    parser = parser_for("steer", "Turn a model's dials and judge what it writes.", EXAMPLE)
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--out", help="directory to make for the table, the texts and the pictures")
    parser.add_argument("--dials", type=list[str], default=[], help="which dials, a list; all by default")
    parser.add_argument(
        "--values", type=list[float], default=[], help="values of u; by default -1.5 to 1.5 in quarters"
    )
    parser.add_argument("--prompts", type=int, default=32, help="held-out beginnings, the same at every value")
    parser.add_argument("--max_tokens", type=int, default=700)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    add_inference_options(parser)
    options = parse(parser, arguments)
    if options.out is None:
        raise ConfigError("--out is missing: name the directory to make, such as --out runs/steered-dial")
    out = Path(options.out)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out} exists and is not empty; nothing is overwritten: name another --out")
    results = [_measure(options, name) for name in _dials(options)]
    _write(out, results)


def _dials(options: Any) -> list[str]:
    from glissando.loading import load

    names = load(options.run, inference_overrides(options)).config.depth.control
    if not names:
        raise ConfigError(f"the model of {options.run} has no dials; train one whose depth.control names them")
    for name in options.dials:
        if name not in names:
            raise unknown_name("dial", name, names)
    return options.dials or names


def _measure(options: Any, name: str) -> Any:
    from glissando.config import from_dict
    from glissando.data.corpora import DataConfig, build_corpus
    from glissando.evaluation.steering import VALUES, sweep
    from glissando.loading import load
    from glissando.runs import Run

    model = load(options.run, inference_overrides(options))
    data = from_dict(DataConfig, Run.open(options.run).read_config().get("data", {}), "data")
    corpus = build_corpus(data, model.tokenizer)
    chosen = {k: getattr(options, k) for k in ("prompts", "max_tokens", "temperature", "seed")}
    result = sweep(model, corpus, name, values=options["values"] or VALUES, **chosen)
    print(table(result.as_dict()), flush=True)
    return result


def table(figures: dict[str, Any]) -> str:
    """The figures of one dial, one a line, and the sweep."""
    f = figures

    def share(name: str) -> str:
        low, high = f[f"{name}_95"]
        return f"{f[name]:.1%}   (95 %: {low:.1%} to {high:.1%})"

    lines = [
        f"dial {f['dial']}, {f['prompts']} held-out prompts",
        f"  success at +1      {share('success_at_+1')}",
        f"  success at -1      {share('success_at_-1')}",
        f"  Spearman           {f['spearman']:.3f}",
        f"  crossing           {f['crossing']:.3f}   (95 %: {f['crossing_95'][0]:.3f} to {f['crossing_95'][1]:.3f})",
        f"  anti-steerable     {f['anti_steerable']:.1%}",
        f"  no control  {f['bits_per_byte_uncontrolled']:.4f} bits a byte ({f['bits_per_byte_at_0']:.4f} at 0)",
        "       u   mean label   evidence   bits per byte",
    ]
    for u, mean, evidence, bits in zip(f["u"], f["mean_label"], f["evidence"], f["bits_per_byte"], strict=True):
        lines.append(f"  {u:6.2f}   {mean:10.3f}   {evidence:8.1%}   {bits:13.4f}")
    return "\n".join(lines)


def _write(out: Path, results: list[Any]) -> None:
    from glissando.evaluation.plots import plot_dial

    out.mkdir(parents=True, exist_ok=True)
    (out / "steering.json").write_text(json.dumps([result.as_dict() for result in results], indent=2) + "\n")
    with (out / "texts.jsonl").open("w") as file:
        for result in results:
            for u, texts in zip(result.values, result.texts, strict=True):
                for text in texts:
                    file.write(json.dumps({"dial": result.name, "u": u, "text": text}) + "\n")
    for result in results:
        print(f"picture: {plot_dial(result, out / f'{result.name}.png')}", file=sys.stderr)
