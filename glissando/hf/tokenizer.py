"""The library's tokenizers as a `PreTrainedTokenizerFast`, which `AutoTokenizer` opens again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from glissando.data.tokenizers import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer, stand_ins
from glissando.errors import ConfigError
from glissando.pretrained import resolve


def fast_tokenizer(tokenizer: Tokenizer | str | Path, **options: Any) -> PreTrainedTokenizerFast:
    """`tokenizer`, or that of a run or a packaged model, with the same ids for the same text behind the end token.

    Rows are padded on the left with the end token, which the attention mask hides. With `add_special_tokens=False`
    the ids are those of `tokenizer.encode`. `options` are those of PreTrainedTokenizerFast.

    Raises ConfigError for a tokenizer that Hugging Face's format cannot hold, DataError if a directory has none.
    """
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(resolve(tokenizer))
    backend, eos = _backend(tokenizer)
    marked = [(eos, tokenizer.eos_id)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{eos} $A", pair=f"{eos} $A {eos} $B", special_tokens=marked
    )
    defaults: dict[str, Any] = {
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), eos),
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **defaults | options)


def _backend(tokenizer: Tokenizer) -> tuple[Backend, str]:
    """A copy in Hugging Face's format, and the name of its end token.

    Of bytes: byte-level BPE without a merge, 256 tokens, and the end token is the character of its byte. Wherever that
    character stands in a text, it is the end token, as it is for ByteTokenizer.
    """
    if isinstance(tokenizer, HFTokenizer):
        return Backend.from_str(tokenizer.to_json()), tokenizer.eos
    if not isinstance(tokenizer, ByteTokenizer):
        raise ConfigError(
            f"a {type(tokenizer).__name__} has no form in Hugging Face's format; give a ByteTokenizer or an HFTokenizer"
        )
    if (eos_id := tokenizer.eos_id) >= 128:
        raise ConfigError(f"the end token is byte {eos_id}, which is no character by itself; one below 128 can be kept")
    eos = chr(eos_id)
    vocabulary = {eos if byte == eos_id else token: byte for token, byte in stand_ins().items()}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(eos, special=True, normalized=False)])
    return backend, eos
