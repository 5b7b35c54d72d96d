"""A graph with uneven weights, and random numbers for vectors over it, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from glissando.mixers.tau.laplacian import edges_of, from_edges
from research.audit.tau.graph import random_graph

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=DOUBLE)


def weighted(size: int = 12, seed: int = 0) -> Tensor:
    """A graph with uneven weights."""
    edges, _ = edges_of(random_graph(size, 3, seed))
    return from_edges(edges, draw(edges.shape[1], seed=seed).abs() + 0.1, size)
