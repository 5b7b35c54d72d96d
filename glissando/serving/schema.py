"""What clients may send: OpenAI's fields, with those of no meaning here refused unless they ask for nothing.

`top_k` and `control` are ours.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

#: what is no text; the end token of a byte model is one of them
_CONTROL_BYTES = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SEED = 2**63 - 1

#: OpenAI's fields that nothing is done for here, and the values that ask for nothing, which clients send
_ASKS_NOTHING: dict[str, list[Any]] = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "logit_bias": [{}],
    "tools": [[]],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "prediction": [],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "store": [False],
    "metadata": [{}],
    "service_tier": ["auto", "default"],
    "verbosity": ["medium"],
    "reasoning_effort": ["none"],
}

#: what answers' messages carry beside their text, which clients send back with it
_BESIDE_TEXT = ("refusal", "audio", "function_call", "tool_calls", "annotations")

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Text = str
StopText = Annotated[str, Field(min_length=1, max_length=256)]


def refuse_control_bytes(text: str) -> str:
    """`text`; raises ValueError where it holds a NUL, a control byte or half a surrogate pair."""
    found = _CONTROL_BYTES.search(text)
    if found:
        raise ValueError(
            f"character {found.start()} is the control byte 0x{ord(found[0]):02x}, which is not text; remove it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not text; remove it") from None
    return text


def _as_text(content: Any) -> Any:
    """A message's content, or a part's text, with U+FFFD for every control byte."""
    if isinstance(content, str):
        return _CONTROL_BYTES.sub("\ufffd", content)
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return content | {"text": _as_text(content["text"])}
    return content


class _Strict(BaseModel):
    """A number is no string and no other fields are taken."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False

    @field_validator("include_obfuscation")
    @classmethod
    def _is_not_done(cls, asked: bool) -> bool:
        if asked:
            raise ValueError("include_obfuscation is not done by this server; leave it out")
        return asked


class _Common(_Strict):
    model: str
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=-_SEED, le=_SEED - 2**20)
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    control: dict[str, float] | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: Any) -> Any:
        """As in OpenAI's schema, where nearly every field may be null; so are fields that ask for nothing."""
        if not isinstance(given, dict):
            return given
        for name, nothing in _ASKS_NOTHING.items():
            value = given.get(name)
            # True is no 1 here, nor 0 False.
            if value is not None and not any(
                value == v and isinstance(value, bool) == isinstance(v, bool) for v in nothing
            ):
                raise ValueError(f"{name} is not done by this server; leave it out")
        given = {name: value for name, value in given.items() if name not in _ASKS_NOTHING}
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()} - {"prompt"}
        return {name: value for name, value in given.items() if value is not None or name not in optional}

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Common:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is for stream: true; leave it out")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: Text | TokenIds | Annotated[list[Text] | list[TokenIds], Field(min_length=1)] = ""
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("prompt")
    @classmethod
    def _is_text(cls, prompt: Any) -> Any:
        for part in [prompt] if isinstance(prompt, str) else prompt:
            if isinstance(part, str):
                refuse_control_bytes(part)
        return prompt

    @model_validator(mode="after")
    def _refuse_more(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not done by this server; leave it out, or give as many as n")
        if self.suffix:
            raise ValueError("suffix is not done by this server, whose models read from left to right; leave it out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _an_answer_comes_back(cls, given: Any) -> Any:
        """An answer of this server may be sent as it was: with fields that are empty, and what the model wrote."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if name not in _BESIDE_TEXT or value not in (None, [])}
        if given.get("role") == "assistant" and "content" in given:
            content = given["content"]
            given["content"] = list(map(_as_text, content)) if isinstance(content, list) else _as_text(content)
        return given

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @field_validator("content")
    @classmethod
    def _is_text(cls, content: Any) -> Any:
        for part in [content] if isinstance(content, str) else [part.text for part in content]:
            refuse_control_bytes(part)
        return content


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class ControlBody(_Strict):
    """POST /v1/completions/ID/control: the dials of texts under way."""

    control: dict[str, float]


class LookBody(_Strict):
    """POST /v1/glissando/look: what is to be seen of the model over a text."""

    text: str = Field(max_length=4000)
    control: dict[str, float] | None = None

    @field_validator("text")
    @classmethod
    def _is_text(cls, text: str) -> str:
        return refuse_control_bytes(text)
