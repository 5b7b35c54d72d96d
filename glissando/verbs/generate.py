"""glissando generate: text from a run, streamed to the terminal."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glissando.errors import ConfigError
from glissando.verbs.options import (
    add_checkpoint_option,
    add_inference_options,
    inference_overrides,
    named_values,
    parse,
    parser_for,
    quoted,
    take_checkpoint,
)

EXAMPLE = 'glissando generate runs/first --prompt "Once upon a time" --max_tokens 300 --temperature 0.7 --seed 1'


def main(arguments: Sequence[str]) -> None:
    """Stream one prompt; several are computed together and printed in turn."""
    parser = parser_for("generate", "Write text with a trained model.", EXAMPLE)
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--prompt", type=list[str], default=[""], help='a text, or a list: \'["a", "b"]\'')
    parser.add_argument("--max_tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top_k", type=int | None, default=None, help="only the k likeliest tokens")
    parser.add_argument("--top_p", type=float | None, default=None, help="only the likeliest that reach p")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", type=list[str], default=[], help="stop before this text, or any of a list")
    parser.add_argument("--control", help="the dials, NAME=VALUE with commas between: mood=0.7,speech=-1")
    parser.add_argument("--diagnostics", help="directory for a table and a picture of a liquid model, token by token")
    add_inference_options(parser)
    add_checkpoint_option(parser)
    options = take_checkpoint(parse(parser, [*_quoted(arguments)]))
    if options.max_tokens < 1:
        raise ConfigError(f"--max_tokens must be at least 1, got {options.max_tokens}")
    if not options.prompt:
        raise ConfigError("--prompt is an empty list; give at least one text, or leave --prompt out")
    _write(options)


def _quoted(arguments: Sequence[str]) -> list[str]:
    """--prompt and --stop, a plain text or a JSON list of them, as a list in YAML: text need not be YAML."""
    found = list(arguments)
    for i, argument in enumerate(found):
        name, sign, value = argument.partition("=")
        if name not in ("--prompt", "--stop"):
            continue
        at = i if sign else i + 1
        if at < len(found):
            texts = quoted(_texts(value if sign else found[at]))
            found[at] = f"{name}={texts}" if sign else texts
    return found


def _texts(given: str) -> list[str]:
    import json

    try:
        value = json.loads(given)
    except ValueError:
        return [given]
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else [given]


def _write(options: object) -> None:
    from glissando.generation import generate, stream, visible
    from glissando.loading import load

    o = vars(options)
    model = load(o["run"], inference_overrides(options))
    folder = o["diagnostics"]
    record: Any = contextlib.nullcontext()
    if folder is not None:
        from glissando.evaluation.diagnostics import recording
        from glissando.verbs.evaluate import require_diagnostics

        if len(o["prompt"]) > 1:
            raise ConfigError(f"--diagnostics is of one text, and --prompt is a list of {len(o['prompt'])}; give one")
        require_diagnostics(model, o["run"], folder)
        record = recording(model)
    # A terminal obeys control characters, which an untrained model writes freely; a file gets what was written.
    shown = visible if sys.stdout.isatty() else str
    keywords: dict[str, Any] = {k: o[k] for k in ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")}
    if o["control"] is not None:
        keywords["control"] = named_values(o["control"])
    full: list[bool] = []
    keywords["when_full"] = lambda: full.append(True)

    def say_full() -> None:
        if full:
            print(f"stopped at the model's {model.config.max_length} positions", file=sys.stderr)

    if len(o["prompt"]) == 1:
        with record as calls:
            pieces = stream(model, o["prompt"][0], **keywords)
            first = next(pieces, "")  # a mistake in the options shows here, and nothing has been printed
            print(o["prompt"][0], end="", flush=True)
            for piece in itertools.chain([first], pieces):
                print(shown(piece), end="", flush=True)
        print(flush=True)
        say_full()
        if calls is not None:
            from glissando.evaluation.diagnostics import gather, write

            for file in write(model, gather(model, calls), Path(folder).expanduser()):
                print(f"written: {file}", file=sys.stderr)
        return
    for number, (prompt, text) in enumerate(
        zip(o["prompt"], generate(model, o["prompt"], **keywords), strict=True), start=1
    ):
        print(f"--- {number} ---", file=sys.stderr, flush=True)
        print(shown(prompt + text), flush=True)
    say_full()
