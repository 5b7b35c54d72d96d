"""Speed and size of the compared models, measured when all are trained: machines are noisy, so they take turns.

decode    milliseconds of a token behind so many, batch 1, by the step that `generate` takes: `rounds` times each model
          writes a few, the median counts
step      which step that is: compiled, or plain (the model's own forward)
train     tokens/s of a step (loss, gradients, AdamW) on random ids in the shape and precision of training
state     bytes of the state behind so many tokens, all tensors of it
memory    MiB of the weights and of all that two such steps need beside them at their peak: activations, gradients and
          AdamW's moments. In a process of its own, over what it holds after a step that is not counted, so that imports
          and compiled kernels are no part of it
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.compare.memory import forget_peak, is_reported, peak_bytes, release_freed, resident_bytes
from glissando.config import from_dict
from glissando.data.corpora import build_corpus
from glissando.data.tokenizers import Tokenizer
from glissando.decoding import decoder_of, step_from
from glissando.errors import GlissandoError
from glissando.imports import import_file, imported
from glissando.loading import load
from glissando.model import LanguageModel
from glissando.precision import flushed_subnormals
from glissando.progress import elapsed_and_left
from glissando.runs import Run
from glissando.state import State, map_state, state_bytes
from glissando.training.config import RunConfig

ROUNDS = 5
_MEASURING = "glissando.compare.speed"  # run as a program, where __name__ is another
_TOKENS = 16
#: about what each part takes of a model of a million parameters, in seconds: the rest of the time is estimated by it
_READ, _DECODE, _STEP, _MEMORY = 5e-4, 0.1, 0.3, 2.0  # a token of a context, a round, a step, a process


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


class _Work:
    """What is done of a measurement, by what its parts take beside each other, and the time that is left."""

    def __init__(self, total: float, status: Callable[[str], None]) -> None:
        self.total, self.status = total, status
        self.done, self.doing, self.began = 0.0, 0.0, time.perf_counter()

    def begin(self, what: str, seconds: float) -> None:
        self.done, self.doing = self.done + self.doing, seconds
        share = min(1.0, self.done / self.total)
        times = elapsed_and_left(time.perf_counter() - self.began, share)
        self.status(f"measuring speed, {100 * share:.0f} %: {what}; {times}")


def measure_speed(
    runs: dict[str, Path], contexts: Sequence[int], status: Callable[[str], None], rounds: int = ROUNDS
) -> dict[str, Any]:
    """name -> its figures, of the run at each path; `status` takes what is being measured, and the time left."""
    entries = {name: _Entry.open(path) for name, path in runs.items()}
    streaming = {n: entry for n, entry in entries.items() if not getattr(entry.model.depth, "recomputes", False)}
    able = {c: {n: entry for n, entry in streaming.items() if c + _TOKENS <= entry.max_length()} for c in contexts}
    decoding = sum(len(able[c]) * (c * _READ + (rounds + 1) * _DECODE) for c in contexts)
    work = _Work(decoding + len(runs) * ((rounds + 1) * _STEP + _MEMORY), status)
    result: dict[str, Any] = {
        name: {"decode": {}, "state": {}, "step": _kind(entry.model)} for name, entry in entries.items()
    }
    for context in contexts:
        for name, (times, size) in _decoding(able[context], context, rounds, work).items():
            result[name]["decode"][str(context)] = _figure(times)
            result[name]["state"][str(context)] = size
    for name, rates in _training(entries, rounds, work).items():
        result[name]["train"] = _figure(rates)
    measured = training_memory(list(runs.values()))
    for name in runs:
        work.begin(f"memory of {name}", _MEMORY)
        result[name]["memory_mib"] = next(measured)
    return result


def training_speed(
    configs: Mapping[str, RunConfig], tokenizer: Tokenizer, status: Callable[[str], None], rounds: int = ROUNDS
) -> dict[str, float]:
    """name -> tokens/s of a training step of a new model, the median of what they do in turn.

    configs    with the tokenizer's vocabulary
    """
    entries = {
        name: _Entry(LanguageModel(config.model, tokenizer).to(device_of(config)), config)
        for name, config in configs.items()
    }
    work = _Work(len(entries) * (rounds + 1) * _STEP, status)
    return {name: statistics.median(rates) for name, rates in _training(entries, rounds, work).items()}


def warm_up(config: RunConfig) -> None:
    """One step and a few decoded tokens of such a model, so that its kernels are compiled before a clock runs.

    config    with the tokenizer's vocabulary
    """
    entry = _Entry(LanguageModel(config.model).to(device_of(config)), config)
    _step_of(entry)()
    entry.model.eval()
    with torch.no_grad():
        _milliseconds(entry.model, *_read(entry, _TOKENS))


def _kind(model: LanguageModel) -> str:
    return "plain" if isinstance(decoder_of(model, "auto", with_control=False), str) else "compiled"


def _figure(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _decoding(entries: dict[str, _Entry], context: int, rounds: int, work: _Work) -> dict[str, tuple[list[float], int]]:
    """Milliseconds a token of each round, and bytes of the state behind `context` tokens."""
    with torch.no_grad():
        read: dict[str, tuple[Tensor, State]] = {}
        for name, entry in entries.items():
            work.begin(f"{name} reads {context:,} tokens", context * _READ)
            read[name] = _read(entry, context)
        times: dict[str, list[float]] = {name: [] for name in entries}
        for turn in range(rounds + 1):
            for name, entry in entries.items():
                work.begin(f"{name} decodes after {context:,} tokens", _DECODE)
                taken = _milliseconds(entry.model, *read[name])
                if turn:  # the first warms up
                    times[name].append(taken)
        return {name: (times[name], state_bytes(read[name][1])) for name in entries}


def _read(entry: _Entry, context: int) -> tuple[Tensor, State]:
    logits, state = entry.model(entry.ids(1, context), entry.model.init_state(1))
    return logits[:, -1].argmax(-1), state


def _milliseconds(model: LanguageModel, latest: Tensor, state: State) -> float:
    """A greedy token by the step that `generate` takes, from a copy of the state; the first token is not counted."""
    step = step_from(model, map_state(torch.clone, state), "auto", with_control=False, spare=_TOKENS)
    latest = step(latest, None).argmax(-1)
    _wait(latest)
    began = time.perf_counter()
    for _ in range(_TOKENS - 1):
        latest = step(latest, None).argmax(-1)
    _wait(latest)
    return 1e3 * (time.perf_counter() - began) / (_TOKENS - 1)


def trainer(module: nn.Module, ids: Tensor) -> Callable[[], float]:
    """Tokens/s of one training step (loss, gradients, AdamW) that predicts ids[:, 1:], as `train` computes it."""
    parameters = list(module.parameters())
    # The fused optimizer refuses complex parameters, which published forms have.
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=not any(p.is_complex() for p in parameters))

    @flushed_subnormals()
    def step() -> float:
        began = time.perf_counter()
        output = module(ids[:, :-1])
        logits = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else output.logits
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return ids[:, 1:].numel() / (time.perf_counter() - began)

    return step


def _training(entries: dict[str, _Entry], rounds: int, work: _Work) -> dict[str, list[float]]:
    """Tokens/s of a step of each round."""
    steps = {name: _step_of(entry) for name, entry in entries.items()}
    rates: dict[str, list[float]] = {name: [] for name in entries}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            work.begin(f"training steps in turn, {name}", _STEP)
            rate = step()
            if turn:
                rates[name].append(rate)
    return rates


def _step_of(entry: _Entry) -> Callable[[], float]:
    rows, length = entry.rows()
    ids = entry.ids(rows, 1 + length)
    step = trainer(entry.model, ids)

    def once() -> float:
        _wait(ids)
        began = time.perf_counter()
        with _arithmetic(entry):
            step()
        _wait(ids)
        return ids[:, 1:].numel() / (time.perf_counter() - began)

    return once


def _arithmetic(entry: _Entry) -> contextlib.AbstractContextManager:
    if entry.config.training.precision != "bf16-mixed":
        return contextlib.nullcontext()
    return torch.autocast(entry.model.embedding.weight.device.type, torch.bfloat16)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def training_memory(paths: Sequence[Path]) -> Iterator[float | None]:
    """MiB of the run at each path, by a process for each, as `_memory` measures it.

    Raises GlissandoError, with its errors, if one fails.
    """
    command = [sys.executable, "-m", _MEASURING, *map(str, paths), "--", *imported()]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8") as process,
    ):
        assert process.stdout is not None
        for path in paths:
            line = process.stdout.readline()
            if not line:
                status = process.wait()
                errors.seek(0)
                raise GlissandoError(f"measuring the memory of {path} failed: {errors.read().strip() or status}")
            yield json.loads(line)["mib"]


def _memory(entry: _Entry) -> float | None:
    """MiB: the weights, and the peak of two steps of training over what this process holds without them; None where
    the system does not report it.

    Where the system does not forget a peak (macOS, some containers) and starting took more, that is counted.
    """
    _step_of(entry)()  # what stays for every model alike: imports, kernels, pools of threads
    step = _step_of(entry)  # of an optimizer that has no state before its first step
    release_freed()
    if entry.model.embedding.weight.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        step(), step()
        return torch.cuda.max_memory_allocated() / 2**20  # the weights among it
    if not is_reported():
        return None
    forget_peak()
    before = resident_bytes()
    step(), step()
    return (peak_bytes() - before + _weights(entry.model)) / 2**20


def _weights(model: LanguageModel) -> int:
    """Bytes of parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def _main(arguments: Sequence[str]) -> None:
    """RUN ... -- FILE ...: a line of JSON for each run, the files being imported first."""
    end = arguments.index("--")
    paths, files = arguments[:end], arguments[end + 1 :]
    for path in paths:
        if hasattr(os, "fork"):
            # A fork has the libraries, which take seconds to import, and nothing that a model has left.
            child = os.fork()
            if child == 0:
                _print_memory(path, files)
                os._exit(0)
            failed = os.waitpid(child, 0)[1] != 0
        elif len(paths) == 1:
            return _print_memory(path, files)
        else:
            failed = subprocess.run([sys.executable, "-m", _MEASURING, path, "--", *files], check=False).returncode != 0
        if failed:
            sys.exit(1)


def _print_memory(path: str, files: Sequence[str]) -> None:
    for file in files:
        import_file(file)
    print(json.dumps({"mib": _memory(_Entry.open(Path(path)))}), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
