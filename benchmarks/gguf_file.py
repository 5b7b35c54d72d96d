"""GGUF: models that compute as Llama does, for llama.cpp.

    python -m benchmarks.gguf_file RUN --out DIR

    x <- x + Wo attention(rope(Wq n(x)), rope(Wk n(x)), Wv n(x)),   x <- x + Wdown (silu(Wgate n'(x)) * Wup n'(x))

llama.cpp turns neighbouring features (2i, 2i + 1) where this library turns (i, i + K/2): the rows of Wq and Wk are put
into that order, which changes no logit. Bytes become a vocabulary of 256 single-byte tokens of GPT-2's kind.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.block import RMSNorm
from glissando.data.tokenizers import ByteTokenizer, HFTokenizer, Tokenizer, stand_ins
from glissando.depth import DiscreteConfig
from glissando.errors import GlissandoError, MissingExtraError, Refused
from glissando.export import check
from glissando.export.check import Check
from glissando.generation import tokenizer_of
from glissando.mixers import AttentionConfig
from glissando.mixers.rope import ROPE_BASE
from glissando.model import LanguageModel
from glissando.runs import Run, require_new
from glissando.storage import publishing, write_atomic

FILE = "model.gguf"
_LLAMA = "export with --to onnx, or train the preset transformer"
#: kinds of tokens
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5

_EXAMPLE = '''"""python example.py "Once upon a time" -- needs llama-cpp-python."""

import pathlib
import sys

from llama_cpp import Llama

model = Llama(str(pathlib.Path(__file__).parent / "model.gguf"), n_ctx={context}, verbose=False)
prompt = " ".join(sys.argv[1:]) or "Once upon a time"
for piece in model(prompt, max_tokens=200, temperature=0.8, stream=True):
    print(piece["choices"][0]["text"], end="", flush=True)
print()
'''

_TEXT = """
## Running it

`{file}` holds the model in float32, as llama.cpp's architecture `llama`, with its tokenizer.

    python example.py "Once upon a time"                # needs llama-cpp-python
    llama-cli -m {file} -p "Once upon a time" -n 200 -no-cnv
    llama-quantize {file} small.gguf Q8_0               # smaller, by llama.cpp's own tools

It was trained on rows of {context} tokens, which is its context_length; its rotary positions continue beyond it. A text
begins with the token {end}, which llama.cpp puts there by itself.
"""


def require_installed() -> None:
    """Raise MissingExtraError where the package is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("benchmarks.gguf_file needs gguf: pip install gguf") from error


def export(model: LanguageModel, context: int, out: Path) -> Check:
    """Write the new folder `out`: the file, its tokenizer, README.md and example.py; checked by reading the file back
    and computing Llama's equations from it in NumPy.

    context  tokens of a row in training

    Raises Refused for a model that computes otherwise than Llama does, RunError where there is something at `out`.
    """
    require_installed()
    require_new(out)
    tokenizer = tokenizer_of(model)
    require_llama(model)
    vocabulary = vocabulary_of(tokenizer, model.config.vocab_size)
    with publishing(out) as folder:
        write(model, vocabulary, tokenizer.eos_id, context, folder / FILE)
        reader = NumpyLlama(folder / FILE)
        found = check.compare(model, reader, reader.start, None, "Llama's equations in NumPy, from the file")
        found.require_equal()
        tokenizer.save(folder)
        write_atomic(folder / "example.py", _EXAMPLE.format(context=context).encode())
        text = _TEXT.format(file=FILE, context=context, end=tokenizer.eos_id)
        heading = (
            f"# A language model as GGUF\n\nMade by benchmarks.gguf_file: {model.num_parameters():,} parameters.\n"
        )
        checked = "\n## Checked\n\n" + "\n".join(f"    {line}" for line in found.lines()) + "\n"
        write_atomic(folder / "README.md", (heading + text + checked).encode())
        return found


def require_llama(model: LanguageModel) -> None:
    """Raise Refused, naming the option, for a model whose computation is not Llama's."""
    c = model.config
    mixer = c.mixers[0]
    if len(c.mixers) > 1 or not isinstance(mixer, AttentionConfig) or not isinstance(c.depth, DiscreteConfig):
        raise Refused(
            "GGUF holds models that compute as Llama does, a stack of attention blocks, and this model is none: "
            f"{_LLAMA}"
        )
    size = model.depth.blocks[0].mixer.head_size  # type: ignore[index,union-attr]
    expected: dict[str, tuple[Any, Any]] = {
        "representation": (c.representation, "real"),
        "max_length": (c.max_length, None),
        "norm": (c.norm, "rms"),
        "final_norm": (c.final_norm, True),
        "head_bias": (c.head_bias, False),
        "depth.gated": (c.depth.gated, []),
        "depth.mean_gate": (c.depth.mean_gate, False),
        "depth.shortcuts": (c.depth.shortcuts, False),
        "block.order": (c.block.order, "pre"),
        "block.mixer_scale": (c.block.mixer_scale, None),
        "block.conv_width": (c.block.conv_width, 0),
        "block.mlp.kind": (c.block.mlp.kind, "swiglu"),
        "block.mlp.bias": (c.block.mlp.bias, False),
        "mixer.keys": (mixer.keys, "own"),
        "mixer.window": (mixer.window, None),
        "mixer.bias": (mixer.bias, False),
        "mixer.rope": (mixer.rope, True),
        "mixer.rope_width": (mixer.rope_width or size, size),
        "mixer.rope_on_value": (mixer.rope_on_value, False),
        "mixer.forget_gate": (mixer.forget_gate, False),
    }
    for name, (given, needed) in expected.items():
        if given != needed:
            raise Refused(
                f"GGUF is for models that compute as Llama does, and model.{name} is {given!r} where Llama has "
                f"{needed!r}: {_LLAMA}"
            )


def write(
    model: LanguageModel, vocabulary: tuple[list[str], list[int], list[str]], end: int, context: int, path: Path
) -> None:
    """The file at `path`."""
    from gguf import GGUFWriter

    c = model.config
    blocks: Any = model.depth.blocks
    mixer = blocks[0].mixer
    writer = GGUFWriter(path, "llama")
    writer.add_name("glissando")
    writer.add_context_length(context)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(len(blocks))
    writer.add_feed_forward_length(blocks[0].mlp.down.in_features)
    writer.add_head_count(mixer.heads)
    writer.add_head_count_kv(mixer.kv_heads)
    writer.add_key_length(mixer.head_size)
    writer.add_value_length(mixer.head_size)
    writer.add_rope_dimension_count(mixer.head_size)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(RMSNorm.eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_file_type(0)  # all in float32
    tokens, types, merges = vocabulary
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(end)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    for name, tensor in tensors(model).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.detach().float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The weights under llama.cpp's names; a scale other than Llama's is multiplied into them."""
    c = model.config
    named: dict[str, Any] = {"token_embd.weight": model.embedding.weight, "output_norm.weight": model.norm.weight}
    if model.head is not None or c.logit_scale != 1.0:
        head: Any = model.embedding if model.head is None else model.head
        named["output.weight"] = head.weight * c.logit_scale
    for i, block in enumerate(model.depth.blocks):  # type: ignore[arg-type]
        mixer: Any = block.mixer
        q, k, v = mixer.qkv.weight.split([heads * mixer.head_size for heads in mixer._split])
        scale = 1.0 if mixer.config.scale is None else mixer.config.scale * math.sqrt(mixer.head_size)
        gate, up = block.mlp.up.weight.chunk(2)
        own = {
            "attn_norm": block.mixer_norm.weight,
            "attn_q": _interleaved(q * scale, mixer.head_size),
            "attn_k": _interleaved(k, mixer.head_size),
            "attn_v": v,
            "attn_output": mixer.out.weight,
            "ffn_norm": block.mlp_norm.weight,
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": block.mlp.down.weight,
        }
        named |= {f"blk.{i}.{name}.weight": tensor for name, tensor in own.items()}
    return named


def _interleaved(weight: Tensor, head_size: int) -> Tensor:
    """(H K, D) with rows (i, i + K/2) of each head side by side."""
    return weight.unflatten(0, (-1, 2, head_size // 2)).transpose(1, 2).flatten(0, 2)


def vocabulary_of(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens by id, in GPT-2's stand-ins for bytes; their kinds; and the merges.

    Raises Refused for a tokenizer that is neither of bytes nor GPT-2's kind of byte-level BPE.
    """
    if isinstance(tokenizer, ByteTokenizer):
        letters = {byte: letter for letter, byte in stand_ins().items()}
        pieces = [letters[byte] for byte in range(256)]
        merges: list[str] = []
    else:
        pieces, merges = _byte_level(tokenizer)
    types = [_NORMAL] * len(pieces)
    types[tokenizer.eos_id] = _CONTROL
    unused = [f"<unused{i}>" for i in range(len(pieces), size)]
    # llama.cpp needs a merge; one of letters that no byte stands for never happens.
    return pieces + unused, types + [_UNUSED] * len(unused), merges or ["\u2400 \u2401"]


def _byte_level(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    refused = Refused(
        "GGUF needs a tokenizer of bytes, or byte-level BPE as GPT-2's (data.tokenizer bpe): this run's is another; "
        "export with --to onnx"
    )
    if not isinstance(tokenizer, HFTokenizer) or tokenizer.token_bytes is None:
        raise refused
    spec = json.loads(tokenizer.to_json())
    steps = spec["pre_tokenizer"]
    if spec["model"]["type"] != "BPE" or steps["type"] != "ByteLevel" or not steps.get("use_regex", True):
        raise refused
    by_id = {index: token for token, index in spec["model"]["vocab"].items()}
    by_id |= {token["id"]: token["content"] for token in spec["added_tokens"]}
    pieces = [by_id.get(i, f"<unused{i}>") for i in range(tokenizer.vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return pieces, merges


class NumpyLlama:
    """Llama's equations as llama.cpp has them, from nothing but a GGUF file of ours."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        reader = GGUFReader(path)
        self.weights = {t.name: np.array(t.data, np.float32) for t in reader.tensors}
        fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
        self.layers, self.heads = fields["llama.block_count"], fields["llama.attention.head_count"]
        self.groups, self.size = fields["llama.attention.head_count_kv"], fields["llama.attention.key_length"]
        self.base, self.eps = fields["llama.rope.freq_base"], fields["llama.attention.layer_norm_rms_epsilon"]

    def start(self, rows: int) -> list[Tensor]:
        return [torch.zeros(rows, 0, self.groups, self.size) for _ in range(2 * self.layers)]

    def __call__(self, ids: Tensor, *state: Tensor) -> list[Tensor]:
        """Logits, and the keys and values of all tokens so far."""
        x, after = self.weights["token_embd.weight"][ids.numpy()], []
        for i in range(self.layers):
            w = {name: self.weights[f"blk.{i}.{name}.weight"] for name in _PARTS}
            y, k, v = self._attention(self._norm(x, w["attn_norm"]), w, *(s.numpy() for s in state[2 * i : 2 * i + 2]))
            after += [torch.from_numpy(k), torch.from_numpy(v)]
            x = x + y
            h = self._norm(x, w["ffn_norm"])
            gate = h @ w["ffn_gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
        head = self.weights.get("output.weight", self.weights["token_embd.weight"])
        return [torch.from_numpy(self._norm(x, self.weights["output_norm.weight"]) @ head.T), *after]

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.eps) * weight

    def _attention(self, x: np.ndarray, w: dict[str, np.ndarray], keys: np.ndarray, values: np.ndarray) -> Any:
        rows, new, past = *x.shape[:2], keys.shape[1]
        q, k, v = (
            (x @ w[f"attn_{name}"].T).reshape(rows, new, -1, self.size) for name in ("q", "k", "v")
        )  # (B, T, H or G, K)
        keys, values = np.concatenate([keys, self._turned(k, past)], 1), np.concatenate([values, v], 1)
        share = self.heads // self.groups
        logits = np.einsum("bthk,bjhk->bhtj", self._turned(q, past), keys.repeat(share, 2)) / math.sqrt(self.size)
        hidden = np.arange(past + new) > past + np.arange(new)[:, None]
        logits = np.where(hidden, -np.inf, logits)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("bhtj,bjhk->bthk", weights, values.repeat(share, 2)).reshape(rows, new, -1)
        return y @ w["attn_output"].T, keys, values

    def _turned(self, x: np.ndarray, past: int) -> np.ndarray:
        """Neighbouring features turned by position."""
        angle = np.arange(past, past + x.shape[1])[:, None] * self.base ** (-np.arange(0, self.size, 2) / self.size)
        cos, sin = (part.astype(np.float32)[:, None] for part in (np.cos(angle), np.sin(angle)))
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


_PARTS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def main() -> None:
    """Export a run."""
    from glissando.loading import load

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_file", description=__doc__)
    parser.add_argument("run", help="run directory of a model such as `transformer-nano`")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    options = parser.parse_args()
    try:
        model = load(options.run)
        context = int(Run.open(options.run).read_config().get("data", {}).get("seq_len", 512))
        found = export(model, context, options.out)
    except GlissandoError as error:
        sys.exit(str(error))
    print("\n".join(found.lines()))


if __name__ == "__main__":
    main()
