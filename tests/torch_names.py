"""The public names of the torch that is imported, one a line: `python tests/torch_names.py > FILE`.

data/newer_torch.txt has those of the pinned torch that the oldest one allowed lacks: `LC_ALL=C comm -13 OLDEST PINNED`,
without torch.fx and torch.ao, and without what belongs to a name before it.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections.abc import Iterator

import torch
import torch._inductor.config
import torch.distributed.fsdp
import torch.nn.attention.flex_attention
import torch.nn.utils.parametrize


def names(module: types.ModuleType, seen: set[int]) -> Iterator[str]:
    seen.add(id(module))
    for name in sorted(vars(module)):
        value = getattr(module, name)
        if name.startswith("_") and not isinstance(value, types.ModuleType):
            continue
        if isinstance(value, types.ModuleType):
            if value.__name__.startswith("torch.") and id(value) not in seen and name[0] != "_":
                yield f"{module.__name__}.{name}"
                yield from names(value, seen)
            continue
        yield f"{module.__name__}.{name}"
        if inspect.isclass(value) and value.__module__.startswith("torch"):
            yield from (f"{module.__name__}.{name}.{each}" for each in sorted(vars(value)) if each[0] != "_")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.writelines(sorted({f"{name}\n" for name in names(torch, set())}))
