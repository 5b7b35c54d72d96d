"""Text from a model: one token at a time from its state, any length, at the state's own cost."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glissando.data.tokenizers import Tokenizer
from glissando.decoding.lookup import LookupStep, require_lookup
from glissando.decoding.steps import Kind, Step, computing, read_prompts, require_kind, step_from
from glissando.errors import ConfigError, InputError, unknown_name
from glissando.mixers import Memo
from glissando.model import LanguageModel
from glissando.sampling import RowSampler, Sampler, Sampling, require_finite
from glissando.state import State, map_state
from glissando.state_files import StreamState
from glissando.text_row import TextRow

#: values by name, or all of them in the model's order
Control = Mapping[str, float] | Sequence[float]
#: tokens that `generate` computes in a call
BLOCK = 32
#: tokens of one prompt up to which the step reads it: the compiled one is faster there, and starts no thread
_SHORT = 128
#: largest size of a dial: the squares of a model's numbers, which grow with it, stay finite in float32
_FURTHEST = 1e9


class Continuation(Iterator[list[int | None]]):
    """Token ids behind prompts: one a row at a time, None in rows that have ended; stops with the last row.

    A row ends after `max_tokens`, or where learned positions end behind its own prompt. The model's weights must not
    change meanwhile: what follows from them is computed once.

    prompts    token ids of each row, none empty
    ends       (row, id) -> whether the row ends there; such rows leave the batch, so that they cost nothing
    end_id     a row ends with this id, too
    control    (B, C), or a function that is called for it before each token
    state      the model's state that the prompts are read behind; None: its initial state
    generators  of random numbers, one a row; None: row r has a new one, with the seed sampling.seed + r
    step       how tokens behind the prompt are computed, see glissando.decoding.steps
    lookup     of one prompt: largest number of tokens that are read ahead, see glissando.decoding.lookup
    block      largest number of tokens that are written before the first of them is returned: with more than 1, the
               compiled step draws them itself, and `state`, `unread` and `generators` are behind the last of them

    Raises NotFiniteError where the model computes no numbers, ConfigError for a compiled step where there is none.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        ends: Callable[[int, int], bool] | None = None,
        end_id: int | None = None,
        control: Tensor | Callable[[], Tensor] | None = None,
        state: State = None,
        generators: Sequence[torch.Generator] | None = None,
        step: Kind = "auto",
        lookup: int = 0,
        block: int = 1,
    ) -> None:
        require_kind(step)
        require_lookup(lookup, len(prompts))
        seeds = range(sampling.seed, sampling.seed + len(prompts))
        generators = generators or [torch.Generator().manual_seed(seed) for seed in seeds]
        self._rows = [RowSampler(sampling, generator) for generator in generators]
        self._unread: Any = None
        self._model, self._prompts, self._state, self._kind = model, prompts, state, step
        self._step: Step | None = None
        self._lookup, self._block = lookup, 1 if callable(control) else block
        read = 0 if state is None else int(state.position)
        limits = [min(max_tokens, tokens_left(model, read + len(prompt))) for prompt in prompts]
        self._ids = self._run(limits, ends, -1 if end_id is None else end_id, control)

    def __next__(self) -> list[int | None]:
        return next(self._ids)

    @property
    def state(self) -> State:
        """After every id that was read; it may change in place at the next one."""
        return self._state if self._step is None else self._step.state

    @property
    def unread(self) -> Tensor | None:
        """(B,) int64, the ids drawn last, which the state has not read."""
        return None if self._unread is None else torch.from_numpy(self._unread.copy())

    @property
    def generators(self) -> list[torch.Generator]:
        """The generator of each row, behind the random numbers that were used."""
        return [row.generator for row in self._rows]

    def _run(
        self,
        limits: list[int],
        ends: Callable[[int, int], bool] | None,
        end_id: int,
        control: Tensor | Callable[[], Tensor] | None,
    ) -> Iterator[list[int | None]]:
        model, prompts, device = self._model, self._prompts, self._model.embedding.weight.device
        alive = list(range(len(prompts)))
        memo: Memo = {}
        now = _now(control)
        if self._state is not None and len(prompts[0]) == 1:  # as it would have continued: to the last bit
            logits = self._begin_steps(now, memo, [], limits[0])(torch.tensor(prompts[0], device=device), now)
        elif len(prompts) == 1 and 0 < len(prompts[0]) <= _SHORT and not self._lookup:
            self._state = model.init_state(1) if self._state is None else self._state
            step = self._begin_steps(now, memo, [], limits[0])
            logits = step(torch.tensor(prompts, device=device), now)[:, -1]
        else:
            with computing(model):
                logits, self._state = read_prompts(model, prompts, now, device, memo, self._state)
        if not any(limits):
            return
        sampler = Sampler(self._rows, known_tokens(model))
        written, count = sampler.draw(logits), 0
        while True:
            going = list(range(len(alive)))
            for tokens in written.T.tolist():
                count += 1
                drawn: list[int | None] = [None] * len(prompts)
                for i in going:
                    require_finite(tokens[i])
                    drawn[alive[i]] = tokens[i]
                self._unread = written[:, -1]
                going = [
                    i
                    for i in going
                    if not (ends is not None and ends(alive[i], tokens[i]))
                    and tokens[i] != end_id
                    and count < limits[alive[i]]
                ]
                yield drawn
                if not going:
                    return
            now = _now(control)
            step = self._step or self._begin_steps(now, memo, prompts[0], limits[0] - 1)
            ids = written[:, -1]
            if len(going) < len(alive):
                alive, ids, sampler = [alive[i] for i in going], ids[going], sampler.keep(going)
                step.keep(going)
            here = now if now is None or len(now) == len(alive) else now[alive]
            counts = np.array([min(self._block, limits[row] - count) for row in alive])
            written = step.write(ids, here, sampler, counts, end_id)

    def _begin_steps(self, control: Tensor | None, memo: Memo, text: Sequence[int], left: int) -> Step:
        """The step from the state, which it then has instead of this object, behind `text` and with `left` tokens to
        read."""
        block = step_from(self._model, self._state, self._kind, control is not None, memo)
        step: Step = LookupStep(block, text, self._lookup, left) if self._lookup else block
        self._state, self._step = None, step
        return step


def _now(control: Tensor | Callable[[], Tensor] | None) -> Tensor | None:
    return control() if callable(control) else control


def tokens_left(model: LanguageModel, prompt_tokens: int) -> int:
    """How many tokens the model can write behind a prompt: endless but for learned positions."""
    limit = model.config.max_length
    # The last token that is written is never read, so it needs no position.
    return sys.maxsize if limit is None else max(0, limit - prompt_tokens + 1)


def known_tokens(model: LanguageModel) -> int:
    """How many ids, from 0, the tokenizer knows: there are more logits once a vocabulary has grown."""
    size = model.config.vocab_size
    return size if model.tokenizer is None else min(size, model.tokenizer.vocab_size)


def control_values(model: LanguageModel, control: Control) -> list[float]:
    """One value for each of the model's control dimensions, in their order.

    Raises ConfigError for a model without a trained control or a wrong number of values, UnknownNameError for a wrong
    name.
    """
    names = model.config.controls
    if names and not model.config.dials:
        raise ConfigError(
            f"the dials of this model ({', '.join(names)}) were not trained, because its corpus had no labels: train "
            "on one that has them, such as --from RUN --data.labelled true"
        )
    if not names:
        raise ConfigError(
            "this model takes no control: it has no dials. Use one that has, such as `dial` of the package, or train "
            "the preset hybrid-ode-nano with --data.labelled true"
        )
    if not isinstance(control, Mapping):
        if isinstance(control, str | Real) or len(control) != len(names):
            raise ConfigError(
                f"control must be a mapping of dials, such as {{{names[0]!r}: 0.7}}, or {len(names)} numbers "
                f"({', '.join(names)}); got {control!r}"
            )
        control = dict(zip(names, control, strict=True))
    for name, value in control.items():
        if name not in names:
            raise unknown_name("control", name, names)
        if not (hasattr(value, "__float__") and abs(value) <= _FURTHEST):  # nor NaN
            raise ConfigError(f"the value of a dial must be a number from -1e9 to 1e9, such as 0.7; got {name}={value}")
    return [float(control.get(name, 0.0)) for name in names]


class Stream(Iterator[str]):
    """The pieces of a text as they come."""

    def __init__(self, texts: _Texts, resumable: bool) -> None:
        self._texts, self._resumable = texts, resumable
        self._pieces = texts.pieces(finishes=not resumable)

    def __next__(self) -> str:
        return next(piece for (piece,) in self._pieces if piece)

    @property
    def state(self) -> StreamState:
        """What `stream(model, state=...)` goes on from, now or in another process (`glissando.save_state`).

        Raises ConfigError for a stream that is not resumable, or has not begun.
        """
        if not self._resumable:
            raise ConfigError("only a resumable stream has a state: stream(model, prompt, resumable=True)")
        ids, row = self._texts.ids, self._texts.rows[0]
        if ids.unread is None:
            raise ConfigError("this stream has not begun, so that it has no state yet: take a piece of it first")
        return StreamState(
            map_state(torch.clone, ids.state), ids.unread.clone(), ids.generators[0].get_state(),
            torch.tensor(row.recent, dtype=torch.int64), row.held,
        )  # fmt: skip


def stream(
    model: LanguageModel,
    prompt: str = "",
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float = 0.0,
    seed: int = 0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    control: Control | Callable[[], Control] | None = None,
    when_full: Callable[[], None] | None = None,
    state: StreamState | None = None,
    resumable: bool = False,
    step: Kind = "auto",
    lookup: int = 0,
) -> Stream:
    """The continuation of a prompt, in pieces as they are generated.

    The weights of the model must not change until the last piece.

    Args:
        model: A model with a tokenizer.
        prompt: The beginning of the text.
        max_tokens: Largest number of tokens.
        temperature: Logits are divided by it; 0 chooses the most likely token.
        top_k: Sample only from the k most likely tokens.
        top_p: Sample only from the most likely tokens that together have this probability.
        min_p: Sample only from tokens at least this many times as likely as the most likely one.
        seed: Seed of sampling; without effect if `state` is given.
        frequency_penalty: Subtracted from a token's logit each time that the token was generated.
        presence_penalty: Subtracted from the logit of every token that was generated, once.
        repetition_penalty: Divides positive logits of tokens that were generated, and multiplies negative ones.
        logit_bias: Added to the logits of tokens, by id: {7: -math.inf} never generates token 7.
        allowed: Ids of the only tokens that are generated.
        stop: A text, or several, before which the text ends.
        control: Values of dials by name, {"mood": 0.7} (others are 0), or all values in the model's order. A function
            is called before each token, so a dial can be turned while text streams.
        when_full: Called if a text ends because there are no more learned positions.
        state: State of an earlier stream of this model, from which the text continues; `prompt` is appended first.
        resumable: Whether the stream has a `state`, which also keeps a part of a character or of a stop text.
        step: `compiled` (a token is one call of a kernel; float32 on a CPU), `plain` (the model's forward pass), or
            `auto` (compiled if the model has such a step).
        lookup: Up to so many tokens are read ahead in one call where the last three tokens occurred earlier: those that
            followed them there. It is faster where a text repeats itself, and the text stays the same (to the last bit
            with the compiled step).

    Returns:
        An iterator over pieces of text; with `resumable`, its attribute `state` is the state after the latest piece.

    Raises:
        ConfigError: The model has no tokenizer, or an argument has an impossible value.
    """
    biases, only = _by_token(logit_bias, allowed)
    sampling = Sampling(
        temperature, top_k, top_p, seed, frequency_penalty, presence_penalty, biases, min_p, repetition_penalty, only
    )
    if (resumable or state is not None) and sampling.counts_tokens:
        raise ConfigError(
            "frequency_penalty, presence_penalty and repetition_penalty count all tokens of a text, which the state of "
            "a stream does not keep: leave them out, or stream without state and resumable"
        )
    prompts = _texts([prompt], "prompt")
    texts = _Texts(model, prompts, max_tokens, sampling, stop, control, when_full, step, lookup, state)
    return Stream(texts, resumable)


def generate(
    model: LanguageModel,
    prompts: str | Sequence[str],
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float = 0.0,
    seed: int = 0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    control: Control | None = None,
    when_full: Callable[[], None] | None = None,
    step: Kind = "auto",
    lookup: int = 0,
) -> list[str]:
    """The continuations of several prompts, computed together. Each text equals the one generated alone.

    With `lookup` each text is computed alone, as texts keep different numbers of the tokens that were read ahead.

    Args:
        model: A model with a tokenizer.
        prompts: A text, or several. The other arguments are those of `stream`.

    Returns:
        One continuation for each prompt.
    """
    several = _texts(prompts, "prompts")
    biases, only = _by_token(logit_bias, allowed)
    sampling = Sampling(
        temperature, top_k, top_p, seed, frequency_penalty, presence_penalty, biases, min_p, repetition_penalty, only
    )
    made: list[str] = []
    for row, together in enumerate([[prompt] for prompt in several] if lookup and several else [several]):
        drawn = replace(sampling, seed=seed + row)
        texts = _Texts(model, together, max_tokens, drawn, stop, control, when_full, step, lookup, block=BLOCK)
        made += texts.whole()
    return made


def _by_token(logit_bias: Any, allowed: Any) -> tuple[tuple[tuple[int, float], ...], tuple[int, ...] | None]:
    """Both as Sampling has them. Raises ConfigError for another type."""
    if not isinstance(logit_bias, Mapping | None):
        raise ConfigError(f"logit_bias must be numbers by token id, such as {{7: -100.0}}, got {logit_bias!r}")
    if not isinstance(allowed, Iterable | None):
        raise ConfigError(f"allowed must be several token ids, such as (7, 9), got {allowed!r}")
    return tuple((logit_bias or {}).items()), None if allowed is None else tuple(allowed)


def _texts(value: object, what: str) -> list[str]:
    """One text or several, as a list. Raises ConfigError for anything else."""
    if isinstance(value, str):
        return [value]
    several = list(value) if isinstance(value, Iterable) else [value]
    texts = [text for text in several if isinstance(text, str)]
    if len(texts) < len(several):
        raise ConfigError(f"{what} must be a text, or a list of texts (which may be empty), got {value!r}")
    return texts


class _Texts:
    """The texts of several rows; `ids` and `rows` have where they are.

    before    a stream of one text that it goes on from
    block     largest number of tokens that are computed before the first is looked at; above 1 for `whole` alone
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[str],
        max_tokens: int,
        sampling: Sampling,
        stop: str | Sequence[str],
        control: Control | Callable[[], Control] | None,
        when_full: Callable[[], None] | None,
        step: Kind,
        lookup: int,
        before: StreamState | None = None,
        block: int = 1,
    ) -> None:
        self._tokenizer = tokenizer = tokenizer_of(model)
        if not (isinstance(max_tokens, int | Integral) and max_tokens >= 0):
            raise ConfigError(f"max_tokens must be a whole number of at least 0, got {max_tokens!r}")
        self._stops = _texts(stop, "stop")
        if any(not s for s in self._stops):
            raise ConfigError("a stop text is empty: it would stop at once")
        self.rows = [TextRow(tokenizer, self._stops) for _ in prompts]
        first, read = [tokenizer.eos_id], 0
        state: State = None
        generators: list[torch.Generator] | None = None
        if before is not None:
            self.rows[0].go_on(before.recent.tolist(), before.held)
            first, read = before.unread.tolist(), int(before.model.position)
            state = map_state(torch.clone, before.model)
            generators = [torch.Generator()]
            generators[0].set_state(before.generator)
        ids = [[*first, *tokenizer.encode(prompt)] for prompt in prompts]
        dial = None if control is None else _dial(model, control, len(prompts))
        self._pieces = [""] * len(prompts)
        self.ids = Continuation(
            model, ids, max_tokens, sampling,
            ends=self._ends if block == 1 or self._stops else None, end_id=tokenizer.eos_id, control=dial, state=state,
            generators=generators, step=step, lookup=lookup, block=block,
        )  # fmt: skip
        self._short = [tokens_left(model, read + len(prompt)) < max_tokens for prompt in ids]
        self._when_full = when_full

    def whole(self) -> list[str]:
        """The texts; without stop texts each is decoded when it is complete."""
        if self._stops:
            return ["".join(pieces) for pieces in zip(*self.pieces(), strict=True)]
        ids: list[list[int]] = [[] for _ in self.rows]
        for drawn in self.ids:
            for row, token in enumerate(drawn):
                if token is not None:
                    ids[row].append(token)
        ended = [row[-1:] == [self._tokenizer.eos_id] for row in ids]
        self._report_full(ended)
        return [self._tokenizer.decode(row[:-1] if end else row) for row, end in zip(ids, ended, strict=True)]

    def _ends(self, row: int, token: int) -> bool:
        self._pieces[row] = self.rows[row].push(token)
        return self.rows[row].ended

    def pieces(self, finishes: bool = True) -> Iterator[list[str]]:
        """What is new of every row, at each of its tokens; finishes: a text that is cut off returns what was held
        back."""
        for _ in self.ids:
            yield list(self._pieces)
            self._pieces = [""] * len(self.rows)
        ended = [row.ended for row in self.rows]
        if finishes:
            yield [row.finish() for row in self.rows]
        self._report_full(ended)

    def _report_full(self, ended: list[bool]) -> None:
        if self._when_full is not None and any(s and not e for s, e in zip(self._short, ended, strict=True)):
            self._when_full()


def _dial(model: LanguageModel, control: Control | Callable[[], Control], rows: int) -> Tensor | Callable[[], Tensor]:
    """The control of every row, (B, C), or a function that returns it."""

    def now() -> Tensor:
        values = control() if callable(control) else control
        return model.embedding.weight.new_tensor([control_values(model, values)]).expand(rows, -1)

    return now if callable(control) else now()


def tokenizer_of(model: LanguageModel) -> Tokenizer:
    """The model's tokenizer. Raises ConfigError if it has none, InputError for what is no model."""
    if not hasattr(model, "tokenizer"):
        name = repr(str(model)) if isinstance(model, str | os.PathLike) else "RUN"
        raise InputError(
            f"model must be a LanguageModel, got a {type(model).__name__}; load a run or a packaged model with "
            f"glissando.load({name})"
        )
    if model.tokenizer is None:
        raise ConfigError(
            f"this model (vocabulary {model.config.vocab_size}) has no tokenizer; set model.tokenizer = "
            "load_tokenizer('tokenizer.json') from glissando.data.tokenizers, or load a run directory"
        )
    return model.tokenizer
