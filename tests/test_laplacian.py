"""Graphs over features: every builder obeys the laws of a Laplacian, and both forms of the energy agree."""

from __future__ import annotations

import pytest
import torch
from graphs import DOUBLE, draw, weighted
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close
from torch import Tensor

from glissando.errors import ConfigError
from glissando.mixers.tau.laplacian import (
    TokenEmbeddings,
    chain,
    components,
    edges_of,
    energy,
    fiedler_order,
    from_edges,
    from_embeddings,
    load,
    normalise,
    project,
    save,
    token_embeddings_from_corpus,
    validate,
)
from research.audit.tau.graph import random_graph

EXACT = 1e-12


def text(length: int = 4000) -> list[list[int]]:
    """Tokens 0..11 that mostly count upwards, in sequences of 40."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.randint(1, 4, (length // 40, 40), generator=generator)
    return (steps.cumsum(1) % 12).tolist()


BUILT = {
    "chain": lambda: chain(9),
    "pair": lambda: chain(2),
    "random": lambda: random_graph(20, 4, seed=1),
    "edges": weighted,
    "no edges": lambda: from_edges(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), 5),
    "embeddings": lambda: from_embeddings(draw(50, 20), 4),
    "float32 embeddings": lambda: from_embeddings(draw(50, 20).float(), 4),
    "zero columns": lambda: from_embeddings(draw(50, 20) * (torch.arange(20) > 3), 4),
    "huge and tiny columns": lambda: from_embeddings(draw(50, 20) * 10.0 ** torch.linspace(-300, 300, 20).double(), 4),
    "corpus": lambda: graph_of(token_embeddings_from_corpus(text(), 16, 8)),
    "normalised": lambda: normalise(weighted()),
    "projected": lambda: project(weighted(23), 7),
    "projected in pieces": lambda: project(two_pieces(), 5),
}


def graph_of(embeddings: TokenEmbeddings) -> Tensor:
    return from_embeddings(embeddings.vectors, 3, embeddings.counts)


def two_pieces() -> Tensor:
    """A chain of 4, one of 7, and a node by itself."""
    return torch.block_diag(chain(4), chain(7), torch.zeros(1, 1, dtype=DOUBLE))


@pytest.mark.parametrize("name", BUILT)
def test_every_builder_obeys_the_laws(name: str, tmp_path):
    laplacian = BUILT[name]()
    validate(laplacian, name)
    assert laplacian.dtype is DOUBLE
    assert torch.linalg.eigvalsh(laplacian)[0] > -EXACT * max(1.0, float(laplacian.max()))
    edges, weights = edges_of(laplacian)
    assert (edges[0] < edges[1]).all()
    assert (weights > 0).all()
    x = draw(100, len(laplacian))
    rises = (x[:, edges[0]] - x[:, edges[1]]).square() @ weights
    assert_close(energy(x, laplacian), rises / (x.square().sum(-1) + 1e-6), "the sum over edges", EXACT)
    assert (energy(x, laplacian) >= -EXACT * max(1.0, float(laplacian.max()))).all()
    about = {"source": name, "neighbors": "4"}
    save(tmp_path / "graph.safetensors", laplacian, about)
    again, said = load(tmp_path / "graph.safetensors")
    assert torch.equal(again, laplacian)
    assert said == about


def test_energy_closed_forms():
    laplacian = chain(4)
    x = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [0, 2, 0, 0]], dtype=DOUBLE)
    expected = torch.tensor([0.0, 12 / 4, 8 / 4], dtype=DOUBLE)
    assert_close(energy(x, laplacian, eps=0.0), expected, tolerance=EXACT)
    values, vectors = torch.linalg.eigh(laplacian)
    assert_close(energy(vectors.T, laplacian, eps=0.0), values, "Rayleigh quotient of an eigenvector", EXACT)


def test_energy_gradients_closed_form():
    """dE/dx = 2 (Lx - E x) / s,  dE/dL = x x' / s,  s = x'x + eps."""
    laplacian, x = weighted(), draw(12)
    squares = x @ x + 1e-6
    by_x = 2 * (laplacian @ x - energy(x, laplacian) * x) / squares
    inputs = (x.clone().requires_grad_(), laplacian.clone().requires_grad_())
    got = torch.autograd.grad(energy(*inputs), inputs)
    assert_close(got[0], by_x, tolerance=EXACT)
    assert_close(got[1], x.outer(x) / squares, tolerance=EXACT)


def test_energy_of_zero_is_zero_and_so_is_its_gradient():
    laplacian = weighted(6).float()
    x = torch.zeros(2, 6, requires_grad=True)
    y = energy(x, laplacian)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2))
    assert torch.equal(x.grad, torch.zeros(2, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    laplacian = weighted().float()
    x = draw(4, 12).to(dtype)
    expected = energy(x.double(), laplacian.double())
    assert energy(x, laplacian).dtype is torch.float32
    assert_close(energy(x, laplacian), expected, tolerance=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(energy(x, laplacian), energy(x.float(), laplacian))
        assert_close(energy(x, laplacian), expected, tolerance=1e-6)


def test_chain_is_the_path():
    expected = torch.tensor([[1, -1, 0], [-1, 2, -1], [0, -1, 1]], dtype=DOUBLE)
    assert torch.equal(chain(3), expected)
    steps = torch.arange(1, 9, dtype=DOUBLE)
    assert_close(torch.linalg.eigvalsh(chain(9))[1:], 2 - 2 * (torch.pi * steps / 9).cos(), tolerance=EXACT)


def test_random_graph_links_each_node_and_follows_its_seed():
    laplacian = random_graph(30, 4, seed=5)
    assert laplacian.diagonal().min() >= 4
    assert set(edges_of(laplacian)[1].tolist()) == {1.0}
    assert torch.equal(laplacian, random_graph(30, 4, seed=5))
    assert not torch.equal(laplacian, random_graph(30, 4, seed=6))


def test_embedding_graph_is_of_nearest_columns():
    """Three directions in the plane at 0, 10 and 70 degrees, one opposite, one of zeros."""
    angles = torch.tensor([0.0, 10, 70, 190], dtype=DOUBLE).deg2rad()
    scales = torch.tensor([1.0, 5.0, 0.2, 1.0], dtype=DOUBLE)
    plane = torch.stack([angles.cos(), angles.sin()]) * scales
    laplacian = from_embeddings(torch.cat([plane, torch.zeros(2, 1, dtype=DOUBLE)], 1), neighbors=1)
    edges, weights = edges_of(laplacian)
    assert edges.T.tolist() == [[0, 1], [1, 2]]
    assert_close(weights, torch.tensor([10.0, 60.0], dtype=DOUBLE).deg2rad().cos(), tolerance=EXACT)


def test_counted_rows_are_repeated_rows():
    vectors, counts = draw(6, 9), torch.tensor([0, 1, 5, 2, 0, 3])
    assert_close(from_embeddings(vectors, 3, counts), from_embeddings(vectors.repeat_interleave(counts, 0), 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chain(1), "over 1 features has no edge"),
        (lambda: from_embeddings(draw(9, 5), 5), "neighbors is 5, and of 5 features each has 4 others"),
        (lambda: from_embeddings(draw(9, 4), 8), "choose neighbors in 1..3"),
        (lambda: from_embeddings(draw(9)), r"real numbers \(n, F\)"),
        (lambda: from_embeddings(draw(9, 4) / 0), "36 of the 36 embedding entries are not finite"),
        (lambda: from_embeddings(torch.linalg.qr(draw(9, 4).float())[0], 2), "orthogonal"),
        (lambda: from_embeddings(draw(9, 4), 2, torch.ones(8)), "9 numbers from 0 on"),
        (lambda: from_edges(torch.tensor([[0], [3]]), torch.ones(1), 3), r"nodes 0..3 of a graph with 0..2"),
        (lambda: from_edges(torch.tensor([[1], [1]]), torch.ones(1), 3), "links a node to itself"),
        (lambda: from_edges(torch.tensor([[0], [1]]), -torch.ones(1), 3), "a similarity is"),
        (lambda: from_edges(torch.tensor([[0.0], [1]]), torch.ones(1), 3), "give int64"),
        (lambda: from_edges(torch.tensor([[0], [1]]), torch.ones(2), 3), r"\(2, 1\) and \(2,\)"),
        (lambda: project(chain(5), 8), "in at least 8 dimensions"),
        (lambda: normalise(torch.zeros(3, 3)), "has no edge"),
        (lambda: token_embeddings_from_corpus([[1], [2], []], 4), "no two tokens of the text co-occur"),
        (lambda: token_embeddings_from_corpus([[1, 4]], 4), "1..4 do not fit a vocabulary of 4"),
        (lambda: token_embeddings_from_corpus(text(), 16, 13), "13 features are requested, and this text has 1..12"),
        (lambda: token_embeddings_from_corpus(text(), 50_000), "expected 1..8192"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_parallel_edges_add_up():
    edges = torch.tensor([[0, 1, 2], [1, 0, 1]])
    assert edges_of(from_edges(edges, torch.tensor([1.0, 2.0, 5.0]), 3))[1].tolist() == [3.0, 5.0]


def test_normalised_graphs_have_the_mean_degree_of_a_long_chain():
    for laplacian in (weighted(), random_graph(30, 5, 0), 1e-9 * chain(7)):
        assert abs(float(normalise(laplacian).diagonal().mean()) - 2) < EXACT
    assert abs(float(chain(1000).diagonal().mean()) - 2) < 0.01


def test_projection_merges_runs_of_a_chain():
    """Shuffled, a chain is found again: merged in pairs it is a chain, and a vector constant in groups keeps x'Lx."""
    shuffle = torch.randperm(12)
    laplacian = chain(12)[shuffle][:, shuffle]
    assert torch.equal(project(laplacian, 6), chain(6))
    order = shuffle[fiedler_order(laplacian)]
    assert order.tolist() in (list(range(12)), list(range(11, -1, -1)))
    assert torch.equal(project(laplacian, 12), laplacian)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 30), st.integers(0, 99), st.data())
def test_projection_is_a_laplacian_and_loses_only_what_is_inside_groups(features: int, seed: int, data):
    size = data.draw(st.integers(2, features))
    laplacian = weighted(max(features, 4), seed)
    merged = project(laplacian, size)
    validate(merged)
    order = fiedler_order(laplacian)
    assert sorted(order.tolist()) == list(range(len(laplacian)))
    if size < len(laplacian):
        group = torch.empty_like(order)
        group[order] = torch.arange(len(order)) * size // len(order)
        sizes = group.bincount(minlength=size)
        assert sizes.max() - sizes.min() <= 1
        x = draw(size, seed=seed)
        assert_close(x @ merged @ x, x[group] @ laplacian @ x[group], tolerance=1e-11)


def test_components_stay_together():
    laplacian = two_pieces()
    assert components(laplacian) == [[4, 5, 6, 7, 8, 9, 10], [0, 1, 2, 3], [11]]
    assert sorted(fiedler_order(laplacian)[:7].tolist()) == list(range(4, 11))
    assert int((torch.linalg.eigvalsh(laplacian) < EXACT).sum()) == 3


BROKEN = {
    "not symmetric: entries differ from those across the diagonal by up to 0.5": [[1, -1], [-0.5, 0.5]],
    "rows do not sum to 0: off by up to 0.25": [[1.25, -1], [-1, 1]],
    "entries off the diagonal are above 0: up to 1": [[-1, 1], [1, -1]],
    "not positive semidefinite: smallest eigenvalue -2": [[-1, 1], [1, -1]],
    "1 of its entries are not finite": [[float("nan"), 0], [0, 0]],
    r"its shape is \(2, 3\), not \(K, K\)": [[1.0, -1, 0], [-1, 1, 0]],
}


@pytest.mark.parametrize("law", BROKEN)
def test_every_broken_law_is_refused_by_name(law: str, tmp_path):
    matrix = torch.tensor(BROKEN[law], dtype=DOUBLE)
    with pytest.raises(ConfigError, match=f"domain.*{law}.*Build it as Deg - A"):
        validate(matrix, "domain")
    with pytest.raises(ConfigError, match=law):
        save(tmp_path / "x.safetensors", matrix, {})
    assert not list(tmp_path.iterdir())


def test_validate_allows_rounding_and_no_more():
    laplacian = weighted(40)
    validate(laplacian.float())
    laplacian[3, 3] += 1e-6
    with pytest.raises(ConfigError, match="off by up to 1e-06"):
        validate(laplacian)
    with pytest.raises(ConfigError, match=r"torch.int64, not real"):
        validate(chain(3).long())


def test_pmi_of_a_text_is_that_of_its_definition():
    """One sequence, counted by hand."""
    sequence = [0, 1, 2, 0, 1, 3, 3]
    pairs = torch.zeros(5, 5, dtype=DOUBLE)
    for i, u in enumerate(sequence):
        for j, v in enumerate(sequence):
            pairs[u, v] += i != j and abs(i - j) <= 4
    joint = pairs / pairs.sum()
    ratio = joint / (joint.sum(0) * joint.sum(1, keepdim=True)).clamp_min(1e-300)
    expected = ratio.clamp_min(1.0).log()
    vectors, counts = token_embeddings_from_corpus([sequence], 5)
    assert counts.tolist() == [2, 2, 1, 2, 0]
    assert_close(vectors, expected[:, [0, 1, 3, 2]], tolerance=EXACT)


def test_sequences_do_not_run_together():
    """Columns are tokens 0, 2, 1, 3, by how often they occur."""
    alike = torch.tensor([[True, False] * 2] * 2 + [[False, True] * 2] * 2)
    assert not token_embeddings_from_corpus([[0, 1, 0], [2, 3, 2]], 4).vectors[~alike].any()
    assert token_embeddings_from_corpus([[0, 1, 0, 2, 3, 2]], 4).vectors[~alike].any()
