"""What a user does, on the Windows of sitecustomize.py: train, lose power, resume, generate, serve; or train
further, export, compare.

Arguments: a text, and which of the two. It works in the current folder.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn

from glissando.cli import main
from glissando.training.progress import Progress

TINY = [
    "--model.hidden_size", "16", "--model.depth.layers", "1", "--data.kind", "text", "--data.path", sys.argv[1],
    "--data.seq_len", "16", "--data.batch_size", "4", "--training.steps", "4",
]  # fmt: skip


def does(*arguments: str, status: int = 0) -> None:
    print("$ glissando", *arguments, flush=True)
    if (found := main(list(arguments))) != status:
        sys.exit(f"{arguments} ended with status {found}")


def lose_power(self: Progress, loop: Any, batches: Any) -> None:
    if loop.state.step == 3:
        raise KeyboardInterrupt
    before_step(self, loop, batches)


async def start_and_stop(self: uvicorn.Server, *arguments: Any, **options: Any) -> None:
    await startup(self, *arguments, **options)
    self.should_exit = True


def trains() -> None:
    Progress.before_step = lose_power  # type: ignore[method-assign]
    does("train", "--preset", "transformer-nano", *TINY, "--training.save_every", "2", "--out", "run", status=130)
    Progress.before_step = before_step  # type: ignore[method-assign]
    does("train", "--resume", "run")
    does("generate", "run", "--prompt", "The", "--max_tokens", "8")
    uvicorn.Server.startup = start_and_stop  # type: ignore[method-assign]
    does("serve", "run", "--port", "0")


def measures() -> None:
    does("train", "--preset", "transformer-nano", *TINY, "--out", "run")
    does("train", "--from", "run", "--training.steps", "6", "--out", "longer")
    does("export", "longer", "--to", "safetensors-int8", "--out", "small")
    models, same = ("transformer-nano", "liquid-ssm-nano"), ("--budget", "steps=2", "--allow_unequal")
    does("compare", *models, *TINY[:-2], *same, "--contexts", "8", "--out", "compared")


before_step, startup = Progress.before_step, uvicorn.Server.startup
{"trains": trains, "measures": measures}[sys.argv[2]]()
