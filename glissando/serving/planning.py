"""One of the models of a server: what a client asks of it, as requests to its engine."""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from glissando import pretrained
from glissando.errors import ConfigError, DataError, UnknownNameError
from glissando.generation import Sampling, control_values, known_tokens, tokens_left
from glissando.runs import Run
from glissando.serving.engine import Engine
from glissando.serving.http import Limits
from glissando.serving.schema import BadRequestError, ChatBody, CompletionBody
from glissando.serving.session import Request


class Served:
    """A model behind its name.

    about       what the page tells of it, see `about`
    dials       the model's control dimensions, in its order
    viewer      the same weights in modules of its own, as what is watched there must not be the engine's batches
    viewing     held while the viewer computes
    looking     looks at texts that are under way or wait
    """

    def __init__(self, name: str, engine: Engine, limits: Limits, about: Mapping[str, Any]) -> None:
        self.name, self.engine, self.limits, self.about = name, engine, limits, about
        self.config, self.tokenizer, self.dials = engine.model.config, engine.tokenizer, engine.model.config.controls
        shared = [*engine.model.parameters(), *engine.model.buffers(), engine.model.tokenizer]
        self.viewer = copy.deepcopy(engine.model, {id(each): each for each in shared})
        self.viewing, self.looking = threading.Lock(), 0

    def completion(self, body: CompletionBody) -> list[Request]:
        """A request for each prompt."""
        self._require_few(len(body.prompts), body.n)
        requests = [self._request(body, self.ids(p, "prompt"), body.max_tokens, body.echo) for p in body.prompts]
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
        """The one request of a chat: its messages one behind the other, as these models were not trained on roles."""
        self._require_few(1, body.n)
        ids = self.ids(" ".join(message.text for message in body.messages), "messages")
        count = body.max_completion_tokens or body.max_tokens or self.limits.max_tokens
        return [self._request(body, ids, count, False)]

    def _require_few(self, prompts: int, n: int) -> None:
        if prompts * n > (most := self.limits.max_copies):
            raise BadRequestError(f"n = {n} of {prompts} prompts is more than {most} texts; send several requests", "n")

    def control(self, values: Mapping[str, float] | None) -> tuple[float, ...] | None:
        """Every dial's value, in the model's order."""
        if values is None:
            return None
        try:
            return tuple(control_values(self.engine.model, values))
        except (ConfigError, UnknownNameError) as error:
            raise BadRequestError(str(error), "control") from error

    def turned(self, asked: tuple[float, ...] | None, values: Mapping[str, float]) -> tuple[float, ...]:
        """Every dial's value once those of `values` are turned; the others stay as `asked`, or 0 under no control."""
        return self.control({**dict(zip(self.dials, asked or (), strict=False)), **values}) or ()

    def ids(self, prompt: str | Sequence[int], param: str) -> tuple[int, ...]:
        """With the end token before them, which every text was trained behind."""
        eos = self.tokenizer.eos_id
        try:
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except DataError as error:  # not numbers, where the tokens are
            raise BadRequestError(str(error), param) from error
        self._require_known(ids, param)
        return tuple(ids if ids[:1] == [eos] and not isinstance(prompt, str) else [eos, *ids])

    def _require_known(self, ids: Iterable[int], param: str) -> None:
        size = known_tokens(self.engine.model)
        if outside := [token for token in ids if token >= size]:
            message = f"{param}: token {str(outside[0])[:20]} is outside the vocabulary of {size}"
            raise BadRequestError(message, param)

    def _request(self, body: CompletionBody | ChatBody, ids: tuple[int, ...], count: int, echo: bool) -> Request:
        limit, most, room = self.limits.max_prompt, self.limits.max_tokens, tokens_left(self.engine.model, len(ids))
        if len(ids) > limit or not room:
            limit = limit if room else self.config.max_length or 0
            raise BadRequestError(
                f"the prompt has {len(ids):,} tokens with its beginning, and there may be {limit:,}; shorten it",
                "messages" if isinstance(body, ChatBody) else "prompt",
                "context_length_exceeded",
            )
        if count > most:
            raise BadRequestError(f"max_tokens is {count:,}, and a text here has at most {most:,}", "max_tokens")
        for name, tokens in (("logit_bias", body.logit_bias), ("allowed", body.allowed or ())):
            self._require_known(tokens, name)
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        sampling = Sampling(
            body.temperature, body.top_k, None if body.top_p == 1 else body.top_p, seed,
            body.frequency_penalty, body.presence_penalty, tuple(sorted(body.logit_bias.items())),
            body.min_p, body.repetition_penalty, None if body.allowed is None else tuple(body.allowed),
        )  # fmt: skip
        control = dials = self.control(body.control)
        in_order = sorted(body.turns, key=attrgetter("at"))
        turns = [(turn.at, dials := self.turned(dials, turn.control)) for turn in in_order]
        return Request(
            ids, min(count, room), sampling, body.n, tuple(body.stop), control, body.top, echo,
            pace=body.pace, turns=tuple(turns),
        )  # fmt: skip


def about(path: str | Path) -> dict[str, Any]:
    """What the page tells of a run.

    trained_on  its corpus in a few words; None where its configuration names none
    prompts     examples that suit it: those on the card of a packaged model; of a model of the built-in stories, those
                of `stories`; else none
    """
    data: Any = Run.open(path).read_config().get("data")
    data = data if isinstance(data, dict) else {}
    kind = data.get("kind")
    card = pretrained.packaged_name(path) or ("stories" if kind == "stories" else None)
    corpus = "the built-in children's stories" if kind == "stories" else kind
    return {
        "trained_on": f"{Path(data['path']).name} ({kind})" if isinstance(data.get("path"), str) else corpus,
        "prompts": [] if card is None else list(pretrained.card(card)[0].get("prompts", [])),
    }
