"""What a comparison is made of: models x seeds x learning rates x tasks, each a run directory of its own.

OUT/sweep/PRESET/lr-0.002-seed-0          a smaller budget, to choose each model's learning rate
OUT/runs/PRESET/lr-0.002-seed-1           what is compared
OUT/probes/TASK/PRESET/lr-0.002-seed-1    the same model trained on a probe
OUT/plan.json                             the options of the last command
OUT/tokenizer.json                        where data.tokenizer.kind is bpe: trained once, with the first seed, for all
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from glissando.compare.models import Given, read_models
from glissando.compare.probes import PROBES
from glissando.config import flat, from_dict, merge, to_dict
from glissando.data.base import Corpus
from glissando.data.corpora import (
    CORPORA,
    BpeOptions,
    DataOptions,
    FileOptions,
    build_corpus,
    build_tokenizer,
)
from glissando.data.tokenizers import Tokenizer, load_tokenizer
from glissando.errors import ConfigError, DataError, RunError
from glissando.imports import imported
from glissando.model import LanguageModel, ModelConfig
from glissando.precision import resolved_precision
from glissando.runs import CONFIG, TOKENIZER, Run
from glissando.storage import write_atomic
from glissando.training.config import RunConfig, TrainingConfig, fitted_vocabulary
from glissando.training.length import BUDGETS
from glissando.urls import is_url

#: how far parameter counts may lie from the first model's
TOLERANCE = 0.05
#: of the budget, to try a learning rate
SWEEP_SHARE = 0.25
_NEVER = 10**9
#: the options of a comparison
PLAN = "plan.json"
#: in each run's directory: what was measured of it, or that it has failed
MEASURED = "measured.json"


class Amount(NamedTuple):
    """How long to train: one of the budgets of training, and how much of it."""

    kind: str
    value: float

    @classmethod
    def parse(cls, text: str, option: str) -> Amount:
        """ "tokens=2e6". Raises ConfigError for what is not of this form."""
        kind, _, value = text.partition("=")
        try:
            amount = cls(kind.strip(), float(value))
        except ValueError:
            amount = cls(kind, math.nan)
        if amount.kind not in BUDGETS or not 0 < amount.value < math.inf:
            raise ConfigError(f"{option} is KIND=NUMBER with KIND one of {', '.join(BUDGETS)}; got {text!r}")
        return amount

    def options(self) -> dict[str, float | int]:
        """As training options; steps and tokens are whole, at least 1."""
        whole = self.kind in ("steps", "tokens")
        return {self.kind: max(1, round(self.value)) if whole else self.value}

    def times(self, share: float) -> Amount:
        return Amount(self.kind, self.value * share)

    def __str__(self) -> str:
        return f"{self.value:,.10g} {self.kind}"


@dataclass(frozen=True)
class Job:
    """One training. `kind` is `sweep`, `run` or `probe`; `task` names the probe."""

    kind: str
    model: str
    seed: int
    learning_rate: float
    task: str = ""

    def path(self, out: Path) -> Path:
        above = {"sweep": "sweep", "run": "runs", "probe": f"probes/{self.task}"}[self.kind]
        return out / above / self.model / f"lr-{self.learning_rate:g}-seed-{self.seed}"

    @property
    def title(self) -> str:
        what = {"sweep": "learning rate", "run": "run", "probe": self.task}[self.kind]
        return f"{self.model}, {what}, seed {self.seed}, learning rate {self.learning_rate:g}"


@dataclass
class Comparison:
    """What to compare.

    given           presets and YAML files of options, or name -> preset, file or options; the others are compared with
                    the first
    out             the directory of the comparison
    learning_rates  tried for each model at SWEEP_SHARE of the budget; none: each preset's own; one: that
    sweep_beyond    while the best is the lowest or the highest, the next one beyond is tried: at most so many
    seeds           trainings of each model, from training.seed and data.seed upwards
    probes          names in PROBES
    contexts        tokens behind which decoding is timed
    allow_unequal   compare models of different size
    model, data, training   options that differ from the models'; data is one for all, the first model's by default
    """

    given: Sequence[str] | Mapping[str, Given]
    out: Path
    budget: Amount
    seeds: int = 1
    learning_rates: list[float] = field(default_factory=list)
    sweep_beyond: int = 3
    probes: list[str] = field(default_factory=list)
    probe_budget: Amount = field(default=Amount("steps", 500))
    contexts: list[int] = field(default_factory=lambda: [256, 1024, 4096])
    allow_unequal: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if is_url(self.out):
            raise ConfigError(f"--out of a comparison is a directory, got {self.out}; copy the finished one there")
        self.out = Path(self.out).expanduser()
        self.learning_rates = list(dict.fromkeys(self.learning_rates))

    def check(self) -> None:
        """Raise ConfigError, UnknownNameError or DataError for what cannot be compared, before anything is written."""
        if not self.given:
            raise ConfigError("name the models to compare: glissando compare transformer-nano liquid-ssm-nano ...")
        for rate in self.learning_rates:
            if not 0 < rate < math.inf:
                raise ConfigError(f"--learning_rates must be positive, got {rate}")
        if self.seeds < 1:
            raise ConfigError(f"--seeds must be at least 1, got {self.seeds}")
        if not self.contexts or min(self.contexts) < 1:
            raise ConfigError(f"--contexts must be token counts of at least 1, got {self.contexts}")
        self._plan()
        if "learning_rate" in merge(TrainingConfig, self.training).get("optimizer", {}):
            raise ConfigError("the learning rate is given by --learning_rates (one value: no sweep)")
        if budgets := set(BUDGETS) & set(self.training):
            raise ConfigError(f"training.{min(budgets)} is given by --budget, such as --budget {min(budgets)}=1000")
        configs = {name: self.config(Job("run", name, 0, self.rates(name)[0])) for name in self.names}
        for name, config in configs.items():
            config.check(1)
            if config.training.devices > 1:
                raise ConfigError("compare trains in one process on one device; remove training.devices")
            if config.training.early_stopping is not None:
                raise ConfigError(
                    f"training.early_stopping is {config.training.early_stopping} ({name}), which would give each "
                    "model a budget of its own; remove it, or give --training.early_stopping null"
                )
        self._check_data()
        counts = self.parameters()
        if not self.allow_unequal:
            self._require_equal(counts)

    def _check_data(self) -> None:
        """Raise DataError or ConfigError where a corpus cannot be opened, or not read by every model."""
        from glissando.training.language_task import require_rows

        for task in ["", *self.probes]:
            kind = "probe" if task else "run"
            data = self.config(Job(kind, self.names[0], 0, 1.0, task)).data
            corpus = build_corpus(data, None if task else self.tokenizer)
            for name in self.names:
                config = self.config(Job(kind, name, 0, 1.0, task))
                require_rows(config.model, config.data, corpus)
            if self.sweeps and not task and _rows(corpus) < 2:
                raise DataError(
                    "the held-out text has a single row, but a sweep needs some rows to choose a rate and others to "
                    "report; give more held-out text, or one learning rate"
                )

    def parameters(self) -> dict[str, int]:
        """Trainable numbers of each model; a complex number counts twice."""
        counts = {}
        for name in self.names:
            config = self.config(Job("run", name, 0, 1.0))
            config.model.vocab_size = fitted_vocabulary(config.model.vocab_size, self.tokenizer.vocab_size)
            with torch.device("meta"):  # counted, not computed with
                counts[name] = LanguageModel.from_config(config.model).num_parameters()
        return counts

    def _require_equal(self, counts: dict[str, int]) -> None:
        first = counts[self.names[0]]
        if any(abs(count - first) > TOLERANCE * first for count in counts.values()):
            sizes = ", ".join(f"{name} {count:,} ({count / first - 1:+.1%})" for name, count in counts.items())
            raise ConfigError(
                f"parameters differ by more than {TOLERANCE:.0%} from the first model's: {sizes}. Change a size, such "
                "as --model.hidden_size, name other models, or compare them nevertheless with --allow_unequal"
            )

    @functools.cached_property
    def models(self) -> dict[str, dict[str, Any]]:
        """The sections of each model by its name."""
        return read_models(self.given)

    @property
    def names(self) -> list[str]:
        """The models' names, as of run directories."""
        return list(self.models)

    # ------------------------------------------------------------------ jobs

    def rates(self, name: str) -> list[float]:
        """The learning rates to try."""
        if self.learning_rates:
            return self.learning_rates
        training = {"optimizer": self.models[name].get("training", {}).get("optimizer", {})}
        return [from_dict(RunConfig, {"training": training}).training.optimizer.learning_rate]

    @property
    def sweeps(self) -> bool:
        return len(self.learning_rates) > 1

    def sweep_jobs(self) -> list[Job]:
        """The requested rates of every model."""
        return [Job("sweep", name, 0, rate) for name in self.names for rate in self.rates(name)] if self.sweeps else []

    def run_jobs(self, chosen: dict[str, float]) -> list[Job]:
        """Seed by seed, so that all models have one before any has two; a model without a rate is left out."""
        return [Job("run", p, seed, chosen[p]) for seed in range(self.seeds) for p in self.names if p in chosen]

    def probe_jobs(self, chosen: dict[str, float]) -> list[Job]:
        seeds, names = range(self.seeds), [p for p in self.names if p in chosen]
        return [Job("probe", p, seed, chosen[p], task) for task in self.probes for seed in seeds for p in names]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """One for all trainings but probes; of kind bpe trained once, on what the first seed reads, and kept in `out`.

        Each seed reads other text, and would have another vocabulary if it trained its own.
        """
        kept = self.out / TOKENIZER
        return load_tokenizer(kept) if kept.is_file() else build_tokenizer(self._first_data())

    def _first_data(self) -> DataOptions:
        """The data options of the first seed, with the tokenizer as requested."""
        return from_dict(RunConfig, {"data": self.shared_data()}).data

    def config(self, job: Job) -> RunConfig:
        """The resolved configuration of one training. All models read the same batches under the same seed."""
        model = self.models[job.model]
        data = PROBES[job.task].data if job.kind == "probe" else self.shared_data()
        sizes = {"run": self.budget, "sweep": self.budget.times(SWEEP_SHARE), "probe": self.probe_budget}
        rate = {"optimizer": {"learning_rate": job.learning_rate}}
        short = {"sample_every": _NEVER}
        training = merge(
            TrainingConfig, model.get("training", {}), short, self.training, rate, sizes[job.kind].options()
        )
        values = {"preset": model["preset"], "model": merge(ModelConfig, model["model"], self.model), "data": data}
        try:
            config = from_dict(RunConfig, values | {"training": training, "imports": imported()})
        except ConfigError as error:
            raise ConfigError(f"{job.model}: {error}") from error
        if job.kind != "probe" and isinstance(config.data.tokenizer, BpeOptions):
            config.data.tokenizer = FileOptions(path=str(self.out / TOKENIZER))
        config.data.seed += job.seed
        config.training.precision = resolved_precision(config.training.precision, config.training.accelerator)
        config.training.seed += job.seed
        return config

    def shared_data(self) -> dict[str, Any]:
        """The first model's data options with the requested changes; stories where it names no corpus."""
        return merge(CORPORA.section(), self.models[self.names[0]].get("data", {}), self.data)

    # ------------------------------------------------------------------ on disk

    def require_same(self, job: Job) -> None:
        """Raise ConfigError where the job's directory holds a run of other options."""
        path = job.path(self.out)
        if not (path / CONFIG).is_file():
            return
        there = from_dict(RunConfig, Run(path).read_config(), "config.yaml").as_dict()
        requested = self.config(job).as_dict()
        for model in (there["model"], requested["model"]):  # what `fit_to_corpus` decides
            model.pop("vocab_size"), model.get("depth", {}).pop("control_trained", None)
        there.pop("imports", None), requested.pop("imports", None)  # wherever the files lay then
        kept = str(self.out / TOKENIZER)
        if requested["data"]["tokenizer"].get("path") == kept:  # however OUT was spelled then
            there["data"]["tokenizer"].pop("path", None), requested["data"]["tokenizer"].pop("path")
        before, now = flat(there), flat(requested)
        if differing := [name for name in before | now if before.get(name) != now.get(name)]:
            lines = [f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in differing[:4]]
            raise ConfigError(
                f"{path} was trained with other options: {'; '.join(lines)}. Give the same, or another --out"
            )

    def _plan(self) -> dict[str, Any]:
        """What plan.json is to hold: the options, of which those that the tokenizer is trained on cannot change.

        Raises RunError for a directory that is no comparison, ConfigError for one with another tokenizer.
        """
        out, data = self.out, self._first_data()
        trained_on = to_dict(data, CORPORA.section()) if isinstance(data.tokenizer, BpeOptions) else None
        known = trained_on
        if (out / PLAN).is_file():
            known = json.loads((out / PLAN).read_bytes())["tokenizer"]
        elif out.exists() and any(out.iterdir() if out.is_dir() else [out]):
            raise RunError(f"{out} is not empty and holds no {PLAN}; nothing is overwritten: choose another --out")
        if known != trained_on:
            raise ConfigError(
                f"{out} has a tokenizer that was trained with other data options, {known}; give the same, or another "
                "--out"
            )
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("out", "given")}
        options |= {name: str(options[name]) for name in ("budget", "probe_budget")}
        return options | {"models": to_dict(self.given), "tokenizer": trained_on}

    def write_plan(self) -> Path:
        """The options, and the tokenizer where it is trained."""
        target, plan = self.out / PLAN, self._plan()
        write_atomic(target, (json.dumps(plan, indent=2) + "\n").encode())
        if plan["tokenizer"] is not None:
            self.tokenizer.save(self.out / TOKENIZER)
        return target


def _rows(corpus: Corpus) -> int:
    """Held-out rows, counted up to two."""
    return sum(len(batch.ids) for batch in itertools.islice(corpus.batches("valid"), 2))
