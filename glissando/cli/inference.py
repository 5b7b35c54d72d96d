"""Options of the commands that use a trained model: what may be changed of how it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glissando.cli.options import Options, Parser, add_import_option, number, whole
from glissando.errors import ConfigError

#: what may be changed of a trained model: how its depth is computed
_INFERENCE = {
    "depth.n_steps": (whole, "steps of a flow, if not those of the training"),
    "depth.method": (str, "solver of a flow, if not that of the training"),
    "depth.tolerance": (number, "relative error below which a token halts in a flow"),
}


def add_inference_options(parser: Parser) -> None:
    """What may be changed of a trained model, and the files that it needs."""
    for name, (kind, text) in _INFERENCE.items():
        parser.add_argument(f"--{name}", type=kind, help=text)
    add_import_option(parser)


def inference_overrides(options: Options, run: str | Path) -> dict[str, Any]:
    """Those of `add_inference_options` that were given, for the model of `run`.

    Raises ConfigError for one that is of another depth than the model has.
    """
    given = {name: getattr(options, name) for name in _INFERENCE if getattr(options, name) is not None}
    if not given:
        return {}
    from glissando.runs import Run

    depth = Run.open(run).read_config().get("model", {}).get("depth", "discrete")
    kind = depth if isinstance(depth, str) else depth.get("kind", "discrete")
    if kind != "flow":
        name, value = next(iter(given.items()))
        raise ConfigError(f"--{name} {value} is for the depth flow, and the depth of {run} is {kind}; leave it out")
    return given
