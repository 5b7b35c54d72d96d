"""CPU seconds until a model from random weights is within 0.01 bits per byte of the stories' floor (docs/speedrun.md).

    python -m benchmarks speedrun benchmarks/speedrun/spectral-delta.yaml --seed 0

trains the entry, an ordinary configuration of `glissando train`, and adds a line to the ledger. After each validation
it scores stories that the entry does not know, each from an empty state and all as one text.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import csv
import hashlib
import math
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._inductor.config

from glissando.allocator import prepare_to_train
from glissando.config import from_dict, merge, options
from glissando.data.base import Batch
from glissando.data.corpora import BpeOptions, BytesOptions, StoriesOptions, register_corpus
from glissando.data.stories.corpus import StoriesCorpus
from glissando.data.stories.stories import Story, generate
from glissando.errors import ConfigError, GlissandoError, Stopped
from glissando.evaluation.carried import score_carried
from glissando.imports import import_file, imported
from glissando.precision import resolved_precision
from glissando.presets import load_preset
from glissando.state import state_bytes
from glissando.training.config import MACHINE, RunConfig, TrainingConfig
from glissando.training.fit import train
from glissando.training.launch import processes
from glissando.training.loop import Loop
from glissando.training.progress import Progress
from glissando.yaml_files import read_options

LEDGER = Path(__file__).parent.parent / "docs" / "comparison" / "speedrun.csv"
TARGET = 0.01
SMALL_STATE = 64 * 1024  # bytes at most, in the track of small states
COLUMNS = (
    "entry", "entry_sha256", "date", "seed", "lexicon", "check_seed", "stories", "reached", "cpu_seconds", "steps",
    "tokens", "parameters", "state_bytes", "small_state", "imports", "reset_mean", "reset_low", "reset_high",
    "carried_mean", "carried_low", "carried_high", "gflops_float32", "gflops_bfloat16", "threads", "precision", "torch",
)  # fmt: skip
_FEW = 32  # stories after which a model that is far from the target is not scored further
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"


def respelling(lexicon: int) -> dict[int, int]:
    """A permutation of the vowels and one of the consonants, alike for capitals; the identity for lexicon 0."""
    draw = np.random.default_rng(lexicon)
    new = {old: old for old in _VOWELS + _CONSONANTS}
    if lexicon:
        for letters in (_VOWELS, _CONSONANTS):
            new |= {old: letters[place] for old, place in zip(letters, draw.permutation(len(letters)), strict=True)}
    before, after = "".join(new), "".join(new.values())
    return str.maketrans(before + before.upper(), after + after.upper())


@options
class RespelledOptions(StoriesOptions):
    """The stories in another spelling, of the same probability and the same number of bytes.

    lexicon  number of the spelling; 0: their own
    """

    lexicon: int = 0


@register_corpus("respelled", RespelledOptions)
class RespelledStories(StoriesCorpus):
    def __init__(self, tokenizer: Any, *, lexicon: int = 0, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.spelling = respelling(lexicon)

    def _text(self, story: Story) -> str:
        return story.text.translate(self.spelling)

    def batch_of(self, story: Story) -> Batch:
        return self._batch([[story]], [0])


class Excess(NamedTuple):
    """Bits per byte above what the scored stories cost in their own grammar, with a 95 % interval over stories."""

    mean: float
    low: float
    high: float


def excess(bits: np.ndarray, floor: np.ndarray, sizes: np.ndarray) -> Excess:
    """The excess over stories of so many `bits`, `floor` bits and bytes, drawn with replacement for the interval."""
    counts = np.random.default_rng(0).multinomial(len(bits), np.full(len(bits), 1 / len(bits)), size=2000)
    low, high = np.quantile((counts @ (bits - floor)) / (counts @ sizes), [0.025, 0.975]).tolist()
    return Excess(float((bits - floor).sum() / sizes.sum()), low, high)


def check(model: Any, corpus: RespelledStories, seed: int, count: int) -> dict[str, Excess]:
    """Excesses over `count` stories of the test split of `seed`, with empty states and carried; only over the first of
    them where these are twice as far as they may be."""
    scores: dict[str, Excess] = {}
    for number in sorted({min(_FEW, count), count}):
        if any(each.mean > 2 * TARGET for each in scores.values()):
            break
        stories = [generate(seed, "test", index) for index in range(number)]
        batches = [corpus.batch_of(story) for story in stories]
        starts = np.cumsum([0, *(int((batch.targets >= 0).sum()) for batch in batches[:-1])])
        floor, sizes = np.array([[story.bits, len(story.text)] for story in stories]).T
        scored = score_carried(model, batches)
        for name, nats in (("reset", scored.reset), ("carried", scored.carried)):
            scores[name] = excess(np.add.reduceat(nats, starts) / math.log(2), floor, sizes)
    return scores


def cpu_seconds() -> float:
    """CPU seconds of this process, all threads, and of the child processes that have ended."""
    return sum(os.times()[:4])


class Watch(Progress):
    """Stops a training at the first validation after which both scores are within the target.

    seconds  CPU seconds of the program without what validations and checks took
    """

    def __init__(self, aside: float, check_seed: int, stories: int) -> None:
        super().__init__()
        self.aside, self.check_seed, self.stories = aside, check_seed, stories
        self.scores, self.counts = dict[str, Excess](), dict[str, int]()
        self.reached, self.seconds, self.stepped = False, 0.0, 0.0

    def after_step(self, loop: Loop) -> None:
        super().after_step(loop)
        self.stepped = cpu_seconds()

    def logged(self, loop: Any) -> None:
        super().logged(loop)
        model = loop.model
        if loop.validated_step != loop.state.step:
            return
        model.require_constant_state("a speedrun")
        self.seconds = self.stepped - self.aside
        with loop.fabric.autocast(), torch.no_grad():
            size = state_bytes(model(torch.zeros(1, 1024, dtype=torch.int64), model.init_state(1))[1])
            self.scores = check(model, loop.task.corpus, self.check_seed, self.stories)
        self.counts = {
            "steps": loop.state.step, "tokens": loop.state.tokens, "state_bytes": size,
            "small_state": size <= SMALL_STATE, "parameters": sum(p.numel() for p in model.parameters()),
        }  # fmt: skip
        shown = ", ".join(f"{name} {each.mean:+.4f}" for name, each in self.scores.items())
        self.message(f"{self.seconds:.0f} CPU s, {loop.state.tokens:,} tokens: above the floor {shown}")
        self.reached = max(each.mean for each in self.scores.values()) <= TARGET
        if self.reached:
            loop.ask_to_stop()
        self.aside += cpu_seconds() - self.stepped


def read_entry(path: str, seed: int, lexicon: int) -> RunConfig:
    """The entry's configuration, on stories of this seed and spelling. Raises ConfigError where it breaks a rule."""
    file = read_options(Path(path).expanduser())
    if "imports" in file:
        raise ConfigError(f"{path}: remove imports; the command line names Python files: --import FILE")
    preset = file.get("preset")
    config = from_dict(RunConfig, merge(RunConfig, {} if preset is None else load_preset(str(preset)), file))
    if broken := [name for name in ("start_from", "stages") if getattr(config, name)]:
        raise ConfigError(f"{path}: an entry is one training from random weights; remove {broken[0]}")
    if type(config.data) is not StoriesOptions or config.data.cut or config.data.labelled:
        raise ConfigError(f"{path}: an entry reads whole stories; remove data.kind, data.cut and data.labelled")
    if not isinstance(config.data.tokenizer, BpeOptions | BytesOptions):
        raise ConfigError(f"{path}: a tokenizer is trained within the time; give data.tokenizer bytes or bpe")
    if any(getattr(mixer, "laplacian", "chain") != "chain" for mixer in config.model.mixers):
        raise ConfigError(f"{path}: an entry reads no file; remove laplacian, so that the mixer starts from its chain")
    for name in MACHINE:
        if (value := getattr(config.training, name)) not in (getattr(TrainingConfig, name), "cpu"):
            fix = f"an entry is one process on a CPU; remove training.{name}"
            raise ConfigError(f"{path}: training.{name} is {value}; {fix}")
    if processes(config.training) != (1, 1):
        raise ConfigError("a speedrun is one process: start it without torchrun")
    config.data = RespelledOptions(**{**vars(config.data), "seed": seed, "lexicon": lexicon})
    config.training.seed, config.training.accelerator, config.imports = seed, "cpu", imported()
    return config


def imported_file(name: str) -> str:
    """Execute a file of --import. Returns its path and SHA-256, as the ledger has them.

    Raises ConfigError, and executes nothing, where an import in it names the stories' grammar.
    """
    path = Path(name).expanduser()
    source = path.read_bytes() if path.is_file() else b""
    with contextlib.suppress(SyntaxError):  # which import_file reports
        require_no_grammar(name, source)
    import_file(name)
    return f"{name}@{hashlib.sha256(source).hexdigest()}"


def require_no_grammar(name: str, source: bytes) -> None:
    """Raises ConfigError where an import in the file names the stories' grammar."""
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt | ast.expr)):
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            names = [str(value.value) for value in values if isinstance(value, ast.Constant)]
        if any(f"{each}.".startswith("glissando.data.stories.") for each in names):
            fix = "an entry learns from training bytes alone; remove the import of glissando.data.stories"
            raise ConfigError(f"--import {name}:{node.lineno}: {fix}")


def digests(imports: str) -> dict[str, str]:
    """File names and SHA-256 in a line's `imports`. Older lines have paths alone."""
    return {Path(name).name: digest for name, digest in re.findall(r"(.+?)@([0-9a-f]{64})(?: |$)", imports)}


def require_ledger(path: Path, entry_sha256: str, imports: str) -> None:
    """Raises ConfigError for a ledger to which no line of this program can be added, and for one that has this entry
    with other bytes of a file in `imports`. A new one is made, empty."""
    try:
        with path.open("a+", encoding="utf-8", errors="replace") as file:
            file.seek(0)
            first, *lines = file.readlines() or [""]
    except OSError as error:
        fix = "name a file in a directory that exists"
        raise ConfigError(f"--ledger {path} cannot be written ({error.strerror}): {fix}") from error
    if first and first.rstrip("\n").split(",") != [*COLUMNS]:
        raise ConfigError(f"--ledger {path} has other columns than this program writes: name a new file")
    same_entry = [line for line in csv.DictReader(lines, COLUMNS) if line["entry_sha256"] == entry_sha256]
    for name, digest in (pair for line in same_entry for pair in digests(line["imports"] or "").items()):
        if digests(imports).get(name, digest) != digest:
            fix = "put that file back, or give this one another name"
            raise ConfigError(f"--import {name} is not the file of {path}, whose SHA-256 is {digest}: {fix}")


def product_rate(dtype: torch.dtype, size: int = 512) -> float:
    """GFLOPs of square matrix products per CPU second, the best of some."""
    a, b = torch.randn(2, size, size).to(dtype)
    times = []
    for _ in range(20):
        times.append(-time.process_time())
        a @ b
        times[-1] += time.process_time()
    return 2e-9 * size**3 / min(times)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speedrun", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("entry", help="a YAML file of options of glissando train")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and training text (default 0)")
    parser.add_argument("--lexicon", type=int, default=0, help="number of a respelling; 0: the stories' own")
    parser.add_argument("--check_seed", type=int, help="seed of the scored stories, drawn by default")
    parser.add_argument("--stories", type=int, default=128, help="number of scored stories (default 128)")
    parser.add_argument("--import", dest="imports", action="append", default=[], help="a Python file with models")
    parser.add_argument("--threads", type=int, default=1, help="of the computation (default 1)")
    parser.add_argument("--out", help="keep the run in this directory")
    parser.add_argument("--ledger", default=str(LEDGER), help="CSV file to add the result to")
    given = parser.parse_args(arguments)
    try:
        line = run(given)
    except GlissandoError as error:
        print(f"python -m benchmarks speedrun: {error}", file=sys.stderr)
        return 1
    print(f"{given.entry}: {'' if line['reached'] else 'NOT '}within {TARGET} after {line['cpu_seconds']:.0f} CPU s")
    return 0


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Train the entry and write its line. Raises GlissandoError, before it trains, for what cannot be run."""
    ledger, entry = Path(given.ledger).expanduser(), Path(given.entry).expanduser()
    for name, least in (("seed", 0), ("lexicon", 0), ("check_seed", 0), ("stories", 1), ("threads", 1)):
        value = getattr(given, name)
        if value is not None and not least <= value < 2**32:
            raise ConfigError(f"--{name} must be from {least} to 4,294,967,295, got {value}")
    imports = " ".join(imported_file(name) for name in given.imports)
    config = read_entry(given.entry, given.seed, given.lexicon)
    digest = hashlib.sha256(entry.read_bytes()).hexdigest()
    require_ledger(ledger, digest, imports)
    torch._inductor.config.compile_threads = 1  # no pool of compilers, whose time would not be counted
    prepare_to_train()
    torch.set_num_threads(given.threads)
    start = cpu_seconds()
    rates = {f"gflops_{kind}": round(product_rate(getattr(torch, kind)), 1) for kind in ("float32", "bfloat16")}
    check_seed = secrets.randbits(32) if given.check_seed is None else given.check_seed
    watch = Watch(cpu_seconds() - start, check_seed, given.stories)
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(config, given.out or Path(folder) / "run", watch)
        except Stopped:
            if not watch.reached:
                raise
    line: dict[str, Any] = {
        "entry": entry.stem, "entry_sha256": digest,
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "seed": given.seed, "lexicon": given.lexicon,
        "check_seed": check_seed, "stories": given.stories,
        "reached": watch.reached, "cpu_seconds": round(watch.seconds, 1), "imports": imports,
        "precision": resolved_precision(config.training.precision, config.training.accelerator),
        "threads": given.threads, "torch": torch.__version__,
    }  # fmt: skip
    line |= watch.counts | rates
    for name, each in watch.scores.items():
        line |= {f"{name}_{part}": round(value, 5) for part, value in each._asdict().items()}
    with ledger.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(line)
    return line
