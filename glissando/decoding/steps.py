"""How texts go on by one token each: by the compiled step where the model has one, else by the model's forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from glissando.block import MLP, ComplexNorm, RMSNorm, ShortConv
from glissando.errors import ConfigError, NotCompiled, unknown_name
from glissando.mixers import Memo
from glissando.model import LanguageModel
from glissando.quantisation import is_rounded
from glissando.sampling import Sampler
from glissando.state import State, fit_room, join_rows, select_rows, state_bytes

#: auto: compiled where the model has a compiled step, else plain
Kind = Literal["auto", "compiled", "plain"]

#: parameters from which `auto` is plain: the compiled step keeps a copy of the weights, and uses one thread a text
_LARGE = 64_000_000


class Step(Protocol):
    """Rows of texts and their states."""

    def __call__(self, ids: Tensor, control: Tensor | None) -> Tensor:
        """One token a row (B,), control (B, C) -> logits (B, V), overwritten by the next call."""

    def write(
        self, ids: Any, control: Tensor | None, sampler: Sampler, counts: Any, end: int, logits: Any = None
    ) -> Any:
        """The next tokens of each row behind ids (B,), drawn by `sampler`: (B, n) int64 with 0 < n, of which the last
        are not read. Behind counts (B,) tokens, `end` and NOT_FINITE a row has ENDED (glissando.kernels.drawing), and
        reads nothing. logits (B, N, V) gets those at which each token was drawn."""

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows, in this order."""

    @property
    def state(self) -> State:
        """The model's state after all tokens read, which the next call may change in place."""


class BlockStep(Step, Protocol):
    """A step that also reads several tokens a row in a call, ids (B, T) -> logits (B, T, V)."""

    def rewind(self, count: int) -> None:
        """After a call of T tokens a row: go back to the state before the last `count` of them, count < T."""

    def select(self, rows: Sequence[int]) -> Any:
        """A step of its own of these rows, also several times."""

    def join(self, other: Any) -> None:
        """The rows of `other` behind these; it is not used any more."""

    def length(self, row: int) -> int:
        """Tokens that a row has read."""

    def mark(self, row: int) -> Mark | None:
        """This state of a row, to go back to; None of a step that would need a copy of all its caches for it."""

    @property
    def bytes(self) -> int:
        """The bytes of the states."""


class PlainStep:
    """The model's own forward."""

    def __init__(self, model: LanguageModel, state: State, memo: Memo | None = None) -> None:
        self.model, self.state, self._memo = model, state, {} if memo is None else memo
        self._latest: Any = None  # of a call of several tokens: the state before it, ids and control

    def __call__(self, ids: Tensor, control: Tensor | None) -> Tensor:
        if ids.ndim == 1:
            return self._read(ids.unsqueeze(1), control, donate=True)[:, -1]
        self._latest = self.state, ids, control
        return self._read(ids, control, donate=False)

    def _read(self, ids: Tensor, control: Tensor | None, donate: bool) -> Tensor:
        with computing(self.model):
            ids = ids.to(self.model.embedding.weight.device)
            logits, self.state = self.model(ids, self.state, control=control, donate=donate, memo=self._memo)
        return logits

    def write(
        self, ids: Any, control: Tensor | None, sampler: Sampler, counts: Any, end: int, logits: Any = None
    ) -> Any:
        after = self(torch.from_numpy(ids), control)
        if logits is not None:
            logits[:, 0] = after.to(torch.promote_types(after.dtype, torch.float32)).cpu().numpy()
        return sampler.draw(after)

    def rewind(self, count: int) -> None:
        self.state, ids, control = self._latest
        self._read(ids[:, : ids.shape[1] - count], control, donate=False)

    def keep(self, rows: Sequence[int]) -> None:
        self.state = fit_room(self._rows(rows), spare=True)

    def select(self, rows: Sequence[int]) -> PlainStep:
        return PlainStep(self.model, fit_room(self._rows(rows)), self._memo)

    def _rows(self, rows: Sequence[int]) -> State:
        return select_rows(self.state, torch.tensor(rows, device=self.model.embedding.weight.device))

    def join(self, other: Any) -> None:
        self.state = join_rows(self.state, other.state)

    def length(self, row: int) -> int:
        return int(self.state.position[row])

    def mark(self, row: int) -> None:
        return None

    @property
    def bytes(self) -> int:
        return state_bytes(self.state)


class CompiledStep:
    """glissando.decoding.Decoder and its rows behind the same calls."""

    def __init__(self, decoder: Any, rows: Any) -> None:
        self.decoder, self.rows = decoder, rows
        self._latest: Any = None  # of a call of several tokens: the states before it, ids and control

    def __call__(self, ids: Tensor, control: Tensor | None) -> Tensor:
        if ids.ndim == 2:
            self._latest = self.decoder.mark(self.rows), ids, control
        return self.decoder.step(ids, self.rows, control)[0]

    def write(
        self, ids: Any, control: Tensor | None, sampler: Sampler, counts: Any, end: int, logits: Any = None
    ) -> Any:
        return self.decoder.write(ids, self.rows, control, sampler, counts, end, logits)

    def rewind(self, count: int) -> None:
        mark, ids, control = self._latest
        self.decoder.restore(self.rows, mark)
        self.decoder.step(ids[:, : ids.shape[1] - count], self.rows, control)

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = self.decoder.select(self.rows, rows, moved=True)

    def select(self, rows: Sequence[int]) -> CompiledStep:
        return CompiledStep(self.decoder, self.decoder.select(self.rows, rows))

    def join(self, other: Any) -> None:
        self.rows = self.decoder.join(self.rows, other.rows)

    @property
    def state(self) -> State:
        return self.decoder.state(self.rows)

    def length(self, row: int) -> int:
        return int(self.rows.filled[row])

    def mark(self, row: int) -> Mark:
        return Mark(*(part[row : row + 1].copy() for part in (self.rows.fixed, self.rows.exact, self.rows.filled)))

    @property
    def bytes(self) -> int:
        return self.decoder.bytes_of(self.rows)


class Mark(NamedTuple):
    """A row at an earlier token: the parts of its state that are no caches, whose pages the row still has."""

    fixed: Any
    exact: Any
    filled: Any

    def step(self, later: Any) -> CompiledStep:
        """A step of its own of the row as it was, from the step of one row that has read on."""
        return CompiledStep(later.decoder, later.decoder.cut(later.rows, self))


def step_from(
    model: LanguageModel, state: State, kind: Kind, with_control: bool, memo: Memo | None = None
) -> BlockStep:
    """The step of texts that `state` is of.

    Raises UnknownNameError for another kind, ConfigError for `compiled` where the model has none: it says why.
    """
    decoder = decoder_of(model, kind, with_control)
    return PlainStep(model, state, memo) if isinstance(decoder, str) else CompiledStep(decoder, decoder.rows(state))


#: of each model its decoders without and with a control, and what the weights were when they were made
_DECODERS: WeakKeyDictionary[LanguageModel, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


def decoder_of(model: LanguageModel, kind: Kind, with_control: bool) -> Any:
    """The model's decoder, made anew where weights have changed; or the reason why steps are plain.

    Raises ConfigError for such a reason where `compiled` was requested, or caches of fewer bits.
    """
    require_kind(kind)
    decoder = _decoder_or_reason(model, kind, with_control)
    if isinstance(decoder, str):
        if kind == "compiled":
            raise ConfigError(f"step `compiled`: {decoder}; use `auto` or `plain`")
        if model.caches_precision != "float32":
            raise ConfigError(
                f"caches in {model.caches_precision} need the compiled step: {decoder}; keep them in float32"
            )
    return decoder


def _decoder_or_reason(model: LanguageModel, kind: Kind, with_control: bool) -> Any:
    if kind == "plain":
        return "the plain step was requested"
    if (device := model.embedding.weight.device).type != "cpu":
        return f"the model is on {device}, and the compiled step computes on a CPU"
    other = _otherwise(model)
    if other is not None:
        return other
    count = sum(p.numel() for p in model.parameters())
    if kind == "auto" and count > _LARGE:
        return f"a model of {count:,} parameters, and the compiled step would keep a copy of them"
    tensors = (*model.parameters(), *model.buffers())
    stamp = (str(model.config), model.caches_precision, *(_digest(tensor) for tensor in tensors))
    known = _DECODERS.setdefault(model, {})
    if with_control not in known or known[with_control][0] != stamp:
        from glissando.decoding.decoder import Decoder

        precision = model.weights_precision
        if precision != "float32" and not is_rounded(model, precision):  # trained on, or loaded anew
            precision = "float32"
        try:
            known[with_control] = stamp, Decoder(model, precision, with_control, model.caches_precision)
        except NotCompiled as reason:
            known[with_control] = stamp, f"no compiled step for {reason}"
    return known[with_control][1]


def _digest(tensor: Tensor) -> tuple[int, int]:
    """Where the numbers are and the sum of their bits, which every write into them changes. PyTorch's own count of
    changes does not see what is written through `.data`, as PEFT's `merge` does. NumPy adds the bits: threads of
    PyTorch wait for each other on a busy machine."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.data_ptr() % 8:
        bits = bits.clone()
    whole = bits[: bits.numel() // 8 * 8].view(torch.int64)
    return tensor.data_ptr(), int(whole.numpy().sum()) + int(bits[whole.numel() * 8 :].sum())


def require_kind(kind: str) -> None:
    """Raise UnknownNameError unless there is such a step."""
    if kind not in get_args(Kind):
        raise unknown_name("step", kind, get_args(Kind))


def _otherwise(model: LanguageModel) -> str | None:
    """Why the model may compute something else than its classes say; None where it does not."""
    if torch.is_autocast_enabled("cpu"):
        return "torch.autocast is on, and the compiled step computes in float32"
    if any((nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)):
        return "there are global forward hooks"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{name or 'the model'} has hooks, or a forward that was replaced"
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm | RMSNorm | ComplexNorm | MLP | ShortConv):
            place = type(module).__module__
            if not place.startswith(("torch.nn.modules.", "glissando.")):
                return f"{name} is a {type(module).__name__}, which may compute something else"
    return None


@contextmanager
def computing(model: LanguageModel) -> Iterator[None]:
    """Without gradients and in evaluation mode; modules that were training are put back into it afterwards.

    Raises RuntimeError where another thread put the model back meanwhile, so that dropout was on: threads share a model
    that is in evaluation mode before.
    """
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
        if model.training:
            raise RuntimeError(
                "the model was put into training mode while it computed a text; call model.eval() before several "
                "threads use it"
            )
    finally:
        for module in training:
            module.training = True


def read_prompts(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    control: Tensor | None,
    device: torch.device,
    memo: Memo,
    state: State = None,
) -> tuple[Tensor, State]:
    """Logits after each prompt (B, V) and the state there, prompts of different length padded and masked."""
    if not prompts:
        raise ConfigError("prompts is an empty list; give one text, or several")
    if any(len(p) == 0 for p in prompts):
        raise ConfigError("a prompt is empty; begin with the tokenizer's eos_id, which precedes every text")
    longest = max(map(len, prompts))
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    ragged = bool((lengths < longest).any())
    mask = torch.arange(longest, device=device) < lengths.unsqueeze(1) if ragged else None
    state = model.init_state(len(prompts)) if state is None else state
    features, state = model.features(ids, state, mask=mask, control=control, donate=True, memo=memo)
    last = features[torch.arange(len(prompts), device=device), lengths - 1]
    return model.logits(last), state
