"""One of the models of a server, with what answers for it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glissando import pretrained
from glissando.model import LanguageModel
from glissando.runs import Run
from glissando.serving.engine import Engine
from glissando.serving.limits import Limits
from glissando.serving.planning import ChatTemplate, Planner


class Served:
    """A model behind its name.

    trained_on  the text that it was trained on, in a few words for the page; None: not known
    prompts     examples for the page
    viewer      the same weights in modules of its own, as what is watched there must not be the engine's batches
    viewing     held while the viewer computes
    looking     looks at texts that are under way or wait
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        limits: Limits,
        template: ChatTemplate,
        trained_on: str | None = None,
        prompts: Sequence[str] = (),
    ) -> None:
        self.name, self.engine, self.trained_on, self.prompts = name, engine, trained_on, list(prompts)
        self.planner = Planner(engine, limits, template)
        self.viewer, self.viewing, self.looking = _twin(engine.model), threading.Lock(), 0

    @property
    def dials(self) -> list[str]:
        """The model's control dimensions, in its order."""
        return self.engine.model.config.controls


def _twin(model: LanguageModel) -> LanguageModel:
    shared = [*model.parameters(), *model.buffers(), model.tokenizer]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def trained_on(path: str | Path) -> str | None:
    """The corpus of a run in a few words; None where its configuration names none."""
    data: Any = Run.open(path).read_config().get("data")
    if not isinstance(data, dict) or "kind" not in data:
        return None
    if isinstance(data.get("path"), str):
        return f"{Path(data['path']).name} ({data['kind']})"
    return {"stories": "the built-in children's stories"}.get(data["kind"], str(data["kind"]))


def prompts(path: str | Path) -> list[str]:
    """Examples of prompts that suit a run: those on the card of a packaged model, and of a model of the built-in
    stories those of `stories`; else the prompt of its training's samples, if it has one."""
    name = pretrained.packaged_name(path)
    config: Any = {} if name else Run.open(path).read_config()
    if name or config.get("data", {}).get("kind") == "stories":
        return list(pretrained.card(name or "stories")[0].get("prompts", []))
    prompt = config.get("training", {}).get("sample_prompt")
    return [prompt] if prompt else []
