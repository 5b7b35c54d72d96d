"""glissando generate: text from a run, streamed to the terminal."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glissando.cli.options import (
    Options,
    add_checkpoint_option,
    add_inference_options,
    inference_overrides,
    named_values,
    number,
    parse,
    parser_for,
    take_checkpoint,
    texts,
    whole,
)
from glissando.errors import ConfigError

EXAMPLE = 'glissando generate runs/first --prompt "Once upon a time" --max_tokens 300 --temperature 0.7 --seed 1'


def main(arguments: Sequence[str]) -> None:
    """Stream one prompt; several are computed together and printed in turn."""
    parser = parser_for("generate", "Write text with a trained model.", EXAMPLE)
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--prompt", type=texts, default=[""], help='a text, or a list: \'["a", "b"]\'')
    parser.add_argument("--max_tokens", type=whole, default=300, help="tokens to write at most")
    parser.add_argument("--temperature", type=number, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top_k", type=whole, help="only the k likeliest tokens")
    parser.add_argument("--top_p", type=number, help="only the likeliest that reach p")
    parser.add_argument("--seed", type=whole, default=0, help="of drawing")
    parser.add_argument("--stop", type=texts, default=[], help="stop before this text, or any of a list")
    parser.add_argument("--control", metavar="NAME=VALUE", help="the dials, with commas between: mood=0.7,speech=-1")
    parser.add_argument(
        "--diagnostics", metavar="DIR", help="directory for a table and a picture of a liquid model, token by token"
    )
    add_inference_options(parser)
    add_checkpoint_option(parser)
    options = take_checkpoint(parse(parser, arguments))
    if options.max_tokens < 1:
        raise ConfigError(f"--max_tokens must be at least 1, got {options.max_tokens}")
    if not options.prompt:
        raise ConfigError("--prompt is an empty list; give at least one text, or leave --prompt out")
    _write(options)


def _write(o: Options) -> None:
    from glissando.generation import generate, stream, visible
    from glissando.loading import load

    model = load(o.run, inference_overrides(o))
    folder = o.diagnostics
    record: Any = contextlib.nullcontext()
    if folder is not None:
        from glissando.cli.evaluate import require_diagnostics
        from glissando.evaluation.diagnostics import recording

        if len(o.prompt) > 1:
            raise ConfigError(f"--diagnostics is of one text, and --prompt is a list of {len(o.prompt)}; give one")
        require_diagnostics(model, o.run, folder)
        record = recording(model)
    # A terminal obeys control characters, which an untrained model writes freely; a file gets what was written.
    shown = visible if sys.stdout.isatty() else str
    keywords: dict[str, Any] = {
        k: getattr(o, k) for k in ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    }
    if o.control is not None:
        keywords["control"] = named_values(o.control)
    full: list[bool] = []
    keywords["when_full"] = lambda: full.append(True)

    def report_full() -> None:
        if full:
            print(f"stopped at the model's {model.config.max_length} positions", file=sys.stderr)

    if len(o.prompt) == 1:
        with record as calls:
            pieces = stream(model, o.prompt[0], **keywords)
            first = next(pieces, "")  # a mistake in the options shows here, and nothing has been printed
            print(o.prompt[0], end="", flush=True)
            for piece in itertools.chain([first], pieces):
                print(shown(piece), end="", flush=True)
        print(flush=True)
        report_full()
        if calls is not None:
            from glissando.evaluation.diagnostics import gather, write

            for file in write(model, gather(model, calls), Path(folder).expanduser()):
                print(f"written: {file}", file=sys.stderr)
        return
    for i, (prompt, text) in enumerate(zip(o.prompt, generate(model, o.prompt, **keywords), strict=True), start=1):
        print(f"--- {i} ---", file=sys.stderr, flush=True)
        print(shown(prompt + text), flush=True)
    report_full()
