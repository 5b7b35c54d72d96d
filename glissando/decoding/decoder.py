"""The compiled decoding step: a model's forward for one token a row, without PyTorch, as one call of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glissando.decoding.interpreter import run
from glissando.decoding.lowering import lower
from glissando.decoding.program import Op, Precision, Program, Slot
from glissando.errors import InputError, LengthError, NotCompiled
from glissando.kernels.compiled import over_rows
from glissando.kernels.products import GROUP, aligned
from glissando.model import LanguageModel
from glissando.sampling import Sampler
from glissando.state import State, leaves


class Rows(NamedTuple):
    """The states of B texts as the compiled step keeps them; it changes them in place."""

    fixed: Any  # (B, F) float32
    exact: Any  # (B, E) float64
    slots: Any  # (B, S capacity) float32
    exact_slots: Any  # (B, D capacity) float64
    filled: Any  # (B,) int64: tokens read
    registers: Any  # (B or more, R) float32: vectors of the latest tokens
    capacity: int  # slots of the caches


class Decoder:
    """`step(ids, rows)` computes what `model(ids.unsqueeze(1), state)` does, for a model of float32 on a CPU.

    precision     in which matrices are kept: `float32`, `bf16`, or `int8` with a scale for each output; arithmetic
                  is float32 always
    with_control  a control is given at each step

    The weights are copied: a model that is trained on needs a new decoder. Raises NotCompiled for a model, or an option
    of it, that has no compiled form; UnknownNameError for another precision.
    """

    def __init__(self, model: LanguageModel, precision: Precision = "float32", with_control: bool = False) -> None:
        for weight in model.parameters():
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                raise NotCompiled(f"weights of {weight.dtype} on {weight.device}: it computes in float32 on a CPU")
        if with_control and not model.config.controls:
            raise NotCompiled("a control, which this model does not take")
        with torch.no_grad():
            self.program: Program = lower(model, precision, with_control)
        self.controls = len(model.config.controls)
        self.with_control, self.vocab_size, self.max_length = with_control, *_limits(model)
        draw = np.zeros_like(self.program.code[:1])
        draw[0, :3] = Op.DRAW, self.program.logits, self.vocab_size
        self._writing = np.concatenate([self.program.code, draw])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are kept."""
        return self.program.weights.nbytes + self.program.halves.nbytes + self.program.bytes.nbytes

    # ------------------------------------------------------------------ states

    def rows(self, state: State, spare: int = 0) -> Rows:
        """The compiled step's form of a state of the model, with room for `spare` tokens more.

        Raises InputError for the state of another model.
        """
        program = self.program
        filled = state.position.numpy().astype(np.int64)
        capacity = _room(int(filled.max(initial=0)) + max(spare, 1)) if program.slots or program.exact_slots else 0
        batch = len(filled)
        rows = Rows(
            aligned((batch, program.fixed), np.float32),
            np.zeros((batch, program.exact), np.float64),
            *_caches(program, batch, capacity),
            filled.copy(),
            aligned((batch, program.registers), np.float32),
            capacity,
        )
        own, given = _slots(program.state), list(leaves(state._replace(trail=None)))
        if len(own) != len(given):
            raise InputError(f"the state is of another model: it has {len(given)} parts, and this model's {len(own)}")
        for slot, leaf in zip(own, given, strict=True):
            if slot.array == "filled":
                if leaf.is_floating_point():
                    raise InputError(
                        'the state stands at a time (dt), and the compiled step counts tokens: step="plain"'
                    )
                continue
            values = leaf.detach().to(torch.float64 if slot.array.startswith("exact") else torch.float32).numpy()
            fixed = (*values.shape[:2], *values.shape[3:]) if slot.array in ("slots", "exact_slots") else values.shape
            if fixed != (batch, *slot.shape):
                raise InputError(
                    f"the state is of another model: it has a part {tuple(values.shape)}, and this model's is "
                    f"{(batch, *slot.shape)}, apart from the slots of a cache; use a state that this model returned"
                )
            if slot.array in ("slots", "exact_slots"):
                _put(rows, slot, values[:, :, :capacity])  # slots behind those that are filled are spare
            else:
                _view(rows, slot)[...] = values
        return rows

    def state(self, rows: Rows) -> State:
        """The model's own state after the tokens that `rows` have read, in memory of its own."""
        return _values(rows, self.program.state)

    # ------------------------------------------------------------------ steps

    def step(self, ids: Tensor, rows: Rows, control: Tensor | None = None) -> tuple[Tensor, Rows]:
        """ids (B,), one token for each row, or (B, T) -> logits (B, V) or (B, T, V) after each of them, and the rows
        after them, in the same memory or, where the caches had to grow, in new.

        control (B, C). The next step with these rows overwrites the logits. T tokens of a call and T calls of one have
        the same bits.

        Raises InputError for ids outside the vocabulary or another number of rows, LengthError where learned positions
        end.
        """
        if ids.is_floating_point():
            raise InputError(f"ids must be int64, got {ids.dtype}")
        program, given = self.program, ids.to(torch.int64).contiguous().numpy()
        batch, length = len(rows.filled), given.shape[1] if given.ndim == 2 else 1
        if given.shape not in ((batch,), (batch, length)) or not length:
            raise InputError(f"ids must be one or more for each of {batch} rows, got the shape {given.shape}")
        if (control is not None) != self.with_control:
            raise InputError("give a control if, and only if, the decoder was built with_control")
        if control is not None and tuple(control.shape) != (batch, self.controls):
            raise InputError(f"the control must be {(batch, self.controls)}, got {tuple(control.shape)}")
        if batch and (int(given.min()) < 0 or int(given.max()) >= self.vocab_size):
            raise InputError(
                f"ids must be from 0 to {self.vocab_size - 1}, got {given.min()} to {given.max()}; encode the text "
                "with this model's own tokenizer"
            )
        rows = self._with_room(rows, length)
        if len(rows.registers) < batch * length:
            rows = rows._replace(registers=aligned((batch * length, program.registers), np.float32))
        self._run(program.code, rows, given.reshape(-1), control, length, _NOT_DRAWN)
        rows.filled[:] += length
        logits = rows.registers[: batch * length, program.logits : program.logits + self.vocab_size]
        return torch.from_numpy(logits).reshape(*given.shape, self.vocab_size), rows

    def write(
        self, ids: Any, rows: Rows, control: Tensor | None, sampler: Sampler, count: int, end: int
    ) -> tuple[Any, Rows]:
        """The next `count` tokens of every row behind ids (B,), each drawn and read without returning to Python: (B,
        count) as `glissando.kernels.drawing.draw_next` has them, and the rows.

        The last token of each is not read yet. A row that ended has read others behind its end. ids and control are
        those that `step` takes.

        Raises LengthError where learned positions end.
        """
        rows, written = self._with_room(rows, count), np.empty((len(ids), count), np.int64)
        self._run(self._writing, rows, ids.copy(), control, 1, (*sampler.arguments(count), end, written))
        sampler.use(written)
        return written, rows

    def _with_room(self, rows: Rows, count: int) -> Rows:
        """The rows with room for `count` tokens more. Raises LengthError where learned positions end."""
        program, needed = self.program, max(rows.filled.tolist(), default=0) + count
        if self.max_length is not None and needed > self.max_length:
            raise LengthError(
                f"this model has learned positions for {self.max_length} tokens, but was given {needed}. Shorten the "
                "input, or use a preset with RoPE or without positions (the -nano ones), which takes any length."
            )
        if needed > rows.capacity and (program.slots or program.exact_slots):
            rows = _resized(rows, program, _room(max(needed, 2 * rows.capacity)))
        return rows

    def _run(
        self, code: Any, rows: Rows, ids: Any, control: Tensor | None, length: int, drawing: tuple[Any, ...]
    ) -> None:
        """The program for all rows, on several threads where they are many tokens."""
        p, batch = self.program, len(rows.filled)
        turned = _NO_CONTROL if control is None else control.detach().to(torch.float32).contiguous().numpy()
        arguments = (
            code, p.numbers, p.weights, p.halves, p.bytes, rows.registers, rows.fixed, rows.exact, rows.slots,
            rows.exact_slots, rows.capacity, rows.filled, ids, turned, length, *drawing,
        )  # fmt: skip
        if batch > 1:
            cost = max(length, drawing[-1].shape[1]) * self.weight_bytes // 2
            over_rows(run, torch.empty(batch, 1), *arguments, cost=cost)
        else:
            run(*arguments, 0, batch)

    def warm_up(self) -> None:
        """Load the kernels, or compile them where this machine has not yet: a step of no rows."""
        empty, filled = np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
        rows = Rows(empty, empty.astype(np.float64), empty, empty.astype(np.float64), filled, empty, 0)
        self._run(self.program.code, rows, filled, None, 1, _NOT_DRAWN)
        Sampler([], 0).draw(torch.zeros(0, 0))

    def mark(self, rows: Rows) -> tuple[Any, Any, Any]:
        """What `restore` needs: states of constant size, and how many slots of the caches are filled."""
        return rows.fixed.copy(), rows.exact.copy(), rows.filled.copy()

    def restore(self, rows: Rows, mark: tuple[Any, Any, Any]) -> None:
        """`rows` as they were at the mark: slots that were filled since are never read."""
        rows.fixed[:], rows.exact[:], rows.filled[:] = mark

    def select(self, rows: Rows, kept: Sequence[int]) -> Rows:
        """Those of the rows, in that order."""
        index = np.asarray(kept, np.int64)
        arrays = {name: part[index] for name, part in rows._asdict().items() if name != "capacity"}
        chosen = Rows(**arrays, capacity=rows.capacity)
        needed = _room(int(chosen.filled.max(initial=0)) + 1)
        return _resized(chosen, self.program, needed) if 2 * needed <= rows.capacity else chosen


#: what stands for the control of a model without
_NO_CONTROL = np.zeros((1, 1), np.float32)
#: what stands for the arguments of drawing in a step that draws nothing
_NOT_DRAWN = (*Sampler([], 0).arguments(0), -1, np.empty((0, 0), np.int64))


def _values(rows: Rows, slot: Any) -> Any:
    """A tree of slots with their values. A closure that called itself would keep `rows` until garbage is collected."""
    if slot is None:
        return None
    if not isinstance(slot, Slot):
        children = [_values(rows, child) for child in slot]
        return type(slot)(*children) if hasattr(slot, "_fields") else tuple(children)
    if slot.array == "filled":
        return torch.from_numpy(rows.filled.copy())
    is_cache = slot.array in ("slots", "exact_slots")
    values = _cached(rows, slot, int(rows.filled.max(initial=0))) if is_cache else _view(rows, slot)
    return torch.from_numpy(values.copy())


def _limits(model: LanguageModel) -> tuple[int, int | None]:
    """The vocabulary, and how many positions were learned."""
    config = model.config
    return config.vocab_size, config.max_length


def _slots(state: Any) -> list[Slot]:
    """The leaves of a program's state, in the order of glissando.state.leaves."""
    if state is None:
        return []
    return [state] if isinstance(state, Slot) else [leaf for child in state for leaf in _slots(child)]


def _view(rows: Rows, slot: Slot) -> Any:
    """The leaf (B, ...) that the slot names, shared with `rows`; a cache as (B, G, slots / 64, 64, ...)."""
    array, size = getattr(rows, slot.array), int(np.prod(slot.shape))
    if slot.array in ("slots", "exact_slots"):
        part = array[:, slot.at * rows.capacity : (slot.at + size) * rows.capacity]
        groups = rows.capacity // GROUP
        if slot.transposed:
            return part.reshape(len(array), groups, *slot.shape, GROUP).transpose(0, 2, 1, 4, 3)
        return part.reshape(len(array), groups, slot.shape[0], GROUP, *slot.shape[1:]).swapaxes(1, 2)
    return array[:, slot.at : slot.at + size].reshape(len(array), *slot.shape)


def _cached(rows: Rows, slot: Slot, count: int) -> Any:
    """The first `count` slots of a cache, (B, G, count, ...)."""
    view = _view(rows, slot)[:, :, : -(-count // GROUP)]
    return view.reshape(*view.shape[:2], view.shape[2] * GROUP, *view.shape[4:])[:, :, :count]


def _put(rows: Rows, slot: Slot, values: Any) -> None:
    """Write the first slots of a cache, values (B, G, count, ...)."""
    view, count = _view(rows, slot), values.shape[2]
    groups, rest = divmod(count, GROUP)
    whole = values[:, :, : count - rest]
    view[:, :, :groups] = whole.reshape(*view.shape[:2], groups, *view.shape[3:])
    if rest:
        view[:, :, groups, :rest] = values[:, :, count - rest :]


def _caches(program: Program, batch: int, capacity: int) -> tuple[Any, Any]:
    """Empty caches, the first with the numbers more that its kernels read."""
    spare = GROUP if program.slots else 0
    return (
        aligned((batch, program.slots * capacity + spare), np.float32),
        np.zeros((batch, program.exact_slots * capacity), np.float64),
    )


def _room(tokens: int) -> int:
    """The least of 64, 128, 256, ... that is not below `tokens`."""
    return 64 << (max(tokens - 1, 0) // 64).bit_length()


def _resized(rows: Rows, program: Program, capacity: int) -> Rows:
    """The same rows with another number of slots, in memory of their own; those that are cut are empty."""
    slots, exact_slots = _caches(program, len(rows.filled), capacity)
    resized = rows._replace(
        slots=slots,
        exact_slots=exact_slots,
        # Of its own: the old rows, whose capacity is the old one, must not count tokens that they have no slots for.
        filled=rows.filled.copy(),
        capacity=capacity,
    )
    for slot in _slots(program.state):
        if slot.array in ("slots", "exact_slots"):
            _put(resized, slot, _cached(rows, slot, min(capacity, rows.capacity)))
    return resized
