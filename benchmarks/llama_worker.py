"""The other side of `python -m benchmarks llama`: llama.cpp decodes, in a process of its own.

Run with a Python that has llama-cpp-python, and with nothing of this library. Each line of stdin is a request in JSON,
and each line of stdout its answer:

    {"do": "quantise", "from": FILE, "to": FILE}                          writes weights as Q8_0
    {"do": "open", "name": NAME, "file": FILE, "prompt": ids, "room": n}  reads the prompt -> {"logits": [...]} after it
    {"do": "time", "name": NAME, "tokens": n}                             -> {"seconds": s} of n greedy tokens
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp as ll
import numpy as np

_CHUNK = 512


class Text:
    """One text of a model, on one thread, with llama.cpp's defaults otherwise (a cache of keys in half precision)."""

    def __init__(self, file: str, prompt: list[int], room: int) -> None:
        model = ll.llama_model_load_from_file(file.encode(), ll.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp does not load {file}")
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        options = ll.llama_context_default_params()
        options.n_ctx, options.n_batch = len(prompt) + room, _CHUNK
        options.n_threads = options.n_threads_batch = 1
        self.context = ll.llama_init_from_model(model, options)
        for begin in range(0, len(prompt), _CHUNK):
            self.read(prompt[begin : begin + _CHUNK])

    def read(self, ids: list[int]) -> None:
        tokens = (ll.llama_token * len(ids))(*ids)
        if ll.llama_decode(self.context, ll.llama_batch_get_one(tokens, len(ids))) != 0:
            raise SystemExit("llama.cpp's llama_decode failed")

    def logits(self) -> Any:
        """(V,), shared with llama.cpp."""
        return np.ctypeslib.as_array(ll.llama_get_logits_ith(self.context, -1), (self.vocabulary,))

    def write(self, tokens: int) -> None:
        for _ in range(tokens):
            self.read([int(self.logits().argmax())])


def answer(request: dict[str, Any], texts: dict[str, Text]) -> dict[str, Any]:
    if request["do"] == "quantise":
        options = ll.llama_model_quantize_default_params()
        options.ftype, options.nthread = ll.LLAMA_FTYPE_MOSTLY_Q8_0, 1
        failed = ll.llama_model_quantize(request["from"].encode(), request["to"].encode(), ctypes.byref(options))
        if failed:
            raise SystemExit(f"llama.cpp does not quantise {request['from']}")
        return {}
    if request["do"] == "open":
        texts[request["name"]] = Text(request["file"], request["prompt"], request["room"])
        return {"logits": texts[request["name"]].logits().tolist()}
    began = time.perf_counter()
    texts[request["name"]].write(request["tokens"])
    return {"seconds": time.perf_counter() - began}


def main() -> None:
    ll.llama_log_set(_SILENT, None)
    ll.llama_backend_init()
    texts: dict[str, Text] = {}
    print(json.dumps({"version": ll.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), texts)), flush=True)


_SILENT = ll.llama_log_callback(lambda level, text, data: None)

if __name__ == "__main__":
    main()
