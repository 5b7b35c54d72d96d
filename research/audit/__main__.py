"""glissando audit: measure what was published, as it was published and as it should be."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glissando.cli.options import parse, parser_for, require_writable
from glissando.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from research.audit.claim import Claim, Plan

EXAMPLE = "glissando audit hybrid-memory hybrid-latency --out runs/audit"


def main(arguments: Sequence[str]) -> None:
    """Measure the named claims and print each with its verdict; without names, list them."""
    options = parse(_parser(), arguments)
    out = _check(options)
    from research.audit.claims import CLAIMS, listing, select

    claims, plan = select(options.claims) if options.claims else list(CLAIMS.values()), _plan(options)
    if options.ledger is not None:
        _keep(Path(options.ledger).expanduser(), claims, plan, options.again)
    elif options.claims:
        _tell(claims, plan, ("published", "corrected") if options.form == "both" else (options.form,), out)
    else:
        print(listing())


def _parser() -> Any:
    parser = parser_for("audit", "Measure published claims.", EXAMPLE)
    parser.add_argument("claims", nargs="*", default=[], help="names, or how they begin (hybrid); without, a list")
    parser.add_argument("--form", default="both", help="published: as the authors measured; corrected; or both")
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that it runs, and nothing else")
    parser.add_argument("--steps", type=int | None, default=None, help="of training; the published number by default")
    parser.add_argument("--seeds", type=int | None, default=None, help="models of a kind to compare, 3 by default")
    parser.add_argument("--text", help="file to train on instead of the built-in stories")
    parser.add_argument("--tokenizer", help="tokenizer.json for it; by default one is trained on the text")
    parser.add_argument("--run", help="a run of ours, where the corrected form measures one")
    parser.add_argument(
        "--pairs", nargs=2, metavar=("TRAIN", "HELD_OUT"), help="base64 pairs as published, for minimal-pairs"
    )
    parser.add_argument("--out", help="directory to make for JSON and pictures")
    parser.add_argument("--ledger", help="a Markdown file to bring up to date: measures what has no record beside it")
    parser.add_argument("--again", action="store_true", help="with --ledger: measure what has a record too")
    return parser


def _plan(options: Any) -> Plan:
    from research.audit.claim import Plan

    names = ("quick", "steps", "seeds", "text", "tokenizer", "run")
    return Plan(**{name: getattr(options, name) for name in names}, pairs=options.pairs and tuple(options.pairs))


def _tell(claims: list[Claim], plan: Plan, forms: Sequence[str], out: Path | None) -> None:
    """Measure and print, and write into `out` if there is one."""
    from research.audit.claims import measure, report, write

    for claim in claims:
        findings = measure(claim, plan, forms)
        print(report(claim, findings, plan.quick), flush=True)
        if out is not None:
            for path in write(out, claim, findings):
                print(f"written: {path}", file=sys.stderr)


def _keep(ledger: Path, claims: list[Claim], plan: Plan, again: bool) -> None:
    """Measure the claims that have no record, or all of them `again`, and write the ledger after each."""
    from research.audit.claims import CLAIMS, measure, report
    from research.audit.ledger import record, recorded, require_no_measured, write_ledger

    if plan.quick:
        require_no_measured(ledger, [claim for claim in claims if again or recorded(ledger, claim) is None])
    for claim in claims:
        kept = None if again else recorded(ledger, claim, quick=plan.quick)
        if kept is not None:
            print(f"kept: {claim.name}, of `{kept['command']}`; --again measures it anew", file=sys.stderr)
            continue
        began = time.perf_counter()
        findings = measure(claim, plan)
        print(report(claim, findings, plan.quick), flush=True)
        record(ledger, claim, findings, _command(claim, plan), time.perf_counter() - began, plan.quick)
        write_ledger(ledger, CLAIMS.values())
    print(f"written: {write_ledger(ledger, CLAIMS.values())}", file=sys.stderr)


def _command(claim: Claim, plan: Plan) -> str:
    """What shows this claim; files by their names alone where their place is this machine's own."""
    words = ["glissando", "audit", claim.name, *(["--quick"] if plan.quick else [])]
    for name in ("steps", "seeds", "text", "tokenizer", "run"):
        value = getattr(plan, name)
        words += [] if value is None else [f"--{name}", _told(value)]
    words += [] if plan.pairs is None else ["--pairs", *map(_told, plan.pairs)]
    return " ".join(words)


def _told(value: object) -> str:
    path = Path(str(value))
    return shlex.quote(path.name if path.is_absolute() else str(value))


def _check(options: Any) -> Path | None:
    """The directory to write to, if any."""
    if options.form not in ("published", "corrected", "both"):
        raise unknown_name("--form", options.form, ("published", "corrected", "both"))
    for name in ("steps", "seeds"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    _check_given(options)
    if options.again and options.ledger is None:
        raise ConfigError("--again is for --ledger, which keeps what it has measured; name one")
    if options.ledger is not None:
        _check_ledger(options)
    if options.run is not None:
        from glissando.runs import Run

        Run.open(options.run)  # before hours of training, not after
    if options.out is None:
        return None
    out = Path(options.out).expanduser()
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out} exists and is not empty; nothing is overwritten: name another --out")
    require_writable("--out", out)
    return out


def _check_given(options: Any) -> None:
    """Raise ConfigError for a file that is not there, and for options where nothing is measured."""
    for name in ("text", "tokenizer", "pairs"):
        given = getattr(options, name) or []
        for path in [given] if isinstance(given, str) else given:
            if not Path(path).is_file():
                raise ConfigError(f"cannot read --{name} {path}: there is no such file")
    used = ("quick", "steps", "seeds", "text", "tokenizer", "run", "pairs", "out")
    if not options.claims and options.ledger is None and (idle := [name for name in used if getattr(options, name)]):
        raise ConfigError(f"--{idle[0]} needs claims to measure; name them, such as glissando audit hybrid")


def _check_ledger(options: Any) -> None:
    """Raise ConfigError for what a ledger cannot be combined with."""
    if Path(options.ledger).suffix != ".md":
        raise ConfigError(f"--ledger must name a Markdown file, such as docs/audit.md, got {options.ledger}")
    if options.out is not None or options.form != "both":
        raise ConfigError("--ledger keeps both forms and its own pictures; leave --out and --form out")
    from research.audit.ledger import require_ledger

    ledger = Path(options.ledger).expanduser()
    require_ledger(ledger)
    require_writable("--ledger", ledger.parent)
