"""Speed and size of the compared models, measured when all are trained: machines are noisy, so they take turns.

decode    milliseconds of a token behind so many, batch 1, drawn and written as `generate` does: `rounds` times each
          model writes some, the median counts
step      which step that is: compiled, or plain (the model's own forward)
train     tokens/s of a step (loss, gradients, AdamW) on random ids in the shape and precision of training
state     bytes of the state behind so many tokens, all tensors of it
memory    MiB of the weights and of all that PyTorch allocates beside them in such a step at its peak: activations,
          gradients, and AdamW's moments
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.config import from_dict
from glissando.data.corpora import build_corpus
from glissando.decoding import decoder_of
from glissando.evaluation.scoring import score
from glissando.generation import BLOCK, Continuation
from glissando.loading import load
from glissando.machine import allocated_at_peak
from glissando.model import LanguageModel
from glissando.precision import flushed_subnormals
from glissando.runs import Run
from glissando.sampling import Sampling
from glissando.state import State, map_state, state_bytes
from glissando.training.config import RunConfig

ROUNDS = 5
_TOKENS = 2 * BLOCK
#: seconds for which steps are timed
_TIMED = 1.0
#: as the samples of the report are drawn
SAMPLING = Sampling(temperature=0.8, top_p=0.9)


@dataclass
class _Entry:
    """A trained model, and how it was trained."""

    model: LanguageModel
    config: RunConfig

    @classmethod
    def open(cls, path: Path) -> _Entry:
        config = from_dict(RunConfig, Run.open(path).read_config(), "config.yaml")
        return cls(load(path).to(device_of(config)), config)

    def ids(self, rows: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.model.config.vocab_size, (rows, length), generator=generator)
        return ids.to(self.model.embedding.weight.device)

    def rows(self) -> tuple[int, int]:
        """Rows of a step, and tokens of one: the median of a few, as a corpus of whole texts has rows of its own."""
        corpus = build_corpus(self.config.data, self.model.tokenizer)
        widths = [batch.ids.shape[1] for batch in itertools.islice(corpus.batches("train"), 9)]
        return self.config.data.batch_size, int(min(statistics.median_low(widths), self.max_length()))

    def max_length(self) -> float:
        limit = self.model.config.max_length
        return float("inf") if self.model.position_embedding is None or limit is None else limit


def device_of(config: RunConfig) -> torch.device:
    """Where this run is measured: where it was trained."""
    on_gpu = config.training.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")


def measure_speed(
    runs: dict[str, Path], contexts: Sequence[int], status: Callable[[str], None], rounds: int = ROUNDS
) -> dict[str, Any]:
    """name -> its figures, of the run at each path; `status` takes what is being measured."""
    entries = {name: _Entry.open(path) for name, path in runs.items()}
    streaming = {n: entry for n, entry in entries.items() if not getattr(entry.model.depth, "recomputes", False)}
    result: dict[str, Any] = {
        name: {"decode": {}, "state": {}, "step": _kind(entry.model)} for name, entry in entries.items()
    }
    for context in contexts:
        status(f"measuring speed: decoding after {context:,} tokens")
        able = {n: entry for n, entry in streaming.items() if context + _TOKENS <= entry.max_length()}
        for name, (times, size) in _decoding(able, context, rounds).items():
            result[name]["decode"][str(context)] = _figure(times)
            result[name]["state"][str(context)] = size
    status("measuring speed: training steps in turn")
    for name, rates in _in_turn({name: _step_of(entry) for name, entry in entries.items()}, rounds).items():
        result[name]["train"] = _figure(rates)
    for name, entry in entries.items():
        status(f"measuring speed: memory of {name}")
        result[name]["memory_mib"] = _memory(entry)
    return result


class Cost(NamedTuple):
    """Seconds on this machine as it is now: of a token of a training step and of such a step, of all held-out text, and
    of building the corpus and the model."""

    token: float
    step: float
    held_out: float
    start: float


def cost_of(config: RunConfig) -> Cost:
    """What such a model takes, of kernels that are then compiled.

    config    with the tokenizer's vocabulary
    """
    began = time.perf_counter()
    entry = _Entry(LanguageModel(config.model).to(device_of(config)), config)
    rows, length = entry.rows()
    start, step = time.perf_counter() - began, _step_of(entry)
    step()
    began, steps = time.perf_counter(), 0
    while steps < 3 or (time.perf_counter() - began < _TIMED and steps < 50):
        step()
        steps += 1
    taken = (time.perf_counter() - began) / steps
    corpus = build_corpus(config.data, entry.model.tokenizer)
    number, first = sum(1 for _ in corpus.batches("valid")), next(corpus.batches("valid"))
    for _ in range(2):  # the first compiles what steps do not use
        began = time.perf_counter()
        score(entry.model, [first])
    return Cost(taken / (rows * length), taken, (time.perf_counter() - began) * number, start)


def _kind(model: LanguageModel) -> str:
    return "plain" if isinstance(decoder_of(model, "auto", with_control=False), str) else "compiled"


def _figure(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _decoding(entries: dict[str, _Entry], context: int, rounds: int) -> dict[str, tuple[list[float], int]]:
    """Milliseconds a token of each round, and bytes of the state behind `context` tokens."""
    with torch.no_grad():
        read = {name: _read(entry, context) for name, entry in entries.items()}
        writing = {name: partial(_milliseconds, entry.model, *read[name]) for name, entry in entries.items()}
        return {name: (times, state_bytes(read[name][1])) for name, times in _in_turn(writing, rounds).items()}


def _in_turn(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each of them measures in each round; one before these warms up."""
    figures = [[measure() for measure in measures.values()] for _ in range(rounds + 1)]
    return {name: [taken[i] for taken in figures[1:]] for i, name in enumerate(measures)}


def _read(entry: _Entry, context: int) -> tuple[int, State]:
    logits, state = entry.model(entry.ids(1, context), entry.model.init_state(1))
    return int(logits[0, -1].argmax()), state


def _milliseconds(model: LanguageModel, latest: int, state: State) -> float:
    """A token of a text that `generate` writes from a copy of the state."""
    state = map_state(torch.clone, state)
    began = time.perf_counter()
    for _ in Continuation(model, [[latest]], _TOKENS, SAMPLING, state=state, block=BLOCK):
        pass  # each token was on the CPU to be yielded: nothing is left to wait for
    return 1e3 * (time.perf_counter() - began) / _TOKENS


def trainer(
    module: nn.Module, ids: Tensor, arithmetic: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], float]:
    """Tokens/s of one training step (loss, gradients, AdamW) that predicts ids[:, 1:], as `train` computes it, within
    `arithmetic()`."""
    # The fused optimizer refuses complex parameters, which published forms have.
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=not any(p.is_complex() for p in parameters))

    @flushed_subnormals()
    def step() -> float:
        _wait(ids)
        began = time.perf_counter()
        with arithmetic():
            output = module(ids[:, :-1])
            logits = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else output.logits
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        _wait(ids)
        return ids[:, 1:].numel() / (time.perf_counter() - began)

    return step


def _step_of(entry: _Entry) -> Callable[[], float]:
    rows, length = entry.rows()
    device, mixed = entry.model.embedding.weight.device.type, entry.config.training.precision == "bf16-mixed"
    return trainer(
        entry.model, entry.ids(rows, 1 + length), partial(torch.autocast, device, torch.bfloat16, enabled=mixed)
    )


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def _memory(entry: _Entry) -> float:
    """MiB of a step, see the module, and of the weights."""
    model = entry.model
    weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    step = _step_of(entry)  # of an optimizer that has no state before its first step
    return (weights + allocated_at_peak(model.embedding.weight.device, step)) / 2**20
