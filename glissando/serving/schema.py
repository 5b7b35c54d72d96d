"""What clients may send: OpenAI's fields, `top_k`, `min_p` and `repetition_penalty` as other servers have them, and
`control`, `pace` and `turns`, which are this library's."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from glissando.errors import nearest
from glissando.serving.session import RequestError

_SEED = 2**63 - 1
#: with these clients send OpenAI's other fields (`tools`, `store`, `response_format`) though they ask for nothing
_NOTHING: list[Any] = [None, False, "", [], {}, ["text"], {"type": "text"}, "auto", "default", "none", "medium"]


class BadRequestError(RequestError, ValueError):
    """A request that cannot be answered; `param` is the field, `code` OpenAI's word for it."""

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code
        self.http_status = 404 if code in ("model_not_found", "not_found") else 400


class _Strict(BaseModel):
    """A number is no string, null counts as left out, as in OpenAI's schema, and an unknown field that asks for
    something is an error."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    null_is_left_out: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if name not in cls.model_fields and value not in _NOTHING:
                close = nearest(name[:60], cls.model_fields)
                hint = f"did you mean {close!r}?" if close else "leave it out"
                raise ValueError(f"{name[:60]!r} is not supported by this server; {hint}")
        nulls = not cls.null_is_left_out
        return {k: v for k, v in values.items() if k in cls.model_fields and (nulls or v is not None)}


def _at_most(count: int) -> BeforeValidator:
    """Every wrong entry of a mapping is an error: there must not be thousands."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"at most {count:,} entries are allowed, got {len(value):,}")
        return value

    return BeforeValidator(check)


Control = Annotated[dict[str, float], _at_most(64)]
#: what is added to the logits of tokens, by token id, which JSON writes as a string
Biases = Annotated[
    dict[Annotated[int, Field(strict=False, ge=0)], Annotated[float, Field(ge=-100, le=100)]], _at_most(1024)
]
#: tokens a second: a text of fewer would hold its place for long
Pace = Annotated[float, Field(ge=1, le=1000)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
_Item = TypeVar("_Item")
Several = Annotated[list[_Item], Field(min_length=1, fail_fast=True)]
Ids = Several[Annotated[int, Field(ge=0)]]


class Turn(_Strict):
    """Dials that are turned at a token: it is the first that is drawn under them; counted from 0."""

    at: int = Field(ge=1)
    control: Control


class StreamOptions(_Strict):
    include_usage: bool = False


class _Common(_Strict):
    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Biases = {}
    allowed: Ids | None = None
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=2)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=-_SEED, le=_SEED - 2**20)
    stop: Annotated[
        list[StopText],
        Field(max_length=16, fail_fast=True),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    control: Control | None = None
    pace: Pace | None = None
    turns: Annotated[list[Turn], Field(max_length=1024, fail_fast=True)] = []
    user: str | None = None


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: str | Ids | Several[str] | Several[Ids] = ""
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def top(self) -> int | None:
        """With each token the log-probabilities of so many; None: none, not even its own."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)  # type: ignore[list-item, arg-type]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """An answer of this server may be sent as it was: its other fields are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Several[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: Several[Message]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def top(self) -> int | None:
        """As for a completion."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None


class ControlBody(_Strict):
    """POST /v1/completions/ID/control: the dials of texts under way, and their pace; `pace: null` is none."""

    null_is_left_out = False
    control: Control | None = None
    pace: Pace | None = None


class LookBody(_Strict):
    """POST /v1/glissando/look: what is to be seen of the model over a text."""

    model: str
    text: Annotated[str, Field(max_length=4000)]
    control: Control | None = None


#: times that one observation may ask about
MOST_TIMES = 1024
Cell = int | float | str | bool | None


class StateBody(_Strict):
    """What requests to observe a series share.

    series        name of the series
    time          of the observation, as the table of the training had it; of a table without times none
    horizon       how far to predict: 24h, a number in the unit of the times, or several; with `every` each up to it
    begin         true: begin the series anew; false: an error where its state is not here; by default it goes on, or
                  begins
    state         that of an earlier answer, which the client keeps
    return_state  whether the answer has the state, and nothing is kept here
    """

    series: Annotated[str, Field(min_length=1, max_length=200)]
    time: int | float | str | None = None
    horizon: Annotated[list[int | float | str], Field(max_length=MOST_TIMES)] | int | float | str | None = None
    every: int | float | str | None = None
    begin: bool | None = None
    state: str | None = None
    return_state: bool = False


class ObserveBody(StateBody):
    """POST /v1/observe of a series model.

    values        by column; a channel that is left out, or null, was not observed
    quantiles     levels; by default 0.05, 0.5 and 0.95 of a model with a spread
    future        of each known-future column its values at the times that are forecast
    """

    values: Annotated[dict[str, Cell], _at_most(4096)] = Field(default_factory=dict)
    quantiles: Annotated[list[float], Field(max_length=99)] | None = None
    future: Annotated[
        dict[str, Annotated[list[float], Field(max_length=MOST_TIMES, fail_fast=True)]], _at_most(4096)
    ] = Field(default_factory=dict)


class EventsBody(StateBody):
    """POST /v1/observe of a model of events.

    time    of the events; none: nothing happened, and only a question is asked
    events  at that time, of each the kind and the marks by their columns; none: prediction starts at that time
    values  measured at that time, by channel
    facts   static columns
    until   up to here no event came: predictions are from here on; by default from the last event on
    """

    events: Annotated[list[dict[str, Cell]], Field(max_length=1024, fail_fast=True)] = Field(default_factory=list)
    values: Annotated[dict[str, float | None], _at_most(4096)] = Field(default_factory=dict)
    facts: Annotated[dict[str, Cell], _at_most(4096)] = Field(default_factory=dict)
    until: int | float | str | None = None


_Body = TypeVar("_Body", bound=_Strict)


def read_body(kind: type[_Body], body: bytes) -> _Body:
    """A request's body. Raises BadRequestError for the first thing that is wrong with it, in a line.

    Nothing here takes long, whatever the bytes: lists end with the first item that is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    where = [str(part)[:60] for part in first["loc"]]
    message = first["msg"].removeprefix("Value error, ")
    if where[:1] == ["prompt"]:
        message = "a prompt is a text, a list of texts, token ids, or a list of those, each of at least 1 item"
    if where:
        message = f"{'.'.join(where)}: {message[:1].lower()}{message[1:]}; got {reprlib.repr(first['input'])[:60]}"
    raise BadRequestError(message, where[0] if where else None, first["type"])
