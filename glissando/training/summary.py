"""How a training ended: its best and its last validation, and where it should have stopped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def summarize(rows: Sequence[Mapping[str, str]], best_step: int) -> dict[str, Any]:
    """From the rows of metrics.csv; `best` and `last` are validations, None before the first."""
    scored = [row for row in rows if math.isfinite(float(row.get("valid_loss") or math.nan))]
    best = next((row for row in scored if int(row["step"]) == best_step), None)
    return {
        "best": None if best is None else _validation(best),
        "last": _validation(scored[-1]) if scored else None,
    }


def _validation(row: Mapping[str, str]) -> dict[str, Any]:
    loss = float(row["valid_loss"])
    return {
        "step": int(row["step"]), "tokens": int(row["tokens"]), "seconds": float(row["seconds"]), "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": float(row["valid_bits_per_byte"]),
    }  # fmt: skip


def summary_lines(summary: Mapping[str, Any], best_path: str) -> list[str]:
    """The summary in a few lines for a person."""
    best, last, steps = summary["best"], summary["last"], summary["steps"]
    scale, tokens, seconds = summary["learning_rate_scale"], summary["tokens"], summary["seconds"]
    lines = [f"{steps:,} steps, {tokens:,} tokens, {seconds:,.0f} s; learning rate at {scale:.4g} of its base"]
    if best is None:
        return lines
    at = f"step {best['step']} of {steps} ({best['tokens']:,} tokens)"
    figures = "loss {loss:.4f}, perplexity {perplexity:.4g}, {bits_per_byte:.4f} bits/byte"
    lines.append(f"best validation: {at}: {figures.format(**best)}; {best_path}")
    if best["step"] == last["step"]:
        lines.append("best stopping point: the last validation")
    else:
        rise = last["loss"] - best["loss"]
        lines.append(
            f"best stopping point: step {best['step']}; the last validation, step {last['step']}, is {rise:.4f} nats "
            f"worse: {figures.format(**last)}"
        )
    kept = "best validation" if summary["weights"] == "best" else "last step"
    return [*lines, f"the run's own weights are those of the {kept}"]
