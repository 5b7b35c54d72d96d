"""A random graph: the control of a graph that means something."""

from __future__ import annotations

import torch
from torch import Tensor

from glissando.mixers.tau.laplacian import from_edges


def random_graph(size: int, neighbors: int, seed: int) -> Tensor:
    """L (K, K) of `size` nodes, each linked to `neighbors` others drawn uniformly, with weights 1."""
    scores = torch.rand(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen = scores.fill_diagonal_(-torch.inf).topk(neighbors, 1).indices
    linked = torch.zeros(size, size, dtype=torch.bool).scatter_(1, chosen, True)
    edges = (linked | linked.T).triu(1).nonzero().T
    return from_edges(edges, torch.ones(edges.shape[1]), size)
