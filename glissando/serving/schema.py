"""What clients may send: OpenAI's fields, with those of no meaning here refused unless they ask for nothing.

`top_k`, `control`, `pace` and `turns` are ours.
"""

from __future__ import annotations

import json
import re
import reprlib
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from glissando.errors import nearest
from glissando.serving.session import RequestError

#: what is no text; the end token of a byte model is one of them
_CONTROL_BYTES = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SEED = 2**63 - 1

#: OpenAI's fields that nothing is done for here, and the values that ask for nothing, which clients send
_ASKS_NOTHING: dict[str, list[Any]] = {
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

#: strings, lists and objects of a request; all but these are found fast by whoever reads JSON
_MOST_PARTS = 16384
_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]', re.DOTALL)


class BadRequestError(RequestError, ValueError):
    """A request that cannot be answered; `param` is the field, `code` OpenAI's word for it."""

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code
        self.http_status = 404 if code in ("model_not_found", "not_found") else 400


def refuse_control_bytes(text: str) -> str:
    """`text`; raises ValueError where it holds a NUL, a control byte or half a surrogate pair."""
    match = _CONTROL_BYTES.search(text)
    if match:
        raise ValueError(
            f"character {match.start()} is the control byte 0x{ord(match[0]):02x}, which is not text; remove it"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not text; remove it") from None
    return text


Text = Annotated[str, AfterValidator(refuse_control_bytes)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class _Strict(BaseModel):
    """A number is no string and no other fields are taken."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _knows_all_fields(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in given:
                if name not in cls.model_fields:
                    raise PydanticCustomError("unknown_field", "{name}", {"name": name, "known": [*cls.model_fields]})
        return given


def _are_dials(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > 64:
        raise ValueError(f"a model has at most 64 dials, got {len(given):,}")
    return given


Control = Annotated[dict[str, float], BeforeValidator(_are_dials)]


#: tokens a second: a text of fewer would hold its place for long
Pace = Annotated[float, Field(ge=1, le=1000)]


def _are_biases(given: Any) -> Any:
    """By token id, written as a string. The first bias that is none is reported by its token."""
    if not isinstance(given, dict):
        return given
    if len(given) > 1024:
        raise ValueError(f"at most 1,024 tokens may have a bias, got {len(given):,}")
    for name, bias in given.items():
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 20):
            raise ValueError(f'the keys are token ids, such as {{"7": -100}}; got {str(name)[:60]!r}')
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {name} must be a number from -100 to 100, got {reprlib.repr(bias)}")
    return {int(name): float(bias) for name, bias in given.items()}


#: what is added to the logits of tokens
Biases = Annotated[dict[int, float], BeforeValidator(_are_biases)]


class Turn(_Strict):
    """Dials that are turned at a token: it is the first that is drawn under them; counted from 0."""

    at: int = Field(ge=1)
    control: Control


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False

    @field_validator("include_obfuscation")
    @classmethod
    def _is_not_done(cls, asked: bool) -> bool:
        if asked:
            raise ValueError("include_obfuscation is not supported by this server; leave it out")
        return asked


class _Common(_Strict):
    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Biases = {}
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=-_SEED, le=_SEED - 2**20)
    stop: Annotated[list[StopText], FailFast(), Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    control: Control | None = None
    pace: Pace | None = None
    turns: Annotated[list[Turn], FailFast(), Field(max_length=1024)] = []
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
                raise ValueError(f"{name} is not supported by this server; leave it out")
        given = {name: value for name, value in given.items() if name not in _ASKS_NOTHING}
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()} - {"prompt"}
        return {name: value for name, value in given.items() if value is not None or name not in optional}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_is_a_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Common:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is for stream: true; leave it out")
        return self


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: Any = ""  # a text, a list of texts, token ids, or a list of those
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("prompt")
    @classmethod
    def _is_prompt(cls, prompt: Any) -> Any:
        several = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
        if several and all(isinstance(one, str) for one in several):
            for text in several:
                refuse_control_bytes(text)
        elif not several or not all(map(_are_ids, several)):
            raise ValueError(
                "a prompt is a text, a list of texts, token ids, or a list of those, each of at least 1 item; got "
                + reprlib.repr(prompt)
            )
        return prompt

    @model_validator(mode="after")
    def _refuse_more(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported by this server; leave it out, or give as many as n")
        if self.suffix:
            raise ValueError(
                "suffix is not supported by this server, whose models read from left to right; leave it out"
            )
        return self

    @property
    def top(self) -> int | None:
        """With each token the log-probabilities of so many; None: none, not even its own."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int and token >= 0 for token in given)


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], FailFast(), Field(min_length=1)]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _an_answer_comes_back(cls, given: Any) -> Any:
        """An answer of this server may be sent as it was: with fields that are empty, and what the model wrote."""
        if not isinstance(given, dict):
            return given
        given = {name: value for name, value in given.items() if name not in _BESIDE_TEXT or value not in (None, [])}
        if isinstance(given.get("content"), str):
            given["content"] = [{"type": "text", "text": given["content"]}]
        if given.get("role") == "assistant" and isinstance(given.get("content"), list):
            given["content"] = [
                part | {"text": _CONTROL_BYTES.sub("\ufffd", part["text"])}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in given["content"]
            ]
        return given

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def top(self) -> int | None:
        """As for a completion."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ControlBody(_Strict):
    """POST /v1/completions/ID/control: the dials of texts under way, and their pace; `pace: null` is none."""

    control: Control | None = None
    pace: Pace | None = None

    @model_validator(mode="after")
    def _asks_something(self) -> ControlBody:
        if self.control is None and "pace" not in self.model_fields_set:
            raise ValueError("give `control`, `pace`, or both")
        return self


class LookBody(_Strict):
    """POST /v1/glissando/look: what is to be seen of the model over a text."""

    model: str
    text: Annotated[Text, Field(max_length=4000)]
    control: Control | None = None


_Body = TypeVar("_Body", bound=_Strict)


def read_body(kind: type[_Body], body: bytes) -> _Body:
    """A request's body. Raises BadRequestError for the first thing that is wrong with it, in a line.

    Nothing here takes long, whatever the bytes: `_MOST_PARTS` bounds what JSON costs to read, and lists end with the
    first item that is wrong.
    """
    parts = sum(1 for _ in islice(_PARTS.finditer(body), _MOST_PARTS + 1))
    if parts > _MOST_PARTS:
        raise BadRequestError(f"the body has more than {_MOST_PARTS:,} strings, lists and objects; send fewer", None)
    not_an_object = "the body must be a JSON object, sent with the header `content-type: application/json`"
    if not body:
        raise BadRequestError(not_an_object, None)
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(
            f"the body is not JSON in UTF-8: {str(error).partition(';')[0][:200]}", None, "json_invalid"
        ) from None
    if not isinstance(given, dict):
        raise BadRequestError(not_an_object, None)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = [str(part)[:60] for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "unknown_field":
        name = first["ctx"]["name"][:60]
        message = _unknown_field(name, where, first["ctx"]["known"])
        where.append(name)
    elif where:
        value = first.get("input")
        shown = json.dumps(value[:60] if isinstance(value, str) else value) if _is_plain(value) else reprlib.repr(value)
        message = f"{where[0]}: {message[:1].lower()}{message[1:]}; got {shown[:60]}"
    raise BadRequestError(message, where[0] if where else None, first["type"])


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _unknown_field(name: str, outer: list[str], known: list[str]) -> str:
    """What to do about it; a nested one with its path."""
    for kind, route in ((CompletionBody, "/v1/completions"), (ChatBody, "/v1/chat/completions")):
        if not outer and name in kind.model_fields:
            return f"{name!r} is a field of {route}, and not of this request. Leave it out, or send it there."
    close = nearest(name, known)
    inside = f" in {'.'.join(outer)}" if outer else ""
    return f"unknown field {name!r}{inside}." + (f" Did you mean {close!r}?" if close else " Leave it out.")
