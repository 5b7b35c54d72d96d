"""Plain tensor code in the place of kernels and of closed-form gradients, for derivatives that PyTorch takes by itself.

torch.func's transforms (grad, vmap, jvp) and derivatives of higher order see through tensor operations alone. Within a
transform, and within `plain_operations()`, every operation whose backend is `auto` computes by its definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def plain_operations() -> Iterator[None]:
    """`auto` is plain tensor code within, in this thread."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def plain() -> bool:
    """Whether plain tensor code is asked for, or torch.func looks on."""
    return not torch.compiler.is_compiling() and (_PLAIN.get() or torch._C._are_functorch_transforms_active())


def without_derivatives(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a kernel, a static method, which has no derivative: RuntimeError where one may be taken of it,
    also where nothing that arrives depends on a parameter, which PyTorch's `once_differentiable` overlooks."""

    @wraps(backward)
    def gradient(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True was given, and the gradient of a kernel has no derivative of its own: compute the "
                "model with model.backend = 'reference', or within glissando.kernels.plain.plain_operations()"
            )
        return backward(ctx, *grads)

    return gradient


def same_operations() -> tuple[AbstractContextManager, AbstractContextManager]:
    """For torch.utils.checkpoint: the backward pass, which runs outside, computes again as the forward did here."""
    return nullcontext(), plain_operations() if plain() else nullcontext()


def resolved(backend: Any) -> Any:
    """The backend, with `reference` for `auto` where plain tensor code is asked for."""
    return "reference" if backend == "auto" and plain() else backend


def underlying(x: Tensor) -> Tensor:
    """The numbers that x stands for under torch.func's transforms: for checks. vmap's axis may be anywhere."""
    if torch.compiler.is_compiling():  # a graph's checks, if any, see what it sees
        return x
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
