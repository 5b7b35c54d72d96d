"""For the tests of pages: a served model whose tokens come when a test wants them, made-up answers, a file server, and
colours."""

from __future__ import annotations

import codecs
import functools
import http.server
import json
import math
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch
import uvicorn

from glissando.model import LanguageModel
from glissando.serving.api import Server
from glissando.serving.http import Limits

PRESETS = {
    "liquid-ssm-nano": {"hidden_size": 32, "depth": {"layers": 2}},
    "hybrid-ode-nano": {
        "hidden_size": 32,
        "mixer": {"kind": "attention", "heads": 2},
        "depth": {"alpha": 2.0, "n_steps": 2, "layers": 2},
    },
}
PROMPTS = ["Once upon a time", "One morning the little fox", "Long ago", '"Who?" said']
LIMITS = Limits(max_prompt=60, max_tokens=2000, max_body=4000)
KEY = "glis-sándo"
EVER = math.inf
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "no chromium, chromium-browser or google-chrome is installed"


def model_of(preset: str) -> LanguageModel:
    """In float64, where rounding flips no draw. Its texts differ, as its weights are spread, and end at their limit."""
    torch.manual_seed(0)
    model = LanguageModel.from_preset(preset, **PRESETS[preset], vocab_size=256, head_bias=True).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else None
        model.head_bias[model.tokenizer.eos_id] = -1e4
    return model


class Gate:
    """Lets the engine's steps through, a token each, the first two: all, or as many as a test allows."""

    def __init__(self) -> None:
        self._left, self._changed = EVER, threading.Condition()

    def allow(self, steps: float) -> None:
        with self._changed:
            self._left = steps
            self._changed.notify()

    def __call__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0)
            self._left -= 1


class Served:
    """A server in a thread, at a port of its own."""

    def __init__(self, model: LanguageModel, others: dict[str, LanguageModel] | None = None, **options) -> None:
        self.model, self.gate = model, Gate()
        self.server = Server({"tiny": model, **(others or {})}, limits=LIMITS, **options)
        self.engine, self._step = self.server.served["tiny"].engine, self.server.served["tiny"].engine.step
        self.engine.step, self.engine.block = self._gated, 1
        config = self.server.config(port=0, log_level="critical", timeout_graceful_shutdown=1)
        self.http = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.http.run, daemon=True)
        self.thread.start()
        until(lambda: self.http.started)
        self.url = f"http://127.0.0.1:{self.http.servers[0].sockets[0].getsockname()[1]}/"

    def _gated(self) -> None:
        self.gate()
        self._step()

    def post(self, path: str, body: dict) -> dict:
        data, head = json.dumps(body).encode(), {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, head)) as answer:
            return json.load(answer)

    def drop_connections(self) -> None:
        loop = self.server._loop
        for connection in list(self.http.server_state.connections):
            loop.call_soon_threadsafe(connection.transport.abort)

    def stop(self) -> None:
        self.gate.allow(EVER)
        self.http.should_exit = True
        self.thread.join(20)


class Files:
    """A folder at a port of its own, as `python -m http.server` serves it."""

    class _Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    def __init__(self, folder: Path) -> None:
        handler = functools.partial(self._Quiet, directory=str(folder))
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def until(met: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def released(tokens: list[str], surprise: list[float]) -> list[tuple[str, float, int]]:
    """(characters, mean surprise, tokens) of what a byte decoder gives out at a time."""
    decoder, spans, pending = codecs.getincrementaldecoder("utf-8")("replace"), [], []
    for index, (token, bits) in enumerate(zip(tokens, surprise, strict=True)):
        raw = bytes.fromhex(token.removeprefix("bytes:\\x")) if token.startswith("bytes:") else token.encode()
        text = decoder.decode(raw, final=index == len(tokens) - 1)
        pending.append(bits)
        if text:
            spans.append((text, sum(pending) / len(pending), len(pending)))
            pending = []
    return spans


def legend(page) -> list[float]:
    """Lower ends of the colours."""
    return [float(least.strip("+")) for least in page.locator("#legend li").all_text_contents()]


def level(bits: float, legend: list[float]) -> int:
    return max(n for n, least in enumerate(legend) if bits >= least)


def title(bits: float, count: int) -> str:
    return f"{bits:.2f} bits" + (f", the mean of {count} tokens" if count > 1 else "")


def spans(page) -> list[tuple[str, str, str]]:
    """What is written: (text, class, what is said of it)."""
    found = page.locator("#written > *").evaluate_all(
        "all => all.map(s => [s.textContent, s.className, s.dataset.description])"
    )
    return [tuple(span) for span in found]


def looked_at(page) -> int:
    """Tokens of the text on a page with its beginning; what is no text counts as the character that stands in."""
    text = page.text_content("#given") + page.text_content("#written")
    return min(160, 1 + len(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\ufffd", text).encode()))


def event(text: str, tokens: dict[str, float], finish: str | None = None) -> str:
    """A chunk of a made-up answer, each token with its bits."""
    logprobs = {"tokens": list(tokens), "token_logprobs": [-bits * math.log(2) for bits in tokens.values()]}
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
    return "data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}, ensure_ascii=False) + "\n\n"


def colours(canvas) -> set:
    """Those of its pixels."""
    return set(canvas.evaluate(
        "c => { const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
        " return [...new Set(d)] }"
    ))  # fmt: skip


def colour(page, selector: str, kind: str) -> tuple[int, ...]:
    found = page.locator(selector).first.evaluate(f"node => getComputedStyle(node).{kind}")
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


def luminance(rgb: tuple[int, ...]) -> float:
    """WCAG 2's relative luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """WCAG 2's contrast ratio, in [1, 21]."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
