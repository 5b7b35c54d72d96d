"""The ledger: what every claim was measured to be, in one Markdown file; docs/audit.md is one.

    FILE.md             the table and an entry a claim, written anew from the records
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

HEAD = """\
# The audit: what was published, and what it was measured to be

Every headline of the five publications, measured twice: *as published*, with a small form of the published system that
keeps its defects (`research/published/`) and the way its authors measured; and *corrected*, with held-out data,
paired comparisons, or the form of this library, whatever the claim asks for. Written by

    python -m research.audit --ledger docs/audit.md

which measures what has no record yet (`--again` measures anew); the records, with all figures, the commit and the
command of each, lie in `docs/audit/`. A change of how a claim is measured is not seen by itself: ask `--again` for it.

How to read it:

- A verdict is read off checks, each of which is a figure against a bound fixed in the code: *holds*, *does not hold*,
  *holds in part* (what does and what does not is told), *not decided*, where the bound lies inside the figure's
  interval, or *not reproduced here*, with what it would need.
- "+-" is half of a 95 % interval: of a difference between trained models over held-out windows and over seeds, by
  Student's t; of a ratio of times over pairs measured in turn, by order statistics. One seed has none.
- "As published" says whether the authors' own measurement gives what they reported; "corrected" says whether the claim
  is true where it is measured as it should be. One can hold without the other.
- The corrected form of a claim about a defect is often this library's repaired form: where that one *holds*, the idea
  was right and its publication was not.
- Sizes are those of the command under each entry, far below the published ones where those take days. A comparison of
  learning at such a size is evidence of that size alone; what needs the published one says so.
- Every entry has the one command that shows it. Seconds are wall time on a shared machine, of the
  whole ledger in one process: models that an earlier entry has trained are not trained again.
"""


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

    Raises DataError for a record that cannot be read.
    """
    records = {claim: kept for claim in claims if (kept := recorded(ledger, claim)) is not None}
    parts = [HEAD, _table(records)]
    system = ""
    for claim, kept in records.items():
        if claim.system != system:
            system = claim.system
            parts.append(f"## {system}\n")
        parts.append(_entry(claim, kept, folder_of(ledger).name))
    require_ledger(ledger)
    ledger.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(ledger, "\n".join(parts).encode())
    return ledger


def require_ledger(path: Path) -> None:
    """Raise ConfigError for a file that is there and no ledger: nothing else is written over."""
    if path.is_file() and not path.read_bytes().startswith(HEAD.split("\n", 1)[0].encode()):
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


def _table(records: dict[Claim, dict[str, Any]]) -> str:
    lines = ["| claim | published | as published | corrected |", "|---|---|---|---|"]
    for claim, kept in records.items():
        toy = " (toy sizes)" if kept.get("quick") else ""
        outcomes = " | ".join(f"{kept[form]['outcome']}{toy}" for form in ("published", "corrected"))
        lines.append(
            f"| [`{claim.name}`](#{claim.name}) {_cell(claim.claim)} | {_cell(claim.published)} | {outcomes} |"
        )
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _entry(claim: Claim, kept: dict[str, Any], folder: str) -> str:
    """One claim's section."""
    lines = [f"### {claim.name}", "", f"{claim.claim}.", "", f"- **Published:** {_cell(claim.published)}"]
    if claim.notes:
        lines.append(f"- **Notes:** {_cell(claim.notes)}")
    for form, heading in (("published", "Reproduced"), ("corrected", "Corrected")):
        lines += [f"- **{heading}:** {_lines(kept[form]['said'])}", f"  - verdict: {_lines(kept[form]['verdict'])}"]
    lines += ["", f"`{kept['command']}` ({kept['seconds']:.0f} s; {kept['date']}; {kept['machine']})", ""]
    for form, name in kept["pictures"].items():
        lines += [f"![{claim.name}, {form}]({folder}/{name})", ""]
    return "\n".join(lines)


def _lines(text: str) -> str:
    """As Markdown: what would be read as its marks is escaped, and lines stay lines."""
    for mark in ("\\", "|", "*", "_", "<", "`", "["):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", "<br>\n  ")
