"""The published claims by name. Adding one is a function for each of its forms, and its line in `CLAIMS`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from glissando.errors import unknown_name
from research.audit.claim import Claim, Finding, Plan
from research.audit.continuous import claims as continuous_claims
from research.audit.hybrid import claims as hybrid_claims
from research.audit.liquid import claims as liquid_claims
from research.audit.minimal import claims as minimal_claims
from research.audit.tau import claims as tau_claims

FORMS = ("published", "corrected")

_SYSTEMS = (continuous_claims, minimal_claims, hybrid_claims, tau_claims, liquid_claims)
CLAIMS: dict[str, Claim] = {claim.name: claim for system in _SYSTEMS for claim in system.CLAIMS}


def select(names: Sequence[str]) -> list[Claim]:
    """The claims so named and those whose names begin so: `hybrid` is every hybrid-... .

    Raises UnknownNameError for a name that is no claim and begins none.
    """
    chosen: dict[str, Claim] = {}
    for name in names:
        found = {key: claim for key, claim in CLAIMS.items() if key == name or key.startswith(f"{name}-")}
        if not found:
            raise unknown_name("claim", name, {*CLAIMS, *(key.partition("-")[0] for key in CLAIMS)})
        chosen |= found
    return list(chosen.values())


def measure(claim: Claim, plan: Plan, forms: Sequence[str] = FORMS) -> dict[str, Finding]:
    """The findings of a claim by form."""
    functions = {"published": claim.as_published, "corrected": claim.corrected}
    return {form: functions[form](plan) for form in forms}


def report(claim: Claim, findings: dict[str, Finding], quick: bool = False) -> str:
    """Claim, published figure, what was measured of it, and the verdict on each form."""
    summary = f"{claim.name} ({claim.system})" + (", at toy sizes: the verdicts mean nothing" if quick else "")
    lines = [summary, _entry("claim", claim.claim), _entry("published", claim.published)]
    for form, heading in (("published", "reproduced"), ("corrected", "corrected")):
        if form in findings:
            lines.append(_entry(heading, findings[form].said))
    verdicts = [f"{_TOLD[form]}: {finding.verdict}" for form, finding in findings.items()]
    lines.append(_entry("verdict", "\n".join(verdicts)))
    return "\n".join(lines)


_TOLD = {"published": "as published", "corrected": "corrected"}


def _entry(heading: str, text: str) -> str:
    """Wrapped, behind a heading; what the text breaks into lines stays so."""
    wrapped = [part for line in text.split("\n") for part in textwrap.wrap(line, 104) or [""]]
    return "\n".join(f"  {heading if i == 0 else '':12}{part}" for i, part in enumerate(wrapped))


def listing() -> str:
    """Every claim, one a line."""
    width = max(map(len, CLAIMS)) + 2
    return "\n".join(f"{name:{width}}{claim.claim} [{claim.published}]" for name, claim in CLAIMS.items())


def write(out: Path, claim: Claim, findings: dict[str, Finding]) -> list[Path]:
    """CLAIM.json and a picture of each form that has one, into the directory `out`; the paths."""
    summary = {"claim": claim.claim, "system": claim.system, "published": claim.published, "notes": claim.notes}
    target = out / f"{claim.name}.json"
    forms = {form: finding.as_dict() for form, finding in findings.items()}
    target.write_text(json.dumps(summary | forms, indent=2) + "\n")
    drawn = {f: finding.draw for f, finding in findings.items() if finding.draw is not None}
    return [target, *(draw(out / f"{claim.name}-{form}.png") for form, draw in drawn.items())]
