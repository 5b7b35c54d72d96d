"""Graphs that other programs wrote: the same Laplacian from every kind of file, and mistakes named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from glissando.cli import main
from glissando.errors import ConfigError, UnknownNameError
from glissando.mixers.tau.graph_files import read_graph
from glissando.mixers.tau.laplacian import edges_of, from_edges, load, normalise, project, random_graph

sparse = pytest.importorskip("scipy.sparse")
SIZE = 12


def graph() -> Tensor:
    edges, _ = edges_of(random_graph(SIZE, 3, seed=2))
    weights = torch.rand(edges.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    return from_edges(edges, weights, SIZE)


def write(path: Path, matrix: Tensor) -> Path:
    """`matrix` as a file of the kind that the path's name says; .once.csv: its upper half alone."""
    from scipy.io import mmwrite

    if path.suffix == ".npz":
        sparse.save_npz(path, sparse.csr_matrix(matrix.numpy()))
    elif path.suffix == ".mtx":
        mmwrite(path, sparse.csr_matrix(matrix.numpy()))
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        listed = matrix.triu() if ".once" in path.suffixes else matrix
        lines = [mark.join((str(i), str(j), repr(float(listed[i, j])))) for i, j in listed.nonzero().tolist()]
        header = [mark.join(("source", "target", "weight"))] if path.suffix == ".tsv" else []
        path.write_text("\n".join([*header, *lines]) + "\n")
    return path


@pytest.mark.parametrize("name", ["g.csv", "g.once.csv", "g.tsv", "g.mtx", "g.npz"])
def test_every_kind_of_file_holds_the_same_graph(name: str, tmp_path):
    laplacian = graph()
    adjacency = laplacian.diagonal().diag() - laplacian
    for matrix, said in (
        (adjacency, "adjacency (no entry is below 0)"),
        (laplacian, "laplacian (its rows sum to 0)"),
    ):
        result, holds = read_graph(write(tmp_path / name, matrix))
        assert holds == said
        assert (result - laplacian).abs().max() < 1e-12
    result, holds = read_graph(tmp_path / name, "laplacian")
    assert holds == "laplacian (given by --holds)"
    with pytest.raises(ConfigError, match=r"no adjacency matrix: weights are below 0.*themselves"):
        read_graph(tmp_path / name, "adjacency")


@pytest.mark.parametrize("digits", [6, 7])
def test_files_of_few_digits_are_read(digits: int, tmp_path):
    """Rows of what was rounded sum to 0 only nearly; the diagonal is summed anew."""
    rounded = graph().round(decimals=digits)
    result, holds = read_graph(write(tmp_path / "g.csv", rounded))
    assert holds.startswith("laplacian")
    assert (result.sum(1).abs() < 1e-12).all()
    assert (result - graph()).abs().max() < 10.0 ** (1 - digits)


def test_the_verb_projects_what_was_read(tmp_path, capsys):
    file, out = write(tmp_path / "g.npz", graph()), tmp_path / "out.safetensors"
    assert main(["laplacian", "build", "--graph", str(file), "--size", "4", "--out", str(out)]) == 0
    assert "source graph g.npz, holds laplacian (its rows sum to 0), features 12" in capsys.readouterr().out
    assert torch.allclose(load(out)[0], normalise(project(graph(), 4)), atol=1e-12)
    assert main(["laplacian", "build", "--chain", "--size", "4", "--holds", "adjacency", "--out", str(out)]) == 2
    assert "--holds does nothing for --chain; leave it out, or build from --graph" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no edge in it"),
        ("i,j,weight\n", "there is no edge in it"),
        ("0,1,1\n1,2\n", "line 2: expected i, j, weight.*got '1, 2'"),
        ("0,1,1\n1,x,1\n", "line 2: expected i, j, weight"),
        ("0,1,1\n1,-2,1\n", "line 2: expected i, j, weight"),
        ("0,1,1,9\n", "line 1: expected i, j, weight"),
        ("0,1,1\n0,1,2\n", "line 2: the entry 0, 1 was there before"),
        ("1,2,1\n", "its nodes begin at 1"),
        ("0,1,1\n1,0,1\n1,2,1\n", "2 entries from both ends of their edge and 1 from one, such as 1, 2"),
        ("0,1,1\n1,0,2\n", "no adjacency matrix: not symmetric.*by up to 1"),
        ("0,1,nan\n", "2 of the entries of .* are not finite"),
        ("0,1,-1\n1,2,1\n", "smallest entry is -1, and no Laplacian.*sum to up to 1"),
        ("0,0,3\n0,1,1\n", "linked to themselves .*: up to 3"),
        ("0,0,-1\n0,1,1\n1,1,-1\n", "off the diagonal are above 0.*smallest eigenvalue -2"),
        ("0,99999,1\n", r"a matrix \(100000, 100000\).*2 to 8,192 features"),
    ],
)
def test_bad_edge_lists(text: str, message: str, tmp_path):
    (tmp_path / "g.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_graph(tmp_path / "g.csv")


def test_bad_matrices(tmp_path):
    for name in ("g.mtx", "g.npz"):
        (tmp_path / name).write_bytes(b"PK\x03\x04 and no more")
        with pytest.raises(ConfigError, match="truncated or holds no sparse matrix"):
            read_graph(tmp_path / name)
    np.savez(tmp_path / "dense.npz", a=np.eye(3))
    with pytest.raises(ConfigError, match="holds no sparse matrix"):
        read_graph(tmp_path / "dense.npz")
    with pytest.raises(ConfigError, match=r"a matrix \(3, 4\): expected is a square one"):
        read_graph(write(tmp_path / "w.npz", torch.ones(3, 4)))
    with pytest.raises(ConfigError, match="are complex128, not real numbers"):
        read_graph(write(tmp_path / "c.mtx", torch.ones(3, 3) * 1j + 0.5))
    with pytest.raises(ConfigError, match="there is no such file"):
        read_graph(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match=r"ends in \.csv, \.tsv, \.mtx, \.npz"):
        read_graph(Path(__file__))
    with pytest.raises(UnknownNameError, match="Did you mean 'laplacian'"):
        read_graph(tmp_path / "g.mtx", "laplacain")  # type: ignore[arg-type]


def test_scipy_is_asked_for_by_name(tmp_path, monkeypatch):
    file = write(tmp_path / "g.npz", graph())
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    with pytest.raises(ImportError, match="needs scipy to be read: pip install scipy, or write"):
        read_graph(file)
