"""States as files: a text is written on in another process, to the bit as if it had never stopped.

A file is safetensors: the leaves of the state under their names, and in its metadata what kind of state it is, the
digest of the model that it belongs to and the digest of its own contents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glissando.config import to_dict
from glissando.depth import DEPTHS
from glissando.errors import InputError, RunError
from glissando.mixers import MIXERS
from glissando.state import leaf_names, leaves, map_state
from glissando.storage import load_tensors, save_tensors

if TYPE_CHECKING:
    from glissando.backbone import Backbone, ModelState

_OWN = ("unread", "generator", "recent")


@dataclass(frozen=True)
class StreamState:
    """Where a text stands, with everything that what follows depends on but the options of drawing.

    model      the model's state after every token that it has read
    unread     (1,) int64, the token that was drawn last
    generator  the state of the generator of random numbers, bytes
    recent     (n,) int64, the last tokens of the text, of which a character may not be whole yet
    held       text that was held back because a stop text may begin so
    """

    model: ModelState
    unread: Tensor
    generator: Tensor
    recent: Tensor
    held: str = ""


def save_state(model: Backbone, state: ModelState | StreamState, path: str | Path, overwrite: bool = False) -> None:
    """Save a state as a file, from which a text continues exactly, also in another process.

    The trail of a state of `init_state(..., rewind=N)` is not saved: the state that is loaded cannot go back.

    Args:
        model: The model that the state belongs to.
        state: A state of the model, of any number of rows, or that of a stream (`stream(..., resumable=True).state`).
        path: File to write.
        overwrite: Whether an existing file is replaced.

    Raises:
        RunError: The file exists and `overwrite` is false, or it cannot be written.
    """
    path = Path(path).expanduser()
    if not overwrite and path.exists():
        raise RunError(f"{path} exists; nothing is overwritten: choose another name, or overwrite=True")
    inner = (state.model if isinstance(state, StreamState) else state)._replace(trail=None)
    tensors = dict(zip(leaf_names(inner), leaves(inner), strict=True))
    about: dict[str, Any] = {"model": digest(model.state_dict(), model), "about": _about(model)}
    about["complex"] = [name for name, value in tensors.items() if value.is_complex()]
    tensors |= {name: torch.view_as_real(tensors[name]) for name in about["complex"]}
    if isinstance(state, StreamState):
        tensors |= {name: getattr(state, name) for name in _OWN}
        about["held"] = state.held
    about["contents"] = digest(tensors)
    save_tensors(path, tensors, {"glissando_state": json.dumps(about)})


def load_state(model: Backbone, path: str | Path) -> Any:
    """The state in a file that `save_state` wrote.

    Args:
        model: The model that the state belongs to.
        path: The file.

    Returns:
        The state on the device of the model: a ModelState, or the StreamState of a stream.

    Raises:
        InputError: The state belongs to another model.
        RunError: The file is damaged, or is not such a file.
    """
    from safetensors import safe_open

    path = Path(path).expanduser()
    if not path.is_file():
        raise RunError(f"there is no file {path}: name one that save_state or --save_state has written")
    try:
        tensors = load_tensors(path)
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["glissando_state"])
        owner, contents, described = about["model"][:12], about["contents"], about["about"]
    except (RunError, KeyError, TypeError, ValueError) as error:
        message = f"{path} is damaged, or holds no state of a model: save the state again, or name another"
        raise RunError(message) from error
    if digest(tensors) != contents:
        raise RunError(f"{path} is damaged: its contents have another digest than when it was written")
    if owner != (expected := digest(model.state_dict(), model)[:12]):
        raise InputError(
            f"{path} is the state of another model: {described}, digest {owner}; this is {_about(model)} "
            f"with {expected}. The weights and all options must be the same"
        )
    # Memory of its own: arithmetic may round by how its numbers are aligned.
    device = next(model.parameters()).device
    try:
        tensors |= {name: torch.view_as_complex(tensors[name]) for name in about["complex"]}
        like = model.init_state(len(tensors["position"]))
        names = leaf_names(like)
        inner = map_state(lambda _: tensors[next(names)].to(device, copy=True), like)
        if "held" not in about:
            return inner
        return StreamState(inner, tensors["unread"].to(device), tensors["generator"], tensors["recent"], about["held"])
    except (KeyError, TypeError, RuntimeError) as error:  # the digest is of the tensors, and not of their description
        raise RunError(f"{path} is damaged ({error!r}): save the state again, or name another") from error


def digest(tensors: Mapping[str, Tensor], model: Backbone | None = None) -> str:
    """SHA-256 of tensors with their names, types and shapes, and of a model's options."""
    hashed = hashlib.sha256(b"" if model is None else json.dumps(to_dict(model.config), sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _about(model: Backbone) -> str:
    mixers = ", ".join(dict.fromkeys(MIXERS.kind_of(mixer) for mixer in model.config.mixers))
    return f"{model.num_parameters():,} parameters ({mixers}; {DEPTHS.kind_of(model.config.depth)})"
