"""Options of the commands that use a trained model: what may be changed of how it computes."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glissando.cli.options import (
    Options,
    Parser,
    add_device_option,
    add_import_option,
    add_threads_option,
    device_of,
    whole,
)

#: what may be changed of a trained model: how its depth is computed
_INFERENCE = {
    "depth.n_steps": (whole, "steps of a flow, if not those of the training"),
    "depth.method": (str, "solver of a flow, if not that of the training"),
}


#: further options, which not every command has
_FURTHER: dict[str, dict[str, Any]] = {
    "weights": {
        "choices": ["float32", "bf16", "int8"],
        "default": "float32",
        "help": "round the matrices (int8 with a scale for each output); arithmetic stays in float32",
    },
    "step": {
        "choices": ["auto", "compiled", "plain"],
        "default": "auto",
        "help": "how tokens are computed: compiled (a kernel, in float32 on a CPU) or plain (PyTorch); auto: compiled "
        "if the model has such a step. The kernel is compiled once on a machine, in half a minute",
    },
    "caches": {
        "choices": ["float32", "bf16"],
        "default": "float32",
        "help": "how the compiled step keeps keys and values of attention: bf16 takes half the memory, and is faster "
        "behind long texts and for many of them",
    },
    "lookup": {
        "type": whole,
        "default": 0,
        "metavar": "N",
        "help": "read up to N tokens ahead where the last three occurred earlier in the text; the text stays the same, "
        "and comes faster where it repeats itself much, slower where it does not",
    },
}


def add_model_options(parser: Parser, *further: str, computes: bool = True) -> None:
    """What may be changed of a trained model, the files that it needs, and the `further` of weights, step, caches and
    lookup; with the device and the threads where it `computes`."""
    for name in further:
        parser.add_argument(f"--{name}", **_FURTHER[name])
    for name, (kind, text) in _INFERENCE.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    if computes:
        add_device_option(parser)
        add_threads_option(parser)
    add_import_option(parser)


def inference_overrides(options: Options) -> dict[str, Any]:
    """The options of the depth that were given; opening a model of another depth refuses them."""
    return {name: getattr(options, name) for name in _INFERENCE if getattr(options, name) is not None}


def open_model(options: Options, run: str | Path) -> Any:
    """The model of a run on the device of --device, its depth and its matrices as the options say."""
    device = device_of(options)  # an error of it comes before anything is loaded
    from glissando.loading import load

    model = load(run, inference_overrides(options)).to(device)
    if options.weights != "float32":
        from glissando.quantisation import round_weights

        round_weights(model, options.weights)
    return model


def require_step(options: Options, model: Any) -> bool:
    """Have the kernel of --step compiled before any text, and say so where `auto` finds no compiled step -> whether
    there is one that is used.

    Raises ConfigError for `compiled`, or `--caches bf16`, where the model has none.
    """
    from glissando.decoding import decoder_of

    model.caches_precision = options.caches
    decoder = decoder_of(model, options.step, False)
    if isinstance(decoder, str):
        if options.step == "auto":
            print(f"tokens are computed by PyTorch: {decoder}", file=sys.stderr, flush=True)
        return False
    with announced_compilation():
        decoder.warm_up()
    return True


@contextlib.contextmanager
def announced_compilation() -> Iterator[None]:
    """Say on stderr that the decoding step is being compiled, where it takes over two seconds."""
    message = "compiling the decoding step, once on this machine: about half a minute"
    notice = threading.Timer(2.0, lambda: print(message, file=sys.stderr, flush=True))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
