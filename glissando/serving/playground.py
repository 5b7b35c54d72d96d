"""The page at /: files of `page/`, what they need to know of the model, and what is to be seen of it over a text."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from glissando.depth import DEPTHS
from glissando.evaluation.observe import pictures_of
from glissando.mixers import MIXERS
from glissando.serving.answers import token_text
from glissando.serving.schema import LookBody, read_body
from glissando.serving.session import BusyError, ModelFailedError

if TYPE_CHECKING:
    from glissando.serving.api import Server
    from glissando.serving.planning import Served

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
#: nothing from elsewhere, no inline script, and no page may frame this one
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
#: tokens that a look covers: the last of the text
LOOK_TOKENS = 160
#: looks that may be under way or wait their turn; each is read alone, beside the texts
_MAX_LOOKS = 8


def playground(server: Server) -> dict[str, Callable[[Request], Any]]:
    """What the page's routes answer, by method and path."""
    routes, folder = dict[str, Callable[[Request], Any]](), resources.files("glissando.serving") / "page"
    for file in folder.iterdir():
        path = "" if file.name == "index.html" else file.name
        kind = f"{_KINDS['.' + file.name.rpartition('.')[2]]}; charset=utf-8"
        routes[f"GET /{path}"] = partial(_file, file.read_bytes(), kind)

    async def about(request: Request) -> Response:
        """GET /v1/glissando: the models, their dials, and what a text may ask for."""
        limits = {"max_tokens": server.limits.max_tokens, "max_prompt": server.limits.max_prompt}
        return JSONResponse({"models": [_about(served) for served in server.served.values()]} | limits)

    async def look(request: Request) -> Response:
        """POST /v1/glissando/look: the looks over the last tokens of a text."""
        body = await server.read(request, lambda values: read_body(LookBody, values))
        served = server.find(body.model)
        control = served.control(body.control)
        if served.looking >= _MAX_LOOKS:
            raise BusyError(f"{_MAX_LOOKS} looks at texts wait already; try again later")
        served.looking += 1
        try:
            return JSONResponse(await asyncio.to_thread(_look, served, served.ids(body.text, "text"), control))
        finally:
            served.looking -= 1

    return routes | {"GET /v1/glissando": about, "POST /v1/glissando/look": look}


async def _file(content: bytes, kind: str, request: Request) -> Response:
    return Response(content, media_type=kind, headers=_HEADERS)


def _about(served: Served) -> dict[str, Any]:
    config = served.config
    return {
        "model": served.name,
        "parameters": served.engine.model.num_parameters(),
        "trained_on": served.about.get("trained_on"),
        "prompts": list(served.about.get("prompts", ())),
        "mixers": list(dict.fromkeys(MIXERS.kind_of(options) for options in config.mixers)),
        "depth": DEPTHS.kind_of(config.depth),
        "controls": config.dials,
        "max_length": config.max_length,
    }


def _look(served: Served, ids: Sequence[int], control: tuple[float, ...] | None) -> dict[str, Any]:
    """In a thread of its own, while the engine's goes on."""
    model, weight = served.viewer, served.viewer.embedding.weight
    ids = list(ids)[-min(LOOK_TOKENS, model.config.max_length or LOOK_TOKENS) :]
    values = None if control is None else weight.new_tensor([control])
    with served.viewing:
        entries = pictures_of(model, torch.tensor([ids], device=weight.device), values)
    if not all(math.isfinite(value) for look in entries for row in look["values"] for value in row):
        under = "" if control is None else f", under the control {control}"
        raise ModelFailedError(f"the model's values for this text are not finite{under}")
    return {"tokens": [token_text(served.tokenizer, token) for token in ids], "looks": entries}
