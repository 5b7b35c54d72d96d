"""glissando export: a run as a folder that other programs run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from glissando.cli.inference import inference_overrides
from glissando.cli.options import DEPTH, Parser, parse, require_out, whole
from glissando.errors import ConfigError, unknown_name

EXAMPLE = "glissando export runs/first --to onnx --out exported"

#: --to, and what comes out
TO = {
    "onnx": "a graph that reads a prompt or a token, with the state, for ONNX Runtime",
    "web": "a static page that runs these in the browser",
    "safetensors-bf16": "a run with matrices in bfloat16",
    "safetensors-int8": "a run with matrices in int8, with a scale for each output channel",
}


def main(arguments: Sequence[str]) -> None:
    """Write the folder, check what is in it against the model, and print what the check found."""
    usage = "glissando export RUN --to KIND --out DIR [options]"
    parser = Parser("export", "Write a run's model for other programs, and check it.", EXAMPLE, usage)
    add = parser.add_argument
    add("run", "run directory, or one of its checkpoints")
    add("--to", "; ".join(f"{name}: {about}" for name, about in TO.items()), metavar="KIND")
    add("--out", "folder to create; nothing is overwritten", metavar="DIR")
    capacity = "for onnx, web: largest number of tokens of a text if the state grows (attention, tau); 1024"
    add("--capacity", capacity, whole)
    parser.add_shared(*DEPTH, "import")
    options = parse(parser, arguments)
    if options.to is None:
        raise ConfigError(f"--to is missing: one of {', '.join(TO)}")
    if options.to not in TO:
        raise unknown_name("--to", options.to, TO)
    require_out(options, "name the folder to make, such as --out exported")
    from glissando.export import PHASES, export
    from glissando.loading import load
    from glissando.progress import phases
    from glissando.runs import Run

    model = load(options.run, inference_overrides(options))
    with phases(PHASES[options.to]) as begin:
        exported = export(model, Run.open(options.run), options.to, options.out, options.capacity, begin)
    print("\n".join(exported.lines()))
    print(f"exported: {options.out}", file=sys.stderr)
