"""The server: OpenAI's completions and chats, /health, /metrics, and the playground."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from glissando.machine import available_bytes
from glissando.model import LanguageModel
from glissando.serving.answers import Answer, ChatAnswer, as_json
from glissando.serving.engine import Engine
from glissando.serving.group import DisconnectedError, Group
from glissando.serving.limits import Gate, Limits, Receive, Scope, Send, error_body
from glissando.serving.metrics import Metrics
from glissando.serving.planning import ChatTemplate
from glissando.serving.pool import Pool
from glissando.serving.protocol import bounded_protocol
from glissando.serving.schema import BadRequestError, ChatBody, CompletionBody, ControlBody, read_body
from glissando.serving.served import Served
from glissando.serving.session import BusyError, ModelFailedError, Outbox, Piece, RequestError, call_all
from glissando.serving.session import Request as TextRequest

_log = logging.getLogger("glissando.serve")
_Answer = TypeVar("_Answer")
#: bytes of a request, or tokens of an answer, that are read or written beside the event loop
_LARGE = 4096
#: bytes of an answer that are sent at once
_PART = 2**16
#: connections; beyond, every request gets a 503 until some are closed
MAX_CONNECTIONS = 512


class Server:
    """Models and the thread of their engines behind an ASGI application, `app`.

    models      by their names in requests; the first is the page's at first
    trained_on  what they were trained on, in a few words, for the page
    prompts     examples of prompts of each, for the page
    memory      bytes for all texts of all models; half of what is available if None
    prefix_bytes  kept for states of prompts, by all models together
    api_key   required by /v1 and /metrics; of several any one, each with prompt states of its own. None: no key
    hosts     names that requests may call this server by; None: any. Guards a server on loopback against pages of
              other origins whose name was made to point here
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        *,
        trained_on: Mapping[str, str | None] | None = None,
        prompts: Mapping[str, Sequence[str]] | None = None,
        limits: Limits | None = None,
        memory: int | None = None,
        prefix_bytes: int = 2**28,
        api_key: str | Sequence[str] | None = None,
        template: ChatTemplate | None = None,
        hosts: Sequence[str] | None = None,
        **engine_options: Any,
    ) -> None:
        self.limits = limits or Limits()
        device = next(iter(models.values())).embedding.weight.device
        self.pool = Pool(available_bytes(device) // 2 if memory is None else memory)
        self.served: dict[str, Served] = {}
        for name, model in models.items():
            engine = Engine(
                model, deliver=self._deliver, pool=self.pool, prefix_bytes=prefix_bytes // len(models), **engine_options
            )
            about, examples = (trained_on or {}).get(name), (prompts or {}).get(name, ())
            self.served[name] = Served(name, engine, self.limits, template or ChatTemplate(), about, examples)
        self.metrics = Metrics([served.engine for served in self.served.values()])
        self.started = int(time.time())
        #: texts under way, by the id of their answer
        self.groups: dict[str, tuple[Served, Group]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        #: one at a time reads what is large: what clients send can take processors, but not the event loop
        self._reader = ThreadPoolExecutor(1, "glissando-reader")
        keys = [api_key] if isinstance(api_key, str) else list(api_key or ())
        self.app = self._application(keys, hosts)

    def config(self, **options: Any) -> uvicorn.Config:
        """How uvicorn is to serve the application; `options` are its own, such as host and port.

        It logs errors alone: warnings are about what clients send, who could fill the log with them.
        """
        defaults: dict[str, Any] = {
            "http": bounded_protocol(self.limits.patience), "ws": "none", "access_log": False, "log_level": "error",
            "server_header": False, "limit_concurrency": MAX_CONNECTIONS, "timeout_graceful_shutdown": 5,
            "timeout_keep_alive": int(max(1, self.limits.patience)),
        }  # fmt: skip
        return uvicorn.Config(self.app, **defaults | options)

    # ------------------------------------------------------------------ the engine's thread

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self.pool.run, name="glissando-engine", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self.pool.close()
            await asyncio.to_thread(self._thread.join)
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _deliver(self, outbox: Outbox) -> None:
        """From the engine's thread: a whole step at a time wakes the loop once."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call_all, outbox)

    @property
    def healthy(self) -> bool:
        """Whether the engines' thread runs."""
        return self._thread is not None and self._thread.is_alive()

    # ------------------------------------------------------------------ routes

    def _application(self, keys: Sequence[str], hosts: Sequence[str] | None) -> FastAPI:
        from glissando.serving.playground import add_playground

        # FastAPI's own pages of documentation load scripts from elsewhere.
        app = FastAPI(title="glissando", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan)
        for method, path, answer in (
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/completions/{id}/control", self.turn),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/responses", self.responses),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.get_metrics),
        ):
            methods = ["POST"] if method == "POST" else ["GET", "HEAD"]
            app.add_api_route(path, answer, methods=methods, response_model=None)
        add_playground(app, self)
        for kind, handler in _HANDLERS.items():
            app.add_exception_handler(kind, handler)
        app.add_middleware(Gate, limits=self.limits, keys=keys, hosts=hosts)
        app.add_middleware(_Counted, metrics=self.metrics)
        return app

    async def read(self, request: Request, then: Callable[[bytes], _Answer]) -> _Answer:
        """`then` of the body. Raises HTTPException where the request does not say that it is JSON: a page of another
        origin may send other types without being allowed to."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, f"the content type is {kind[:60]!r}; send JSON, as application/json")
        body = await request.body()
        return await self._aside(then, body, large=len(body) > _LARGE)

    async def _aside(self, work: Callable[..., _Answer], *arguments: Any, large: bool) -> _Answer:
        if not large:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *arguments)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._texts(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._texts(request, ChatBody)

    async def turn(self, id: str, request: Request) -> Response:
        """POST /v1/completions/ID/control: the dials and the pace of a text that streams, from its next token on."""
        body = await self.read(request, lambda given: read_body(ControlBody, given))
        if id not in self.groups:
            raise BadRequestError(f"no text {id} is being written", "id", "not_found")
        served, group = self.groups[id]
        first = group.sessions[0]  # those of a request are turned together
        values = first.asked if body.control is None else served.planner.turned(first.asked, body.control)
        for session in group.sessions:
            if body.control is not None and values is not None:
                session.turn(values)
            if "pace" in body.model_fields_set:
                session.set_pace(body.pace)
        control = None if values is None else dict(zip(served.dials, values, strict=True))
        return JSONResponse({"id": id, "control": control, "pace": first.pace})

    async def responses(self) -> Response:
        """POST /v1/responses, which newer clients call first: refused with what is here in its place."""
        raise BadRequestError("/v1/responses is not supported by this server; POST /v1/chat/completions is", None)

    async def models(self) -> Response:
        """GET /v1/models: those that are served."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        return JSONResponse(self._model(self.find(name).name))

    def find(self, name: str) -> Served:
        """The model of this name. Raises BadRequestError, a 404, for one that is not served."""
        if name not in self.served:
            raise BadRequestError(
                f"there is no model {name[:60]!r} here; choose {' or '.join(map(repr, self.served))}",
                "model", "model_not_found",
            )  # fmt: skip
        return self.served[name]

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": "glissando"}

    async def health(self) -> Response:
        """GET /health: 200 while the engine runs."""
        return JSONResponse({"status": "ok"} if self.healthy else {"status": "stopped"}, 200 if self.healthy else 503)

    async def get_metrics(self) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ------------------------------------------------------------------ answers

    async def _texts(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        def planned(content: bytes) -> tuple[Served, CompletionBody | ChatBody, list[TextRequest]]:
            body = read_body(kind, content)
            served = self.find(body.model)
            requests = served.planner.chat(body) if isinstance(body, ChatBody) else served.planner.completion(body)
            return served, body, [replace(each, key=request.scope["key"]) for each in requests]

        served, body, plan = await self.read(request, planned)
        tokenizer = served.engine.tokenizer
        answer = (Answer if kind is CompletionBody else ChatAnswer)(
            served.name, tokenizer, body.top is not None, served.dials
        )
        prompts = body.prompts if isinstance(body, CompletionBody) and body.echo else []
        echoed = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts for _ in range(body.n)]
        group = Group(served.engine, plan, not body.stream, self.metrics.first_token.observe)

        def usage() -> dict[str, int]:
            read = sum(len(each.ids) for each in plan)
            written = sum(len(session.written) for session in group.sessions)
            return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return _EventStream(self, served, group, answer, usage if with_usage else None, echoed)
        texts, pieces = echoed or [""] * len(group.sessions), [list[Piece]() for _ in group.sessions]
        try:
            async for index, piece in group.pieces(request.receive):
                texts[index] += piece.text
                pieces[index].append(piece)
            count = sum(len(piece.tokens) for parts in pieces for piece in parts)
            large = count * (1 + (body.top or 0)) > _LARGE
            return _Whole(await self._aside(answer.whole, texts, pieces, usage(), large=large), group)
        except BaseException as error:
            group.close()
            if not isinstance(error, DisconnectedError):
                raise
            self.metrics.disconnects.inc()
            return Response(status_code=499)  # nobody reads it


class _Whole(Response):
    """An answer as JSON, sent in parts: time to take one is for each of them, and its memory is free after the last."""

    media_type = "application/json"

    def __init__(self, content: bytes, group: Group) -> None:
        super().__init__(headers={"content-length": str(len(content))})
        self.content, self.group = content, group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for first in range(0, len(self.content), _PART):
                part = self.content[first : first + _PART]
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.group.close()


class _EventStream(Response):
    """Server-sent events, a piece as it comes. A client that leaves gives up its texts at once."""

    def __init__(
        self,
        server: Server,
        served: Served,
        group: Group,
        answer: Answer,
        usage: Callable[[], dict[str, int]] | None,
        echoed: Sequence[str],
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self.server, self.served, self.group = server, served, group
        self.answer, self.usage, self.echoed = answer, usage, echoed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self.server.groups[self.answer.id] = self.served, self.group
        try:
            async for event in self._events(receive):
                await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        except DisconnectedError:
            self.server.metrics.disconnects.inc()
            return
        finally:
            self.group.close()
            del self.server.groups[self.answer.id]
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, receive: Receive) -> AsyncIterator[str]:
        # As OpenAI's: where the usage comes at the end, every chunk before it has a null in its place.
        null = {} if self.usage is None else {"usage": None}
        openings = [self.answer.opening(index) for index in range(len(self.group.sessions))]
        echoes = [self.answer.chunk(index, text, Piece()) for index, text in enumerate(self.echoed)]
        try:
            for event in [*openings, *echoes]:
                if event is not None:
                    yield as_json(event | null)
            async for index, piece in self.group.pieces(receive):
                if piece.text or piece.tokens or piece.finish:
                    yield as_json(self.answer.chunk(index, piece.text, piece) | null)
            if self.usage is not None:
                yield as_json(self.answer.usage(self.usage()))
            yield "[DONE]"
        except RequestError as error:  # the status is sent: the error goes into the stream
            if isinstance(error, ModelFailedError):
                _log.exception("a text was given up")
            yield as_json(_body(error))


# ---------------------------------------------------------------------- errors


def _body(error: RequestError) -> dict[str, Any]:
    return error_body(str(error), error.kind, error.code, getattr(error, "param", None))


async def _refused(request: Request, error: RequestError) -> Response:
    if isinstance(error, ModelFailedError):
        _log.error("a text was given up", exc_info=error)
    headers = {"retry-after": "1"} if isinstance(error, BusyError) else None
    return JSONResponse(_body(error), error.http_status, headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Unexpected error: a generic 500, details in the log."""
    return JSONResponse(error_body(f"the server failed on this request: {type(error).__name__}", "server_error"), 500)


async def _http(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    messages = {
        404: f"there is no {path} here; POST /v1/completions is",
        405: f"{path} does not take {request.method}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)


_HANDLERS: dict[type[Exception], Any] = {RequestError: _refused, HTTPException: _http, Exception: _unexpected}


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
