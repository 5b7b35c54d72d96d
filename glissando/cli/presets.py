"""glissando presets: what there is to train."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import Parser, parse
from glissando.presets import load_preset, preset_about, preset_names, preset_parameters


def main(arguments: Sequence[str]) -> None:
    """List the presets with their parameters, or show one's file."""
    parser = Parser("presets", "List the presets, or show one.", "glissando presets transformer-nano")
    parser.add_argument("name", nargs="?", help="a preset to show")
    name = parse(parser, arguments).name
    if name is not None:
        import yaml

        print(f"# {preset_about(name)}\n{yaml.safe_dump(load_preset(name), sort_keys=False)}", end="")
        return
    names = preset_names()
    widest = max(map(len, names))
    for preset in names:
        print(f"{preset:{widest}}{preset_parameters(preset):>13,}   {preset_about(preset)}")
