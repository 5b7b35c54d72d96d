"""glissando models: trained models that are part of the package."""

from __future__ import annotations

from collections.abc import Sequence

from glissando.cli.options import Parser, parse
from glissando.errors import unknown_name
from glissando.pretrained import ROOT, card, names

_USE = "\nA name can be used like a run directory: `glissando generate {name}`, `glissando.load({name!r})`."


def main(arguments: Sequence[str]) -> None:
    """List the models with their sizes and what they do, or print one's card."""
    parser = Parser("models", "List the trained models in the package, or show one's card.", "glissando models dial")
    parser.add_argument("name", "a model whose card to print", nargs="?")
    name, known = parse(parser, arguments).name, names()
    if name is not None:
        if name not in known:
            raise unknown_name("model", name, known)
        print(card(name)[1], end="")
        return
    widest = max(map(len, known))
    for model in known:
        size = sum(file.stat().st_size for file in (ROOT / model).iterdir())
        about, _ = card(model)
        print(f"{model:{widest}}{about['parameters']:>11,} parameters{size / 1e6:>6.1f} MB   {about['about']}")
    print(_USE.format(name=known[0]))
