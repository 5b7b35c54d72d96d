"""Tokenizers of the published kinds, built by code: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from glissando.data.tokenizers import END_OF_TEXT, HFTokenizer

ASCII = [chr(c) for c in range(33, 127)]
PRINTABLE = ["[UNK]", "[SEP]", *ASCII, *(f"##{c}" for c in ASCII)]


def wordpiece_backend(pieces: Sequence[str]) -> Tokenizer:
    """BERT's pipeline over `pieces`."""
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def wordpiece(pieces: Sequence[str] = PRINTABLE) -> HFTokenizer:
    return HFTokenizer(wordpiece_backend(pieces))


def bert() -> Tokenizer:
    """As `bert-base-uncased`: 30522 pieces, special tokens among them, [CLS] and [SEP] around a text."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = ["[PAD]", *(f"[unused{i}]" for i in range(99)), *special, *ASCII, *(f"##{c}" for c in ASCII)]
    words = ("".join(letters) for letters in product("etaoinshrdlucmwfgypbvk", repeat=4))
    pieces += islice(words, 30522 - len(pieces))
    backend = wordpiece_backend(pieces)
    backend.add_special_tokens(["[PAD]", *special])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, pieces.index(name)) for name in ("[CLS]", "[SEP]")]
    )
    return backend


def gpt2() -> Tokenizer:
    """As `gpt2`: 256 bytes, 50000 merges and <|endoftext|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (not char.islower(), char != "Ġ", char))
    merges = list(islice(product(alphabet, repeat=2), 50_000))
    tokens = [*alphabet, *(a + b for a, b in merges), END_OF_TEXT]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=True, special=True)])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_fallback() -> HFTokenizer:
    """As Llama's: words with their space marked, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcé.", "▁a", "bc"]
    merges = [("▁", "a"), ("b", "c")]
    model = models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return HFTokenizer(backend)
