"""A sequence cut over processes: each reads one part, and hands its states to the process that reads the next one.

The split law is what makes it right: reading `ab` equals reading `a`, and then `b` from the state that `a` left, in
values and in gradients. So process r computes

    y_r, s_r = f(x_r, s_{r-1})

where f is a block's mixer with the convolution before it. s_{r-1} comes from process r - 1 while the forward pass runs,
and dL/ds_{r-1} goes back to it while the backward pass runs. It holds the activations of its own part alone.

Processes are a pipeline over layers: while one reads its part in layer l, the next reads its own in layer l - 1. With L
layers and R processes a pass takes about (L + R - 1) / (L R) of one process's time.

The alternative is to let each process read its part from an empty state and to add what the true state contributes
(an all-gather of states and of transitions). That is exact only where the new state is linear in the old one, which is
not so for `liquid`; a transition of `delta` is a K x K matrix a head and takes as many operations as the part itself;
and each mixer would need a second, composable form. The pipeline needs the split law alone.

State passing between processes: Sun et al. 2024 (LASP), arXiv 2404.02882; Dao and Gu 2024 (Mamba-2), arXiv 2405.21060,
section 8.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glissando.state import State, leaves, map_state

#: types that a state's tensors may have, in the order of their numbers in a message
_TYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
#: messages of passes that overlap have other tags; so many passes may
_PASSES = 256
_HEADER, _STATE, _GRADIENT = range(3)


class Neighbours:
    """This process's place among the `ranks` that share a sequence, in the order of its parts; all call it together.

    Raises ValueError if this process is not one of them.
    """

    def __init__(self, ranks: Sequence[int], group: Any) -> None:
        self.ranks, self.group = list(ranks), group
        self.place, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        self.before = self.ranks[self.place - 1] if self.place else None
        self.after = self.ranks[self.place + 1] if self.place + 1 < self.size else None
        self.device = torch.device("cpu")  # of what is sent
        if dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._passes = itertools.count()
        self._sent: list[tuple[Any, Tensor]] = []

    def relay(self) -> Relay:
        """For one forward pass and its backward pass; every process takes as many."""
        return Relay(self, next(self._passes) % _PASSES)

    def send(self, values: Tensor, to: int, tag: int) -> None:
        """Without waiting for who receives it."""
        values = values.detach().to(self.device).contiguous()
        if values.numel():
            values = values.view(-1).view(torch.uint8)
            self._sent.append((dist.isend(values, to, self.group, tag), values))

    def receive(self, values: Tensor, source: int, tag: int) -> None:
        """Into `values`, which is contiguous."""
        if values.numel():
            here = values.to(self.device)
            dist.recv(here.view(-1).view(torch.uint8), source, self.group, tag)
            values.copy_(here)

    def settle(self) -> None:
        """Wait until all that was sent has been received, and let go of it."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


class Relay:
    """The states of one forward pass, received from the process before and sent to the one behind.

    A unit is what keeps a state: a block, a gate. Each calls `receive` and `send` once, in the same order on every
    process. What is computed again for gradient checkpointing is given the same state again.
    """

    def __init__(self, neighbours: Neighbours, number: int) -> None:
        self.neighbours, self.number = neighbours, number
        #: by the state that a unit was given: that state, which keeps its id its own, the received one, and the number
        self._units: dict[int, tuple[State, State, int]] = {}
        self._done: set[int] = set()
        self._anchors: list[Tensor] = []

    def receive(self, start: State) -> State:
        """The state that the process before left; on the first process `start`, which is that before any token.

        Every unit has a `start` of its own, of the form of the state.
        """
        if id(start) not in self._units:
            unit = len(self._units)
            state = start if self.neighbours.before is None else self._received(start, unit)
            self._units[id(start)] = (start, state, unit)
        return self._units[id(start)][1]

    def send(self, start: State, state: State, y: Tensor) -> Tensor:
        """Hand over the state that the unit which was given `start` leaves; returns y, by which gradients come back."""
        unit = self._units[id(start)][2]
        if self.neighbours.after is None or unit in self._done:
            return y
        self._done.add(unit)
        y, anchor = _Send.apply(self.neighbours, self._tag(unit), y, *leaves(state))
        self._anchors += [anchor] if anchor.requires_grad else []
        return y

    def closed(self, y: Tensor) -> Tensor:
        """y, the pass's last result: its backward pass comes by every unit and exchanges the gradients of all states,
        those of which the loss is independent too, so that no process waits for one in vain."""
        return _Anchored.apply(y, *self._anchors) if self._anchors else y

    def _tag(self, unit: int) -> int:
        return (self.number << 20) + 3 * unit

    def _received(self, start: State, unit: int) -> State:
        like = list(leaves(start))
        where, source = self.neighbours, self.neighbours.before
        assert source is not None
        header = torch.empty(1 + sum(2 + leaf.ndim for leaf in like), dtype=torch.int64, device=where.device)
        where.receive(header, source, self._tag(unit) + _HEADER)
        of, *rest = header.tolist()
        if of != len(like):
            raise RuntimeError(f"unit {unit} received a state of {of} tensors and keeps one of {len(like)}")
        received, differentiable, numbers = [], [], iter(rest)
        for leaf in like:
            dtype, needs = _TYPES[next(numbers)], bool(next(numbers))
            values = torch.empty([next(numbers) for _ in range(leaf.ndim)], dtype=dtype, device=leaf.device)
            where.receive(values, source, self._tag(unit) + _STATE)
            received.append(values)
            differentiable.append(needs)
        if any(differentiable) and torch.is_grad_enabled():
            anchor = torch.zeros((), requires_grad=True)
            anchor, *received = _Receive.apply(where, self._tag(unit), differentiable, anchor, *received)
            self._anchors.append(anchor)
        values_of = iter(received)
        return map_state(lambda _: next(values_of), start)


class _Receive(torch.autograd.Function):
    """Leaves as they came; their gradients go back to where they came from."""

    @staticmethod
    def forward(
        ctx: Any, where: Neighbours, tag: int, differentiable: list[bool], anchor: Tensor, *received: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.where, ctx.tag, ctx.differentiable = where, tag, differentiable
        ctx.mark_non_differentiable(*[x for x, needs in zip(received, differentiable, strict=True) if not needs])
        return anchor.clone(), *received

    @staticmethod
    def backward(ctx: Any, _: Tensor, *gradients: Tensor) -> tuple[None, ...]:
        for gradient, needs in zip(gradients, ctx.differentiable, strict=True):
            if needs:
                ctx.where.send(gradient, ctx.where.before, ctx.tag + _GRADIENT)
        return (None,) * (4 + len(gradients))


class _Send(torch.autograd.Function):
    """y; the state goes to the next process, whose gradient of it comes back with that of y."""

    @staticmethod
    def forward(ctx: Any, where: Neighbours, tag: int, y: Tensor, *state: Tensor) -> tuple[Tensor, Tensor]:
        assert where.after is not None
        needs = [bool(needed) for needed in ctx.needs_input_grad[3:]]
        ctx.where, ctx.tag, ctx.needs = where, tag, needs
        ctx.like = [(leaf.shape, leaf.dtype, leaf.device) for leaf in state]
        header = [len(state)]
        for leaf, needed in zip(state, needs, strict=True):
            header += [_TYPES.index(leaf.dtype), int(needed), *leaf.shape]
        where.send(torch.tensor(header, device=where.device), where.after, tag + _HEADER)
        for leaf in state:
            where.send(leaf, where.after, tag + _STATE)
        return y.view_as(y), torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for (shape, dtype, device), needs in zip(ctx.like, ctx.needs, strict=True):
            values = torch.empty(shape, dtype=dtype, device=device) if needs else None
            if values is not None:
                ctx.where.receive(values, ctx.where.after, ctx.tag + _GRADIENT)
            gradients.append(values)
        return None, None, gradient, *gradients


class _Anchored(torch.autograd.Function):
    """y; gives every anchor a gradient of 0, so that the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *anchors: Tensor) -> Tensor:
        ctx.like = [(anchor.shape, anchor.dtype, anchor.device) for anchor in anchors]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
