"""The compiled decoding step: a model's forward for one token a row, without PyTorch, as one call of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.decoding.interpreter import run
from glissando.decoding.program import Caches, Op, Precision, Program, Slot, lower
from glissando.errors import ConfigError, InputError, LengthError, NotCompiled
from glissando.kernels.compiled import over_rows
from glissando.kernels.products import GROUP, aligned
from glissando.model import LanguageModel
from glissando.sampling import Sampler
from glissando.state import State, leaves


@dataclass
class Rows:
    """The states of B texts as the compiled step keeps them; it changes them in place.

    fixed      (B, F) float32
    exact      (B, E) float64
    filled     (B,) int64: tokens read
    pages      of each text, its caches in pages of 64 tokens, each an array of bytes. Texts may share pages that are
               full: these are never written again
    addresses  (B, G) int64 of the pages
    registers  (B or more, R) float32: vectors of the latest tokens; (0, R) before the first, as kept rows have none
    """

    fixed: Any
    exact: Any
    filled: Any
    pages: list[list[Any]]
    addresses: Any
    registers: Any

    def __len__(self) -> int:
        return len(self.filled)


class Decoder:
    """`step(ids, rows)` computes what `model(ids.unsqueeze(1), state)` does, for a model of float32 on a CPU.

    precision     in which matrices are kept: `float32`, `bf16`, or `int8` with a scale for each output; arithmetic
                  is float32 always
    with_control  a control is given at each step
    caches        in which keys and values of attention are kept, `float32` or `bf16`, and values of tau

    The weights are copied: a model that is trained on needs a new decoder. Raises NotCompiled for a model, or an option
    of it, that has no compiled form; UnknownNameError for another precision; ConfigError for caches that it has not.
    """

    def __init__(
        self,
        model: LanguageModel,
        precision: Precision = "float32",
        with_control: bool = False,
        caches: Caches = "float32",
    ) -> None:
        for weight in model.parameters():
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                raise NotCompiled(f"weights of {weight.dtype} on {weight.device}: it computes in float32 on a CPU")
        if with_control and not model.config.controls:
            raise NotCompiled("a control, which this model does not take")
        with torch.no_grad():
            self.program: Program = lower(model, precision, with_control, caches)
        if caches != "float32" and not self.program.half_slots:
            raise ConfigError(f"caches in {caches}: this model keeps no keys or values of tokens; keep float32")
        self.controls = len(model.config.controls)
        self.with_control = with_control
        self.vocab_size, self.max_length = model.config.vocab_size, model.config.max_length
        p = self.program
        units = 4 * p.slots + 2 * p.half_slots + 8 * p.exact_slots
        self.page_bytes = (units + 4) * GROUP if units else 0  # a vector may reach beyond the last number
        draw = np.zeros_like(self.program.code[:1])
        draw[0, :3] = Op.DRAW, self.program.logits, self.vocab_size
        self._writing = np.concatenate([self.program.code, draw])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are kept."""
        return self.program.weights.nbytes + self.program.halves.nbytes + self.program.bytes.nbytes

    # ------------------------------------------------------------------ states

    def rows(self, state: State, caches: bool = True) -> Rows:
        """The compiled step's form of a state of the model, or of its part without the caches.

        Raises InputError for the state of another model.
        """
        program = self.program
        filled = state.position.numpy().astype(np.int64)
        batch = len(filled)
        rows = self._rows(
            aligned((batch, program.fixed), np.float32), np.zeros((batch, program.exact)), filled.copy(), [[]] * batch
        )
        if caches:
            self._make_room(rows, 0)
        slots, values = _slots(program.state), list(leaves(state._replace(trail=None)))
        if len(slots) != len(values):
            raise InputError(
                f"the state is of another model: it has {len(values)} parts, and this model's {len(slots)}"
            )
        for slot, leaf in zip(slots, values, strict=True):
            if slot.array == "filled":
                if leaf.is_floating_point():
                    raise InputError(
                        'the state stands at a time (dt), and the compiled step counts tokens: step="plain"'
                    )
                continue
            numbers = leaf.detach().to(torch.float64 if slot.array.startswith("exact") else torch.float32).numpy()
            is_cache = slot.array in _CACHES
            fixed = (*numbers.shape[:2], *numbers.shape[3:]) if is_cache else numbers.shape
            if fixed != (batch, *slot.shape):
                raise InputError(
                    f"the state is of another model: it has a part {tuple(numbers.shape)}, and this model's is "
                    f"{(batch, *slot.shape)}, apart from the slots of a cache; use a state that this model returned"
                )
            if not is_cache:
                _view(rows, slot)[...] = numbers
                continue
            for row, pages in enumerate(rows.pages):
                for number, page in enumerate(pages):
                    part = numbers[row, :, number * GROUP : (number + 1) * GROUP]
                    if slot.array == "half_slots":
                        part = torch.from_numpy(part).to(torch.bfloat16).view(torch.uint16).numpy()
                    self._cached(page, slot)[:, : part.shape[1]] = part
        return rows

    def state(self, rows: Rows) -> State:
        """The model's own state after the tokens that `rows` have read, in memory of its own."""
        return self._values(rows, self.program.state)

    # ------------------------------------------------------------------ steps

    def step(self, ids: Tensor, rows: Rows, control: Tensor | None = None) -> tuple[Tensor, Rows]:
        """ids (B,), one token for each row, or (B, T) -> logits (B, V) or (B, T, V) after each of them, and the rows,
        which are changed in place.

        control (B, C). The next step with these rows overwrites the logits. T tokens of a call and T calls of one have
        the same bits.

        Raises InputError for ids outside the vocabulary or another number of rows, LengthError where learned positions
        end.
        """
        if ids.is_floating_point():
            raise InputError(f"ids must be int64, got {ids.dtype}")
        program, tokens = self.program, ids.to(torch.int64).contiguous().numpy()
        batch, length = len(rows), tokens.shape[1] if tokens.ndim == 2 else 1
        if tokens.shape not in ((batch,), (batch, length)) or not length:
            raise InputError(f"ids must be one or more for each of {batch} rows, got the shape {tokens.shape}")
        if (control is not None) != self.with_control:
            raise InputError("give a control if, and only if, the decoder was built with_control")
        if control is not None and tuple(control.shape) != (batch, self.controls):
            raise InputError(f"the control must be {(batch, self.controls)}, got {tuple(control.shape)}")
        if batch and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size):
            raise InputError(
                f"ids must be from 0 to {self.vocab_size - 1}, got {tokens.min()} to {tokens.max()}; encode the text "
                "with this model's own tokenizer"
            )
        self._make_room(rows, length)
        if len(rows.registers) < batch * length:
            rows.registers = aligned((batch * length, program.registers), np.float32)
        self._run(program.code, rows, tokens.reshape(-1), control, length, _NOT_DRAWN)
        rows.filled[:] += length
        logits = rows.registers[: batch * length, program.logits : program.logits + self.vocab_size]
        return torch.from_numpy(logits).reshape(*tokens.shape, self.vocab_size), rows

    def write(
        self, ids: Any, rows: Rows, control: Tensor | None, sampler: Sampler, counts: Any, end: int, logits: Any = None
    ) -> Any:
        """The next counts (B,) tokens of the rows behind ids (B,), each drawn and read without returning to Python:
        (B, N) as `glissando.kernels.drawing.draw_next` has them, N the largest count.

        The last token of each row is not read yet, and a row that ended has read nothing behind it. ids and control
        are those that `step` takes; logits (B, N, V) gets those at which each token was drawn.

        Raises LengthError where learned positions end.
        """
        self._make_room(rows, counts)
        count, kept = int(counts.max()), _NO_LOGITS if logits is None else logits
        written = np.empty((len(ids), count), np.int64)
        if len(rows.registers) < len(rows):
            rows.registers = aligned((len(rows), self.program.registers), np.float32)
        drawing = (*sampler.arguments(count), end, counts, kept, written)
        self._run(self._writing, rows, ids.copy(), control, 1, drawing)
        sampler.use(written)
        return written

    def _make_room(self, rows: Rows, counts: Any) -> None:
        """Pages for so many tokens more, (B,) or of each row. Raises LengthError where learned positions end."""
        sizes = (rows.filled + counts).tolist()
        needed = max(sizes, default=0)
        if self.max_length is not None and needed > self.max_length:
            raise LengthError(
                f"this model has learned positions for {self.max_length} tokens, but was given {needed}. Shorten the "
                "input, or use a preset with RoPE or without positions (the -nano ones), which takes any length."
            )
        if not self.page_bytes:
            return
        most = -(-needed // GROUP)
        if most > rows.addresses.shape[1]:
            wider = np.zeros((len(rows), max(most, 2 * rows.addresses.shape[1])), np.int64)
            wider[:, : rows.addresses.shape[1]] = rows.addresses
            rows.addresses = wider
        for row, (size, pages) in enumerate(zip(sizes, rows.pages, strict=True)):
            for number in range(len(pages), -(-size // GROUP)):
                pages.append(aligned(self.page_bytes, np.uint8))
                rows.addresses[row, number] = pages[-1].ctypes.data

    def _run(
        self, code: Any, rows: Rows, ids: Any, control: Tensor | None, length: int, drawing: tuple[Any, ...]
    ) -> None:
        """The program for all rows, on several threads where they are many tokens."""
        p, batch = self.program, len(rows)
        turned = _NO_CONTROL if control is None else control.detach().to(torch.float32).contiguous().numpy()
        arguments = (
            code, p.numbers, p.weights, p.halves, p.bytes, rows.registers, rows.fixed, rows.exact, rows.addresses,
            rows.filled, ids, turned, length, *drawing,
        )  # fmt: skip
        if batch > 1:
            cost = max(length, drawing[-1].shape[1]) * self.weight_bytes // 2
            over_rows(partial(_run_with, rows.pages), torch.empty(batch, 1), *arguments, cost=cost)
        else:
            run(*arguments, 0, batch)

    def warm_up(self) -> None:
        """Load the kernels, or compile them where this machine has not yet: a step of no rows."""
        rows = self._rows(np.zeros((0, 0), np.float32), np.zeros((0, 0)), np.zeros(0, np.int64), [])
        self._run(self.program.code, rows, rows.filled, None, 1, _NOT_DRAWN)
        Sampler([], 0).draw(torch.zeros(0, 0))

    def mark(self, rows: Rows) -> tuple[Any, Any, Any]:
        """What `restore` needs: states of constant size, and how many slots of the caches are filled."""
        return rows.fixed.copy(), rows.exact.copy(), rows.filled.copy()

    def restore(self, rows: Rows, mark: tuple[Any, Any, Any]) -> None:
        """`rows` as they were at the mark: slots that were filled since are never read."""
        rows.fixed[:], rows.exact[:], rows.filled[:] = mark

    def select(self, rows: Rows, kept: Sequence[int], moved: bool = False) -> Rows:
        """The rows with the indices `kept`, in that order, also several times. Full pages are shared, the last one is
        copied.

        moved  `rows` is not used any more, and `kept` has each number once: no page is copied
        """
        index = np.asarray(kept, np.int64)
        chosen = self._rows(rows.fixed[index], rows.exact[index], rows.filled[index], [rows.pages[i] for i in kept])
        if not moved:
            for row, filled in enumerate(chosen.filled.tolist()):
                self._cut_pages(chosen, row, filled)
        return chosen

    def join(self, rows: Rows, others: Rows) -> Rows:
        """The rows of both, which are not used any more."""
        return self._rows(
            np.concatenate([rows.fixed, others.fixed]), np.concatenate([rows.exact, others.exact]),
            np.concatenate([rows.filled, others.filled]), [*rows.pages, *others.pages],
        )  # fmt: skip

    def cut(self, rows: Rows, mark: tuple[Any, Any, Any]) -> Rows:
        """One row as it was at a mark, in memory of its own but for the pages that were full then."""
        fixed, exact, filled = mark
        earlier = self._rows(fixed.copy(), exact.copy(), filled.copy(), [rows.pages[0]])
        self._cut_pages(earlier, 0, int(filled[0]))
        return earlier

    def keeps_alike(self, other: Decoder) -> bool:
        """Whether the rows of the other one can be gone on from: each part of the states lies in the same place."""
        a, b = self.program, other.program
        return all(getattr(a, name) == getattr(b, name) for name in _PLACES)

    def bytes_of(self, rows: Rows) -> int:
        """The bytes of states and caches, shared pages counted for each row."""
        return rows.fixed.nbytes + rows.exact.nbytes + self.page_bytes * sum(map(len, rows.pages))

    def _rows(self, fixed: Any, exact: Any, filled: Any, pages: Sequence[list[Any]]) -> Rows:
        """Rows with lists of pages of their own; the first columns of `fixed` lie aligned where it is `aligned`."""
        lists = [list(each) for each in pages]
        addresses = np.zeros((len(lists), max(map(len, lists), default=0)), np.int64)
        for row, each in enumerate(lists):
            addresses[row, : len(each)] = [page.ctypes.data for page in each]
        return Rows(fixed, exact, filled, lists, addresses, np.empty((0, self.program.registers), np.float32))

    def _cut_pages(self, rows: Rows, row: int, filled: int) -> None:
        """The first `filled` slots of a row: full pages, and a copy of the one that is not."""
        pages = rows.pages[row]
        del pages[-(-filled // GROUP) :]
        if pages and filled % GROUP:
            copied = aligned(self.page_bytes, np.uint8)
            copied[:] = pages[-1]
            pages[-1], rows.addresses[row, len(pages) - 1] = copied, copied.ctypes.data

    def _values(self, rows: Rows, slot: Any) -> Any:
        """A tree of slots with their values. A closure that called itself would keep `rows` until garbage is
        collected."""
        if slot is None:
            return None
        if not isinstance(slot, Slot):
            children = [self._values(rows, child) for child in slot]
            return type(slot)(*children) if hasattr(slot, "_fields") else tuple(children)
        if slot.array == "filled":
            return torch.from_numpy(rows.filled.copy())
        if slot.array not in _CACHES:
            return torch.from_numpy(_view(rows, slot).copy())
        count, kind = int(rows.filled.max(initial=0)), np.float64 if slot.array == "exact_slots" else np.float32
        values = np.zeros((len(rows), slot.shape[0], count, *slot.shape[1:]), kind)
        for row, pages in enumerate(rows.pages):
            for number, page in enumerate(pages[: -(-count // GROUP)]):
                part = values[row, :, number * GROUP : (number + 1) * GROUP]
                cached = self._cached(page, slot)[:, : part.shape[1]]
                is_half = slot.array == "half_slots"
                part[...] = (cached.astype(np.uint32) << 16).view(np.float32) if is_half else cached
        return torch.from_numpy(values)

    def _cached(self, page: Any, slot: Slot) -> Any:
        """The slots of a cache in a page, (G, 64, K) or (H, 64), shared with it."""
        size = int(np.prod(slot.shape)) * GROUP
        p, kind = self.program, _CACHES[slot.array]
        begins = {"slots": 0, "half_slots": 4 * p.slots, "exact_slots": 4 * p.slots + 2 * p.half_slots}
        width = np.dtype(kind).itemsize
        begin = GROUP * (begins[slot.array] + width * slot.at)
        part = page[begin : begin + width * size].view(kind)
        if slot.array == "exact_slots":
            return part.reshape(*slot.shape, GROUP)
        if slot.transposed:
            return part.reshape(*slot.shape, GROUP).swapaxes(1, 2)
        return part.reshape(slot.shape[0], GROUP, *slot.shape[1:])


#: the arrays of a page and what they hold: float32, bfloat16, float64
_CACHES: dict[str, Any] = {"slots": np.float32, "half_slots": np.uint16, "exact_slots": np.float64}
#: what two programs share whose states lie alike
_PLACES = ("state", "fixed", "exact", "slots", "half_slots", "exact_slots")
#: what stands for the control of a model without
_NO_CONTROL = np.zeros((1, 1), np.float32)
#: what stands for logits that nobody asks for
_NO_LOGITS = np.empty((0, 0, 0), np.float32)
#: what stands for the arguments of drawing in a step that draws nothing
_NOT_DRAWN = (*Sampler([], 0).arguments(0), -1, np.empty(0, np.int64), _NO_LOGITS, np.empty((0, 0), np.int64))


def _run_with(_: list[list[Any]], *arguments: Any) -> None:
    """The program on a thread that holds the pages, of which the kernel has addresses alone: where another thread is
    interrupted, or fails, nobody else holds them."""
    run(*arguments)


def _slots(state: Any) -> list[Slot]:
    """The leaves of a program's state, in the order of glissando.state.leaves."""
    if state is None:
        return []
    return [state] if isinstance(state, Slot) else [leaf for child in state for leaf in _slots(child)]


def _view(rows: Rows, slot: Slot) -> Any:
    """The leaf (B, ...) of constant size that the slot names, shared with `rows`."""
    array, size = getattr(rows, slot.array), int(np.prod(slot.shape))
    return array[:, slot.at : slot.at + size].reshape(len(array), *slot.shape)
