"""The vocabulary of GPT-2: the two files that OpenAI published, fetched once and checked by their digests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from urllib.request import urlopen

from glissando.cache_directory import cache_dir
from glissando.data.tokenizers import END_OF_TEXT, HFTokenizer
from glissando.errors import DataError
from glissando.storage import write_atomic

URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
#: each file's SHA-256, as OpenAI's own `tiktoken` pins it (`tiktoken_ext/openai_public.py`)
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def gpt2() -> HFTokenizer:
    """Byte-level BPE with GPT-2's 50,257 ids, `<|endoftext|>` being 50256.

    The files lie under gpt2 in the cache directory and are checked at every use; one that is missing or has changed is
    fetched. Raises DataError where it cannot be, or where what comes is another file.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary, merges = (str(_file(name)) for name in ("encoder.json", "vocab.bpe"))
    backend = Tokenizer(models.BPE.from_file(vocabulary, merges))
    backend.add_special_tokens([END_OF_TEXT])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return HFTokenizer(backend)


def _file(name: str) -> Path:
    path, url = cache_dir("gpt2") / name, f"{URL}/{name}"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256[name]:
        return path
    by_hand = (
        f"put GPT-2's {name} at {path}, or name a file of GPT-2's vocabulary: --data.tokenizer path/to/tokenizer.json"
    )
    try:
        with urlopen(url, timeout=30) as source:
            content = source.read()
    except OSError as error:
        raise DataError(f"cannot fetch {url} ({error}); {by_hand}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256[name]:
        raise DataError(f"{url} is not the file expected: its SHA-256 is {digest}, and not {SHA256[name]}; {by_hand}")
    write_atomic(path, content)
    return path
