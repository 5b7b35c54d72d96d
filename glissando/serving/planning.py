"""From what a client asks to what the engine is given."""

from __future__ import annotations

import json
import reprlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import jinja2.sandbox
import torch

from glissando.data.tokenizers import Tokenizer
from glissando.errors import ConfigError, DataError, UnknownNameError
from glissando.generation import Sampling, control_values
from glissando.serving.engine import Engine
from glissando.serving.limits import Limits
from glissando.serving.schema import BadRequestError, ChatBody, CompletionBody, Message, Turn, refuse_control_bytes
from glissando.serving.session import Request


class ChatTemplate:
    """Messages as one text. By default one behind the other, without roles: these models were not trained on chats.

    A template file is Jinja, as Hugging Face's are, with `messages`, `add_generation_prompt`, `eos_token` and
    `bos_token` (both empty), `raise_exception`, `strftime_now`, `tojson`, `break` and `continue`.
    """

    def __init__(self, source: str | Path | None = None) -> None:
        self.template = None
        if source is not None:
            environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            environment.globals |= {"raise_exception": _refuse, "strftime_now": time.strftime}
            environment.filters["tojson"] = _as_json
            try:
                self.template = environment.from_string(Path(source).read_text("utf-8"))
            except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
                raise ConfigError(f"the chat template {source} cannot be used: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt. Raises BadRequestError where the template refuses the messages."""
        if self.template is None:
            return " ".join(message.text for message in messages)
        turns = [{"role": message.role, "content": message.text} for message in messages]
        try:
            text = self.template.render(messages=turns, add_generation_prompt=True, eos_token="", bos_token="")
            return refuse_control_bytes(text)
        except Exception as error:  # a template may call anything that its values have
            why = error if isinstance(error, (jinja2.TemplateError, ValueError)) else f"{type(error).__name__}: {error}"
            raise BadRequestError(f"the server's chat template refuses these messages: {why}", "messages") from error


def _as_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """As Hugging Face's templates have it: Jinja's own escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _refuse(message: str) -> NoReturn:
    """A template's `raise_exception`."""
    raise jinja2.TemplateError(message)


def encoded(tokenizer: Tokenizer, text: str, param: str) -> list[int]:
    """The tokens of a text. Raises BadRequestError for a text that this tokenizer does not read, as numbers alone."""
    try:
        return tokenizer.encode(text)
    except DataError as error:
        raise BadRequestError(str(error), param) from error


class Planner:
    """Checks that need the model and the server's limits."""

    def __init__(self, engine: Engine, limits: Limits, template: ChatTemplate) -> None:
        self.engine, self.limits, self.template = engine, limits, template

    def completion(self, body: CompletionBody) -> list[Request]:
        """A request for each prompt."""
        if len(body.prompts) * body.n > self.limits.max_copies:
            asked = f"{len(body.prompts)} prompts with n = {body.n}"
            raise BadRequestError(f"{asked} are more than {self.limits.max_copies} texts; send several requests", "n")
        every = [self._ids(prompt) for prompt in body.prompts]
        requests = [self._request(body, ids, body.max_tokens, body.echo) for ids in every]
        return [
            replace(
                request,
                begun=not isinstance(prompt, str) and tuple(prompt) == request.ids,
                # As `generate` does for a list of prompts: equal ones are not to be one text several times.
                sampling=replace(request.sampling, seed=request.sampling.seed + number * body.n),
            )
            for number, (request, prompt) in enumerate(zip(requests, body.prompts, strict=True))
        ]

    def chat(self, body: ChatBody) -> list[Request]:
        """The one request of a chat."""
        if body.n > self.limits.max_copies:
            raise BadRequestError(f"n = {body.n} is more than {self.limits.max_copies} texts", "n")
        ids = self._ids(self.template.render(body.messages), "messages")
        counts = [count for count in (body.max_completion_tokens, body.max_tokens) if count is not None]
        count = counts[0] if counts else min(self.limits.max_tokens, max(1, self.engine.room(len(ids))))
        request = self._request(body, ids, count, False)
        needs, memory = self.engine.needs, self.engine.memory
        while not counts and request.max_tokens > 1 and needs.alone(request) + request.answer_bytes > memory:
            request = replace(request, max_tokens=request.max_tokens // 2)
        return [request]

    def control(self, values: Mapping[str, float] | None) -> tuple[float, ...] | None:
        """Every dial's value, in the model's order."""
        if values is None:
            return None
        try:
            setting = tuple(control_values(self.engine.model, values))
        except (ConfigError, UnknownNameError) as error:
            raise BadRequestError(str(error), "control") from error
        dtype = self.engine.model.embedding.weight.dtype
        for name, value in zip(self.engine.model.config.controls, setting, strict=True):
            most = torch.finfo(dtype).max
            if abs(value) > most:
                raise BadRequestError(
                    f"the dial {name} is set to {value}, and the largest number of {dtype} is {most:.2g}; "
                    "choose a value closer to 0, such as 0.7", "control",
                )  # fmt: skip
        return setting

    def turned(self, asked: tuple[float, ...] | None, values: Mapping[str, float]) -> tuple[float, ...]:
        """Every dial's value once those of `values` are turned; the others stay as `asked`, or 0 under no control."""
        before = {} if asked is None else dict(zip(self.engine.model.config.controls, asked, strict=True))
        setting = self.control({**before, **values})
        assert setting is not None
        return setting

    def _turns(
        self, control: tuple[float, ...] | None, turns: Sequence[Turn]
    ) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Every dial's value from each of `turns` on."""
        settled: list[tuple[int, tuple[float, ...]]] = []
        for turn in turns:
            if settled and turn.at <= settled[-1][0]:
                raise BadRequestError(f"turns: token {turn.at} comes after token {settled[-1][0]}; sort them", "turns")
            control = self.turned(control, turn.control)
            settled.append((turn.at, control))
        return tuple(settled)

    def _ids(self, prompt: str | Sequence[int], param: str = "prompt") -> tuple[int, ...]:
        """With the end token before them, which every text was trained behind."""
        tokenizer = self.engine.tokenizer
        size = min(tokenizer.vocab_size, self.engine.model.config.vocab_size)
        if isinstance(prompt, str) and len(prompt) > 16 * self.limits.max_prompt:
            raise BadRequestError(f"the prompt has {len(prompt):,} characters; send a shorter one", param)
        ids = encoded(tokenizer, prompt, param) if isinstance(prompt, str) else list(prompt)
        outside = [token for token in ids if token >= size]
        if outside:
            shown = reprlib.repr(outside[0])
            raise BadRequestError(f"token {shown} is outside the vocabulary of {size}", param)
        if not ids or isinstance(prompt, str) or ids[0] != tokenizer.eos_id:
            ids = [tokenizer.eos_id, *ids]
        limit = self.limits.max_prompt
        if len(ids) > limit:
            raise BadRequestError(
                f"the prompt has {len(ids):,} tokens with its beginning, and {limit:,} may be sent", param,
                "context_length_exceeded",
            )  # fmt: skip
        return tuple(ids)

    def _request(self, body: CompletionBody | ChatBody, ids: tuple[int, ...], count: int, echo: bool) -> Request:
        if count > self.limits.max_tokens:
            raise BadRequestError(
                f"max_tokens is {count:,}, and a text here has at most {self.limits.max_tokens:,}", "max_tokens"
            )
        room = self.engine.room(len(ids))
        if room == 0:
            param = "messages" if isinstance(body, ChatBody) else "prompt"
            raise BadRequestError(
                f"this model has learned positions for {self.engine.model.config.max_length} tokens, and the prompt "
                f"has {len(ids)} with its beginning; shorten it", param, "context_length_exceeded",
            )  # fmt: skip
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        unknown = [token for token in body.logit_bias if token >= self.engine.model.config.vocab_size]
        if unknown:
            size = self.engine.model.config.vocab_size
            raise BadRequestError(f"logit_bias: token {unknown[0]} is outside the vocabulary of {size}", "logit_bias")
        sampling = Sampling(
            body.temperature, body.top_k, None if body.top_p == 1 else body.top_p, seed,
            body.frequency_penalty, body.presence_penalty, tuple(sorted(body.logit_bias.items())),
        )  # fmt: skip
        control = self.control(body.control)
        return Request(
            ids, min(count, room), sampling, body.n, tuple(body.stop), control, body.top, echo,
            pace=body.pace, turns=self._turns(control, body.turns),
        )  # fmt: skip
