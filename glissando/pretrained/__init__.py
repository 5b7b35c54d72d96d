"""Trained models that are part of the package. Each folder is a run with int8 matrices and a model card, README.md.

A name stands wherever a run directory is expected: `glissando.load("dial")`, `glissando generate stories`. A directory
of that name in the working directory comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from glissando.errors import DataError, RunError

ROOT = Path(__file__).parent
CARD, _CONFIG = "README.md", "config.yaml"
_TEXTS = ("path", "valid_path")


def names() -> list[str]:
    """Names of all packaged models, in alphabetical order."""
    return sorted(folder.parent.name for folder in ROOT.glob(f"*/{_CONFIG}"))


def language_models() -> list[str]:
    """The packaged models that write text, in alphabetical order."""
    # What a model of another kind is begins with it; reading all of YAML takes longer than opening the run.
    configs = {name: (ROOT / name / _CONFIG).read_text(encoding="utf-8") for name in names()}
    return [name for name, text in configs.items() if not any(line.startswith("kind:") for line in text.splitlines())]


def packaged_name(path: str | Path) -> str | None:
    """The name of the packaged model that `path` stands for, or None where it stands for another run."""
    folder = resolve(path)
    return folder.name if folder.parent == ROOT else None


def resolve(path: str | Path) -> Path:
    """The folder of a packaged model if `path` is its name and nothing of that name is here, else `path` itself."""
    path = Path(path).expanduser()
    packaged = len(path.parts) == 1 and not path.exists() and (ROOT / path / _CONFIG).is_file()
    return ROOT / path if packaged else path


def how_to_open(path: Path, kind: str | None) -> str:
    """What a run of another kind than the one that was asked for holds, and what opens it."""
    name = packaged_name(path) or str(path)
    if kind == "series":
        use = (
            f"use `glissando series evaluate {name} --file FILE`, `glissando series export {name} --out FILE.onnx`, or "
            f"glissando.SeriesModel.load({name!r})"
        )
        return f"{name} predicts numbers: {use}. Language models in the package: {', '.join(language_models())}"
    if kind == "events":
        return f"{name} predicts events: use `glissando events evaluate {name}`, or EventModel.load({name!r})"
    if kind is None:
        return f"{name} holds a model of language: use the other commands, or glissando.load({name!r})"
    opens = f"glissando.training.fit.trained({name!r}, CLASS), of its TaskConfig, opens it, and resume goes on with it"
    return f"{name} holds a model of {kind}: {opens}"


def require_text(path: str | Path, data: Mapping[str, Any]) -> None:
    """Raises DataError where `path` stands for a packaged model whose text, which `data` names, is not here."""
    if (name := packaged_name(path)) is None:
        return
    import yaml

    text = yaml.safe_load((ROOT / name / _CONFIG).read_text(encoding="utf-8"))["data"]
    named = [option for option in _TEXTS if data.get(option) and data[option] == text.get(option)]
    if any(not Path(data[option]).expanduser().exists() for option in named):
        raise DataError(
            f"{name} was trained on {text['path']}, which is not part of the package. Give your own text: `glissando "
            f"evaluate {name} --file FILE`, or `glissando train --from {name} --data.path FILE`"
        )


def without_held_out(path: str | Path, data: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """`data`, the options of the packaged model's text, without its `valid_path` where another text is `named` (names
    of options) and that file is not here; those of any other run as they are."""
    kept = dict(data)
    held_out = kept.get("valid_path")
    if packaged_name(path) and held_out and "data.path" in named and not Path(held_out).exists():
        kept["valid_path"] = None
    return kept


def card(name: str) -> tuple[dict[str, Any], str]:
    """A card's front matter and its text. Raises RunError for a card that has none."""
    import yaml

    text = (ROOT / name / CARD).read_text(encoding="utf-8")
    parts = text.split("---\n", 2)
    if len(parts) != 3 or parts[0]:
        raise RunError(f"{ROOT / name / CARD} has no front matter between two lines `---`: the installation is damaged")
    return yaml.safe_load(parts[1]), parts[2].lstrip()
