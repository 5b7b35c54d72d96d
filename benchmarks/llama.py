"""Decoding beside llama.cpp: `python -m benchmarks llama --python /path/to/python`.

The compiled step of three presets and llama.cpp, which runs `transformer-nano` exported as GGUF with weights in float32
and in Q8_0, write greedy tokens in turns, each on one thread. Both sides are called at their lowest level, so that
neither is slowed down by its Python interface, and both choose the largest of the logits with NumPy. The other Python
has llama-cpp-python; nothing else needs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gguf_file as gguf
from benchmarks.speed import Row, random_bytes
from glissando.data.tokenizers import ByteTokenizer
from glissando.decoding.decoder import Decoder
from glissando.errors import GlissandoError
from glissando.model import LanguageModel

#: presets of one size; llama.cpp runs the last
PRESETS = ("liquid-ssm-nano", "continuous-transformer-nano", "transformer-nano")
CONTEXTS = (256, 4096)
_GOALS = {(preset, 4096) for preset in PRESETS[:2]}
#: tokens between two looks at the clock
_TOKENS = 50
#: difference of logits, in parts of the largest, that keys in half precision and another order of sums explain
_EQUAL = 1e-2


class Peer:
    """benchmarks/llama_worker.py under another Python."""

    def __init__(self, python: str) -> None:
        """Raises GlissandoError where it does not start."""
        worker = str(Path(__file__).with_name("llama_worker.py"))
        try:
            self._process = subprocess.Popen(
                [python, "-I", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise GlissandoError(f"--python must be a Python with llama-cpp-python, got {python!r}: {error}") from error

    def __enter__(self) -> Peer:
        try:
            self.version = self._answer()["version"]
        except GlissandoError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            last = (self._process.stderr.read().strip().splitlines() or ["no message"])[-1]
            raise GlissandoError(
                f"llama.cpp's process ended: {last}; --python must be a Python with llama-cpp-python (pip install "
                "llama-cpp-python into an environment of its own)"
            )
        return json.loads(line)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()


def written(model: LanguageModel, prompt: list[int], room: int) -> tuple[Callable[[int], float], torch.Tensor]:
    """Seconds for so many greedy tokens by the compiled step, and the logits (V,) after the prompt."""
    decoder = Decoder(model)
    with torch.no_grad():
        _, state = model(torch.tensor([prompt[:-1]]), model.init_state(1))
        rows = decoder.rows(state)
    after, rows = decoder.step(torch.tensor(prompt[-1:]), rows)
    first = after[0].clone()

    def seconds(tokens: int) -> float:
        nonlocal after, rows
        began = time.perf_counter()
        for _ in range(tokens):
            after, rows = decoder.step(torch.from_numpy(after.numpy().argmax(-1)), rows)
        return time.perf_counter() - began

    return seconds, first


def compared(peer: Peer, context: int, rounds: int, folder: Path) -> list[Row]:
    """Tokens/s of each preset beside each kind of weights of llama.cpp, behind `context` random bytes.

    Raises GlissandoError where llama.cpp computes other logits.
    """
    torch.manual_seed(0)
    models = {preset: LanguageModel.from_preset(preset).eval() for preset in PRESETS}
    prompt, room = random_bytes(1, context)[0].tolist(), _TOKENS * (rounds + 1)
    files = {"F32": str(folder / f"{context}.gguf"), "Q8_0": str(folder / f"{context}-q8.gguf")}
    model, tokenizer = models[PRESETS[-1]], ByteTokenizer()
    vocabulary = gguf.vocabulary_of(tokenizer, model.config.vocab_size)
    gguf.write(model, vocabulary, tokenizer.eos_id, context + room, Path(files["F32"]))
    peer.ask(do="quantise", **{"from": files["F32"], "to": files["Q8_0"]})

    turns: dict[str, Callable[[int], float]] = {}
    for preset, each in models.items():
        turns[preset], logits = written(each, prompt, room)
    for kind, file in files.items():
        theirs = torch.tensor(peer.ask(do="open", name=kind, file=file, prompt=prompt, room=room)["logits"])
        apart = float((theirs[: len(logits)] - logits).abs().max() / logits.abs().max())
        print(f"logits after {context:,} tokens, llama.cpp {kind}: {apart:.1e} of the largest apart", flush=True)
        if kind == "F32" and not apart < _EQUAL:
            raise GlissandoError(f"llama.cpp's logits differ by {apart:.2g} of the largest: it computes something else")
        turns[kind] = lambda tokens, kind=kind: peer.ask(do="time", name=kind, tokens=tokens)["seconds"]  # type: ignore[misc]
    for turn in turns.values():
        turn(_TOKENS)
    spent = [{name: turn(_TOKENS) for name, turn in turns.items()} for _ in range(rounds)]
    rates = {name: statistics.median(_TOKENS / each[name] for each in spent) for name in turns}
    rows = []
    for preset in PRESETS:
        for kind in files:
            ratio = statistics.median(each[kind] / each[preset] for each in spent)
            goal = (preset, context) in _GOALS
            name, wanted = f"{preset} behind {context:,}", "1x" if goal else "none"
            met = not goal or ratio >= 1
            rows.append(Row(name, rates[preset], rates[kind], "tokens/s", ratio, wanted, met, f"llama.cpp {kind}"))
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks llama", description="Decoding beside llama.cpp.")
    parser.add_argument("--python", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds; the median counts")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS), help="tokens before the first")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or min(options.contexts) < 2:
        parser.error("--rounds must be at least 1, and --contexts at least 2")
    torch.set_num_threads(1)
    try:
        gguf.require_installed()
        with Peer(options.python) as peer, tempfile.TemporaryDirectory() as folder:
            print(
                f"torch {torch.__version__}, llama-cpp-python {peer.version}, {options.rounds} rounds, one thread each"
            )
            for context in options.contexts:
                for row in compared(peer, context, options.rounds, Path(folder)):
                    print(row.line(), flush=True)
    except GlissandoError as error:
        print(f"python -m benchmarks llama: {error}", file=sys.stderr)
        return 1
    return 0
