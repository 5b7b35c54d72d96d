"""Plain tensor code in the place of kernels and of closed-form gradients, for derivatives that PyTorch takes by itself.

torch.func's transforms (grad, vmap, jvp) and derivatives of higher order see through tensor operations alone. Within
`plain_operations()` every operation whose backend is `auto` computes by its definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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
    """Whether plain tensor code is asked for."""
    return not torch.compiler.is_compiling() and _PLAIN.get()


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
