"""Speed of attention by |lambda_q - lambda_k| beside PyTorch's fused causal attention."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.speed import Row, beside
from glissando.mixers.tau.attention import exponents, tau_attention

HEADS, SIZE = 6, 64
#: name -> length and what the ratio should reach
FORWARD = {"4k": (4096, 8), "16k": (16384, 20), "64k": (65536, 45)}
BACKWARD = {"4k": (4096, 4), "16k": (16384, 12)}


def forward(case: str, rounds: int) -> Row:
    """Milliseconds of a forward without gradients, importance and gate on."""
    with torch.no_grad():
        return _beside(f"tau attention, T {case}", *FORWARD[case], rounds, with_gradients=False)


def backward(case: str, rounds: int) -> Row:
    """Forward and backward with the gradients of lambdas, values, temperature, importance and gate."""
    return _beside(f"tau attention and gradients, T {case}", *BACKWARD[case], rounds, with_gradients=True)


def _beside(name: str, length: int, goal: float, rounds: int, with_gradients: bool) -> Row:
    tau, standard = tau_call(length, with_gradients), standard_call(length, with_gradients)
    return beside(name, lambda: _rate(tau), lambda: _rate(standard), rounds, goal, "fused softmax", "calls/s")


def _rate(call: Callable[[], object]) -> float:
    """Calls/s over a fifth of a second, after one more: threads that PyTorch left spinning would slow the first."""
    call()
    began, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - began < 0.2:
        call()
        calls += 1
    return calls / (time.perf_counter() - began)


def tau_call(length: int, with_gradients: bool) -> Callable[[], object]:
    """One call at 6 heads of 64, every option on."""
    generator = torch.Generator().manual_seed(0)
    q, k, bias = (torch.rand(1, HEADS, length, generator=generator) for _ in range(3))
    v = torch.randn(1, HEADS, length, SIZE, generator=generator)
    forget = -0.1 * torch.rand(1, HEADS, length, generator=generator, dtype=torch.float64).cumsum(-1)
    temperature = torch.full((HEADS,), 0.05)
    inputs = (q, k, v, temperature, bias, forget)

    def call() -> torch.Tensor:
        return tau_attention(q, k, v, temperature, exponents(k, bias, forget), "fast")

    return _call(call, inputs, with_gradients)


def standard_call(length: int, with_gradients: bool) -> Callable[[], object]:
    """PyTorch's scaled_dot_product_attention at the same heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, generator=generator) for _ in range(3))
    return _call(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), with_gradients)


def _call(
    run: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...], with_gradients: bool
) -> Callable[[], object]:
    if not with_gradients:
        return run
    for tensor in inputs:
        tensor.requires_grad_()
    return lambda: torch.autograd.grad(run().sum(), inputs)
