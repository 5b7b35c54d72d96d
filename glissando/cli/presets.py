"""glissando presets: what there is to train."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import Parser, parse
from glissando.presets import RECOMMENDED, load_preset, preset_about, preset_names, preset_parameters

_LARGE = ("-100m", "-124m")


def main(arguments: Sequence[str]) -> None:
    """List the presets by purpose, with their parameters, or show one's file."""
    parser = Parser("presets", "List the presets, or show one.", "glissando presets transformer-nano")
    parser.add_argument("name", "a preset to show", nargs="?")
    name = parse(parser, arguments).name
    if name is not None:
        import yaml

        print(f"# {preset_about(name)}\n{yaml.safe_dump(load_preset(name), sort_keys=False)}", end="")
        return
    from glissando.pretrained import names as trained

    print(f"already trained, and part of the package: {', '.join(trained())}; see `glissando models`")
    small = [name for name in preset_names() if name.endswith("-nano")]
    large = [name for name in preset_names() if name.endswith(_LARGE)]
    others = [name for name in preset_names() if name not in (*small, *large)]
    _print_group("text, about 1M parameters: minutes on a laptop", [RECOMMENDED, *sorted({*small} - {RECOMMENDED})])
    _print_group("text, as published, with their baselines", others)
    _print_group("text, 100M parameters and more: for a GPU", large)
    for folder in ("series", "events"):
        print(f"\n{folder}: for `glissando {folder} train`")
        for name in preset_names(folder):
            print(f"  {name:41}   {preset_about(name, folder)}")


def _print_group(title: str, names: Sequence[str]) -> None:
    print(f"\n{title}")
    for name in names:
        start = "start here: " if name == RECOMMENDED else ""
        print(f"  {name:28}{preset_parameters(name):>13,}   {start}{preset_about(name)}")
