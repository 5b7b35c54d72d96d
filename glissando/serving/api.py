"""The server: OpenAI's completions and chats, /health, and the playground."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from glissando.machine import available_bytes
from glissando.model import LanguageModel
from glissando.serving.answers import Answer, ChatAnswer, as_json
from glissando.serving.engine import Engine
from glissando.serving.http import Limits, Receive, Scope, Send, application, configuration, logged
from glissando.serving.planning import Served
from glissando.serving.runner import Runner
from glissando.serving.schema import BadRequestError, ChatBody, CompletionBody, ControlBody, read_body
from glissando.serving.session import (
    ModelFailedError,
    Outbox,
    Piece,
    RequestError,
    Reservation,
    Session,
    StoppingError,
    call_all,
)
from glissando.serving.session import Request as TextRequest

_Read = TypeVar("_Read")
#: bytes of a request that are read at once in the event loop, and of an answer that are sent at once
_SHORT, _PART = 2**12, 2**16


class Group:
    """Started texts; `pieces` yields what comes of them. `close` gives up what is not written, and frees the memory of
    what is: call it when the answer is sent.

    whole  wake the reader when a text ends, and not at every token
    """

    def __init__(self, engine: Engine, requests: Sequence[TextRequest], whole: bool) -> None:
        """Raises BusyError if they cannot all wait; then none does."""
        self.sessions: list[Session] = []
        self._requests = requests
        self._engine, self._reservation = engine, Reservation(sum(each.answer_bytes for each in requests))
        self._whole, self._come, self._gone, self._awake = whole, list[tuple[int, Piece]](), False, asyncio.Event()
        self._stopping: StoppingError | None = None
        try:
            for request in requests:
                before = len(self.sessions)
                listeners = [partial(self._receive, before + copy) for copy in range(request.copies)]
                self.sessions += engine.submit(request, listeners, self._reservation)
        except BaseException:
            self.close()
            raise

    def _receive(self, index: int, piece: Piece) -> None:
        """In the server's loop."""
        if isinstance(piece.error, StoppingError):
            self._stopping = piece.error
        self._come.append((index, piece))
        if not self._whole or piece.finish is not None or piece.error is not None:
            self._awake.set()

    def close(self) -> None:
        for session in self.sessions:
            session.cancel()
        self._engine.release(self._reservation)

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's count of tokens; a prompt of several texts is read once."""
        read = sum(len(request.ids) for request in self._requests)
        written = sum(len(session.written) for session in self.sessions)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    async def pieces(self, receive: Receive) -> AsyncIterator[tuple[int, Piece]]:
        """(text, what is new of it) until all are done.

        Raises ClientDisconnect when the client leaves, StoppingError when the server stops, else ModelFailedError.
        """
        watch = asyncio.ensure_future(self._watch(receive))
        left = len(self.sessions)
        try:
            while left:
                await self._awake.wait()
                self._awake.clear()
                if self._gone:
                    raise ClientDisconnect
                come, self._come = self._come, []
                for index, piece in come:
                    if self._stopping is not None:  # and not when a slow reader has taken what comes before it
                        raise self._stopping
                    if piece.error is not None:
                        cause = f"{type(piece.error).__name__}: {piece.error}"
                        raise ModelFailedError(f"the model failed on this text: {cause}") from piece.error
                    left -= piece.finish is not None
                    yield index, piece
        finally:
            watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._awake.set()


class Server:
    """Models and the thread of their engines behind an ASGI application, `app`.

    models      by their names in requests; the first is the page's at first
    about       of each by its name what the page tells: `trained_on`, a few words, and `prompts`, examples
    memory      bytes for all texts, an equal share for each model; half of what is available if None
    prefix_bytes  kept for states of prompts, by all models together
    api_key   required by /v1; of several any one, each with prompt states of its own. None: no key
    hosts     names that requests may call this server by; None: any. Guards a server on loopback against pages of
              other origins whose name was made to point here
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        *,
        about: Mapping[str, Mapping[str, Any]] | None = None,
        limits: Limits | None = None,
        memory: int | None = None,
        prefix_bytes: int = 2**28,
        api_key: str | Sequence[str] | None = None,
        hosts: Sequence[str] | None = None,
        **engine_options: Any,
    ) -> None:
        self.limits, self.runner = limits or Limits(), Runner()
        device = next(iter(models.values())).embedding.weight.device
        memory = available_bytes(device) // 2 if memory is None else memory
        engine_options |= {"memory": memory // len(models), "prefix_bytes": prefix_bytes // len(models)}
        self.served: dict[str, Served] = {}
        for name, model in models.items():
            engine = Engine(model, deliver=self._deliver, runner=self.runner, **engine_options)
            self.served[name] = Served(name, engine, self.limits, (about or {}).get(name, {}))
        self.started = int(time.time())
        #: texts under way, by the id of their answer
        self.groups: dict[str, tuple[Served, Group]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        #: reads and writes JSON one by one: what clients send can take processors, but not the event loop
        self._reader = ThreadPoolExecutor(1, "glissando-reader")
        from glissando.serving.playground import playground  # which is typed by this file

        routes: dict[str, Callable[[Request], Any]] = {
            "POST /v1/completions": partial(self._texts, CompletionBody),
            "POST /v1/completions/{id}/control": self.turn,
            "POST /v1/chat/completions": partial(self._texts, ChatBody),
            "GET /v1/models": self.models,
            "GET /v1/models/{name:path}": self.model,
            "GET /health": self.health,
        }
        known = "POST /v1/completions and /v1/chat/completions are"
        keys = [api_key] if isinstance(api_key, str) else list(api_key or ())
        self.app = application(routes | playground(self), known, self.limits, keys, hosts, self._lifespan)

    def config(self, **options: Any) -> uvicorn.Config:
        """How uvicorn is to serve the application, see `configuration`."""
        return configuration(self.app, self.limits, **options)

    # ------------------------------------------------------------------ the engine's thread

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self.runner.run, name="glissando-engine", daemon=True)
        self._thread.start()
        try:
            yield
        finally:
            self.runner.close()
            await asyncio.to_thread(self._thread.join)
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _deliver(self, outbox: Outbox) -> None:
        """From the engine's thread: a whole step at a time wakes the loop once."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call_all, outbox)

    # ------------------------------------------------------------------ routes

    async def read(self, request: Request, then: Callable[[bytes], _Read]) -> _Read:
        """`then` of the body."""
        body = await request.body()
        return then(body) if len(body) < _SHORT else await self._aside(then, body)

    async def _aside(self, work: Callable[..., _Read], *arguments: Any) -> _Read:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *arguments)

    async def turn(self, request: Request) -> Response:
        """POST /v1/completions/ID/control: the dials and the pace of a text that streams, from its next token on."""
        id = request.path_params["id"]
        body = await self.read(request, lambda content: read_body(ControlBody, content))
        if id not in self.groups:
            raise BadRequestError(f"no text {id} is being written", "id", "not_found")
        served, group = self.groups[id]
        first = group.sessions[0]  # those of a request are turned together
        values = first.asked if body.control is None else served.turned(first.asked, body.control)
        for session in group.sessions:
            if body.control is not None and values is not None:
                session.turn(values)
            if "pace" in body.model_fields_set:
                session.pace = body.pace
        control = None if values is None else dict(zip(served.dials, values, strict=True))
        return JSONResponse({"id": id, "control": control, "pace": first.pace})

    async def models(self, request: Request) -> Response:
        """GET /v1/models: those that are served."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        return JSONResponse(self._model(self.find(request.path_params["name"]).name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": "glissando"}

    def find(self, name: str) -> Served:
        """The model of this name. Raises BadRequestError, a 404, for one that is not served."""
        if name not in self.served:
            message = f"there is no model {name[:60]!r} here; choose {' or '.join(map(repr, self.served))}"
            raise BadRequestError(message, "model", "model_not_found")
        return self.served[name]

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engines' thread runs."""
        runs = self._thread is not None and self._thread.is_alive()
        return JSONResponse({"status": "ok" if runs else "stopped"}, 200 if runs else 503)

    # ------------------------------------------------------------------ answers

    async def _texts(self, kind: type[CompletionBody] | type[ChatBody], request: Request) -> Response:
        def planned(content: bytes) -> tuple[Served, CompletionBody | ChatBody, list[TextRequest]]:
            body = read_body(kind, content)
            served = self.find(body.model)
            requests = served.chat(body) if isinstance(body, ChatBody) else served.completion(body)
            return served, body, [replace(each, key=request.scope["key"], streams=body.stream) for each in requests]

        served, body, plan = await self.read(request, planned)
        group = Group(served.engine, plan, whole=not body.stream)
        answer = (Answer if kind is CompletionBody else ChatAnswer)(served, body.top is not None)
        prompts = body.prompts if isinstance(body, CompletionBody) and body.echo else []
        echoed = [p if isinstance(p, str) else served.tokenizer.decode(p) for p in prompts for _ in range(body.n)]
        try:
            if body.stream:
                headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
                events = self._events(request.receive, served, group, answer, echoed, body.stream_options.include_usage)
                return _Sent(events, group, "text/event-stream", headers)
            texts, pieces = echoed or [""] * len(group.sessions), [list[Piece]() for _ in group.sessions]
            async for index, piece in group.pieces(request.receive):
                texts[index] += piece.text
                pieces[index].append(piece)
            content = await self._aside(answer.whole, texts, pieces, group.usage)
            return _Sent(_parts(content), group, "application/json", {"content-length": str(len(content))})
        except BaseException as error:
            group.close()
            if isinstance(error, ClientDisconnect):
                return Response(status_code=499)  # nobody reads it
            raise

    async def _events(
        self, receive: Receive, served: Served, group: Group, answer: Answer, echoed: Sequence[str], with_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events, a piece as it comes. A client that leaves gives up its texts at once."""
        # As OpenAI's: where the usage comes at the end, every chunk before it has a null in its place.
        null = {"usage": None} if with_usage else {}
        self.groups[answer.id] = served, group
        try:
            for chunk in answer.openings(len(group.sessions)):
                yield _event(chunk | null)
            for index, text in enumerate(echoed):
                yield _event(answer.chunk(index, text, Piece()) | null)
            async for index, piece in group.pieces(receive):
                if piece.text or piece.tokens or piece.finish:  # else the tokens end within a character
                    yield _event(answer.chunk(index, piece.text, piece) | null)
            if with_usage:
                yield _event(answer.usage(group.usage))
            yield b"data: [DONE]\n\n"
        except RequestError as error:  # the status is sent: the error goes into the stream
            yield _event(logged(error))
        finally:
            del self.groups[answer.id]


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {as_json(chunk)}\n\n".encode()


async def _parts(content: bytes) -> AsyncGenerator[bytes, None]:
    """Time to take an answer is for each of its parts."""
    for first in range(0, len(content), _PART):
        yield content[first : first + _PART]


class _Sent(Response):
    """An answer in parts as they come; the memory of its texts is free when the last is taken, or the client left."""

    def __init__(self, parts: AsyncGenerator[bytes, None], group: Group, kind: str, headers: dict[str, str]) -> None:
        super().__init__(media_type=kind, headers=headers)
        if kind == "text/event-stream":
            del self.headers["content-length"]
        self.parts, self.group = parts, group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self.parts) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ClientDisconnect:
            pass
        finally:
            self.group.close()
