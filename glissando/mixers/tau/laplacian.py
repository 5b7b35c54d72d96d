"""Laplacians over features: the graph on which the energy of a vector is measured, and that energy.

Features are nodes. Weights A_ij = A_ji >= 0 with A_ii = 0 give the unnormalised Laplacian, Deg_ii = sum_j A_ij:

    L = Deg - A,    x'Lx = sum over {i, j} of A_ij (x_i - x_j)^2

Hence its four laws: symmetric, rows that sum to 0, no entry above 0 off the diagonal, positive semidefinite. A
Laplacian is a dense float64 tensor (K, K); its sparse form, which files hold, is edges (2, E) int64, i < j, and weights
(E,). A node without an edge is allowed: it adds nothing to any x'Lx.

The energy of a vector is its Rayleigh quotient, E = x'Lx / (x'x + eps): 0 for a constant vector, at most the largest
eigenvalue of L. It is computed at least in float32, also under autocast, and returned so: what is made of an energy
(lambda = E / (E + tau)) distinguishes near ones. x = 0 has E = 0 and gradient 0.

Chung 1997, Spectral Graph Theory, section 1.2; ordering by the second eigenvector: Fiedler 1973, Czechoslovak
Mathematical Journal 23.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from glissando.errors import ConfigError, RunError, nearest
from glissando.precision import upcast, without_autocast
from glissando.storage import save_tensors

FORMAT = "glissando laplacian 1"
MEAN_DEGREE = 2.0  # of a long chain
COOCCURRENCE_WINDOW = 4
#: what `token_embeddings_from_corpus` gives by default, if the text has as many
DEFAULT_FEATURES = 64
#: its dense matrices take 0.5 GB each at this size
MAX_VOCABULARY = 8192
_RESERVED = ("format", "size", "sha256")
_REBUILD = "Build it again: glissando laplacian build --help."
# Columns that are orthogonal in float32 have cosines of this size, of either sign.
_NO_SIMILARITY = 1e-6
# Relative to the largest entry; what a sum over some thousand entries loses.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-5}


def chain(size: int) -> Tensor:
    """The path 0 - 1 - ... - K-1 with weights 1: x'Lx = sum_i (x_{i+1} - x_i)^2.

    Raises ConfigError for less than two nodes.
    """
    _require_size(size)
    nodes = torch.arange(size)
    return from_edges(torch.stack([nodes[:-1], nodes[1:]]), torch.ones(size - 1, dtype=torch.float64), size)


def energy(x: Tensor, laplacian: Tensor, eps: float = 1e-6) -> Tensor:
    """x (..., K), laplacian (K, K), or (K,) a diagonal -> (...); differentiable in both.

    Rounding may take the energy of a nearly constant vector slightly below 0.
    """
    x = upcast(x)
    laplacian = laplacian.to(x.dtype)
    if laplacian.ndim == 1:
        return (x * laplacian * x).sum(-1) / (x.square().sum(-1) + eps)
    with without_autocast(x.device.type):
        smoothed = x @ laplacian
    return (smoothed * x).sum(-1) / (x.square().sum(-1) + eps)


def from_embeddings(embeddings: Tensor, neighbors: int = 8, counts: Tensor | None = None) -> Tensor:
    """The graph between the columns of embeddings (n, F): each linked to the `neighbors` others of largest cosine.

    Weights are the cosines; a link that one of the two chose counts; only positive cosines link. `counts` (n,) says how
    often each row occurs: the result is that of the embeddings with every row repeated as often. A column of zeros
    resembles nothing and stays without an edge.

    Raises ConfigError for what is no finite matrix, for counts of another length or below 0, for F <= neighbors, and
    where no two columns resemble each other, as with singular vectors or principal components, which are orthogonal.
    """
    if embeddings.dim() != 2 or embeddings.dtype.is_complex or not len(embeddings):
        raise ConfigError(
            f"embeddings are expected as real numbers (n, F), one row an item, got {embeddings.dtype} of shape "
            f"{tuple(embeddings.shape)}"
        )
    if bad := int((~embeddings.isfinite()).sum()):
        raise ConfigError(f"{bad} of the {embeddings.numel()} embedding entries are not finite; drop those rows")
    features = embeddings.shape[1]
    _require_size(features)
    if not 1 <= neighbors < features:
        raise ConfigError(
            f"neighbors is {neighbors}, and of {features} features each has {features - 1} others; choose neighbors in "
            f"1..{features - 1}, or more features"
        )
    columns = embeddings.detach().to(torch.float64)
    if counts is not None:
        if counts.shape != columns.shape[:1] or (counts < 0).any():
            expected = f"{len(columns)} numbers from 0 on, one a row"
            raise ConfigError(f"counts are expected as {expected}, got {tuple(counts.shape)}")
        columns = columns * counts.to(torch.float64).sqrt().unsqueeze(-1)
    largest = columns.abs().amax(0)
    # Divided first, entries near either end of the range do not leave it when they are squared.
    unit = F.normalize(columns / torch.where(largest > 0, largest, 1.0), dim=0)
    cosine = unit.T @ unit
    cosine = (cosine + cosine.T) / 2  # symmetric to the bit
    nearest_ones = cosine.clone().fill_diagonal_(-torch.inf).topk(neighbors, 1).indices
    chosen = torch.zeros_like(cosine, dtype=torch.bool).scatter_(1, nearest_ones, True)
    adjacency = torch.where((chosen | chosen.T) & (cosine > _NO_SIMILARITY), cosine, 0.0)
    if not adjacency.any():
        raise ConfigError(
            f"no two of the {features} columns have a positive cosine, so their graph has no edge. Singular vectors "
            "and principal components are orthogonal: give embeddings before such a rotation, or count rows by how "
            "often they occur"
        )
    return _from_adjacency(adjacency)


def from_edges(edges: Tensor, weights: Tensor, size: int) -> Tensor:
    """edges (2, E) integers in [0, size), weights (E,) >= 0 -> (size, size); parallel edges add up.

    Raises ConfigError for other shapes, nodes out of range, an edge from a node to itself, and weights below 0 or not
    finite.
    """
    if edges.dim() != 2 or edges.shape[0] != 2 or weights.shape != edges.shape[1:]:
        shapes = f"{tuple(edges.shape)} and {tuple(weights.shape)}"
        raise ConfigError(f"edges (2, E) and weights (E,) are expected, got shapes {shapes}")
    if edges.dtype.is_floating_point or edges.dtype.is_complex or edges.dtype is torch.bool:
        raise ConfigError(f"edges are pairs of node numbers, got {edges.dtype}; give int64")
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < size:
        raise ConfigError(f"edges name nodes {int(edges.min())}..{int(edges.max())} of a graph with 0..{size - 1}")
    if (edges[0] == edges[1]).any():
        raise ConfigError("an edge links a node to itself, which adds nothing to x'Lx; leave it out")
    if not (weights.isfinite() & (weights >= 0)).all():
        raise ConfigError("weights are expected to be finite and at least 0: a distance is no weight, a similarity is")
    upper = torch.zeros(size, size, dtype=torch.float64)
    low, high = edges.long().sort(0).values
    upper.index_put_((low, high), weights.to(torch.float64), accumulate=True)
    return _from_adjacency(upper + upper.T)


def edges_of(laplacian: Tensor) -> tuple[Tensor, Tensor]:
    """The sparse form: edges (2, E) int64 with i < j in lexicographic order, and their weights (E,)."""
    upper = (-laplacian.triu(1)).clamp_min(0)  # what `validate` allows for rounding is no edge
    edges = upper.nonzero().T.contiguous()
    return edges, upper[edges[0], edges[1]]


def normalise(laplacian: Tensor) -> Tensor:
    """Scaled to a mean degree tr(L) / K of 2, like a long chain's, so that energies of different graphs compare.

    Raises ConfigError for a graph without an edge.
    """
    degree = float(laplacian.trace()) / len(laplacian)
    if not degree > 0:
        raise ConfigError(
            "the graph has no edge, so every energy is 0 and no scale changes that; take more neighbors, or a larger "
            "size to project to"
        )
    return _from_adjacency(_adjacency(laplacian) * (MEAN_DEGREE / degree))


def project(laplacian: Tensor, size: int) -> Tensor:
    """P'LP (size, size): features merged in `size` groups, contiguous in `fiedler_order` and of near-equal size.

    P (F, size) has one 1 a row and else 0: the weights between two groups are summed, those inside one vanish, and
    x'P'LPx is that of the vector with x_g at every feature of group g. With F = size the graph is returned as it is.

    Raises ConfigError if there are fewer features than `size`.
    """
    _require_size(size)
    features = len(laplacian)
    if features < size:
        raise ConfigError(
            f"the graph has {features} features, fewer than the {size} it shall be projected to: a feature cannot be "
            f"split. Embed in at least {size} dimensions (of a text: with a larger vocabulary), or project to at "
            f"most {features}, the head size then"
        )
    if features == size:
        return laplacian
    group = torch.empty(features, dtype=torch.int64)
    group[fiedler_order(laplacian)] = torch.arange(features) * size // features
    edges, weights = edges_of(laplacian)
    merged = group[edges]
    between = merged[0] != merged[1]
    return from_edges(merged[:, between], weights[between], size)


def fiedler_order(laplacian: Tensor) -> Tensor:
    """(K,) the nodes so that neighbours are near: each component by its Fiedler vector, the largest component first.

    The Fiedler vector, of the second-smallest eigenvalue, is the smoothest one that is not constant; of its two signs,
    the one whose largest entry is positive.
    """
    orders = []
    for nodes in map(torch.tensor, components(laplacian)):
        if len(nodes) > 2:
            fiedler = torch.linalg.eigh(laplacian[nodes][:, nodes])[1][:, 1]
            nodes = nodes[(fiedler * fiedler[fiedler.abs().argmax()].sign()).argsort(stable=True)]
        orders.append(nodes)
    return torch.cat(orders)


def components(laplacian: Tensor) -> list[list[int]]:
    """The nodes of each connected component, the largest first; as many as the eigenvalue 0 is multiple."""
    linked, parts = laplacian < 0, []
    left = torch.ones_like(linked[0])
    while left.any():
        part = new = torch.zeros_like(left).index_fill(0, left.nonzero()[0], True)
        while new.any():
            new = linked[new].any(0) & left & ~part
            part = part | new
        parts.append(part.nonzero().flatten().tolist())
        left = left & ~part
    return sorted(parts, key=len, reverse=True)


def validate(laplacian: Tensor, what: str = "the matrix") -> None:
    """Raises ConfigError that names every law of a Laplacian that `laplacian` breaks, by how much, and the fix.

    Allowed is 1e-9 of the largest entry, 1e-5 in less than float64.
    """
    if broken := _broken_laws(laplacian):
        raise ConfigError(
            f"{what} is no graph Laplacian: {'; '.join(broken)}. Build it as Deg - A from symmetric weights A >= 0, "
            "such as glissando.mixers.tau.laplacian.from_edges(edges, weights, size) does"
        )


def _broken_laws(laplacian: Tensor) -> list[str]:
    if laplacian.dim() != 2 or laplacian.shape[0] != laplacian.shape[1] or not len(laplacian):
        return [f"its shape is {tuple(laplacian.shape)}, not (K, K)"]
    if not laplacian.dtype.is_floating_point:
        return [f"its entries are {laplacian.dtype}, not real numbers"]
    if bad := int((~laplacian.isfinite()).sum()):
        return [f"{bad} of its entries are not finite"]
    exact = laplacian.detach().to(torch.float64)
    amounts = {
        "not symmetric: entries differ from those across the diagonal by up to": (exact - exact.T).abs().max(),
        "rows do not sum to 0: off by up to": exact.sum(1).abs().max(),
        "entries off the diagonal are above 0: up to": (-_adjacency(exact)).max(),
    }
    slack = _SLACK.get(laplacian.dtype, 1e-5) * float(exact.abs().max())
    broken = [f"{law} {float(amount):.3g}" for law, amount in amounts.items() if float(amount) > slack]
    # By Gershgorin's theorem the three laws imply the fourth, so its eigenvalues are computed only for the message.
    lowest = float(torch.linalg.eigvalsh((exact + exact.T) / 2)[0]) if broken else 0.0
    return [*broken, f"not positive semidefinite: smallest eigenvalue {lowest:.3g}"] if lowest < -slack else broken


def save(path: str | Path, laplacian: Tensor, about: Mapping[str, str]) -> None:
    """Writes the sparse form as safetensors, with `about` (source, neighbors, ...), the size and a SHA-256 as metadata.
    `load` sums the diagonal anew, in float64.
    Raises ConfigError if `laplacian` is none, if a file of this name exists, and for a key of `about` that is taken;
    RunError if the file cannot be written.
    """
    validate(laplacian, "what shall be saved")
    refuse_existing(path)
    if taken := sorted(set(about) & set(_RESERVED)):
        raise ConfigError(f"{', '.join(taken)} in `about` would hide the file's own entry; name it otherwise")
    edges, weights = edges_of(laplacian.detach().to("cpu", torch.float64))
    metadata = {"format": FORMAT, "size": str(len(laplacian)), **about}
    metadata["sha256"] = _digest(metadata, edges, weights)
    save_tensors(path, {"edges": edges, "weights": weights}, metadata)


def load(path: str | Path) -> tuple[Tensor, dict[str, str]]:
    """The Laplacian (K, K) of the edges that `save` wrote, bit by bit, and its description.

    Raises RunError for a file that is missing, damaged or of another kind, ConfigError if it holds no Laplacian.
    """
    path = Path(path).expanduser()
    tensors, metadata = _read(path)
    if metadata.get("format") != FORMAT or set(tensors) != {"edges", "weights"} or "size" not in metadata:
        version = metadata.get("format")
        raise RunError(f"{path} holds no Laplacian: its format is {version!r}, not {FORMAT!r}. {_REBUILD}")
    edges, weights = tensors["edges"], tensors["weights"]
    digest = metadata.pop("sha256", None)
    if digest != _digest(metadata, edges, weights):
        raise RunError(f"{path} is damaged: its content does not have the SHA-256 {digest} that it names. {_REBUILD}")
    laplacian = from_edges(edges, weights, int(metadata["size"]))
    validate(laplacian, str(path))
    return laplacian, {key: metadata[key] for key in sorted(metadata) if key not in _RESERVED}


def starting_laplacian(source: str, size: int) -> Tensor:
    """L (size, size) that `tau.laplacian` names, at the chain's mean degree.

    Raises ConfigError for a file that is absent, of another size or no Laplacian.
    """
    if source == "saved":
        return torch.full((size, size), torch.nan)  # to be replaced by the weights that are loaded
    if source == "chain":
        return chain(size)
    if not source or (nearest(source, ["chain", "saved"]) and not Path(source).exists()):
        raise ConfigError(
            f"tau.laplacian must be `chain`, `saved` or a file of `glissando laplacian build`, got {source!r}, "
            "which is none"
        )
    laplacian, _ = load(source)
    if len(laplacian) != size:
        raise ConfigError(
            f"tau.laplacian {source} is over {len(laplacian)} features and a head of this model has {size}; build it "
            f"with `glissando laplacian build ... --size {size}`, or set tau.key_size: {len(laplacian)}"
        )
    return normalise(laplacian)


def refuse_existing(path: str | Path) -> None:
    """Raises RunError if there is something at `path`."""
    if Path(path).exists():
        raise RunError(f"{path} exists; nothing is overwritten: name another file, or move that one")


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise RunError(f"there is no file {path}; build one: glissando laplacian build --help.")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise RunError(f"{path} is truncated or no safetensors file ({error}). {_REBUILD}") from error


def _digest(metadata: Mapping[str, str], edges: Tensor, weights: Tensor) -> str:
    """SHA-256 of everything the file holds, so that a flipped bit shows even where the laws still hold."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for tensor in (edges, weights):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class TokenEmbeddings(NamedTuple):
    """Vectors of tokens and how often each occurs: the arguments of `from_embeddings`."""

    vectors: Tensor  # (V, F) float64; a token that does not occur has zeros
    counts: Tensor  # (V,) int64


def token_embeddings_from_corpus(
    sequences: Iterable[Sequence[int]], vocab_size: int, features: int | None = None
) -> TokenEmbeddings:
    """Tokens as vectors by the company they keep: positive pointwise mutual information (PPMI) of co-occurrence.

        M_uv = max(0, log (#(u, v) #(.,.) / (#(u, .) #(., v))))

    #(u, v) counts v within 4 tokens of u, to either side, in the same sequence. The F features are the columns of M for
    the F tokens that occur most; `features` is F; None: 64, or as many as there are. The graph between them is
    from_embeddings(vectors, neighbors, counts).

    Raises ConfigError for ids out of range, a text where nothing co-occurs, a vocabulary that no dense matrix can hold,
    and more features than the text has.

    PPMI of small windows: Bullinaria and Levy 2007, Behavior Research Methods 39.
    """
    if not 1 <= vocab_size <= MAX_VOCABULARY:
        raise ConfigError(f"the vocabulary has {vocab_size} tokens, expected 1..{MAX_VOCABULARY}; take a smaller one")
    pairs = torch.zeros(vocab_size * vocab_size, dtype=torch.float64)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        ids = torch.as_tensor(sequence, dtype=torch.int64)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ConfigError(f"ids {int(ids.min())}..{int(ids.max())} do not fit a vocabulary of {vocab_size} tokens")
        counts.index_add_(0, ids, torch.ones_like(ids))
        for distance in range(1, COOCCURRENCE_WINDOW + 1):
            codes = ids[:-distance] * vocab_size + ids[distance:]
            pairs.index_add_(0, codes, torch.ones_like(codes, dtype=torch.float64))
    both_ways = pairs.view(vocab_size, vocab_size) + pairs.view(vocab_size, vocab_size).T
    total = both_ways.sum(1)
    expected = total.unsqueeze(1) * total / total.sum()
    pmi = torch.where(both_ways > expected, (both_ways / expected).log(), 0.0)
    if not pmi.any():
        raise ConfigError("no two tokens of the text co-occur more often than by chance; give a longer text")
    available = int(counts.count_nonzero())
    chosen = min(DEFAULT_FEATURES, available) if features is None else features
    if not 1 <= chosen <= available:
        raise ConfigError(
            f"{chosen} features are requested, and this text has 1..{available}: at most one for each token that "
            "occurs. Ask for fewer, or take a larger vocabulary"
        )
    return TokenEmbeddings(pmi[:, counts.argsort(descending=True, stable=True)[:chosen]], counts)


def _from_adjacency(adjacency: Tensor) -> Tensor:
    """Deg - A. Every Laplacian is made here, so that one read back from its edges is the same to the bit."""
    return adjacency.sum(1).diag() - adjacency


def _adjacency(laplacian: Tensor) -> Tensor:
    return (-laplacian).fill_diagonal_(0.0)


def _require_size(size: int) -> None:
    if size < 2:
        raise ConfigError(f"a graph over {size} features has no edge; give at least 2, such as the head size 64")
