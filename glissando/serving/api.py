"""The server: OpenAI's completions and chats, /health, /metrics, and the playground."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from glissando.errors import nearest
from glissando.model import LanguageModel
from glissando.serving.answers import Answer, ChatAnswer
from glissando.serving.engine import BusyError, Engine, Outbox, StoppingError, call_all
from glissando.serving.group import DisconnectedError, Group, ModelFailedError
from glissando.serving.limits import BodyLimit, KeyRequired, Limits, OwnNames, Receive, Scope, Send, error_body
from glissando.serving.metrics import Metrics
from glissando.serving.planning import BadRequestError, ChatTemplate, Planner
from glissando.serving.schema import ChatBody, CompletionBody, ControlBody, Message, StreamOptions, TextPart
from glissando.serving.session import Piece
from glissando.serving.session import Request as TextRequest

_log = logging.getLogger("glissando.serve")


class Server:
    """A model and its engine's thread behind an ASGI application, `app`.

    name      the model's name in requests
    api_key   asked for by /v1 and /metrics; None: anyone may
    hosts     names that requests may call this server by; None: any. Guards a server on loopback against pages of
              other origins whose name was made to point here
    """

    def __init__(
        self,
        model: LanguageModel,
        name: str,
        *,
        limits: Limits | None = None,
        api_key: str | None = None,
        template: ChatTemplate | None = None,
        hosts: Sequence[str] | None = None,
        **engine_options: Any,
    ) -> None:
        self.limits = limits or Limits()
        self.engine = Engine(model, deliver=self._deliver, **engine_options)
        self.planner = Planner(self.engine, self.limits, name, template or ChatTemplate())
        self.metrics = Metrics(self.engine)
        self.name, self.started = name, int(time.time())
        self.groups: dict[str, Group] = {}
        #: the same weights in modules of its own, as what is watched there must not be the engine's batches
        self.viewer, self.viewing, self.looking = _twin(model), threading.Lock(), 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.app = self._application(api_key, hosts)

    # ------------------------------------------------------------------ the engine's thread

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self.engine.run, name="glissando-engine", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self.engine.close()
            await asyncio.to_thread(self._thread.join)

    def _deliver(self, outbox: Outbox) -> None:
        """From the engine's thread: a whole step at a time wakes the loop once."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call_all, outbox)

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    # ------------------------------------------------------------------ routes

    def _application(self, api_key: str | None, hosts: Sequence[str] | None) -> FastAPI:
        from glissando.serving.playground import add_playground

        # FastAPI's own pages of documentation load scripts from elsewhere.
        app = FastAPI(title="glissando", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan)
        app.add_api_route("/v1/completions", self.completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/completions/{id}/control", self.turn, methods=["POST"], response_model=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models, methods=["GET", "HEAD"], response_model=None)
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET", "HEAD"], response_model=None)
        app.add_api_route("/health", self.health, methods=["GET", "HEAD"], response_model=None)
        app.add_api_route("/metrics", self.get_metrics, methods=["GET", "HEAD"], response_model=None)
        add_playground(app, self)
        for kind, handler in _HANDLERS.items():
            app.add_exception_handler(kind, handler)
        app.add_middleware(BodyLimit, limit=self.limits.max_body)
        if api_key is not None:
            app.add_middleware(KeyRequired, key=api_key)
        if hosts is not None:
            app.add_middleware(OwnNames, names=hosts)
        app.add_middleware(_Counted, metrics=self.metrics)
        return app

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """POST /v1/completions."""
        plan = self.planner.completion(body)
        answer = Answer(self.name, self.engine.tokenizer, body.logprobs is not None)
        echoed = [self._echoed(prompt) for prompt in body.prompts for _ in range(body.n)] if body.echo else None
        return await self._answer(request, plan, answer, body, echoed)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """POST /v1/chat/completions."""
        plan = self.planner.chat(body)
        return await self._answer(request, plan, ChatAnswer(self.name, self.engine.tokenizer, body.logprobs), body)

    async def turn(self, id: str, body: ControlBody) -> Response:
        """POST /v1/completions/ID/control: the dials of a text that streams, from its next token on."""
        if id not in self.groups:
            raise BadRequestError(f"no text {id} is being written", "id", "not_found")
        sessions = self.groups[id].sessions
        values = self.planner.turned(sessions[0].asked, body.control)  # those of a request are turned together
        for session in sessions:
            session.turn(values)
        names = self.engine.model.config.controls
        return JSONResponse({"id": id, "control": dict(zip(names, values, strict=True))})

    async def models(self) -> Response:
        """GET /v1/models: the one that is served."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        self.planner.check_model(name)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "glissando"}

    async def health(self) -> Response:
        """GET /health: 200 while the engine runs."""
        return JSONResponse({"status": "ok"} if self.healthy else {"status": "stopped"}, 200 if self.healthy else 503)

    async def get_metrics(self) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ------------------------------------------------------------------ answers

    def _echoed(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(prompt)

    async def _answer(
        self,
        request: Request,
        plan: list[TextRequest],
        answer: Answer,
        body: CompletionBody | ChatBody,
        echoed: list[str] | None = None,
    ) -> Response:
        group = Group(self.engine, plan, not body.stream, self.metrics.first_token.observe)
        usage = _Usage(plan)
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return _EventStream(self, group, answer, usage if with_usage else None, echoed)
        texts, pieces = list(echoed or [""] * len(group.sessions)), [list[Piece]() for _ in group.sessions]
        try:
            async for index, piece in group.pieces(request.receive):
                texts[index] += piece.text
                pieces[index].append(piece)
        except DisconnectedError:
            self.metrics.disconnects.inc()
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(answer.whole(texts, pieces, usage.of(group)))


class _Usage:
    """Tokens that were read and written."""

    def __init__(self, plan: Sequence[TextRequest]) -> None:
        self.read = sum(len(request.ids) for request in plan)

    def of(self, group: Group) -> dict[str, int]:
        written = sum(len(session.written) for session in group.sessions)
        return {"prompt_tokens": self.read, "completion_tokens": written, "total_tokens": self.read + written}


class _EventStream(Response):
    """Server-sent events, a piece as it comes. A client that leaves gives up its texts at once."""

    def __init__(
        self, server: Server, group: Group, answer: Answer, usage: _Usage | None, echoed: list[str] | None
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self.server, self.group, self.answer, self.usage, self.echoed = server, group, answer, usage, echoed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self.server.groups[self.answer.id] = self.group
        try:
            for event in self._openings():
                await self._send_chunk(send, event)
            async for index, piece in self.group.pieces(receive):
                if piece.text or piece.tokens or piece.finish:
                    await self._send_chunk(send, self.answer.chunk(index, piece.text, piece))
            if self.usage is not None:
                await self._send(send, self.answer.usage(self.usage.of(self.group)))
            await self._write(send, "[DONE]")
        except DisconnectedError:
            self.server.metrics.disconnects.inc()
            return
        except asyncio.CancelledError:  # by a server that stops and waits for this reader no longer
            return
        except (ModelFailedError, BusyError) as error:  # the status is sent: the error goes into the stream
            if isinstance(error, ModelFailedError):
                _log.exception("a text was given up")
            await self._send(send, _failure(error)[1])
        finally:
            self.group.cancel()
            del self.server.groups[self.answer.id]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _openings(self) -> Sequence[Mapping[str, Any]]:
        every = [self.answer.opening(index) for index in range(len(self.group.sessions))]
        echoes = [self.answer.chunk(index, text, Piece()) for index, text in enumerate(self.echoed or [])]
        return [event for event in every if event is not None] + echoes

    async def _send_chunk(self, send: Send, event: Mapping[str, Any]) -> None:
        """As OpenAI's: where the usage comes at the end, every chunk before it has a null in its place."""
        await self._send(send, event if self.usage is None else {**event, "usage": None})

    async def _send(self, send: Send, event: Mapping[str, Any]) -> None:
        await self._write(send, json.dumps(event, ensure_ascii=False, separators=(",", ":")))

    async def _write(self, send: Send, data: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


def _twin(model: LanguageModel) -> LanguageModel:
    shared = [*model.parameters(), *model.buffers(), model.tokenizer]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


# ---------------------------------------------------------------------- errors


def _failure(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    if isinstance(error, BadRequestError):
        status = 404 if error.code in ("model_not_found", "not_found") else 400
        return status, error_body(str(error), "invalid_request_error", error.code, error.param), {}
    if isinstance(error, StoppingError):
        return 503, error_body(str(error), "server_error", "stopping"), {"retry-after": "1"}
    if isinstance(error, BusyError):
        return 429, error_body(str(error), "rate_limit_error", "too_many_texts"), {"retry-after": "1"}
    return 500, error_body(str(error), "server_error", "model_failed"), {}


async def _failed(request: Request, error: Exception) -> Response:
    status, body, headers = _failure(error)
    if status == 500:
        _log.error("a text was given up", exc_info=error)
    return JSONResponse(body, status, headers)


async def _told_fault(request: Request, error: Exception) -> Response:
    """What nobody foresaw; its words are for the log, which has them from the server."""
    return JSONResponse(error_body(f"the server failed on this request: {type(error).__name__}", "server_error"), 500)


async def _told_http(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    messages = {
        400: "the body is no JSON in UTF-8 that can be read",  # FastAPI's own message says no more
        404: f"there is no {path} here; POST /v1/completions is",
        405: f"{path} does not take {request.method}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)


async def _told_validation(request: Request, error: RequestValidationError) -> Response:
    """The first thing that is wrong, in a line."""
    first = _likeliest(error.errors())
    where = [str(part)[:60] for part in first["loc"] if part != "body"]
    param = where[0] if where else None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = _unknown_field(where)
    elif first["type"] == "json_invalid":
        message, param = f"the body is no JSON: {first.get('ctx', {}).get('error', message)}", None
    elif not where and first["type"] in ("missing", "model_attributes_type", "dict_type"):
        message = "the body must be a JSON object, sent with the header `content-type: application/json`"
    elif first["type"].endswith("_type") and param in _UNIONS:
        message = f"{param}: {_UNIONS[param]}; got {json.dumps(first.get('input'), default=str)[:60]}"
    elif where:
        given = json.dumps(first.get("input"), default=str)[:60]
        message = f"{'.'.join(where[:1])}: {message[:1].lower()}{message[1:]}; got {given}"
    return JSONResponse(error_body(message, "invalid_request_error", first["type"], param), 400)


def _unknown_field(where: Sequence[str]) -> str:
    """What to do about it; a nested one with its path."""
    *outer, name = where
    inside = f" in {'.'.join(part for part in outer if part.isidentifier() or part.isdigit())}" if outer else ""
    kinds = (Message, TextPart, StreamOptions) if outer else (CompletionBody, ChatBody)
    for kind, route in ((CompletionBody, "/v1/completions"), (ChatBody, "/v1/chat/completions")):
        if not outer and name in kind.model_fields:
            return f"{name!r} is a field of {route}, and not of this request. Leave it out, or send it there."
    close = nearest(name, {field for kind in kinds for field in kind.model_fields})
    return f"unknown field {name!r}{inside}." + (f" Did you mean {close!r}?" if close else " Leave it out.")


#: what fields of several types take
_UNIONS = {"prompt": "a text, a list of texts, token ids, or a list of those", "stop": "a text, or at most 16 texts"}


def _likeliest(errors: Sequence[Any]) -> Any:
    """Of a field that may be of several types there is an error for each: that of the value itself counts most."""
    return next((e for e in errors if not e["type"].endswith("_type")), errors[0])


_HANDLERS: dict[type[Exception], Any] = {
    BadRequestError: _failed,
    BusyError: _failed,
    HTTPException: _told_http,
    RequestValidationError: _told_validation,
    ModelFailedError: _failed,
    Exception: _told_fault,
}


class _Counted:
    """Requests by path and status; unknown paths are one, or a client could fill the memory with names."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        return await self.app(scope, receive, counted)
