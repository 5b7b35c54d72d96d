"""The report of a comparison: one HTML file that needs nothing else, a CSV and a Markdown of the same figures, and
the pictures as files beside that.

It begins with what a reader wants first: a sentence, and the models in order with what each writes. Tables follow, and
folded at the end settings, definitions and every run.

Every figure names the runs it comes from by number; the last table has the directory of each run, and its seed, commit
and machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from glissando.compare.as_csv import as_csv
from glissando.compare.figures import COLOURS, as_files, figures
from glissando.compare.plan import TOLERANCE, Comparison
from glissando.compare.probes import PROBES
from glissando.compare.ranking import entries, extent, headline, prompt, ranked
from glissando.compare.results import Estimate, Finished, ModelResult, Runs, accuracy, bits_on, reported
from glissando.storage import write_atomic

#: a time is marked as noisy where the slowest measurement took so many times the fastest
NOISY = 1.5

HTML, CSV, MARKDOWN, PICTURES = "report.html", "results.csv", "report.md", "pictures"


class Table(NamedTuple):
    """Headings and rows of cells as text; the first column names the row."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""


def write_report(comparison: Comparison, results: Sequence[ModelResult]) -> Path:
    """Write all of them; returns the HTML's path."""
    runs = Runs(comparison, results)
    floor = next((result.floor for result in results if result.floor is not None), None)
    about, notes, tables = _about(comparison, results, runs), _notes(comparison, results, runs), _tables(results, runs)
    pictures = figures(results, floor)
    page = _html(comparison, results, floor, about, notes, tables, pictures)
    write_atomic(comparison.directory / HTML, page.encode())
    write_atomic(comparison.directory / CSV, as_csv(results, runs).encode())
    (comparison.directory / PICTURES).mkdir(exist_ok=True)
    for name, picture in as_files(pictures).items():
        write_atomic(comparison.directory / PICTURES / f"{name}.svg", picture.encode())
    title = headline(comparison, results)
    write_atomic(
        comparison.directory / MARKDOWN, _markdown(title, about, notes, tables, results, list(pictures)).encode()
    )
    return comparison.directory / HTML


# ---------------------------------------------------------------------- header and notes


def _rows(data: Mapping[str, Any], results: Sequence[ModelResult]) -> str:
    """What a step reads, the same for all models. A corpus of whole texts has rows of its own length."""
    corpus, rows = data.get("kind", "stories"), data.get("batch_size", 32)
    tokens, steps = (results[0].mean("spent", name) for name in ("tokens", "step"))
    scored = "" if tokens is None or steps is None else f", {tokens / steps:,.0f} scored tokens on average"
    read = "1 row" if rows == 1 else f"{rows} rows"
    return f"{corpus}, {read} a step{scored}; the same batches for every model under the same seed"


def _about(comparison: Comparison, results: Sequence[ModelResult], runs: Runs) -> list[tuple[str, str]]:
    """What was compared, as pairs of a name and a text."""
    data = comparison.shared_data()
    seeds = "seed" if comparison.seeds == 1 else "seeds"
    about = [
        ("models", ", ".join(f"{r.model} ({r.parameters:,} parameters)" for r in results)),
        ("budget", f"{comparison.budget} for each training, {comparison.seeds} {seeds}"),
        ("data", _rows(data, results)),
    ]
    if comparison.sweeps:
        rates = ", ".join(f"{rate:g}" for rate in comparison.learning_rates)
        swept = comparison.budget.times(comparison.sweep_share)
        further = f", and up to {comparison.sweep_beyond} beyond a best at the edge" if comparison.sweep_beyond else ""
        chosen = f"{rates}{further}, each tried for {swept}; chosen on held-out rows not reported here"
        about.append(("learning rates", chosen))
    else:
        about.append(("learning rates", ", ".join(f"{r.model} {r.learning_rate:g}" for r in results)))
    changed = {"model": comparison.model, "data": comparison.data, "training": comparison.training}
    about += [(f"{name} options", _flat(values)) for name, values in changed.items() if values]
    for name, title in (("machine", "machine"), ("commit", "commit"), ("torch", "PyTorch")):
        values = list(dict.fromkeys(str(run.figures["provenance"][name] or "unknown") for run in runs.all))
        about.append((title, ", ".join(values)))
    return about


def _flat(values: dict[str, Any], prefix: str = "") -> str:
    parts = []
    for key, value in values.items():
        if isinstance(value, dict):
            parts.append(_flat(value, f"{prefix}{key}."))
        else:
            parts.append(f"{prefix}{key} {value if isinstance(value, str) else json.dumps(value)}")
    return ", ".join(parts)


def _notes(comparison: Comparison, results: Sequence[ModelResult], runs: Runs) -> list[str]:
    """What a reader must know before comparing."""
    notes = []
    if comparison.seeds == 1:
        notes.append("One seed a model: the intervals do not contain the variation between seeds.")
    first = results[0].parameters
    unequal = [r.model for r in results if abs(r.parameters - first) > TOLERANCE * first]
    if unequal:
        notes.append(f"Not within 5 % of {results[0].model} in size: {', '.join(unequal)}.")
    notes += [
        f"{r.model}: {r.learning_rate:g} is the {edge} learning rate that was tried; a better one may lie beyond it."
        for r in results
        if (edge := r.at_edge())
    ]
    if not comparison.sweeps:
        notes.append("No learning rates were swept: each model was trained with its own rate or the one given.")
    notes += [f"R{runs.numbers[run.path]} failed: {run.failed}" for run in runs.all if run.failed]
    notes += [*_other_texts(results, runs), *_other_machines(comparison, runs)]
    modified = [run for run in runs.all if run.figures["provenance"]["modified"]]
    if modified:
        notes.append(f"{runs.named(modified)}: trained from a working tree with changes that the commit does not have.")
    resumed = [run for run in runs.all if run.figures["provenance"]["resumed"]]
    if resumed:
        notes.append(f"{runs.named(resumed)}: interrupted and resumed.")
    return notes


def _other_texts(results: Sequence[ModelResult], runs: Runs) -> list[str]:
    """A data file may have changed between two commands, under the same name and so unseen in the options."""
    good = [run for result in results for run in (*result.sweep, *result.runs) if run.failed is None]
    held = _alike(good, lambda run: run.figures["held_out"].get("digest", ""))
    read = _alike([run for run in good if run.figures.get("training_digest")], lambda r: r.figures["training_digest"])
    notes = []
    for kinds, what in ((held, "scored on another held-out text"), (read, "trained on another text")):
        first, *others = list(kinds.values()) or [[]]
        notes += [
            f"{runs.named(those)}: {what} than {runs.named(first[:1])}, whose file has changed since. Figures over "
            "both mean nothing: train them again under another --out."
            for those in others
        ]
    return notes


def _other_machines(comparison: Comparison, runs: Runs) -> list[str]:
    """Runs of several commands may be of several commits and machines."""
    commits = _alike(runs.all, lambda run: str(run.figures["provenance"]["commit"] or "unknown")[:10])
    machines = _alike(runs.all, _machine)
    notes = []
    if len(commits) > 1:
        each = "; ".join(f"{runs.named(those)} {commit}" for commit, those in commits.items())
        notes.append(f"Trained at several commits, whose differences may show in the figures: {each}.")
    if len(machines) > 1:
        each = "; ".join(f"{runs.named(those)} {machine}" for machine, those in machines.items())
        unequal = ", and a faster one trains for more steps" if comparison.budget.kind == "seconds" else ""
        notes.append(f"Trained on several machines, so that seconds and tokens/s cannot be compared{unequal}: {each}.")
    return notes


def _alike(those: Sequence[Finished], key: Callable[[Finished], str]) -> dict[str, list[Finished]]:
    """By what they have in common, in order."""
    groups: dict[str, list[Finished]] = {}
    for run in those:
        groups.setdefault(key(run), []).append(run)
    return groups


def _machine(run: Finished) -> str:
    origin = run.figures["provenance"]
    return f"{origin['machine']}, {origin['threads']} of {origin['cores']} cores"


def _tables(results: Sequence[ModelResult], runs: Runs) -> dict[str, Table]:
    tables = {"summary": _summary(results, runs), "cost": _cost(results, runs)}
    if any(result.speed.get("decode") for result in results):
        tables["contexts"] = _contexts(results, runs)
    if any(result.sweep for result in results):
        tables["sweep"] = _sweep(results, runs)
    if any(result.probes for result in results):
        tables["probes"] = _probes(results, runs)
    tables["runs"] = _all_runs(runs)
    return tables


def _summary(results: Sequence[ModelResult], runs: Runs) -> Table:
    rows = [
        [
            r.model,
            _interval(r.bits),
            _number(r.excess, ".3f"),
            "(the first)" if i == 0 else _interval(r.against_first, "+.3f"),
            _number(r.mean("epiplexity", "bits"), ",.0f"),
            f"{r.parameters:,}",
            _number(r.learning_rate, "g"),
            runs.good(r.runs),
        ]
        for i, r in enumerate(results)
    ]
    headings = ["model", "bits per byte", "bits per byte above the floor",
                f"difference from {results[0].model}, bits per byte", "epiplexity, bits", "parameters",
                "learning rate", "runs"]  # fmt: skip
    seeds = max((len(result.good) for result in results), default=0)
    wide = {1: " over held-out rows alone", 2: "; those of two seeds are wide", 3: "; those of three seeds are wide"}
    note = (
        f"Intervals are of 95 %{wide.get(seeds, '')}; a difference whose interval contains 0 is not significant. Bits "
        "per byte: lower is better. Epiplexity: a model that learns slowly has more of it as well."
    )
    return Table("Learned", headings, rows, note)


_NOISE = f"A time marked ~ is noisy: the machine was busy, and the slowest took more than {NOISY:g} times the fastest. "


def _cost(results: Sequence[ModelResult], runs: Runs) -> Table:
    rows = [
        [
            r.model,
            *(_number(r.mean("spent", name), ",.0f") for name in ("step", "tokens")),
            _number(r.mean("spent", "flops"), ".3g"),
            _number(r.mean("spent", "seconds"), ",.0f"),
            _number(r.mean("tokens_per_second"), ",.0f"),
            _spread(r.speed.get("train"), ",.0f"),
            _number(r.speed.get("memory_mib"), ",.0f"),
            runs.good(r.runs),
        ]
        for r in results
    ]
    headings = ["model", "steps", "tokens", "FLOPs", "seconds", "tokens/s as trained", "tokens/s in turn",
                "memory, MiB", "runs"]  # fmt: skip
    uncounted = any(r.good and r.mean("spent", "flops") is None for r in results)
    note = (
        "Means over seeds. "
        + ("FLOPs —: not counted for this kind of model. " if uncounted else "")
        + "As trained: the median of the log, whatever else the machine did then. In turn: the models take turns at "
        "single steps, median (lowest to highest). " + _NOISE + "Memory: the weights, and the peak of two steps over "
        "what a process of its own holds after one: imports and compiled kernels are no part of it. "
        + _timed_where(results, runs)
    )
    return Table("Spent", headings, rows, note)


def _timed_where(results: Sequence[ModelResult], runs: Runs) -> str:
    """Which runs' models were timed, and where and when that was."""
    timed = [result.speed for result in results if result.speed]
    if not timed:
        return ""
    named = runs.named([run for run in runs.all if runs.place(run) in {speed["run"] for speed in timed}])
    here = timed[0]["provenance"]
    commit = (here["commit"] or "unknown")[:10] + (" (modified)" if here["modified"] else "")
    return f"Timed: the models of {named} on {here['machine']}, commit {commit}, {here['date']}."


def _contexts(results: Sequence[ModelResult], runs: Runs) -> Table:
    contexts = sorted({int(c) for r in results for c in r.speed.get("decode", {})})
    headings = ["model", *(f"ms a token at {c:,}" for c in contexts), *(f"state at {c:,}, bytes" for c in contexts)]
    rows = []
    for r in results:
        times = [_spread(r.speed.get("decode", {}).get(str(c)), ".3g") for c in contexts]
        rows.append([r.model, *times, *(_number(r.speed.get("state", {}).get(str(c)), ",d") for c in contexts)])
    note = (
        "Greedy, batch 1, after so many tokens; models take turns: median (lowest to highest). "
        + _NOISE
        + "A dash: no positions for so many. "
        + _steps(results)
        + _timed_where(results, runs)
    )
    return Table("Decoding", headings, rows, note)


def _steps(results: Sequence[ModelResult]) -> str:
    """By which step each model decodes; nothing where figures of an earlier version do not say it."""
    plain = [r.model for r in results if r.speed.get("step") == "plain"]
    if not any("step" in r.speed for r in results):
        return ""
    others = f", but the model's own forward for {', '.join(plain)}, as `generate` does" if plain else ""
    return f"Time of the compiled step{others}. "


def _sweep(results: Sequence[ModelResult], runs: Runs) -> Table:
    rates = sorted({run.job.learning_rate for r in results for run in r.sweep})
    rows = []
    for r in results:
        cells = []
        for rate in rates:
            run = next((run for run in r.sweep if run.job.learning_rate == rate), None)
            cells.append("—" if run is None else _tried(run, rate == r.learning_rate))
        rows.append([r.model, *cells, runs.named(r.sweep)])
    headings = ["model", *(f"{rate:g}" for rate in rates), "runs"]
    note = "Bits per byte on the held-out rows that choose; chosen rates are marked *."
    return Table("Learning rates tried", headings, rows, note)


def _tried(run: Finished, chosen: bool) -> str:
    if run.failed is not None:
        return "diverged"
    return f"{bits_on(run.figures, slice(0, None, 2)):.3f}{' *' if chosen else ''}"


def _probes(results: Sequence[ModelResult], runs: Runs) -> Table:
    tasks = list(dict.fromkeys(task for r in results for task in r.probes))
    rows = []
    for task in tasks:
        chances = [
            run.figures.get("chance_accuracy") for r in results for run in r.probes.get(task, []) if not run.failed
        ]
        cells = [_percent(accuracy(r.probes.get(task, []))) for r in results]
        named = runs.good([run for r in results for run in r.probes.get(task, [])], "runs")
        rows.append([task, *cells, _number(chances[0] if chances else None, ".1%"), PROBES[task].about, named])
    headings = ["probe", *(r.model for r in results), "chance", "setting", "runs"]
    note = "Accuracy of the answers on held-out rows (95 %), mean over seeds. Lengths and loads are in the setting."
    return Table("Probes", headings, rows, note)


def _all_runs(runs: Runs) -> Table:
    headings = ["run", "directory", "seed", "learning rate", "bits per byte", "commit", "machine", "started"]
    note = "Directories are beside this report; their seeds count from 0. Bits per byte of all held-out rows."
    return Table("Every run", headings, [_one_run(run, runs) for run in runs.all], note)


def _one_run(run: Finished, runs: Runs) -> list[str]:
    origin = run.figures["provenance"]
    bits = "failed" if run.failed else f"{bits_on(run.figures, slice(None)):.3f}"
    commit = (origin["commit"] or "unknown")[:10] + (" (modified)" if origin["modified"] else "")
    seed, rate = str(runs.seed(run)), f"{run.job.learning_rate:g}"
    return [f"R{runs.numbers[run.path]}", runs.place(run), seed, rate, bits, commit, _machine(run), origin["date"]]


# ---------------------------------------------------------------------- numbers as text


def _number(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _interval(estimate: Estimate | None, form: str = ".3f") -> str:
    if estimate is None:
        return "—"
    if estimate.low == estimate.high:  # of one seed and one row, whose spread nobody knows
        return f"{estimate.value:{form}}"
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def _percent(estimate: Estimate | None) -> str:
    return "—" if estimate is None else f"{estimate.value:.1%} ({estimate.low:.1%} to {estimate.high:.1%})"


def _spread(figure: dict[str, float] | None, form: str) -> str:
    if figure is None:
        return "—"
    noisy = "~" if figure["high"] > NOISY * figure["low"] else ""
    return f"{noisy}{figure['median']:{form}} ({figure['low']:{form}} to {figure['high']:{form}})"


# ---------------------------------------------------------------------- the files


def _html(
    comparison: Comparison,
    results: Sequence[ModelResult],
    floor: float | None,
    about: list[tuple[str, str]],
    notes: list[str],
    tables: dict[str, Table],
    pictures: Mapping[str, str],
) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((resources.files(__package__) / "report.html.j2").read_text("utf-8"))
    return template.render(
        colours=Markup(COLOURS), title=headline(comparison, results), entries=entries(results), prompt=prompt(results),
        floor=floor, floor_at=None if floor is None else 100 * floor / extent(results),
        about=about, notes=notes, tables=tables, pictures={name: Markup(svg) for name, svg in pictures.items()},
        half=reported(comparison) != slice(None),
    )  # fmt: skip


def _markdown(
    title: str,
    about: list[tuple[str, str]],
    notes: list[str],
    tables: dict[str, Table],
    results: Sequence[ModelResult],
    pictures: Sequence[str],
) -> str:
    lines = [f"# {title}", "", *(f"- {name}: {text}" for name, text in about), ""]
    lines += [f"> {note}\n" for note in notes]
    for table in tables.values():
        lines += [f"## {table.title}", "", _markdown_row(table.headings), "|---" * len(table.headings) + "|"]
        lines += [*(_markdown_row(row) for row in table.rows), "", table.note, ""]
    if pictures:
        legend = "Rings: seeds; dots: means; bars: 95 % intervals. Losses: marked, held out; faint, training."
        lines += ["## Pictures", "", legend, "", *(f"![{name}]({PICTURES}/{name}.svg)" for name in pictures), ""]
    for result in ranked(results):
        sample = result.good[0].figures["sample"]
        quoted = f"{sample['prompt']}|{sample['text']}".replace("\n", "\n    ")
        lines += [f"## Sample of {result.model}, after the bar", "", f"    {quoted}", ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
