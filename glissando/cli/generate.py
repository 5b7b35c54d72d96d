"""glissando generate: text from a run, streamed to the terminal."""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glissando.cli.inference import open_model, require_step
from glissando.cli.options import COMPUTING, Options, Parser, at_least, choose_threads, number, parse, whole
from glissando.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from glissando.model import LanguageModel

#: products of a weight and a byte of a short prompt: what a thread does in some tenths of a second
_SHORT = 2e9
EXAMPLE = 'glissando generate runs/first --prompt "Once upon a time" --max_tokens 300 --temperature 0.7 --seed 1'


def main(arguments: Sequence[str]) -> None:
    """Stream one prompt; several are computed together and printed in turn."""
    parser = Parser("generate", "Write text with a trained model; a published preset's, as published.", EXAMPLE)
    add = parser.add_argument
    add("run", "run directory, or one of its checkpoints")
    add("--prompt", "a text, or - to read stdin; may be repeated", action="append")
    add("--max_tokens", "largest number of tokens (default: as published, or 300)", at_least(1))
    add("--temperature", "0 chooses the most likely token (default: as published, or 0.8)", number)
    add("--top_k", "sample only from the k most likely tokens", whole)
    top_p = "sample only from the most likely tokens that together have probability p (default: as published, or 1)"
    add("--top_p", top_p, number)
    add("--seed", "seed of sampling; by default a random one, which is printed", whole)
    add("--stop", "stop before this text; may be repeated", default=[], action="append")
    dials = "values of dials, separated by commas: mood=0.7,speech=-1"
    add("--control", dials, _named_values, metavar="NAME=VALUE")
    add("--save_state", "save the state to this file, for --load_state", metavar="FILE")
    continued = "continue the text exactly where it stopped; --prompt is appended first"
    add("--load_state", continued, metavar="FILE")
    parser.add_shared("weights", "step", "caches", "lookup", *COMPUTING)
    options = parse(parser, arguments)
    _take_prompts(options)
    _check_states(options)
    _complete_sampling(options)
    _write(options)


def _named_values(text: str) -> dict[str, float]:
    """ "mood=0.7,speech=-1" as a mapping."""
    try:
        return {name.strip(): float(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        expected = "NAME=VALUE pairs separated by commas, such as mood=0.7,speech=-1"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None


def _complete_sampling(o: Options) -> None:
    """Fill in what no option sets: from the publication of the run's preset, which is printed, or the same for all."""
    from glissando.presets import preset_note
    from glissando.runs import Run

    preset = Run.open(o.run).read_config().get("preset")
    sampling = preset_note(preset, "sampling") or {}
    published = {name: value for name, value in sampling.items() if getattr(o, name) is None}
    if published:
        values = ", ".join(f"{name} {value:g}" for name, value in published.items())
        print(f"as published with {preset}: {values}", file=sys.stderr)
    for name, value in ({"max_tokens": 300, "temperature": 0.8} | published).items():
        if getattr(o, name) is None:
            setattr(o, name, value)


def _take_prompts(o: Options) -> None:
    o.prompt = o.prompt or [""]
    if o.prompt.count("-") > 1:
        raise ConfigError("--prompt - is given more than once; stdin can be read once")
    if "-" in o.prompt:
        if sys.stdin.isatty():  # a line that is begun, so that no time is shown over what is typed
            print("the prompt, then Ctrl-D: ", end="", file=sys.stderr, flush=True)
        try:
            read = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise DataError(f"--prompt -: stdin is not UTF-8 text ({error})") from error
        # The newline that ends a line of a file is none of the text's.
        o.prompt = [read.removesuffix("\n") if text == "-" else text for text in o.prompt]
    try:
        "".join([*o.prompt, *o.stop]).encode()
    except UnicodeEncodeError as error:
        raise ConfigError("--prompt or --stop is not UTF-8 text; write it under a locale of UTF-8") from error


def _check_states(o: Options) -> None:
    for name in ("save_state", "load_state"):
        if getattr(o, name) is not None and len(o.prompt) > 1:
            raise ConfigError(f"--{name} needs one text, and --prompt gives {len(o.prompt)}; give one")
    if o.load_state is not None and o.seed is not None:
        raise ConfigError(
            "--seed would do nothing, because the text of --load_state keeps its own random numbers; leave it out"
        )
    if o.save_state is not None:
        path = Path(o.save_state).expanduser()
        before = None if o.load_state is None else Path(o.load_state).expanduser().resolve()
        if path.exists() and path.resolve() != before:
            raise RunError(f"--save_state: {path} exists; only the file of --load_state may be overwritten")
        path.parent.mkdir(parents=True, exist_ok=True)


def _write(o: Options) -> None:
    from glissando.generation import Sampling, control_values, generate
    from glissando.text_row import visible

    seed = random.randrange(2**32) if o.seed is None else o.seed
    Sampling(o.temperature, o.top_k, o.top_p, seed)
    model = open_model(o, o.run)
    if o.control is not None:  # a wrong name is an error before anything is compiled
        control_values(model, o.control)
        for name, value in o.control.items():
            if abs(value) > 1:
                print(f"{name}={value:g} is outside -1 to 1, where this model was trained.", file=sys.stderr)
    compiled = require_step(o, model)
    is_short = len(o.prompt) == 1 and len(o.prompt[0].encode(errors="replace")) * model.num_parameters() < _SHORT
    # A text that goes on in another process is to have the same bits there; and where PyTorch reads no more than a
    # short prompt, measuring takes longer than a second thread could save.
    one_thread = o.save_state is not None or o.load_state is not None or (compiled and is_short)
    choose_threads(o, len(o.prompt), model.config.hidden_size, 1 if one_thread else None)
    # A terminal obeys control characters, which an untrained model writes freely; a file gets what was written.
    shown = visible if sys.stdout.isatty() else str
    keywords: dict[str, Any] = {
        k: getattr(o, k) for k in ("max_tokens", "temperature", "top_k", "top_p", "stop", "step", "lookup", "control")
    }
    full: list[bool] = []
    keywords |= {"seed": seed, "when_full": lambda: full.append(True)}
    # Printed after the checks of the options, and only where it decides something.
    seed_line = f"seed {seed}\n" if o.seed is None and o.load_state is None and o.temperature > 0 else ""
    if len(o.prompt) == 1:
        _write_one(o, model, keywords, shown, seed_line)
    else:
        texts = generate(model, o.prompt, **keywords)
        print(seed_line, end="", file=sys.stderr)
        for i, (prompt, text) in enumerate(zip(o.prompt, texts, strict=True), start=1):
            print(f"--- {i} ---", file=sys.stderr, flush=True)
            print(shown(prompt + text), flush=True)
    if full:
        print(f"stopped at the model's {model.config.max_length} positions", file=sys.stderr)


def _write_one(
    o: Options, model: LanguageModel, keywords: dict[str, Any], shown: Callable[[str], str], seed_line: str
) -> None:
    from glissando.generation import stream
    from glissando.state_files import load_state, save_state

    if o.load_state is not None:
        keywords["state"] = load_state(model, o.load_state)
    stopped: list[int] = []
    if o.save_state is not None:  # Ctrl-C ends the text after the piece in progress, and the state is saved
        before = signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))
    try:
        pieces = stream(model, o.prompt[0], resumable=o.save_state is not None, **keywords)
        first = next(pieces, "")  # a mistake in the options shows here, and nothing has been printed
        print(seed_line, end="", file=sys.stderr, flush=True)
        print(o.prompt[0], end="", flush=True)
        for piece in itertools.chain([first], pieces):
            print(shown(piece), end="", flush=True)
            if stopped:
                break
    finally:
        if o.save_state is not None:
            signal.signal(signal.SIGINT, before)
    print(flush=True)
    if o.save_state is not None:
        save_state(model, pieces.state, o.save_state, overwrite=True)
        print(f"state: {o.save_state}", file=sys.stderr)
    if stopped:
        raise KeyboardInterrupt
