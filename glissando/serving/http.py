"""What every server here has: an application behind the gate, errors in OpenAI's form, and how uvicorn runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from glissando.serving.limits import Gate, Limits, error_body
from glissando.serving.protocol import bounded_protocol
from glissando.serving.session import BusyError, ModelFailedError, RequestError

_log = logging.getLogger("glissando.serve")
#: connections; beyond, every request gets a 503 until some are closed
MAX_CONNECTIONS = 512


def route(method: str, path: str, answer: Callable[[Request], Any]) -> Route:
    """A place and the function that answers there; HEAD goes with GET."""
    return Route(path, answer, methods=[method])


def application(
    routes: Sequence[Route], known: str, limits: Limits, keys: Sequence[str], hosts: Sequence[str] | None, lifespan: Any
) -> Starlette:
    """An application that answers at `routes`, of which `known` tells who asks at another place; keys and hosts as in
    Gate."""

    async def http(request: Request, error: HTTPException) -> Response:
        messages = {
            404: f"there is no {request.url.path} here; {known}",
            405: f"{request.url.path} does not take {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(message, "invalid_request_error"), error.status_code, error.headers)

    handlers: dict[Any, Any] = {RequestError: _refused, HTTPException: http, Exception: _unexpected}
    gate = Middleware(Gate, limits=limits, keys=keys, hosts=hosts)
    return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers, lifespan=lifespan)


def configuration(app: Starlette, limits: Limits, **options: Any) -> uvicorn.Config:
    """How uvicorn is to serve an application; `options` are its own, such as host and port.

    It logs errors alone: warnings are about what clients send, who could fill the log with them.
    """
    defaults: dict[str, Any] = {
        "http": bounded_protocol(limits.patience), "ws": "none", "access_log": False, "log_level": "error",
        "server_header": False, "limit_concurrency": MAX_CONNECTIONS, "timeout_graceful_shutdown": 5,
        "timeout_keep_alive": int(max(1, limits.patience)),
    }  # fmt: skip
    return uvicorn.Config(app, **defaults | options)


def logged(error: RequestError) -> dict[str, Any]:
    """The body of an error, which is logged where the model failed."""
    if isinstance(error, ModelFailedError):
        _log.error("a text was given up", exc_info=error)
    return error_body(str(error), error.kind, error.code, getattr(error, "param", None))


async def _refused(request: Request, error: RequestError) -> Response:
    headers = {"retry-after": "1"} if isinstance(error, BusyError) else None
    return JSONResponse(logged(error), error.http_status, headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Unexpected error: a generic 500, details in the log."""
    return JSONResponse(error_body(f"the server failed on this request: {type(error).__name__}", "server_error"), 500)
