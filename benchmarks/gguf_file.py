"""GGUF: models that compute as Llama does, for llama.cpp.

    python -m benchmarks.gguf_file RUN --out FILE

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
from torch import Tensor

from glissando.block import RMSNorm
from glissando.data.tokenizers import ByteTokenizer, HFTokenizer, Tokenizer, stand_ins
from glissando.depth import DiscreteConfig
from glissando.errors import GlissandoError, MissingExtraError, Refused, RunError
from glissando.generation import tokenizer_of
from glissando.mixers import AttentionConfig
from glissando.mixers.rope import ROPE_BASE
from glissando.model import LanguageModel
from glissando.runs import Run

_LLAMA = "export with --to onnx, or train the preset transformer"
#: kinds of tokens
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def require_installed() -> None:
    """Raise MissingExtraError where the package is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("benchmarks.gguf_file needs gguf: pip install gguf") from error


def export(model: LanguageModel, context: int, path: Path) -> None:
    """Write the file of a model that was trained on rows of `context` tokens.

    Raises Refused for a model that computes otherwise than Llama does, RunError where there is something at `path`.
    """
    require_installed()
    if path.exists():
        raise RunError(f"{path} exists; nothing is overwritten: name another --out")
    require_llama(model)
    tokenizer = tokenizer_of(model)
    write(model, vocabulary_of(tokenizer, model.config.vocab_size), tokenizer.eos_id, context, path)


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


def main() -> None:
    """Export a run."""
    from glissando.loading import load

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_file", description=__doc__)
    parser.add_argument("run", help="run directory of a model such as `transformer-nano`")
    parser.add_argument("--out", type=Path, required=True, help="file to create, such as model.gguf")
    options = parser.parse_args()
    try:
        model = load(options.run)
        context = int(Run.open(options.run).read_config().get("data", {}).get("seq_len", 512))
        export(model, context, options.out)
    except GlissandoError as error:
        sys.exit(str(error))
    print(f"written: {options.out}, in float32, a context of {context:,} tokens")


if __name__ == "__main__":
    main()
