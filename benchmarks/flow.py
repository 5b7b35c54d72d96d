"""The flow depth: its latency beside blocks with weights of their own, and what it keeps for the backward pass.

Latency: `hybrid-ode`, four blocks around four Euler steps, beside `gpt`, six of the same blocks, which is what it was
published against. A step evaluates one block, so that whole sequences without the head should take 8 / 6 of the time;
the head, which both have, brings the ratio nearer to 1. What should be reached is counted, not assumed: the
multiplications in all matrix products of the very call that is timed, those of queries with keys and of weights with
values among them (for every pair of tokens, also those that the causal mask hides).

Memory: the tensors that autograd keeps between the passes, without the weights, for a flow as it is (`direct`), with
gradient checkpointing (`checkpoint`), for the reversible scheme of research.reversible, and for torchdiffeq's adjoint
method over the same steps, whose gradients are not those of the scheme.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed import Row, paired
from glissando.depth.flow import FlowDepth
from glissando.model import LanguageModel
from research.published.hybrid_ode import torchdiffeq
from research.reversible import ReversibleFlow

LATENCY_GOAL = 1.05
#: what the learned positions of both models hold
LENGTH = 128

#: from a flow and what flows in, to what flows out
Way = Callable[[FlowDepth, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Whole sequences from nothing, or tokens one by one behind `prefix` others; with or without the head."""

    batch: int
    prefix: int
    head: bool


CASES: dict[str, Case] = {
    "sequences-head": Case(8, 0, head=True),
    "sequences-trunk": Case(8, 0, head=False),
    "decoding-head": Case(1, LENGTH // 2, head=True),
    "decoding-trunk": Case(1, LENGTH // 2, head=False),
}


def latency(name: str, rounds: int) -> Row:
    """How many times longer `hybrid-ode` takes than `gpt`, beside how many times more it multiplies."""
    flow, blocks = (LanguageModel.from_preset(preset).eval() for preset in ("hybrid-ode", "gpt"))
    return compare(name, flow, blocks, CASES[name], rounds)


def compare(name: str, flow: LanguageModel, blocks: LanguageModel, case: Case, rounds: int) -> Row:
    """The row of one case: ratio of times, ratio of multiplications, and the one over the other."""
    counts = [multiplications(_call(model, case)) for model in (flow, blocks)]
    ours, theirs, measured = paired(lambda: seconds(_call(flow, case)), lambda: seconds(_call(blocks, case)), rounds)
    counted = counts[0] / counts[1]
    print(
        f"  flow-latency-{name}: {1e3 * ours:,.4g} ms, {counts[0]:,} multiplications; "
        f"without a flow {1e3 * theirs:,.4g} ms, {counts[1]:,}",
        flush=True,
    )
    ratio = measured / counted
    met = ratio <= LATENCY_GOAL
    title = f"flow latency, {name.replace('-', ', ')}"
    return Row(title, measured, counted, "x", ratio, f"at most {LATENCY_GOAL}", met, "multiplications")


@torch.no_grad()
def _call(model: LanguageModel, case: Case) -> Callable[[], Any]:
    """What is timed and counted. A prefix is read here, before."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (case.batch, model.config.max_length or LENGTH), generator=rng)
    read = model if case.head else model.features
    if not case.prefix:
        return partial(read, ids)
    _, state = model.features(ids[:, : case.prefix], model.init_state(case.batch))

    def decode() -> None:
        nonlocal state
        for latest in ids[:, case.prefix :].split(1, 1):
            _, state = read(latest, state, donate=True)

    return decode


@torch.no_grad()
def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@torch.no_grad()
def multiplications(call: Callable[[], Any]) -> int:
    """Number in all matrix products, by PyTorch's counter, which misses fused attention on a CPU: here it is off."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() // 2  # it counts a multiplication and an addition


class Equation(nn.Module):
    """alpha F(H, tau, u) of a flow depth, written out for torchdiffeq: forward(tau, H), tau () a tensor."""

    def __init__(self, depth: FlowDepth, control: Tensor | None = None) -> None:
        super().__init__()
        self.depth, self.u = depth, control

    def forward(self, tau: Tensor, h: Tensor) -> Tensor:
        at = h + self.depth.time(tau.to(h.dtype).reshape(1))
        if self.u is not None and self.depth.control is not None:
            at = at + self.depth.control(self.u)
        return self.depth.alpha * self.depth.field(at, residual=False)[0]


def memory_table(steps: Sequence[int], hidden_size: int = 256, length: int = 64) -> dict[str, list[int]]:
    """Bytes kept for the backward pass of the flow of `hybrid-ode`, by the way of computing it, for each of `steps`.

    One sequence of `length` tokens, no blocks around the flow, no dropout: the adjoint method would draw it anew.
    Raises GlissandoError where torchdiffeq is not installed.
    """
    peer, x = torchdiffeq(), torch.randn(1, length, hidden_size, generator=torch.Generator().manual_seed(0))
    ways: dict[str, tuple[str, Way]] = {mode: (mode, _integrated) for mode in ("direct", "checkpoint", "reversible")}
    ways["torchdiffeq adjoint, a state a step, as published"] = "direct", partial(_adjoint, peer, True)
    ways["torchdiffeq adjoint, the two ends"] = "direct", partial(_adjoint, peer, False)

    def kept(mode: str, run: Way, n_steps: int) -> int:
        depth = flow_depth(hidden_size, n_steps=n_steps)
        depth.gradient_checkpointing = mode == "checkpoint"
        if mode == "reversible":
            depth.__class__ = ReversibleFlow
        return kept_bytes(lambda: run(depth, x.clone().requires_grad_()), depth.parameters())

    return {name: [kept(mode, run, n) for n in steps] for name, (mode, run) in ways.items()}


def flow_depth(hidden_size: int, **options: Any) -> FlowDepth:
    """The flow of `hybrid-ode` alone, without dropout; `options` are those of its depth."""
    none = {"mixer.dropout": 0.0, "block.mlp_dropout": 0.0}
    model = LanguageModel.from_preset(
        "hybrid-ode", vocab_size=256, hidden_size=hidden_size, depth={"layers": 0, **options}, **none
    )
    assert isinstance(model.depth, FlowDepth)
    return model.depth


def _integrated(depth: FlowDepth, x: Tensor) -> Tensor:
    return depth(x)[0]


def _adjoint(peer: Any, every_state: bool, depth: FlowDepth, x: Tensor) -> Tensor:
    """Euler steps. A time that is asked for is a state that is kept, and from which the way back begins again."""
    n = depth.n_steps
    times = torch.linspace(0, 1, (n if every_state else 1) + 1)
    options = None if every_state else {"step_size": 1 / n}
    return peer.odeint_adjoint(Equation(depth), x, times, method="euler", options=options)[-1]


def kept_bytes(run: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """Bytes of the distinct memory that autograd keeps for the backward pass of run(), `weights` left out."""
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    del output
    return sum(storages.values())
