"""The report of a comparison: one HTML file that needs nothing else, and a Markdown of the same figures.

It begins with what a reader wants first: a sentence, and the models in order with what each writes. Tables follow, and
folded at the end settings, definitions and every run: a figure of a model comes from those of its runs that ended well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from glissando.compare.figures import colour_name, figures
from glissando.compare.plan import SWEEP_SHARE, TOLERANCE, Comparison
from glissando.compare.probes import PROBES
from glissando.compare.results import Estimate, Finished, ModelResult, accuracy, against, bits_on, reported
from glissando.storage import write_atomic

#: a time is marked as noisy where the slowest measurement took so many times the fastest
NOISY = 1.5

HTML, MARKDOWN = "report.html", "report.md"


class Table(NamedTuple):
    """Headings and rows of cells as text; the first column names the row."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""


def write_report(comparison: Comparison, results: Sequence[ModelResult]) -> Path:
    """Write both; returns the HTML's path."""
    title, notes, tables = headline(comparison, results), _notes(comparison, results), _tables(comparison, results)
    about = _about(comparison, results)
    for name, text in (
        (HTML, _html(comparison, results, about, notes, tables)),
        (MARKDOWN, _markdown(title, about, notes, tables, results)),
    ):
        write_atomic(comparison.out / name, text.encode())
    return comparison.out / HTML


def _runs(results: Sequence[ModelResult]) -> list[Finished]:
    """All of them: of each model its sweep and its runs, then the probes'."""
    probes = [run for result in results for runs in result.probes.values() for run in runs]
    return [run for result in results for run in (*result.sweep, *result.runs)] + probes


# ---------------------------------------------------------------------- what it begins with


class Entry(NamedTuple):
    """A model in the ranking; where its figure and its interval stand between the ends of the axis, in percent."""

    model: str
    colour: str
    bits: str
    interval: str
    at: float
    low: float
    high: float
    text: str  # the sample


def ranked(results: Sequence[ModelResult]) -> list[ModelResult]:
    """The models of which a training has ended well, from the fewest bits per byte to the most."""
    return sorted((r for r in results if r.bits is not None), key=lambda r: r.bits or ())


def headline(comparison: Comparison, results: Sequence[ModelResult]) -> str:
    """One sentence: which model predicts the held-out text best, and which are not significantly different from it."""
    order, budget = ranked(results), comparison.budget
    if not order:
        return f"No training of {len(results)} models has ended well"
    best = order[0]
    assert best.bits is not None
    figure, equal = f"{best.bits.value:.3f} bits per byte", []
    for other in order[1:]:
        between = against(best, other, comparison)
        if between is None or between.low == between.high or between.low <= 0 <= between.high:
            equal.append(other.model)
    if not equal:
        return f"{best.model} predicts the held-out text best after {budget}: {figure}"
    return f"{best.model} has {figure} after {budget}; not significantly different: {', '.join(equal)}"


def entries(results: Sequence[ModelResult]) -> list[Entry]:
    """The ranking, each with what it writes."""
    ranking, (first, last) = [], extent(results)
    for result in ranked(results):
        bits, text = result.bits, str(_sample(result)["text"]).strip()
        assert bits is not None
        interval = "" if bits.low == bits.high else f"{bits.low:.3f} to {bits.high:.3f}"
        at, low, high = [100 * (value - first) / (last - first) for value in (bits.value, bits.low, bits.high)]
        colour = colour_name(list(results).index(result))
        ranking.append(Entry(result.model, colour, f"{bits.value:.3f}", interval, at, low, high, text))
    return ranking


def extent(results: Sequence[ModelResult]) -> tuple[float, float]:
    """Bits per byte at the ends of the axis: from the floor, or 0 where it is unknown, to the worst interval's end."""
    known = [(r.bits, r.floor or 0.0) for r in results if r.bits is not None]
    first = min((min(bits.low, floor) for bits, floor in known), default=0.0)
    last = max((max(bits.high, floor) for bits, floor in known), default=1.0)
    return first, max(last, first + 0.01)


def _sample(result: ModelResult) -> dict[str, Any]:
    """The sample of the first run that ended well."""
    return result.good[0].figures["sample"]


def _about(comparison: Comparison, results: Sequence[ModelResult]) -> list[tuple[str, str]]:
    """What was compared, as pairs of a name and a text."""
    data = comparison.shared_data()
    tokens, steps = (results[0].mean("spent", name) for name in ("tokens", "step"))
    scored = "" if tokens is None or steps is None else f", {tokens / steps:,.0f} scored tokens on average"
    rates = ", ".join(f"{r.model} {r.learning_rate:g}" for r in results if r.learning_rate is not None)
    if comparison.sweeps:
        tried = f"each tried for {comparison.budget.times(SWEEP_SHARE)}"
        rates += f"; chosen on held-out rows that are not reported here, {tried}"
    about = [
        ("models", ", ".join(f"{r.model} ({r.parameters:,} parameters)" for r in results)),
        ("budget", f"{comparison.budget} for each training, {comparison.seeds} of each model"),
        ("data", f"{data.get('kind', 'stories')}, batch size {data.get('batch_size', 32)}{scored}, in the same order"),
        ("learning rates", rates),
    ]  # fmt: skip
    changed = {"model": comparison.model, "data": comparison.data, "training": comparison.training}
    about += [(f"{name} options", json.dumps(values)) for name, values in changed.items() if values]
    for name, title in (("machine", "machine"), ("commit", "commit"), ("torch", "PyTorch")):
        values = dict.fromkeys(str(run.figures["provenance"][name] or "unknown") for run in _runs(results))
        about.append((title, ", ".join(values)))
    return about


def _notes(comparison: Comparison, results: Sequence[ModelResult]) -> list[str]:
    """What a reader must know before comparing."""
    notes, runs = [], _runs(results)
    if comparison.seeds == 1:
        notes.append("One seed a model: the intervals do not contain the variation between seeds.")
    first = results[0].parameters
    if unequal := [r.model for r in results if abs(r.parameters - first) > TOLERANCE * first]:
        notes.append(f"Not within 5 % of {results[0].model} in size: {', '.join(unequal)}.")
    notes += [
        f"{r.model}: {r.learning_rate:g} is the lowest or highest learning rate that was tried; a better one may lie "
        "beyond it."
        for r in results
        if r.is_at_edge
    ]
    if not comparison.sweeps:
        notes.append("No learning rates were swept: each model was trained with its own rate or the one given.")
    notes += [f"{run.job.title} failed: {run.failed}" for run in runs if run.failed]
    scored = {run.figures["held_out"].get("digest") for r in results for run in r.good}
    if len(scored) > 1:
        notes.append("The held-out text has changed between trainings: train all again under another --out.")
    origins = [run.figures["provenance"] for run in runs]
    for what, values in (
        ("at several commits", {origin["commit"] for origin in origins}),
        ("on several machines, so that seconds and tokens/s cannot be compared", set(map(_machine, origins))),
    ):
        if len(values) > 1:
            notes.append(f"Trained {what}: see every run.")
    return notes


def _machine(origin: Mapping[str, Any]) -> str:
    return f"{origin['machine']}, {origin['threads']} of {origin['cores']} cores"


def _commit(origin: Mapping[str, Any]) -> str:
    return (origin["commit"] or "unknown")[:10] + (" (modified)" if origin["modified"] else "")


# ---------------------------------------------------------------------- tables


def _tables(comparison: Comparison, results: Sequence[ModelResult]) -> dict[str, Table]:
    tables = {"summary": _summary(results), "cost": _cost(results)}
    if any(result.speed.get("decode") for result in results):
        tables["contexts"] = _contexts(results)
    if any(result.sweep for result in results):
        tables["sweep"] = _sweep(results)
    if any(result.probes for result in results):
        tables["probes"] = _probes(results)
    tables["runs"] = _all_runs(comparison, results)
    return tables


def _seeds(runs: Sequence[Finished]) -> str:
    """How many seeds a mean comes from: 3, or 2 of 3 where one has failed."""
    good = sum(run.failed is None for run in runs)
    return f"{good}" if good == len(runs) else f"{good} of {len(runs)}"


def _summary(results: Sequence[ModelResult]) -> Table:
    rows = [
        [
            r.model,
            _interval(r.bits),
            _number(r.excess, ".3f"),
            "(the first)" if i == 0 else _interval(r.against_first, "+.3f"),
            f"{r.parameters:,}",
            _number(r.learning_rate, "g"),
            _seeds(r.runs),
        ]
        for i, r in enumerate(results)
    ]
    headings = ["model", "bits per byte", "bits per byte above the floor",
                f"difference from {results[0].model}, bits per byte", "parameters", "learning rate",
                "seeds"]  # fmt: skip
    note = (
        "Intervals are of 95 %: those of one seed are over held-out rows alone, those of two or three are wide. A "
        "difference whose interval contains 0 is not significant. Bits per byte: lower is better."
    )
    return Table("Learned", headings, rows, note)


_NOISE = f"A time marked ~ is noisy: the machine was busy, and the slowest took more than {NOISY:g} times the fastest. "


def _cost(results: Sequence[ModelResult]) -> Table:
    rows = [
        [
            r.model,
            *(_number(r.mean("spent", name), ",.0f") for name in ("step", "tokens")),
            _number(r.mean("spent", "flops"), ".3g"),
            _number(r.mean("spent", "seconds"), ",.0f"),
            _number(r.mean("tokens_per_second"), ",.0f"),
            _spread(r.speed.get("train"), ",.0f"),
            _number(r.speed.get("memory_mib"), ",.0f"),
            _seeds(r.runs),
        ]
        for r in results
    ]
    headings = ["model", "steps", "tokens", "FLOPs", "seconds", "tokens/s as trained", "tokens/s in turn",
                "memory, MiB", "seeds"]  # fmt: skip
    uncounted = any(r.good and r.mean("spent", "flops") is None for r in results)
    note = (
        "Means over seeds. "
        + ("FLOPs —: not counted for this kind of model. " if uncounted else "")
        + "As trained: the median of the log, whatever else the machine did then. In turn: the models take turns at "
        "single steps, median (lowest to highest). " + _NOISE + "Memory: the weights, and what PyTorch allocates "
        "beside them in a step at its peak. " + _timed_where(results)
    )
    return Table("Spent", headings, rows, note)


def _timed_where(results: Sequence[ModelResult]) -> str:
    """Where and when models were timed."""
    here = next((result.speed["provenance"] for result in results if result.speed), None)
    return "" if here is None else f"Timed on {here['machine']}, commit {_commit(here)}, {here['date']}."


def _contexts(results: Sequence[ModelResult]) -> Table:
    contexts = sorted({int(c) for r in results for c in r.speed.get("decode", {})})
    headings = ["model", *(f"ms a token at {c:,}" for c in contexts), *(f"state at {c:,}, bytes" for c in contexts)]
    rows = []
    for r in results:
        times = [_spread(r.speed.get("decode", {}).get(str(c)), ".3g") for c in contexts]
        rows.append([r.model, *times, *(_number(r.speed.get("state", {}).get(str(c)), ",d") for c in contexts)])
    plain = [r.model for r in results if r.speed.get("step") == "plain"]
    others = f", but the model's own forward for {', '.join(plain)}" if plain else ""
    note = (
        "A token as the command generate writes it, batch 1, temperature 0.8, top-p 0.9, after so many tokens; models "
        "take turns: median (lowest to highest). "
        + _NOISE
        + f"A dash: no positions for so many. By the compiled step{others}. "
        + _timed_where(results)
    )
    return Table("Decoding", headings, rows, note)


def _sweep(results: Sequence[ModelResult]) -> Table:
    rates = sorted({run.job.learning_rate for r in results for run in r.sweep})
    rows = []
    for r in results:
        tried = {run.job.learning_rate: _tried(run, run.job.learning_rate == r.learning_rate) for run in r.sweep}
        rows.append([r.model, *(tried.get(rate, "—") for rate in rates)])
    note = "Bits per byte on the held-out rows that choose; chosen rates are marked *."
    return Table("Learning rates tried", ["model", *(f"{rate:g}" for rate in rates)], rows, note)


def _tried(run: Finished, chosen: bool) -> str:
    if run.failed is not None:
        return "diverged"
    return f"{bits_on(run.figures, slice(0, None, 2)):.3f}{' *' if chosen else ''}"


def _probes(results: Sequence[ModelResult]) -> Table:
    tasks = list(dict.fromkeys(task for r in results for task in r.probes))
    rows = []
    for task in tasks:
        runs = [run for r in results for run in r.probes.get(task, [])]
        chance = next((run.figures.get("chance_accuracy") for run in runs if not run.failed), None)
        cells = [_interval(accuracy(r.probes.get(task, [])), ".1%") for r in results]
        rows.append([task, *cells, _number(chance, ".1%"), PROBES[task].about])
    headings = ["probe", *(r.model for r in results), "chance", "setting"]
    note = "Accuracy of the answers on held-out rows (95 %), mean over seeds. Lengths and loads are in the setting."
    return Table("Probes", headings, rows, note)


def _all_runs(comparison: Comparison, results: Sequence[ModelResult]) -> Table:
    headings = ["directory", "learning rate", "bits per byte", "resumed", "commit", "machine", "started"]
    note = "Directories are beside this report; their seeds count from 0. Bits per byte of all held-out rows."
    rows = []
    for run in _runs(results):
        origin = run.figures["provenance"]
        bits = "failed" if run.failed else f"{bits_on(run.figures, slice(None)):.3f}"
        where, resumed = str(run.path.relative_to(comparison.out)), str(origin["resumed"])
        rate = f"{run.job.learning_rate:g}"
        rows.append([where, rate, bits, resumed, _commit(origin), _machine(origin), origin["date"]])
    return Table("Every run", headings, rows, note)


# ---------------------------------------------------------------------- numbers as text


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _interval(estimate: Estimate | None, form: str = ".3f") -> str:
    if estimate is None:
        return "—"
    if estimate.low == estimate.high:  # of one seed and one row, whose spread nobody knows
        return f"{estimate.value:{form}}"
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def _spread(figure: dict[str, float] | None, form: str) -> str:
    if figure is None:
        return "—"
    noisy = "~" if figure["high"] > NOISY * figure["low"] else ""
    return f"{noisy}{figure['median']:{form}} ({figure['low']:{form}} to {figure['high']:{form}})"


# ---------------------------------------------------------------------- the files


def _html(
    comparison: Comparison,
    results: Sequence[ModelResult],
    about: list[tuple[str, str]],
    notes: list[str],
    tables: dict[str, Table],
) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources.files(__package__) / "report.html.j2").read_text("utf-8"))
    floor = next((result.floor for result in results if result.floor is not None), None)
    return template.render(
        title=headline(comparison, results), entries=entries(results), floor=floor,
        prompt=next((str(_sample(result)["prompt"]) for result in ranked(results)), ""),
        ends=extent(results), about=about, notes=notes, tables=tables,
        pictures={name: Markup(svg) for name, svg in figures(results, floor).items()},
        half=reported(comparison) != slice(None),
    )  # fmt: skip


def _markdown(
    title: str,
    about: list[tuple[str, str]],
    notes: list[str],
    tables: dict[str, Table],
    results: Sequence[ModelResult],
) -> str:
    lines = [f"# {title}", "", *(f"- {name}: {text}" for name, text in about), ""]
    lines += [f"> {note}\n" for note in notes]
    for table in tables.values():
        lines += [f"## {table.title}", "", _markdown_row(table.headings), "|---" * len(table.headings) + "|"]
        lines += [*(_markdown_row(row) for row in table.rows), "", table.note, ""]
    for result in ranked(results):
        quoted = "{prompt}|{text}".format(**_sample(result)).replace("\n", "\n    ")
        lines += [f"## Sample of {result.model}, after the bar", "", f"    {quoted}", ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
