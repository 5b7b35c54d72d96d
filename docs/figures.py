"""Figures of the documents: each is kept in one record, and README.md and docs/*.md follow it.

docs/marks.yaml names, by page, a text that the page has once, and the records of the numbers that follow it:

    "at ": runs/stories/8M/composite-nano/mean            at 0.367                   one number
    "by ": gap/stories/8M/liquid-ssm-nano/gpt             by -0.006 +- 0.048         as many as the record has
    "are ": parameters/gpt; floor/expected                are 30,503,424 and 0.290   of several records
    "| model | bits |": runs/stories/8M/{}/mean | ...     of a table with this heading: of each column behind the first,
                                                          whose code or first word in a row stands for {}

New figures are marked in the page, as `at <!--= PATH -->0.367`, and a table in a line above it; --write moves the marks
into the file. Decimals, commas and signs stay as they are written; `PATH*100` is in per cent. In a list a key is a
place, or `mean`.

    python docs/figures.py                says what differs from its record, and fails if anything does
    python docs/figures.py --write        writes what the records say
    python docs/figures.py --list PATH    the records below a path

Records: docs/audit/*.json (audit/NAME/..., verdicts/...), docs/comparison/*.csv (compare/..., runs/..., muon/...,
recipe/..., carried/..., gap/..., recipe_gap/..., carried_gap/..., forgetting/..., elastic/..., decoding/...), the cards
of packaged models (cards/...), the code (parameters/..., floor/...); and, for what has no other record,
docs/figures.yaml (kept/..., and some of runs/...).
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml

from glissando import pretrained
from glissando.data.stories import entropy_floor, generate
from glissando.model import LanguageModel
from glissando.presets import preset_names

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent))  # research, which no wheel holds

from research.intervals import t_quantile  # noqa: E402

PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
MARKS = DOCS / "marks.yaml"
HEAD = "# Where the pages' figures stand, and their records: see docs/figures.py, whose --write writes this file.\n"
MARK = re.compile(r"<!--= *(.*?) *-->")
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?![\d])")


class NoRecord(Exception):
    """A path at which no number is kept."""


# ---------------------------------------------------------------------- records


@cache
def kept() -> dict[str, Any]:
    return yaml.safe_load((DOCS / "figures.yaml").read_text())


@cache
def audit() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in (DOCS / "audit").glob("*.json")}


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (DOCS / "comparison" / f"{name}.csv").open(newline="") as file:
        yield from csv.DictReader(file)


@cache
def compare() -> dict[str, Any]:
    """NAME/MODEL/MEASURE: a value, and its interval where it has one; `excess` over the floor of the same stories;
    probes/PROBE/MODEL: accuracy."""
    found: dict[str, Any] = {}
    for name in ("stories", "composites", "probes"):
        for row in _rows(name):
            numbers = [float(row[column]) for column in ("value", "low", "high") if row[column]]
            if row["section"] == "model" and numbers:
                found.setdefault(name, {}).setdefault(row["model"], {})[row["measure"]] = numbers
            elif row["section"].startswith("one probe") and row["measure"] == "accuracy":
                found[name].setdefault(row["section"].split()[-1], {})[row["model"]] = numbers
        for of in found[name].values():
            if "entropy_floor" in of:
                of["excess"] = of["bits_per_byte"][0] - of["entropy_floor"][0]
    return found


@cache
def runs() -> dict[str, Any]:
    """CORPUS/BYTES/MODEL, trained with AdamW: held-out bits per byte by SEED, `seeds` (all of them), their `mean`,
    `range` and `count`."""
    first = (
        ("stories", "2M", row["model"], row["seed"], row["value"])
        for row in _rows("stories")
        if row["section"] == "one run" and row["measure"] == "bits_per_byte"
    )
    others = (
        (corpus, size, model, seed, bits)
        for corpus, sizes in kept()["runs"].items()
        for size, models in sizes.items()
        for model, found in models.items()
        for seed, bits in found.items()
    )
    return _by_model(chain(first, _trainings("runs"), others))


@cache
def muon() -> dict[str, Any]:
    """As `runs`, trained with Muon, one story a step."""
    return _by_model(_trainings("muon"))


@cache
def recipe() -> dict[str, Any]:
    """As `muon`, with a BPE that all models share; also `above_floor`, by how many per cent the mean is above the
    floor, of models all of whose runs were measured on the 128 held-out stories of `floor`."""
    found = _by_model(_trainings("recipe"))
    measured: dict[tuple[str, str, str], set[float]] = {}
    for row in _rows("recipe"):
        key = row["corpus"], f"{int(row['bytes']) / 1e6:g}M", row["model"]
        measured.setdefault(key, set()).add(float(row["held_out_bytes"]))
    for (corpus, size, model), sizes in measured.items():
        if corpus == "stories" and sizes == {floor()["held_out_bytes"]}:
            of = found[corpus][size][model]
            of["above_floor"] = 100 * (of["mean"] / floor()["held_out"] - 1)
    return found


def _trainings(name: str) -> Iterator[tuple[str, str, str, str, str]]:
    for row in _rows(name):
        model = row["model"] + (" with labels" if row["labels_told"] else "")
        yield row["corpus"], f"{int(row['bytes']) / 1e6:g}M", model, row["seed"], row["bits_per_byte"]


def _by_model(trainings: Iterable[tuple[str, str, str, Any, Any]]) -> dict[str, Any]:
    seeds: dict[str, Any] = {}
    for corpus, size, model, seed, bits in trainings:
        of_model = seeds.setdefault(corpus, {}).setdefault(size, {}).setdefault(model, {})
        if str(seed) in of_model:
            raise ValueError(f"two records of {corpus}, {size}, {model}, seed {seed}")
        of_model[str(seed)] = float(bits)
    return {
        corpus: {size: {model: _summary(of) for model, of in models.items()} for size, models in sizes.items()}
        for corpus, sizes in seeds.items()
    }


def _summary(by_seed: dict[str, float]) -> dict[str, Any]:
    bits = [by_seed[seed] for seed in sorted(by_seed)]
    of_all = {"seeds": bits, "mean": statistics.mean(bits), "range": [min(bits), max(bits)], "count": len(bits)}
    return {**by_seed, **of_all}


@cache
def gap() -> dict[str, Any]:
    """CORPUS/BYTES/MODEL/OTHER: the mean difference of the same seeds, and half of its 95 % interval by Student's t."""
    return _gaps(runs())


@cache
def recipe_gap() -> dict[str, Any]:
    """As `gap`, of `recipe`."""
    return _gaps(recipe())


@cache
def carried() -> dict[str, Any]:
    """As `runs`, trained with carried states, CORPUS/reset/MODEL read from empty states and CORPUS/carried/MODEL as one
    text; also `lead`, by how many per cent the mean is below the baseline's."""
    found = _by_model(
        (row["corpus"], read, row["model"], row["seed"], row[read])
        for row in _rows("carried")
        for read in ("reset", "carried")
    )
    for models in chain.from_iterable(sizes.values() for sizes in found.values()):
        for of in models.values():
            of["lead"] = 100 * (1 - of["mean"] / models["transformer-plus-nano"]["mean"])
    return found


@cache
def carried_gap() -> dict[str, Any]:
    """As `gap`, of `carried`."""
    return _gaps(carried())


def _gaps(record: dict[str, Any]) -> dict[str, Any]:
    return {
        corpus: {
            size: {
                model: {other: _gap(mine, yours) for other, yours in models.items() if other != model}
                for model, mine in models.items()
            }
            for size, models in sizes.items()
        }
        for corpus, sizes in record.items()
    }


def _gap(mine: dict[str, Any], yours: dict[str, Any]) -> list[float]:
    if mine.keys() != yours.keys() or mine["count"] < 2:
        return []
    each = [a - b for a, b in zip(mine["seeds"], yours["seeds"], strict=True)]
    half = t_quantile(len(each) - 1) * statistics.stdev(each) / len(each) ** 0.5
    return [statistics.mean(each), half]


@cache
def forgetting() -> dict[str, Any]:
    """MODEL/OTHERS/FROM: accuracy, bits and more of facts that were set FROM to 10 FROM tokens ago."""
    found: dict[str, Any] = {}
    for row in _rows("forgetting"):
        model, others, first = (row.pop(column) for column in ("model", "others", "from"))
        found.setdefault(model, {}).setdefault(others, {})[first] = {name: float(row[name]) for name in row}
    return found


@cache
def elastic() -> dict[str, Any]:
    """MODEL/GROUP: of tokens, by seed: how many, their steps, bits and correlations."""
    found: dict[str, Any] = {}
    for row in _rows("elastic"):
        of_group = found.setdefault(row.pop("model"), {}).setdefault(row.pop("group"), {})
        for name in row:
            of_group.setdefault(name, []).append(float(row[name] or "nan"))
    return found


@cache
def parameters() -> dict[str, int]:
    """NAME; and `NAME without shortcuts` of a -nano preset, as many as it had before it had shortcuts."""
    with torch.device("meta"):
        models = {name: LanguageModel.from_preset(name) for name in preset_names()}
        for name in [name for name in models if name.endswith("-nano")]:
            models[f"{name} without shortcuts"] = LanguageModel.from_preset(name, depth={"shortcuts": False})
    return {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}


@cache
def floor() -> dict[str, float]:
    """Bits per byte: expected of the generator; of the first 128 held-out stories themselves, and their bytes; of the
    half of these that compare reports where the other half has chosen a learning rate."""
    stories = sorted((generate(0, "valid", index) for index in range(128)), key=lambda story: len(story.text))

    def of(some: list[Any]) -> float:
        return sum(story.bits for story in some) / sum(len(story.text.encode()) for story in some)

    return {
        "expected": entropy_floor(),
        "held_out": of(stories),
        "held_out_bytes": sum(len(story.text.encode()) for story in stories),
        "reported": of(stories[1::2]),
    }


@cache
def cards() -> dict[str, dict[str, Any]]:
    """NAME: the front matter of a packaged model's card."""
    return {name: pretrained.card(name)[0] for name in pretrained.names()}


@cache
def verdicts() -> dict[str, dict[str, int]]:
    """FORM/VERDICT: how many claims of the audit, `corrected` or `published`, have it; FORM/all of them."""
    found: dict[str, dict[str, int]] = {}
    for claim in audit().values():
        for form in ("published", "corrected"):
            if form in claim:
                counts = found.setdefault(form, {"all": 0})
                for name in ("all", claim[form]["outcome"]):
                    counts[name] = counts.get(name, 0) + 1
    return found


@cache
def decoding() -> dict[str, Any]:
    """MODEL/milliseconds: CPU time of a token by the compiled step; MODEL/state: bytes; behind 256, 1,024, 4,096 and
    16,384 tokens."""
    found: dict[str, Any] = {}
    for row in _rows("decoding"):
        of = found.setdefault(row["model"], {"milliseconds": [], "state": []})
        of["milliseconds"].append(float(row["milliseconds"]))
        of["state"].append(int(row["state_bytes"]))
    return found


RECORDS: dict[str, Callable[[], Mapping[str, Any]]] = {
    each.__name__: each for each in (audit, verdicts, compare, runs, muon, recipe, gap, recipe_gap, forgetting, elastic)
} | {each.__name__: each for each in (carried, carried_gap, decoding, cards, parameters, floor, kept)}


def numbers_at(path: str) -> list[float]:
    """The numbers kept at a path. Raises NoRecord where none is."""
    path, _, scale = path.strip().partition("*")
    node = node_at(path)
    values = node if isinstance(node, list) else [node]
    if not values or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise NoRecord(f"{path}: no number, but {_below(node)}")
    return [value * float(scale or 1) for value in values]


def node_at(path: str) -> Any:
    root, *keys = path.split("/")
    if root not in RECORDS:
        raise NoRecord(f"{path}: no record {root!r}; there are {', '.join(RECORDS)}")
    node: Any = RECORDS[root]()
    for key in keys:
        try:
            node = _child(node, key)
        except (KeyError, IndexError, ValueError, TypeError):
            raise NoRecord(f"{path}: no {key!r}, but {_below(node)}") from None
    return node


def _child(node: Any, key: str) -> Any:
    if not isinstance(node, list):
        return node[key]
    return statistics.mean(node) if key == "mean" else node[int(key)]


def _below(node: Any) -> str:
    return ", ".join(map(str, node)) if isinstance(node, dict) else repr(node)


# ---------------------------------------------------------------------- pages


@cache
def marks() -> dict[str, dict[str, str]]:
    """PAGE: text of the page: the mark behind it, or, of a text that ends with a table's heading, above that."""
    return yaml.safe_load(MARKS.read_text())


def marked(text: str, anchors: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text with its marks, and what stands in it not once."""
    problems, places = [], []
    for anchor, mark in anchors.items():
        place = text.find(anchor)
        if place < 0 or place != text.rfind(anchor):
            problems.append(f"marks.yaml: {anchor!r} does not stand in the page once, but {text.count(anchor)} times")
            continue
        end = place + len(anchor)
        above = text.rfind("\n", 0, end) + 1
        places.append((above, f"<!--= {mark} -->\n") if "|" in mark else (end, f"<!--= {mark} -->"))
    for place, comment in sorted(places, reverse=True):
        text = text[:place] + comment + text[place:]
    return text, problems


def unmarked(text: str) -> tuple[str, dict[str, str]]:
    """The text without its marks, and the shortest text before each that it has once, 16 characters at least."""
    plain, found, done = "", [], 0
    for mark in MARK.finditer(text):
        plain += text[done : mark.start()]
        done = mark.end()
        if "|" in mark[1]:
            done += 1  # its line
            found.append((len(plain) + text.index("\n", done) - done, mark[1]))
        else:
            found.append((len(plain), mark[1]))
    plain += text[done:]
    anchors = {}
    for end, mark in found:
        start = next(
            at for at in range(max(end - 16, 0), -1, -1) if plain.find(plain[at:end]) == plain.rfind(plain[at:end])
        )
        anchors[plain[start:end]] = mark
    assert len(anchors) == len(found), "two marks stand at one place"
    return plain, anchors


def settle_page(page: Path) -> tuple[str, dict[str, str], list[str]]:
    """As `settle`, of a page's text with its marks of docs/marks.yaml: the text without them, and they."""
    text, problems = marked(page.read_text(), marks().get(page.name, {}))
    text, others = settle(text)
    return *unmarked(text), problems + others


def settle(text: str) -> tuple[str, list[str]]:
    """The text with every marked figure as its record has it; and what differed or has no record, a line each."""
    problems: list[str] = []
    lines = text.split("\n")
    for start, line in enumerate(lines):
        mark = MARK.search(line)
        if mark and "|" not in mark[1] and not line[: mark.start()].strip():
            problems.append(
                f"{mark[0]}: begins a line, which would end the paragraph; put a word before it (of a table: end the "
                "mark with |)"
            )
        if mark and "|" in mark[1]:
            columns = [column.strip() for column in mark[1].split("|")]
            row = start + 3  # the comment, the heading, the dashes
            while row < len(lines) and lines[row].startswith("|"):
                lines[row] = _table_row(lines[row], columns, problems)
                row += 1
            if row == start + 3:
                problems.append(f"{mark[0]}: no table stands under it")
    text, place = "\n".join(lines), 0
    while mark := MARK.search(text, place):
        place = mark.end()
        if "|" not in mark[1]:
            try:
                values = [value for path in mark[1].split(";") for value in numbers_at(path)]
                text = text[:place] + _written(text[place:], values, mark[1], problems)
            except NoRecord as error:
                problems.append(str(error))
    return text, problems


def _table_row(line: str, columns: list[str], problems: list[str]) -> str:
    cells = line.split("|")  # the first is empty
    name = re.search(r"`([^`]+)`|\d[\d,]*\d|[\w-]+", cells[1])
    key = (name[1] or name[0]) if name else ""
    for column, cell in enumerate(cells[2:-1], 2):
        template = columns[column - 2] if column - 2 < len(columns) else ""
        if not template or MARK.search(cell):
            continue
        try:
            values = [value for path in template.split(";") for value in numbers_at(path.format(key))]
            cells[column] = _written(cell, values, f"{key}, {template}", problems)
        except NoRecord as error:
            if NUMBER.search(cell):
                problems.append(f"{cell.strip()}: {error}")
    return "|".join(cells)


def _written(text: str, values: list[float], name: str, problems: list[str]) -> str:
    """The text with its first numbers replaced by the values where they differ."""
    place = 0
    for value in values:
        found = NUMBER.search(text, place)
        if found is None or (place == 0 and found.start() > 8):
            problems.append(f"{name}: {value:.6g} is kept, and no number follows")
            return text
        new = _like(value, found[0])
        if new != found[0]:
            problems.append(f"{name}: {found[0]} is written, {new} is kept")
        text = text[: found.start()] + new + text[found.end() :]
        place = found.start() + len(new)
    return text


def _like(value: float, written: str) -> str:
    """The value in the form of a number that is written; that itself if it is a rounding of the value."""
    mantissa, _, exponent = written.partition("e")
    decimals = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(exponent or 0) - decimals)
    if abs(float(written.replace(",", "")) - value) <= 0.5 * unit * (1 + 1e-6):
        return written
    sign = "+" if written.startswith("+") else ""
    return format(value, f"{sign}.{decimals}e" if exponent else f"{sign},.{decimals}f")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write what the records say into the pages")
    parser.add_argument("--list", metavar="PATH", help="print what is kept below a path")
    options = parser.parse_args()
    if options.list:
        try:
            print(json.dumps(node_at(options.list), indent=1))
        except NoRecord as error:
            parser.error(f"--list {options.list}: {error}")
        return 0
    failed, anchors, texts = False, {}, {}
    for page in PAGES:
        texts[page], own, problems = settle_page(page)
        for problem in problems:
            print(f"{page.relative_to(DOCS.parent)}: {problem}{' and written now' * options.write}")
        anchors |= {page.name: own} if own else {}
        if options.write:
            problems = settle(marked(texts[page], own)[0])[1]
        failed = failed or bool(problems)
    if options.write:
        for page, text in texts.items():
            page.write_text(text)
        MARKS.write_text(HEAD + yaml.safe_dump(anchors, allow_unicode=True, width=10_000, sort_keys=False))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
