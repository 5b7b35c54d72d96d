"""glissando train: a preset, a corpus and a budget into a run directory."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from glissando.cli.options import Options, Parser, choose_threads, parse, require_out, require_own_held_out
from glissando.config import flat, from_dict, hints_of, merge, to_dict, unregistered
from glissando.errors import ConfigError
from glissando.presets import RECOMMENDED, load_preset
from glissando.pretrained import require_text, without_held_out
from glissando.training.length import BUDGETS
from glissando.yaml_files import read_options

if TYPE_CHECKING:
    from glissando.training.config import RunConfig

#: it learns the built-in stories
EXAMPLE = "glissando train --preset transformer-nano --data.tokenizer bpe --training.seconds 120 --out runs/first"
#: what the README begins with, too
OWN_TEXT = "glissando train --data.path book.txt --training.seconds 600 --out runs/book"
#: the options that --help shows
COMMON = (
    "--preset", "--out", "--from", "--resume", "--config", "--data.kind", "--data.path", "--data.tokenizer",
    "--data.seq_len", "--data.batch_size", "--training.seconds", "--training.tokens",
    "--training.optimizer.learning_rate", "--model.hidden_size", "--model.depth.layers",
)  # fmt: skip
_USAGE = (
    "glissando train --preset NAME --out DIR [options]\n       glissando train --from RUN --out DIR [options]\n"
    "       glissando train --resume DIR"
)
#: rows and width of activations for which threads are chosen, where a run does not say how many it was made with
_USUAL = (1024, 256)


def main(arguments: Sequence[str]) -> None:
    """Train, or with --resume go on."""
    options = parse(_parser(), arguments)
    if options.resume is not None:
        budget = f". With another budget: glissando train --from {options.resume} --out DIR"
        resume_run(options, ("data.path", "data.valid_path"), _USUAL, budget)
        return
    config = _config(options)
    if options.print_config:
        import yaml

        print(yaml.safe_dump(config.as_dict(), sort_keys=False), end="")
        return
    require_out(options, "name the run directory to make, such as --out runs/first")
    if not config.stages:  # a stage may name its own
        config.require_text()
    from glissando.allocator import prepare_to_train
    from glissando.stages import train_stages
    from glissando.training.fit import train

    prepare_to_train()
    _choose_threads(options, config)
    if config.stages:
        train_stages(config, options.out)
    else:
        train(config, options.out)


def _choose_threads(options: Options, config: RunConfig) -> None:
    """Several processes share the cores as Fabric deals them out, and a GPU needs no threads."""
    import math

    import torch

    from glissando.training.launch import processes

    t = config.training
    on_cpu = t.accelerator == "cpu" or not torch.accelerator.is_available()
    if options.threads is not None or (on_cpu and math.prod(processes(t)) == 1):
        rows = config.data.batch_size * config.data.seq_len // t.accumulate
        choose_threads(options, rows, config.model.hidden_size)


def _parser() -> Parser:
    parser = Parser("train", "Train a model into a run directory.", f"{OWN_TEXT}\n{EXAMPLE}", _USAGE)
    add = parser.add_argument
    add("--preset", "model and training options by name; see glissando presets")
    add("--out", "run directory to make, or a URL such as s3://bucket/book", metavar="DIR")
    add("--config", "YAML file of options; those on the command line take precedence", metavar="FILE")
    start = "run whose weights, tokenizer and options to start from"
    add("--from", start, dest="start_from", metavar="RUN")
    resumed = "run to continue; only options of the machine, and paths of moved texts, may be given too"
    add("--resume", resumed, metavar="RUN")
    add("--print_config", "print the values of all options and stop", action="store_true")
    parser.add_shared("threads", "import")
    parser.common, parser.preset = COMMON, _of_preset
    parser.sections = run_sections()
    return parser


def run_sections() -> dict[str, Any]:
    """The types of the sections of a run's configuration."""
    from glissando.training.config import RunConfig

    return {name: hints_of(RunConfig)[name] for name in ("model", "data", "training")}


def _of_preset(name: str) -> RunConfig:
    from glissando.training.config import RunConfig

    return from_dict(RunConfig, load_preset(name))


def _config(options: Options) -> RunConfig:
    """The run started from, then the preset, then the file of --config, then the command line."""
    from glissando.imports import imported
    from glissando.run_files import require_texts
    from glissando.runs import Run
    from glissando.training.config import RunConfig

    file = {} if options.config is None else dict(read_options(options.config, f"--config {options.config}"))
    names = from_dict(RunConfig, {name: file[name] for name in ("preset", "start_from", "imports") if name in file})
    preset, start = options.preset or names.preset, options.start_from or names.start_from
    if file.get("imports") and (missing := unregistered(RunConfig, file)):
        raise ConfigError(
            f"--config {options.config} needs {', '.join(dict.fromkeys(missing))}, which nothing has registered yet; "
            f"if you trust them, add --import {' --import '.join(file['imports'])}"
        )
    before = {} if start is None else _of_run(start)
    named = [*options.given, *flat(file)]
    if start is not None and "data" in before:
        before["data"] = without_held_out(start, before["data"], named)
    if preset is None and start is None and not {name.partition(".")[0] for name in named} & {"model", "stages"}:
        preset = RECOMMENDED
        print(f"--preset {preset}: the recommended one, as none was given; others: glissando presets", file=sys.stderr)
    chosen = {} if preset is None else load_preset(preset)
    usual = _of_own_text(named, flat(chosen) | flat(file) | flat(options.sections)) if start is None else {}
    last = {"preset": preset or before.get("preset"), "start_from": start, "imports": imported()}
    config = from_dict(RunConfig, merge(RunConfig, before, chosen, usual, file, options.sections, last))
    if start is not None:
        data = to_dict(config)["data"]
        require_own_held_out(named, data, before.get("data", {}))
        require_text(start, data)
        if not options.print_config:
            require_texts(config.data, Run.open(start), named, may_differ=True)
    return config


def _of_own_text(options: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """What a text of one's own needs no option for: its kind, by its path; under a budget of time a BPE, by which it is
    read three times as fast."""
    usual: dict[str, Any] = {}
    kind, path = values.get("data.kind"), str(values.get("data.path", ""))
    if kind is None and path:
        usual["kind"] = kind = "jsonl" if path.endswith(".jsonl") else "text"
    named = any(name.startswith("data.tokenizer") for name in (*options, *values))
    if kind in ("text", "jsonl") and "training.seconds" in options and not named:
        usual["tokenizer"] = "bpe"
        note = "--data.tokenizer bpe: the default under a budget of time; --data.tokenizer bytes reads bytes"
        print(note, file=sys.stderr)
    return {"data": usual} if usual else {}


def _of_run(path: str) -> dict[str, Any]:
    """The options of a run, but for what it was started from, its budget and what was special to its training."""
    from glissando.runs import Run

    config = Run.open(path).read_config(to_train=True)
    for name in ("start_from", "grown"):  # what growth has left is taken from the run itself
        config.pop(name, None)
    for name in (*BUDGETS, "freeze", "neutral_kl"):
        config.get("training", {}).pop(name, None)
    return config


def resume_run(options: Options, texts: Collection[str], usual: tuple[int, int], fix: str = "", **kind: Any) -> None:
    """--resume: it takes the machine's options and where the files of the options `texts` lie now.

    Args:
        options: Of the command.
        texts: Options that name files.
        usual: Rows and width of activations for which threads are chosen.
        fix: What else a user may do who gives other options.
        **kind: As of `glissando.training.fit.resume`.
    """
    from glissando.allocator import prepare_to_train
    from glissando.stages import STAGES
    from glissando.threads import threads_of
    from glissando.training.config import MACHINE
    from glissando.training.fit import resume
    from glissando.training.mirroring import place_of

    path, machine = options.resume, [f"training.{name}" for name in MACHINE]
    if others := [name for name in options.given if name not in ("resume", "threads", "import", *machine, *texts)]:
        raise ConfigError(
            f"--resume continues exactly with {path}/config.yaml and takes no other options than --"
            f"{', --'.join(machine)}, and the new place of its files, --{' and --'.join(texts)}; "
            f"got --{' --'.join(others)}{fix}"
        )
    prepare_to_train()
    folder = place_of(path, resumed=True)[0]
    if (folder / STAGES).is_file():
        raise ConfigError(f"--resume {path} holds stages: the command that began them, given again, goes on")
    choose_threads(options, *usual, before=threads_of(folder))  # with others sums may round otherwise
    moved = flat({"data": options.sections.get("data", {})})
    resume(path, options.sections.get("training", {}), texts=moved, **kind)
