"""The ledger: what every claim was measured to be, in Markdown; docs/audit.md is one.

    FILE.md             totals and the table of all claims, written anew from the records
    FILE/SYSTEM.md      an entry a claim of one publication
    FILE/CLAIM.json     a record: the figures of both forms, the command, the date and the machine
    FILE/CLAIM-*.png    its pictures

Measuring takes hours in all and a record stays, so that a ledger grows claim by claim.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from glissando.errors import ConfigError, DataError
from glissando.machine import git_state
from glissando.storage import write_atomic
from research.audit.claim import Claim, Finding

TITLE = "# Claims of the "
HEAD = f"""\
{TITLE}publications, measured

Each main claim of the five publications is measured twice: *as published*, with a small form of the published system
that keeps its defects (`research/published/`) and with the authors' way of measuring; and *corrected*, with held-out
data, paired comparisons, or the form of this library, as the claim requires. This page and the pages of the systems are
written by

    python -m research.audit --ledger docs/audit.md

It measures the claims that have no record yet. The records are in `docs/audit/`, with all figures, the commit and the
command of each. If the way a claim is measured changes, use `--again`; the program does not detect it.
"""
GUIDE = """\
## How to read it

- A verdict is computed from checks, each of which compares a figure with a bound that is fixed in the code. It is
  *holds*, *does not hold*, *holds in part* (the entry lists which parts hold), *not decided* if the bound lies
  inside the figure's interval, or *not reproduced here*, with what that would need.
- "+-" is half of a 95 % interval. For a difference between trained models it is over held-out windows and over
  seeds, by Student's t; for a ratio of times it is over pairs measured in turn, by order statistics. One seed has
  no interval.
- "As published" is whether the authors' own measurement gives what they reported. "Corrected" is whether the claim
  is true when it is measured correctly. One can hold without the other.
- The corrected form of a claim about a defect is often this library's repaired form. If that one *holds*, the idea
  was right and its publication was not.
- Sizes are those of the command under each entry. They are far below the published ones where those take days. A
  comparison of learning at such a size is evidence for that size alone; an entry that needs the published size
  states it.
- Each entry has the command that reproduces it. Seconds are wall time on a shared machine, when the whole ledger is
  measured in one process: models that an earlier entry has trained are not trained again.
"""
FORMS = ("published", "corrected")
OUTCOMES = {
    "holds": "hold",
    "holds in part": "hold in part",
    "does not hold": "do not hold",
    "not decided": "are not decided",
    "not reproduced here": "are not reproduced here",
}


def folder_of(ledger: Path) -> Path:
    """Where the records of a ledger lie."""
    return ledger.with_suffix("")


def recorded(ledger: Path, claim: Claim, quick: bool = True) -> dict[str, Any] | None:
    """The record of the claim as it reads today, if there is one: figures must not stand under other words.

    quick    one of toy sizes counts too
    Raises DataError for a record that cannot be read.
    """
    path = folder_of(ledger) / f"{claim.name}.json"
    if not path.exists():
        return None
    kept = _read(path)
    as_today = {name: kept.get(name) for name in _WORDS} == _words(claim)
    return kept if as_today and (quick or not kept.get("quick")) else None


_WORDS = ("claim", "published_figure")


def _words(claim: Claim) -> dict[str, str]:
    return {"claim": claim.claim, "published_figure": claim.published}


def record(ledger: Path, claim: Claim, findings: dict[str, Finding], command: str, seconds: float, quick: bool) -> None:
    """The record of a claim and its pictures, in place of those that there were."""
    folder = folder_of(ledger)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{claim.name}-*.png"):
        if old.stem.removeprefix(f"{claim.name}-") in findings:
            old.unlink()
    pictures = {form: f"{claim.name}-{form}.png" for form, found in findings.items() if found.draw is not None}
    for form, name in pictures.items():
        draw = findings[form].draw
        assert draw is not None
        draw(folder / name)
    kept: dict[str, Any] = _words(claim) | {
        "command": command,
        "git": git_state(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
    }
    kept |= {"seconds": round(seconds, 1), "quick": quick, "pictures": pictures}
    kept |= {form: finding.as_dict() for form, finding in findings.items()}
    write_atomic(folder / f"{claim.name}.json", (json.dumps(kept, indent=1) + "\n").encode())


def machine() -> str:
    """Cores, architecture, torch and its device."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    version, threads = torch.__version__.split("+")[0], torch.get_num_threads()
    return f"{os.cpu_count()}-core {platform.machine()}, {threads} thread(s), torch {version} {device}"


def write_ledger(ledger: Path, claims: Iterable[Claim]) -> Path:
    """The Markdown of every claim that has a record of its words today, in the order of `claims`.

    Raises DataError for a record that cannot be read, ConfigError for a page that is there and is none of a ledger.
    """
    records = {claim: kept for claim in claims if (kept := recorded(ledger, claim)) is not None}
    systems: dict[str, dict[Claim, dict[str, Any]]] = {}
    for claim, kept in records.items():
        systems.setdefault(claim.system, {})[claim] = kept
    folder = folder_of(ledger)
    pages = {ledger: "\n".join([HEAD, _totals(systems, folder.name), GUIDE, _table(records, folder.name)])}
    for system, its in systems.items():
        lead = f"{TITLE}{system}\n\n[All claims, and how to read an entry](../{ledger.name}).\n"
        pages[folder / _page(system)] = "\n".join([lead, *(_entry(claim, kept) for claim, kept in its.items())])
    for path in pages:
        require_ledger(path)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        write_atomic(path, text.encode())
    return ledger


def _page(system: str) -> str:
    """The file of a system's entries."""
    return f"{system.lower().replace(' ', '-')}.md"


def require_ledger(path: Path) -> None:
    """Raise ConfigError for a file that is there and no page of a ledger: nothing else is written over."""
    if path.is_file() and not path.read_bytes().startswith(TITLE.encode()):
        raise ConfigError(f"{path} is there and is no ledger; nothing is overwritten: name another --ledger")


def require_no_measured(ledger: Path, claims: Iterable[Claim]) -> None:
    """Raise ConfigError where a record that was measured would give way to one of toy sizes.

    Raises DataError for a record that cannot be read.
    """
    for claim in claims:
        path = folder_of(ledger) / f"{claim.name}.json"
        if path.exists() and not _read(path).get("quick"):
            raise ConfigError(
                f"{path} has measured figures, which --quick would replace by those of toy sizes: leave --quick out, "
                "or name another --ledger"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if {"command", "date", "machine", "published", "corrected"} <= kept.keys():
            return kept
        raise ValueError("a part of it is missing")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the record {path}: {error}; remove it, and its claim is measured anew") from error


def _totals(systems: dict[str, dict[Claim, dict[str, Any]]], folder: str) -> str:
    """How many claims have which outcome, in words and by system; those of toy sizes do not count."""
    found = {
        form: {
            system: [kept[form]["outcome"] for kept in its.values() if not kept.get("quick")]
            for system, its in systems.items()
        }
        for form in FORMS
    }
    every = {form: [outcome for outcomes in its.values() for outcome in outcomes] for form, its in found.items()}
    lines = [
        f"Of {len(every['corrected'])} claims, {_counted(every['corrected'])} when they are measured correctly.",
        f"With the authors' way of measuring, {_counted(every['published'])}.",
        "",
        "| measured correctly | claims | hold | hold in part | do not hold | not decided | not reproduced here |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = {f"[{system}]({folder}/{_page(system)})": outcomes for system, outcomes in found["corrected"].items()}
    for name, outcomes in (rows | {"all": every["corrected"]}).items():
        counts = [str(outcomes.count(outcome)) for outcome in OUTCOMES]
        lines.append(f"| {' | '.join([name, str(len(outcomes)), *counts])} |")
    return "\n".join([*lines, ""])


def _counted(outcomes: list[str]) -> str:
    """'19 hold, 9 hold in part and 10 do not hold', of the outcomes that there are."""
    parts = [f"{outcomes.count(outcome)} {verb}" for outcome, verb in OUTCOMES.items() if outcome in outcomes]
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])) or "none is measured at full size"


def _table(records: dict[Claim, dict[str, Any]], folder: str) -> str:
    """Every claim with its outcomes; a row has the anchor of its entry, for links to the claim on this page."""
    lines = ["## All claims", "", "| claim | published | as published | corrected |", "|---|---|---|---|"]
    for claim, kept in records.items():
        toy = " (toy sizes)" if kept.get("quick") else ""
        outcomes = " | ".join(f"{kept[form]['outcome']}{toy}" for form in FORMS)
        link = f'<a id="{claim.name}"></a>[`{claim.name}`]({folder}/{_page(claim.system)}#{claim.name})'
        lines.append(f"| {link} {_cell(claim.claim)} | {_cell(claim.published)} | {outcomes} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _entry(claim: Claim, kept: dict[str, Any]) -> str:
    """One claim's section."""
    lines = [f"## {claim.name}", "", f"{claim.claim}.", "", f"- **Published:** {_cell(claim.published)}"]
    if claim.notes:
        lines.append(f"- **Notes:** {_cell(claim.notes)}")
    for form, heading in (("published", "Reproduced"), ("corrected", "Corrected")):
        lines += [f"- **{heading}:** {_lines(kept[form]['said'])}", f"  - verdict: {_lines(kept[form]['verdict'])}"]
    lines += ["", f"`{kept['command']}` ({kept['seconds']:.0f} s; {kept['date']}; {kept['machine']})", ""]
    for form, name in kept["pictures"].items():
        lines += [f"![{claim.name}, {form}]({name})", ""]
    return "\n".join(lines)


def _lines(text: str) -> str:
    """As Markdown: what would be read as its marks is escaped, and lines stay lines."""
    for mark in ("\\", "|", "*", "_", "<", "`", "["):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", "<br>\n  ")
