"""Starting: seconds from a new process to its first token, beside those that PyTorch's import takes in another."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.speed import Row, paired
from glissando.errors import TrainingError
from glissando.model import LanguageModel

_PRESET = "liquid-ssm-nano"
_GOAL = 2.0  # seconds
#: the machine's own number of threads, as a user has it
_PLAIN = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def _imported() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=_PLAIN)
    return time.perf_counter() - began


def _row(name: str, started: Callable[[Path], float], rounds: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "model"
        LanguageModel.from_preset(_PRESET).save(run)
        seconds, torch, ratio = paired(lambda: started(run), _imported, rounds)
    goal = f"under {_GOAL:g} s"
    return Row(f"{name} to its first token", seconds, torch, "s", ratio, goal, seconds < _GOAL, "import torch")


def _process(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "glissando", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=_PLAIN)


def generate(rounds: int) -> Row:
    """`glissando generate`, which writes nothing before there is a token."""

    def started(run: Path) -> float:
        began = time.perf_counter()
        with _process("generate", str(run), "--prompt", "Once", "--max_tokens", "1", "--seed", "1") as process:
            assert process.stdout is not None
            if not process.stdout.read(1):
                raise TrainingError("glissando generate wrote nothing")
            return time.perf_counter() - began

    return _row("glissando generate", started, rounds)


def serve(rounds: int) -> Row:
    """`glissando serve`, asked as soon as it listens."""

    def started(run: Path) -> float:
        began = time.perf_counter()
        with _process("serve", str(run), "--port", "0") as process:
            assert process.stdout is not None
            try:
                port = int(process.stdout.readline().partition("127.0.0.1:")[2].split()[0])
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
                request = {"model": "model", "prompt": "Once", "max_tokens": 1}
                link.request("POST", "/v1/completions", json.dumps(request), {"content-type": "application/json"})
                answer = link.getresponse()
                answer.read()
                if answer.status != 200:
                    raise TrainingError(f"the server answered {answer.status}")
                return time.perf_counter() - began
            finally:
                process.terminate()

    return _row("glissando serve", started, rounds)
