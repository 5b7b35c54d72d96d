"""glissando presets: what there is to train."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import Parser, parse
from glissando.presets import RECOMMENDED, load_preset, preset_names, preset_note


def main(arguments: Sequence[str]) -> None:
    """List the presets by purpose, with their parameters, or show one's file."""
    parser = Parser("presets", "List the presets, or show one.", "glissando presets transformer-nano")
    parser.add_argument("name", "a preset to show", nargs="?")
    name = parse(parser, arguments).name
    if name is not None:
        import yaml

        options, about = load_preset(name), preset_note(name, "about")
        print(f"# {about}\n{yaml.safe_dump(options, sort_keys=False)}", end="")
        return
    from glissando.pretrained import names as trained

    print(f"already trained, and part of the package: {', '.join(trained())}; see `glissando models`")
    small = sorted(name for name in preset_names() if name.endswith("-nano") and name != RECOMMENDED)
    large = [name for name in preset_names() if name.endswith(("-100m", "-124m"))]
    others = [name for name in preset_names() if name not in (RECOMMENDED, *small, *large)]
    groups = {
        "text, about 1M parameters: minutes on a laptop": ([RECOMMENDED, *small], ""),
        "text, as published, with their baselines": (others, ""),
        "text, 100M parameters and more: for a GPU": (large, ""),
        **{f"{each}: for `glissando {each} train`": (preset_names(each), each) for each in ("series", "events")},
    }
    for title, (names, folder) in groups.items():
        print(f"\n{title}")
        for name in names:
            start = "start here: " if name == RECOMMENDED else ""
            count = "" if folder else f"{preset_note(name, 'parameters'):,}"
            print(f"  {name:28}{count:>13}   {start}{preset_note(name, 'about', folder)}")
