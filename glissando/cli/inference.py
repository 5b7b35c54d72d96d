"""What the commands that use a trained model share: opening it, and how it computes."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from glissando.cli.options import DEPTH, Options


def inference_overrides(options: Options) -> dict[str, Any]:
    """The options of the depth that were given; opening a model of another depth refuses them."""
    return {name: getattr(options, name) for name in DEPTH if getattr(options, name) is not None}


def open_model(options: Options, run: str | Path) -> Any:
    """The model of a run on the device of --device, its depth and its matrices as the options say."""
    from glissando.loading import load
    from glissando.machine import find_device

    options.device = str(find_device(options.device))  # an error of it comes before anything is loaded
    model = load(run, inference_overrides(options)).to(options.device)
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
    from numba.core.event import Listener, install_listener

    message = "compiling the decoding step, once on this machine: about half a minute"
    notice = threading.Timer(2.0, partial(print, message, file=sys.stderr, flush=True))
    notice.daemon = True

    class Compiling(Listener):
        """Nothing begins where kernels are only loaded, however long that takes."""

        def on_start(self, event: Any) -> None:
            if notice.ident is None:
                notice.start()

        def on_end(self, event: Any) -> None:
            pass

    with install_listener("numba:compile", Compiling()):
        try:
            decoder.warm_up()
        finally:
            notice.cancel()
    return True
