"""Text, pairs and probes: a language model predicts the next token of a corpus."""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glissando.backbone import for_saved_weights
from glissando.checkpoints import BEST, CHECKPOINTS
from glissando.data.base import IGNORED, WHOLE, Batch, Corpus, Shard, Split
from glissando.data.corpora import CORPORA, DataOptions, build_corpus
from glissando.errors import ConfigError
from glissando.evaluation.scoring import accepted_control, divergence, merged, score_part, to_device, token_losses
from glissando.flops import forward_flops, training_flops, training_flops_or_nan
from glissando.generation import generate, tokens_left
from glissando.kernels.compiled import compiled_by_row_length
from glissando.loading import BASE, load
from glissando.metrics import read_metrics, summarize, summary_lines
from glissando.model import LanguageModel, ModelConfig
from glissando.runs import METRICS, Run
from glissando.sharding import is_sharded, whole_weights
from glissando.text_row import visible
from glissando.training.calibration import Calibration
from glissando.training.config import RunConfig, fitted_vocabulary
from glissando.training.observation import Observation
from glissando.training.start import start_tokenizer
from glissando.training.task import Loss, Sums, Task

_ROW_LENGTHS = 64  # so many a compiled model is compiled for; at others it runs as it is


def open_task(config: RunConfig, resumed: Run | None) -> LanguageTask:
    """The task of a new run, whose model's options are fitted to the corpus, or of one that is `resumed`."""
    tokenizer = None
    if resumed is not None:
        tokenizer = resumed.require_tokenizer()
    elif config.start_from is not None:
        tokenizer = start_tokenizer(Run.open(config.start_from), config.data)
    corpus = build_corpus(config.data, tokenizer)
    notes = [] if resumed is not None else fit_to_corpus(config, corpus)
    base = None
    if config.training.neutral_kl:
        source = config.start_from if resumed is None else resumed.path / BASE
        base = load(str(source)).requires_grad_(False)
        if config.training.precision == "64-true":
            base.double()
    return LanguageTask(config, corpus, base, notes)


class LanguageTask(Task):
    """Cross-entropy over the scored targets and, where there is a base, a tie of u = 0 to it:

    sum over scored targets of (-log p(target) + neutral_kl * KL(base || model at u = 0))
    """

    def __init__(
        self, config: RunConfig, corpus: Corpus, base: LanguageModel | None = None, notes: Sequence[str] = ()
    ) -> None:
        self.config, self.corpus, self.base, self.notes = config, corpus, base, notes
        self.nominal = config.data.batch_size * config.data.seq_len
        self.columns = ("train_bits_per_byte", "train_accuracy", "valid_bits_per_byte", "valid_accuracy")
        if base is not None:
            self.columns += ("neutral_kl",)
        self.carries = config.training.carry > 0
        self._flops_at = functools.lru_cache(maxsize=_ROW_LENGTHS)(training_flops_or_nan)
        compiles = config.training.compile
        self._logits: Any = compiled_by_row_length(_logits, _ROW_LENGTHS) if compiles else _logits

    @property
    def epoch_rows(self) -> int | None:
        return self.corpus.epoch_rows

    @property
    def turns(self) -> int:
        return self.corpus.turns

    def new_model(self, saved: bool = False) -> LanguageModel:
        config = self.config
        model = LanguageModel(for_saved_weights(config.model) if saved else config.model, self.corpus.tokenizer)
        if model.config.controls and not self.corpus.control_names:
            model.depth.control.requires_grad_(False)  # weight decay would act on what labels do not train
        if config.training.flops is not None:
            training_flops(model, 1)  # raises for a mixer or depth whose FLOPs are not known
        # before weights are loaded into it
        return model.double() if config.training.precision == "64-true" else model

    def batches(self, split: Split, step: int = 0, shard: Shard = WHOLE) -> Iterator[Batch]:
        return self.corpus.batches(split, start=step, shard=shard)

    def steps(self, step: int, shards: Sequence[Shard]) -> Iterator[list[Batch]]:
        return self.corpus.steps(step, shards, self.carries)

    # ---------------------------------------------------------------------- the loss

    def loss(self, model: LanguageModel, batch: Batch, state: Any = None, logged: bool = False) -> Loss:
        targets = int((batch.targets != IGNORED).sum())  # before the batch is on a device
        batch = to_device(batch, model.embedding.weight.device)
        logits, expected, state = self._scored(model, batch, targets, state)
        nats = token_losses(logits, expected).sum()
        also: dict[str, Any] = {"n_bytes": batch.n_bytes}
        if logged:
            also |= {"hits": (logits.detach().argmax(-1) == expected).sum(), "judged": targets}
        if self.base is None:
            return Loss(nats, targets, also, state)
        neutral = self._neutral_kl(model, self.base, batch)
        also |= {"nats": nats.detach(), "neutral": neutral.detach()}
        return Loss(nats + self.config.training.neutral_kl * neutral, targets, also, state)

    def _scored(self, model: LanguageModel, batch: Batch, targets: int, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Logits (B, T, V), their targets (B, T) and the state; of the scored positions alone, (1, N, V) and (1, N),
        where these are the fewer: with a large vocabulary the others would cost more than the layers."""
        few = 0 < 2 * targets < batch.targets.numel()
        if not few or self.config.training.compile or self.base is not None or is_sharded(model):
            logits, state = self._logits(model, batch, state)
            return logits, batch.targets, state
        control = accepted_control(model, batch)
        features, state = model(batch.ids, state, mask=batch.mask, control=control, head=False)
        scored = batch.targets != IGNORED
        return model.logits(features[scored].unsqueeze(0)), batch.targets[scored].unsqueeze(0), state

    def _neutral_kl(self, model: LanguageModel, base: LanguageModel, batch: Batch) -> Tensor:
        assert batch.control is not None
        with torch.no_grad():
            expected, _ = base.to(batch.ids.device)(batch.ids, mask=batch.mask)  # without a control: u = 0
        neutral = batch._replace(control=torch.zeros_like(batch.control))
        return divergence(expected, self._logits(model, neutral, None)[0], batch.targets)

    def flops(self, model: LanguageModel, batch: Batch) -> float:
        """A tie to a base adds that model's forward pass and one more of this one, trained."""
        rows, length = batch.ids.shape
        cost = self._flops_at(model, length)
        if self.base is not None and not math.isnan(cost):
            cost = 2 * cost + forward_flops(self.base, length).total
        return rows * length * cost

    def row(self, sums: Sums) -> dict[str, Any]:
        """The accuracy is that of the last step's batch alone."""
        also, targets = sums.also, max(sums.targets, 1)
        nats = also.get("nats", sums.loss)
        row = {
            "train_loss": nats / targets,
            "train_bits_per_byte": nats / math.log(2) / max(also.get("n_bytes", 0), 1),
            "train_accuracy": also["hits"] / max(also["judged"], 1) if "hits" in also else "",
        }
        return row | ({"neutral_kl": also["neutral"] / targets} if self.base is not None else {})

    # ---------------------------------------------------------------------- scores and samples

    def score(
        self, model: LanguageModel, device: torch.device, stride: int = 1, shard: Shard = WHOLE
    ) -> dict[str, float]:
        batches = itertools.islice(self.batches("valid", shard=shard), stride // 2, None, stride)
        score = merged(score_part(model, batches, device), shard.world)
        figures = {
            "valid_loss": score.loss, "valid_bits_per_byte": score.bits_per_byte, "valid_accuracy": score.accuracy,
        }  # fmt: skip
        return figures if score.floor is None else figures | {"entropy_floor": score.floor}

    def sample(self, model: LanguageModel, tokens: int = 200) -> str:
        """A held-out beginning, a bar, and how the model goes on."""
        prompt = self.corpus.prompts(1, seed=0)[0]
        tokens = min(tokens, tokens_left(model, len(self.corpus.tokenizer.encode(prompt)) + 2))
        model.eval()
        try:
            with whole_weights(model):
                texts = generate(model, prompt, max_tokens=tokens, temperature=0.8, top_p=0.9) if tokens else [""]
        finally:
            model.train()
        return visible(f"{prompt}|{texts[0]}")

    # ---------------------------------------------------------------------- around the training

    def hooks(self) -> list[Any]:
        return [Observation(), Calibration()]

    def describe(self, batch: Batch) -> str:
        shapes = [f"{k} {tuple(v.shape)}" for k, v in batch._asdict().items() if hasattr(v, "shape")]
        t = self.config.training
        parts = f" in {t.accumulate} parts" if t.accumulate > 1 else ""
        return (
            f"data {CORPORA.kind_of(self.config.data)}, a step: {self.config.data.batch_size} rows{parts}; a batch: "
            f"{', '.join(shapes)}"
        )

    def write(self, run: Run) -> None:
        """The tokenizer, and a copy of the base: it is needed to resume, and to measure steering against."""
        run.write_tokenizer(self.corpus.tokenizer)
        if self.base is not None:
            self.base.save(run.path / BASE)

    def summary(self, run: Run, best_step: int) -> dict[str, Any]:
        return summarize(read_metrics(run.path / METRICS), best_step)

    def closing(self, summary: Mapping[str, Any], run: Run, name: str) -> list[str]:
        lines = summary_lines(summary, str(run.path / CHECKPOINTS / BEST), self._beside())
        if not summary["finished"]:
            return lines
        if self.corpus.problems:
            lines.append(self.corpus.problems)
        prompt, where = self.corpus.prompts(1)[0], shlex.quote(name)
        option = f" --prompt={shlex.quote(prompt)}" if prompt.isprintable() else ""
        return [*lines, f"run: {name}   (try: glissando generate {where}{option})"]

    def _beside(self) -> str:
        """The floor where it is known; of a text, what its tokens' frequencies alone would have."""
        if self.corpus.entropy_floor is not None:
            return f" (floor {self.corpus.entropy_floor:.3f})"
        if CORPORA.kind_of(self.config.data) not in ("text", "jsonl", "hub"):
            return ""
        counts = torch.ones(self.corpus.tokenizer.vocab_size, dtype=torch.float64)
        for batch in itertools.islice(self.corpus.batches("train"), 64):
            counts += batch.targets[batch.targets != IGNORED].bincount(minlength=len(counts))
        surprise, bits, n_bytes = -(counts / counts.sum()).log2(), 0.0, 0
        for batch in itertools.islice(self.corpus.batches("valid"), 16):
            bits += float(surprise[batch.targets[batch.targets != IGNORED]].sum())
            n_bytes += batch.n_bytes
        return f" (by its tokens' frequencies alone: {bits / n_bytes:.2f})"


def _logits(model: LanguageModel, batch: Batch, state: Any) -> tuple[Tensor, Any]:
    return model(batch.ids, state, mask=batch.mask, control=accepted_control(model, batch))


def fit_to_corpus(config: RunConfig, corpus: Corpus) -> list[str]:
    """Give the model the corpus's vocabulary; returns what a person should know of how they fit.

    Raises ConfigError or DataError for options that do not fit the corpus.
    """
    notes, model = [], config.model
    size, tokens = model.vocab_size, corpus.tokenizer.vocab_size
    # A preset's vocabulary is that of its published tokenizer; a smaller tokenizer leaves a part of it unused.
    model.vocab_size = fitted_vocabulary(size, tokens)
    if size > tokens and model.vocab_size == size:
        notes.append(
            f"the tokenizer has {tokens} tokens of the model's {size:,} (--model.vocab_size {tokens}: no more)"
        )
    elif size not in (ModelConfig.vocab_size, tokens):
        notes.append(f"--model.vocab_size {size} is too small and not used: the tokenizer has {tokens} tokens")
    require_rows(model, config.data, corpus)
    labels = list(corpus.control_names)
    if hasattr(model.depth, "control_trained"):
        if labels:
            model.depth.control_trained = True
        elif config.start_from is None:  # else it is as trained as it was
            model.depth.control_trained = False
    if model.controls and not labels:
        notes.append(f"the corpus has no labels: the dials {', '.join(model.controls)} are not trained")
    if model.controls and labels and model.controls != labels:
        raise ConfigError(
            f"model.depth.control is {model.controls}, and the corpus's labels are {labels}: give both the same names "
            "in the same order"
        )
    if config.training.neutral_kl and not (config.start_from and labels and model.controls):
        raise ConfigError(
            "training.neutral_kl ties the model at u = 0 to the one that training started from: it needs --from RUN "
            f"(or stages; got {config.start_from}), a model with dials (model.depth.control, got {model.controls}) and "
            f"a labelled corpus (labels: {', '.join(labels) or 'none'}); or leave it out"
        )
    return notes


def require_rows(model: ModelConfig, data: DataOptions, corpus: Corpus) -> None:
    """Raises DataError if there is too little to train on, ConfigError for rows longer than learned positions."""
    width = max(batch.ids.shape[1] for batch in itertools.islice(corpus.batches("train"), 4))  # rows may vary
    limit, seq_len = model.max_length, data.seq_len
    if limit is None:
        return
    if seq_len > limit:
        raise ConfigError(
            f"data.seq_len {seq_len} is longer than model.max_length {limit}: lower it to {limit} or less"
        )
    if width > limit:
        fix = "--data.cut true" if hasattr(data, "cut") else "another corpus"
        raise ConfigError(
            f"corpus {CORPORA.kind_of(data)} has rows of {width} tokens, whatever data.seq_len is, and "
            f"model.max_length is {limit}: give {fix}, or --model.max_length {width}"
        )
