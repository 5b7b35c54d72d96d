"""What `glissando serve` takes and gives: tokens/s by texts at a time, through HTTP, beside Hugging Face's generate.

The server is a process of its own, and so are its clients. A round is 32 texts of at most 96 tokens behind prompts of
64 that nobody sent before.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import torch

from benchmarks.speed import Row, llama_like, paired
from glissando.errors import MissingExtraError, TrainingError
from glissando.model import LanguageModel

_PROMPT, _NEW, _TEXTS = 64, 96, 32
_seeds = count()


@contextlib.contextmanager
def _served(model: LanguageModel, step: str = "auto", prefix_mib: int = 0, *options: str) -> Iterator[int]:
    """The port of a server of `model`. Raises MissingExtraError without its packages."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "model"
        model.save(run)
        command = [
            sys.executable,
            "-m",
            "glissando",
            "serve",
            str(run),
            "--port",
            "0",
            "--prefix_mib",
            str(prefix_mib),
            "--step",
            step,
            *options,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            if not line:
                raise MissingExtraError(f"the server did not start: {process.stderr.read().strip()}")
            try:
                yield int(line.partition("127.0.0.1:")[2].split()[0])
            finally:
                process.terminate()


def _rate(port: int, texts: int, stream: bool) -> float:
    """Tokens/s over all clients, of `texts` at a time; the clients are another process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving",
        str(port),
        str(texts),
        str(int(stream)),
        str(next(_seeds)),
    ]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _ask(port: int, seed: int, stream: bool) -> int:
    """One text; how many tokens it has."""
    prompt = [1 + (seed * 7919 + i * i) % 255 for i in range(_PROMPT)]
    body = _post(port, {"prompt": prompt, "max_tokens": _NEW, "seed": seed, "stream": stream, "logprobs": 0})
    if not stream:
        return json.loads(body)["usage"]["completion_tokens"]
    events = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    return sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events)


def _post(port: int, request: dict[str, object]) -> bytes:
    """The answer's body. Raises TrainingError for another status than 200."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = json.dumps({"model": "model", **request})
    link.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = link.getresponse()
    found = answer.read()
    link.close()
    if answer.status != 200:
        raise TrainingError(f"the server answered {answer.status}: {found[:200]!r}")
    return found


def _clients(port: int, texts: int, stream: bool, turn: int) -> float:
    """A text a client where there is one, as many after each other as make the times alike where there are many."""
    each = max(1, 2 * _TEXTS // texts // 8)
    began = time.perf_counter()
    with ThreadPoolExecutor(texts) as pool:
        tokens = sum(pool.map(lambda n: _ask(port, 10_000 * turn + n, stream), range(texts * each)))
    return tokens / (time.perf_counter() - began)


#: presets of equal size
MODELS = {"transformer": "transformer-nano", "liquid": "liquid-ssm-nano", "tau": "tauformer-nano"}


def throughput(case: str, stream: bool, rounds: int) -> Row:
    """32 texts at a time against one, answers sent whole, or every token as it comes."""
    with _served(LanguageModel.from_preset(MODELS[case])) as port:
        many, one, ratio = paired(lambda: _rate(port, _TEXTS, stream), lambda: _rate(port, 1, stream), rounds)
    how = "streamed" if stream else "whole"
    return Row(f"serving {MODELS[case]}, {how}", many, one, "tokens/s", ratio, "10x", ratio >= 10, "one text")


def compiled(case: str, texts: int, rounds: int) -> Row:
    """So many texts at a time by the compiled step against the plain one."""
    model = LanguageModel.from_preset(MODELS[case])
    with _served(model, "compiled") as ours, _served(model, "plain") as theirs:
        fast, slow, ratio = paired(lambda: _rate(ours, texts, False), lambda: _rate(theirs, texts, False), rounds)
    return Row(f"serving {MODELS[case]}, {texts} texts", fast, slow, "tokens/s", ratio, "none", True, "plain step")


def against_generate(rounds: int) -> Row:
    """32 texts at a time through the server against Hugging Face's `generate` of the same model, one by one."""
    model = LanguageModel.from_preset("transformer-nano").eval()
    peer = llama_like(model).eval()
    generator = torch.Generator().manual_seed(0)

    def loop() -> float:
        tokens, began = 0, time.perf_counter()
        with torch.no_grad():
            for _ in range(4):
                prompt = torch.randint(1, 256, (1, _PROMPT), generator=generator)
                tokens += peer.generate(prompt, max_new_tokens=_NEW, do_sample=True, use_cache=True).shape[1] - _PROMPT
        return tokens / (time.perf_counter() - began)

    with _served(model) as port:
        ours, theirs, ratio = paired(lambda: _rate(port, _TEXTS, False), loop, rounds)
    return Row("serving, 1M, 32 texts", ours, theirs, "tokens/s", ratio, "8x", ratio >= 8, "HF generate in a loop")


#: tokens of a prompt behind what it shares with an earlier one
_TAIL = 32


def prefix(case: str, length: int, rounds: int) -> Row:
    """Milliseconds to a text's first token: `length` tokens of its prompt were read before, for another, or none."""
    generator = torch.Generator().manual_seed(0)

    def fresh(tokens: int) -> list[int]:
        return torch.randint(1, 256, (tokens,), generator=generator).tolist()

    model, shared = LanguageModel.from_preset(MODELS[case]), fresh(length)
    with _served(model, "auto", 2048, "--max_prompt", str(length + _TAIL + 1)) as port:

        def first(prompt: list[int]) -> float:
            began = time.perf_counter()
            _post(port, {"prompt": prompt, "max_tokens": 1})
            return 1000 * (time.perf_counter() - began)

        first(shared)
        reused, whole, ratio = paired(
            lambda: first(shared + fresh(_TAIL)), lambda: first(fresh(length + _TAIL)), rounds
        )
    name = f"first token, {MODELS[case]}, prefix {length:,}"
    return Row(name, reused, whole, "ms", ratio, "none", True, "whole prompt")


if __name__ == "__main__":
    print(_clients(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", int(sys.argv[4])))
