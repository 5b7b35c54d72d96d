"""glissando audit: measure what was published, as it was published and as it should be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glissando.errors import ConfigError, unknown_name
from glissando.verbs.options import parse, parser_for

EXAMPLE = "glissando audit hybrid-memory hybrid-latency --out runs/audit"


def main(arguments: Sequence[str]) -> None:
    """Measure the named claims and print each with its verdict; without names, list them."""
    parser = parser_for("audit", "Measure published claims.", EXAMPLE)
    parser.add_argument("claims", nargs="*", default=[], help="names, or how they begin (hybrid); without, a list")
    parser.add_argument("--form", default="both", help="published: as the authors measured; corrected; or both")
    parser.add_argument("--quick", action="store_true", help="toy sizes: shows that it runs, and nothing else")
    parser.add_argument("--steps", type=int | None, default=None, help="of training; the published number by default")
    parser.add_argument("--seeds", type=int, default=1, help="models of each kind to train")
    parser.add_argument("--text", help="file to train on instead of the built-in stories")
    parser.add_argument("--tokenizer", help="tokenizer.json for it; by default one is trained on the text")
    parser.add_argument("--run", help="a run of ours, where the corrected form measures one")
    parser.add_argument("--out", help="directory to make for JSON and pictures")
    options = parse(parser, arguments)
    out = _check(options)
    from glissando.lab.audit import listing, measure, report, select, write
    from glissando.lab.claim import Plan

    if not options.claims:
        print(listing())
        return
    names = ("quick", "steps", "seeds", "text", "tokenizer", "run")
    plan = Plan(**{name: getattr(options, name) for name in names})
    forms = ("published", "corrected") if options.form == "both" else (options.form,)
    for claim in select(options.claims):
        findings = measure(claim, plan, forms)
        print(report(claim, findings, options.quick), flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            for path in write(out, claim, findings):
                print(f"written: {path}", file=sys.stderr)


def _check(options: Any) -> Path | None:
    """The directory to write to, if any."""
    if options.form not in ("published", "corrected", "both"):
        raise unknown_name("--form", options.form, ("published", "corrected", "both"))
    for name in ("steps", "seeds"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    for name in ("text", "tokenizer"):
        path = getattr(options, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"cannot read --{name} {path}: there is no such file")
    if options.run is not None:
        from glissando.runs import Run

        Run.open(options.run)  # before hours of training, not after
    if options.out is None:
        return None
    out = Path(options.out)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out} exists and is not empty; nothing is overwritten: name another --out")
    return out
