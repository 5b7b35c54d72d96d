"""glissando laplacian: a graph over features for a Tauformer, built from a domain or shown."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from glissando.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from glissando.data.base import Corpus
    from glissando.data.tokenizers import Tokenizer

EXAMPLE = "glissando laplacian build --corpus stories --vocabulary 512 --size 64 --out stories.safetensors"
USAGE = """glissando laplacian build SOURCE --out FILE [options]
       glissando laplacian show FILE"""
NEIGHBORS = 8
TOKENS = 1_000_000
#: rows and width of the arrays for which threads are chosen
_USUAL = (1024, 256)

SOURCES = ("embeddings", "corpus", "text")
#: options of corpus and text alone
_OF_TEXT = ("tokens", "vocabulary")


def main(arguments: Sequence[str]) -> None:
    """Build a Laplacian and save it, or show a saved one."""
    from glissando.cli.options import Parser, parse, whole

    parser = Parser("laplacian", "Build a graph over features for a Tauformer, or show one.", EXAMPLE, USAGE)
    add = parser.add_argument
    add("action", "build, or show")
    add("file", "for show: the file", nargs="?")
    add("--embeddings", "source: vectors (n, F) of a domain, .npy or .safetensors")
    add("--corpus", "source: co-occurrence in a corpus that needs no file, such as stories")
    add("--text", "source: co-occurrence in a text file, without its held-out end")
    add("--size", "head size to project to", whole)
    add("--neighbors", f"number of neighbours that each feature chooses ({NEIGHBORS})", whole)
    add("--tokens", f"for a text: number of tokens to read ({TOKENS:,})", whole)
    add("--vocabulary", "for a text: vocabulary of a BPE; by default bytes", whole)
    add("--out", "for build: the file to write")
    parser.add_shared("threads")
    options = parse(parser, arguments)
    if options.action not in ("build", "show"):
        raise unknown_name("action", options.action, ("build", "show"))
    print(build(options) if options.action == "build" else show(options), flush=True)


def build(options: Namespace) -> str:
    """Makes the file; what was made of what, in two lines."""
    _require_source(options)
    if options.file is not None:
        raise ConfigError(f"build takes no file, got {options.file}; name the one to write with --out")
    if options.out is None:
        raise ConfigError("--out is missing: name the file to write, such as --out domain.safetensors")
    from glissando.cli.options import choose_threads

    from . import laplacian as graphs

    options.out = str(Path(options.out).expanduser())
    graphs.refuse_existing(options.out)
    choose_threads(options, *_USUAL)
    neighbors = NEIGHBORS if options.neighbors is None else options.neighbors
    embeddings, counts, about = _embed(options)
    laplacian = graphs.from_embeddings(embeddings, neighbors, counts)
    about |= {"features": str(len(laplacian)), "neighbors": str(neighbors)}
    laplacian = graphs.normalise(laplacian if options.size is None else graphs.project(laplacian, options.size))
    graphs.save(options.out, laplacian, about)
    n_edges = graphs.edges_of(laplacian)[1].numel()
    listed = ", ".join(f"{name} {value}" for name, value in about.items())
    return f"written: {options.out}, {len(laplacian)} nodes, {n_edges} edges\n{listed}"


def show(options: Namespace) -> str:
    """A saved Laplacian in figures, one a line."""
    if extra := _given(options, (*SOURCES, *_OF_TEXT, "neighbors", "size", "out")):
        raise ConfigError(f"show takes a file alone; leave out --{', --'.join(extra)}")
    if options.file is None:
        raise ConfigError("show needs a file: glissando laplacian show domain.safetensors")
    import torch

    from . import laplacian as graphs

    laplacian, about = graphs.load(options.file)
    degrees, parts = laplacian.diagonal(), len(graphs.components(laplacian))
    eigenvalues = torch.linalg.eigvalsh(laplacian)
    figures = {
        "size": len(laplacian),
        "edges": graphs.edges_of(laplacian)[1].numel(),
        "degrees": f"{float(degrees.min()):.4g} to {float(degrees.max()):.4g}, mean {float(degrees.mean()):.4g}",
        "components": parts,
    }
    if parts < len(laplacian):  # the eigenvalue 0 has one vector for each component
        name = "algebraic connectivity" if parts == 1 else "smallest nonzero eigenvalue"
        figures[name] = f"{float(eigenvalues[parts]):.4g}"
    figures |= {"largest eigenvalue": f"{float(eigenvalues[-1]):.4g}"} | about
    return "\n".join(f"{name:28} {value}" for name, value in figures.items())


def _require_source(options: Namespace) -> None:
    """Raise ConfigError for no source, for several, and for an option that it has no use for."""
    sources = _given(options, SOURCES)
    if len(sources) != 1:
        got = " and ".join(f"--{name}" for name in sources) or "none"
        raise ConfigError(f"build needs exactly one source, got {got}; choose one of --{', --'.join(SOURCES)}")
    if sources == ["embeddings"] and (extra := _given(options, _OF_TEXT)):
        raise ConfigError(f"--{extra[0]} does nothing for --embeddings; leave it out, or build from --corpus, --text")


def _given(options: Namespace, names: Iterable[str]) -> list[str]:
    return [name for name in names if getattr(options, name) is not None]


def _embed(options: Namespace) -> tuple[Tensor, Tensor | None, dict[str, str]]:
    """Embeddings (n, F), how often each row counts, and their description: names of files, never their folders."""
    if options.embeddings is not None:
        path = Path(options.embeddings)
        return read_embeddings(path), None, {"source": f"embeddings {path.name}"}
    from glissando.data.tokenizers import train_bpe

    from .laplacian import token_embeddings_from_corpus

    budget = TOKENS if options.tokens is None else options.tokens
    if budget < 2:
        raise ConfigError(f"--tokens must be at least 2, got {budget}; {TOKENS:,} is the default")
    corpus = _corpus(options)
    tokenizer: Tokenizer = corpus.tokenizer
    if options.vocabulary is not None:
        as_bytes = _sequences(corpus, tokenizer, budget)
        tokenizer = train_bpe(map(tokenizer.decode, as_bytes), options.vocabulary)
    sequences = _sequences(corpus, tokenizer, budget)
    vectors, counts = token_embeddings_from_corpus(sequences, tokenizer.vocab_size)
    name = f"corpus {options.corpus}" if options.text is None else f"text {Path(options.text).name}"
    kind = "bytes" if options.vocabulary is None else f"{tokenizer.vocab_size} BPE tokens"
    return vectors, counts, {"source": name, "tokenizer": kind, "tokens": str(int(counts.sum()))}


def _corpus(options: Namespace) -> Corpus:
    """Text to count in, of which the held-out part stays unseen."""
    from glissando.data.corpora import CORPORA, TextOptions, build_corpus
    from glissando.data.textfile import open_files

    if options.text is not None:
        if not Path(options.text).expanduser().is_file():
            raise ConfigError(f"cannot read --text {options.text}: there is no such file")
        open_files(options.text, "--text")
        return build_corpus(TextOptions(path=options.text))
    CORPORA.require(options.corpus)
    files = [name for name, cls in CORPORA.options.items() if any(field.name == "path" for field in fields(cls))]
    if options.corpus in files:
        free = ", ".join(name for name in CORPORA if name not in files)
        raise ConfigError(f"the corpus {options.corpus} is a file: give --text FILE, or one that needs none: {free}")
    return build_corpus(CORPORA.read(options.corpus))


def _sequences(corpus: Corpus, tokenizer: Tokenizer, tokens: int) -> Iterator[list[int]]:
    """Each text as ids, `tokens` of them in all if there are as many."""
    for text in corpus.texts("train"):
        ids = tokenizer.encode(text)[:tokens]
        yield ids
        tokens -= len(ids)
        if tokens <= 0:
            return


def read_embeddings(path: Path) -> Tensor:
    """The matrix in a .npy file, or the only one of a .safetensors file.

    Raises ConfigError for a file that is missing, of another kind or malformed, or that holds several tensors.
    """
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"cannot read --embeddings {path}: there is no such file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix != ".npy":
        raise ConfigError(f"--embeddings takes a .npy or .safetensors file, got {path}; save the vectors as one")
    import numpy as np
    import torch

    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(
            f"{path} is truncated or no .npy file of numbers ({error}); save it with numpy.save"
        ) from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise ConfigError(f"{path} holds no array of real numbers; save the vectors (n, F) with numpy.save")
    return torch.from_numpy(array.astype(np.float64))


def _read_safetensors(path: Path) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if len(names) != 1:
                raise ConfigError(f"{path} holds {len(names)} tensors, {', '.join(names)}; save the vectors alone")
            return file.get_tensor(names[0])
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is truncated or no safetensors file ({error}); save it again") from None
