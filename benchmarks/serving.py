"""What `glissando serve` takes and gives: tokens a CPU second through HTTP beside the same texts in process.

The server is a process of its own, and so are its clients. A text has 96 tokens behind a prompt of 64 that nobody sent
before.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks import gguf_file
from benchmarks.speed import Row, beside, llama_like
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import MissingExtraError, TrainingError
from glissando.generation import generate, stream
from glissando.model import LanguageModel

_PROMPT, _NEW, _TEXTS = 64, 96, 32
_seeds = count()
_PROCESSES: dict[int, int] = {}  # of servers, by port


@contextlib.contextmanager
def _served(model: LanguageModel, *options: str) -> Iterator[int]:
    """The port of a server of `model`. Raises MissingExtraError without its packages."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "model"
        model.save(run)
        given = ["--port", "0", *options]
        command = [sys.executable, "-m", "glissando", "serve", str(run), *given]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            if not line:
                raise MissingExtraError(f"the server did not start: {process.stderr.read().strip()}")
            port = int(line.partition("127.0.0.1:")[2].split()[0])
            _PROCESSES[port] = process.pid
            try:
                yield port
            finally:
                process.terminate()


def _rate(port: int, texts: int, stream: bool) -> float:
    """Tokens/s over all clients, of `texts` at a time; the clients are another process."""
    numbers = map(str, (port, texts, int(stream), next(_seeds)))
    command = [sys.executable, "-m", "benchmarks.serving", *numbers]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _prompt(seed: int) -> list[int]:
    """Random letters, others for each seed: the server has not read how they begin."""
    return torch.randint(97, 123, (_PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()


def _ask(port: int, seed: int, stream: bool) -> int:
    """One text, which its end token does not end; how many tokens it has."""
    options = {"max_tokens": _NEW, "seed": seed, "stream": stream, "logit_bias": {"0": -100}}
    _post(port, {"prompt": bytes(_prompt(seed)).decode(), **options})
    return _NEW


def _in_process(model: LanguageModel, texts: int) -> float:
    """Tokens a CPU second of `generate`, or, of one text, of `stream`, at the server's temperature."""
    prompts = [bytes(_prompt(next(_seeds))).decode() for _ in range(texts)]
    options: dict[str, Any] = {"max_tokens": _NEW, "temperature": 1.0, "logit_bias": {0: -100.0}}
    began = time.process_time()
    if texts > 1:
        generate(model, prompts, **options)
    else:
        "".join(stream(model, prompts[0], **options))
    return texts * _NEW / (time.process_time() - began)


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


def _each(texts: int) -> int:
    """Texts of a client: as many as make the times alike."""
    return max(1, 2 * _TEXTS // texts // 8)


def _clients(port: int, texts: int, stream: bool, turn: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(texts) as pool:
        tokens = sum(pool.map(lambda n: _ask(port, 10_000 * turn + n, stream), range(texts * _each(texts))))
    return tokens / (time.perf_counter() - began)


#: presets of equal size
MODELS = {"transformer": "transformer-nano", "liquid": "liquid-ssm-nano", "tau": "tauformer-nano"}


def _cpu_seconds(port: int) -> float:
    """CPU seconds of the server's process, as Linux counts them."""
    fields = Path(f"/proc/{_PROCESSES[port]}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(case: str, texts: int, streamed: bool, rounds: int) -> Row:
    """So many texts at a time, answers sent whole or as they come, against the same in process, without HTTP: by the
    CPU seconds of each process, which other processes do not lengthen."""
    model, least = LanguageModel.from_preset(MODELS[case]).eval(), 0.5 if streamed and texts > 1 else 0.7

    def served() -> float:
        before = _cpu_seconds(port)
        _rate(port, texts, streamed)
        return texts * _each(texts) * _NEW / (_cpu_seconds(port) - before)

    with _served(model) as port:
        name, peer = (
            f"serving {MODELS[case]}, {texts} texts{' streamed' * streamed}",
            "generate" if texts > 1 else "stream",
        )
        return beside(name, served, lambda: _in_process(model, texts), rounds, least, peer, "tokens/CPU s")


def _transformers_command(model: LanguageModel, folder: str) -> list[str]:
    """`transformers serve` with continuous batching: a Llama with `model`'s weights, a character a token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    llama_like(model).save_pretrained(f"{folder}/model")
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(256)}, unk_token=chr(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(f"{folder}/model")
    program = str(Path(sys.executable).with_name("transformers"))
    return [program, "serve", "model", "--device", "cpu", "--continuous-batching"]


def _llama_command(model: LanguageModel, folder: str) -> list[str]:
    """`llama-server` of llama.cpp on one thread: the same weights in float32, a slot for each text."""
    context, tokenizer = 256, ByteTokenizer()
    vocabulary = gguf_file.vocabulary_of(tokenizer, model.config.vocab_size)
    gguf_file.write(model, vocabulary, tokenizer.eos_id, context, Path(folder) / "model.gguf")
    threads = ["--threads", "1", "--threads-batch", "1", "--threads-http", str(_TEXTS)]
    rows = ["--parallel", str(_TEXTS), "--ctx-size", str(_TEXTS * context)]
    sampling = ["--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    return ["llama-server", "--model", "model.gguf", *threads, *rows, *sampling]


#: other servers: what starts them, and what installs them
_PEERS = {
    "transformers serve": (_transformers_command, "pip install 'transformers[serving]'"),
    "llama-server": (_llama_command, "build llama.cpp, put llama-server on the PATH and pip install gguf"),
}


@contextlib.contextmanager
def _peer_served(name: str, model: LanguageModel) -> Iterator[int]:
    """The port of another server of `model`. Raises MissingExtraError where it does not start."""
    made, install = _PEERS[name]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = made(model, folder)
            port = _free_port()
            address = ["--host", "127.0.0.1", "--port", str(port)]
            process = subprocess.Popen([*command, *address], env=offline, cwd=folder, **quiet)
        except (ImportError, OSError) as error:
            raise MissingExtraError(f"{name} did not start ({error}): {install}") from error
        with process:
            _PROCESSES[port] = process.pid
            try:
                if not _listens(port, process):
                    raise MissingExtraError(f"{name} did not start: {install}")
                yield port
            finally:
                process.terminate()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _listens(port: int, process: subprocess.Popen[Any], seconds: float = 120) -> bool:
    """Whether the port answers before the process ends, and in time."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, TrainingError):
            _post(port, {"prompt": "a", "max_tokens": 1})
            return True
        time.sleep(0.2)
    return False


def against(peer: str, rounds: int) -> Row:
    """32 texts at a time through the server against another one with the same weights, by the CPU seconds of both."""
    model = LanguageModel.from_preset("transformer-nano").eval()

    def rate(port: int) -> float:
        before = _cpu_seconds(port)
        _rate(port, _TEXTS, False)
        return _TEXTS * _each(_TEXTS) * _NEW / (_cpu_seconds(port) - before)

    with _served(model) as port, _peer_served(peer, model) as other:
        name = "serving, 1M, 32 texts"
        return beside(name, lambda: rate(port), lambda: rate(other), rounds, 1, peer, "tokens/CPU s")


#: tokens of a prompt behind what it shares with an earlier one
_TAIL = 32


def prefix(case: str, length: int, rounds: int) -> Row:
    """Milliseconds to a text's first token: `length` tokens of its prompt were read before, for another, or none."""
    generator = torch.Generator().manual_seed(0)

    def fresh(tokens: int) -> list[int]:
        return torch.randint(1, 256, (tokens,), generator=generator).tolist()

    model, shared = LanguageModel.from_preset(MODELS[case]), fresh(length)
    with _served(model, "--prefix_mib", "2048", "--max_prompt", str(length + _TAIL + 1)) as port:

        def first(prompt: list[int]) -> float:
            began = time.perf_counter()
            _post(port, {"prompt": prompt, "max_tokens": 1})
            return 1000 * (time.perf_counter() - began)

        first(shared)

        def reused() -> float:
            return first(shared + fresh(_TAIL))

        name = f"first token, {MODELS[case]}, prefix {length:,}"
        return beside(name, reused, lambda: first(fresh(length + _TAIL)), rounds, None, "whole prompt", "ms")


def memory(rounds: int) -> Row:
    """MiB at the server's peak above what it holds with the model alone: 32 answers behind one prompt of 16,384.

    A process is measured once, whatever `rounds` is.
    """
    model, length = LanguageModel.from_preset("transformer-nano"), 16_384
    prompt = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    with _served(model, "--max_prompt", str(length + 1)) as port:
        _post(port, {"prompt": "a", "max_tokens": 2})  # what every answer needs is there
        before = _status_mib(port, "VmRSS")
        _post(port, {"prompt": prompt, "n": _TEXTS, "max_tokens": 64, "logit_bias": {"0": -100}})
        peak = _status_mib(port, "VmHWM") - before
    return Row("32 answers behind 16,384 tokens", peak, None, "MiB", None, "under 400", peak < 400)


def _status_mib(port: int, name: str) -> float:
    """A line of the server's process's status on Linux: VmRSS, what it holds now, or VmHWM, the most it ever held."""
    lines = Path(f"/proc/{_PROCESSES[port]}/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


if __name__ == "__main__":
    print(_clients(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", int(sys.argv[4])))
