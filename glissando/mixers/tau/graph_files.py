"""Graphs over features that other programs have written, such as arrowspace: an edge list, or a sparse matrix.

.csv, .tsv   lines of i, j, weight, nodes numbered from 0, with or without a header; each edge once, or from both ends
.mtx, .npz   a matrix in Matrix Market format, or of scipy.sparse.save_npz; both need scipy

The entries are the adjacency matrix A, or the Laplacian Deg - A, whose rows sum to 0.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from glissando.errors import ConfigError, MissingExtraError, unknown_name

from .laplacian import MAX_VOCABULARY, edges_of, from_edges, validate

Holds = Literal["adjacency", "laplacian"]
_READERS = (".csv", ".tsv", ".mtx", ".npz")
# Relative to the largest entry: files are written in float32, or with six digits.
_SLACK = 1e-5


def read_graph(path: Path, holds: Holds | None = None) -> tuple[Tensor, str]:
    """The Laplacian (K, K) of the graph in a file, and what its entries were taken for, and why.

    holds  `adjacency` or `laplacian`; if None a matrix without an entry below 0 is an adjacency matrix, and another one
           whose rows sum to 0 a Laplacian

    Raises ConfigError for a file that is missing, of another kind or malformed, for what is neither matrix, and for one
    that breaks a law of the matrix it is taken for; MissingExtraError where scipy is needed and not installed.
    """
    path = path.expanduser()
    if holds not in (None, "adjacency", "laplacian"):
        raise unknown_name("matrix", holds, ("adjacency", "laplacian"))
    if not path.is_file():
        raise ConfigError(f"cannot read --graph {path}: there is no such file")
    if path.suffix not in _READERS:
        raise ConfigError(f"--graph takes a file that ends in {', '.join(_READERS)}, got {path}")
    matrix = _read_edges(path) if path.suffix in (".csv", ".tsv") else _read_matrix(path)
    if bad := int((~matrix.isfinite()).sum()):
        raise ConfigError(f"{bad} of the entries of {path} are not finite; correct or drop them")
    slack = _SLACK * float(matrix.abs().max())
    lowest, off = float(matrix.min()), float(matrix.sum(1).abs().max())
    why = "given by --holds"
    if holds is None:
        if lowest >= 0:
            holds, why = "adjacency", "no entry is below 0"
        elif off <= slack:
            holds, why = "laplacian", "its rows sum to 0"
        else:
            raise ConfigError(
                f"{path} is no adjacency matrix, as its smallest entry is {lowest:.3g}, and no Laplacian Deg - A, as "
                f"its rows sum to up to {off:.3g}: write weights of at least 0, or Deg - A (not the normalised one)"
            )
    if holds == "laplacian":
        validate(matrix.float(), str(path))
        edges, weights = edges_of(matrix)
    else:
        _check_adjacency(matrix, path, slack)
        edges, weights = edges_of(-matrix)
    return from_edges(edges, weights, len(matrix)), f"{holds} ({why})"


def _check_adjacency(matrix: Tensor, path: Path, slack: float) -> None:
    amounts = {
        "not symmetric: entries differ from those across the diagonal by up to": (matrix - matrix.T).abs().max(),
        "weights are below 0: down to": -matrix.min(),
        "nodes are linked to themselves (the diagonal is not 0): up to": matrix.diagonal().abs().max(),
    }
    if broken := [f"{law} {float(amount):.3g}" for law, amount in amounts.items() if float(amount) > slack]:
        raise ConfigError(
            f"{path} is no adjacency matrix: {'; '.join(broken)}. Write symmetric weights of at least 0 with a 0 "
            "diagonal; if it is a Laplacian, give --holds laplacian"
        )


def _read_edges(path: Path) -> Tensor:
    """(K, K) of a list of edges, K the largest number of a node and one."""
    entries: dict[tuple[int, int], float] = {}
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","), start=1):
            if not row or (number == 1 and not row[0].strip().lstrip("+-").isdigit()):
                continue  # a header
            try:
                i, j, weight = int(row[0]), int(row[1]), float(row[2])
                if len(row) != 3 or min(i, j) < 0:
                    raise ValueError
            except (ValueError, IndexError):
                raise ConfigError(
                    f"{path}, line {number}: expected i, j, weight, two node numbers from 0 on and a number, got "
                    f"{', '.join(row)[:80]!r}"
                ) from None
            if (i, j) in entries:
                raise ConfigError(f"{path}, line {number}: the entry {i}, {j} was there before; write each once")
            entries[i, j] = weight
    nodes = [node for pair in entries for node in pair]
    if not entries or min(nodes) > 0:
        what = f"its nodes begin at {min(nodes)}, and are numbered from 0 on" if entries else "there is no edge in it"
        raise ConfigError(f"{path}: {what}; number them from 0, and write 0, 0, 0 for a node 0 without an edge")
    _require_size(path, (max(nodes) + 1,) * 2)
    matrix = torch.zeros(max(nodes) + 1, max(nodes) + 1, dtype=torch.float64)
    for (i, j), weight in entries.items():
        matrix[i, j] = weight
    links = [pair for pair in entries if pair[0] != pair[1]]
    one_way = [(i, j) for i, j in links if (j, i) not in entries]
    if one_way and len(one_way) < len(links):
        i, j = one_way[0]
        raise ConfigError(
            f"{path} has {len(links) - len(one_way)} entries from both ends of their edge and {len(one_way)} from one, "
            f"such as {i}, {j}: write every edge once, or every one from both ends"
        )
    return matrix + matrix.T - matrix.diag().diag() if one_way else matrix


def _read_matrix(path: Path) -> Tensor:
    try:
        from scipy import io, sparse
    except ImportError as error:
        raise MissingExtraError(f"--graph {path} needs scipy to be read: pip install scipy, or write a .csv") from error
    try:
        with path.open("rb") as file:
            matrix: Any = io.mmread(file) if path.suffix == ".mtx" else sparse.load_npz(file)
    except Exception as error:  # noqa: BLE001 - whatever scipy raises at bytes of any kind
        raise ConfigError(
            f"{path} is truncated or holds no sparse matrix ({error}); write it with scipy.io.mmwrite or "
            "scipy.sparse.save_npz"
        ) from None
    _require_size(path, matrix.shape)
    if matrix.dtype.kind not in "fiu":
        raise ConfigError(f"the entries of {path} are {matrix.dtype}, not real numbers")
    return torch.as_tensor(matrix.toarray() if sparse.issparse(matrix) else matrix, dtype=torch.float64)


def _require_size(path: Path, shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != shape[1] or not 2 <= shape[0] <= MAX_VOCABULARY:
        raise ConfigError(
            f"{path} holds a matrix {tuple(shape)}: expected is a square one of 2 to {MAX_VOCABULARY:,} features. "
            "A graph over items is not one over features"
        )
