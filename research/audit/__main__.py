"""Measure what was published, as it was published and as it should be: `python -m research.audit [claims]`."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glissando.errors import ConfigError, GlissandoError

if TYPE_CHECKING:
    from research.audit.claim import Claim, Plan

_PROGRAM = "python -m research.audit"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named claims and print each with its verdict; without names, list them."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (GlissandoError, OSError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    _check(options)
    from research.audit.claim import Plan
    from research.audit.claims import CLAIMS, FORMS, listing, measure, report, select, write

    names = ("quick", "steps", "seeds", "text", "tokenizer", "run")
    plan = Plan(**{name: getattr(options, name) for name in names})
    claims = select(options.claims) if options.claims else list(CLAIMS.values())
    if options.ledger is not None:
        _update_ledger(options.ledger, claims, plan, options.again)
    elif options.claims:
        for claim in claims:
            findings = measure(claim, plan, FORMS if options.form == "both" else (options.form,))
            print(report(claim, findings, plan.quick), flush=True)
            for path in write(options.out, claim, findings) if options.out is not None else []:
                print(f"written: {path}", file=sys.stderr)
    else:
        print(listing())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Measure published claims.",
        epilog=f"example: {_PROGRAM} hybrid-memory hybrid-latency --out runs/audit",
    )
    parser.add_argument("claims", nargs="*", help="names, or how they begin (hybrid); without, a list")
    parser.add_argument(
        "--form", default="both", choices=("published", "corrected", "both"), help="as the authors measured, or not"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that it runs, and nothing else")
    parser.add_argument("--steps", type=_positive, help="of training; the published number by default")
    parser.add_argument("--seeds", type=_positive, help="models of a kind to compare, 3 by default")
    parser.add_argument("--text", help="file to train on instead of the built-in stories")
    parser.add_argument("--tokenizer", help="tokenizer.json for it; by default one is trained on the text")
    parser.add_argument("--run", help="a run of ours, where the corrected form measures one")
    to = parser.add_mutually_exclusive_group()
    to.add_argument("--out", type=_path, help="directory to make for JSON and pictures")
    to.add_argument("--ledger", type=_path, help="a Markdown file to update: measures what has no record beside it")
    parser.add_argument("--again", action="store_true", help="with --ledger: measure what has a record too")
    return parser


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _path(text: str) -> Path:
    return Path(text).expanduser()


_positive.__name__, _path.__name__ = "positive number", "path"


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError or RunError for what would fail after hours of training, and not before."""
    for name in ("text", "tokenizer"):
        path = getattr(options, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"cannot read --{name} {path}: there is no such file")
    if options.run is not None:
        from glissando.runs import Run

        Run.open(options.run)
    if options.ledger is not None:
        from research.audit.ledger import require_ledger

        if options.ledger.suffix != ".md":
            raise ConfigError(f"--ledger must name a Markdown file, such as docs/audit.md, got {options.ledger}")
        require_ledger(options.ledger)
        options.ledger.parent.mkdir(parents=True, exist_ok=True)
    if options.out is not None:
        if options.out.exists() and any(options.out.iterdir() if options.out.is_dir() else [options.out]):
            raise ConfigError(f"{options.out} exists and is not empty; nothing is overwritten: name another --out")
        options.out.mkdir(parents=True, exist_ok=True)


def _update_ledger(ledger: Path, claims: list[Claim], plan: Plan, again: bool) -> None:
    """Measure the claims that have no record, or all of them `again`, and write the ledger after each."""
    from research.audit.claims import CLAIMS, measure, report
    from research.audit.ledger import record, recorded, require_no_measured, write_ledger

    if plan.quick:
        require_no_measured(ledger, [claim for claim in claims if again or recorded(ledger, claim) is None])
    for claim in claims:
        kept = None if again else recorded(ledger, claim, quick=plan.quick)
        if kept is not None:
            print(f"kept: {claim.name}, of `{kept['command']}`; --again measures it again", file=sys.stderr)
            continue
        began = time.perf_counter()
        findings = measure(claim, plan)
        print(report(claim, findings, plan.quick), flush=True)
        record(ledger, claim, findings, _command(claim, plan), time.perf_counter() - began, plan.quick)
        write_ledger(ledger, CLAIMS.values())
    print(f"written: {write_ledger(ledger, CLAIMS.values())}", file=sys.stderr)


def _command(claim: Claim, plan: Plan) -> str:
    """The command that measures this claim; files by their names alone where their path is absolute."""
    words = [*_PROGRAM.split(), claim.name, *(["--quick"] if plan.quick else [])]
    for name in ("steps", "seeds", "text", "tokenizer", "run"):
        value = getattr(plan, name)
        words += [] if value is None else [f"--{name}", _portable(value)]
    return " ".join(words)


def _portable(value: object) -> str:
    path = Path(str(value))
    return shlex.quote(path.name if path.is_absolute() else str(value))


if __name__ == "__main__":
    sys.exit(main())
