"""Two processes that train by a loop of a user's own, with DistributedDataParallel, fully_shard, or our `shard`.

`rank_of_two` writes FOLDER/RANK.json for the ranks 0 and 1: by case, the largest difference of a gradient from that of
the whole batch in one process. two_processes.py starts both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from glissando.model import LanguageModel
from glissando.sharding import gathered, shard

SMALL = {"hidden_size": 16, "vocab_size": 20}
#: preset and options; by presets whose parameters were once numbers without a dimension
MODELS = {
    "flow": ("hybrid-ode-nano", {"depth": {"layers": 2, "n_steps": 2}}),
    "flow-checkpointed": ("hybrid-ode-nano", {"depth": {"layers": 0, "n_steps": 2}}),
    "scaled": ("continuous-transformer", {"depth": {"n_steps": 2}}),
    "residual": ("liquid-ssm", {"depth": {"layers": 1}}),
}
#: control of each half of the batch
ABSENT, MIXED = (False, False), (True, False)


def model_of(case: str) -> LanguageModel:
    torch.manual_seed(0)
    preset, options = MODELS[case]
    model = LanguageModel.from_preset(preset, **SMALL, **options).double().eval()  # without dropout
    model.depth.gradient_checkpointing = case.endswith("checkpointed")  # type: ignore[assignment]
    return model


def loss(model: nn.Module, part: int, controlled: bool) -> Tensor:
    ids = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(part))
    signals = {"control": torch.ones(2, 2, dtype=torch.float64)} if controlled else {}
    return F.cross_entropy(model(ids[:, :-1], **signals)[0].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: nn.Module) -> list[Tensor]:
    """A weight without a gradient counts as 0."""
    return [torch.zeros(()) if p.grad is None else gathered(p.grad) for p in model.parameters()]


@functools.cache
def whole(case: str, control: tuple[bool, bool] = ABSENT) -> list[Tensor]:
    """The gradients of two backward passes over the whole batch in one process: of the sum of halves, not the mean."""
    model = model_of(case)
    sum(loss(model, part, control[part]) for part in (0, 1)).backward()  # type: ignore[union-attr]
    return gradients(model)


def gap(model: LanguageModel, expected: list[Tensor]) -> float:
    """Largest difference of gradients."""
    return max(float((one - other).abs().max()) for one, other in zip(gradients(model), expected, strict=True))


def measure(case: str, wrap: Callable[[LanguageModel], nn.Module], control: tuple[bool, bool] = ABSENT) -> float:
    """Over two backward passes, the second of which DistributedDataParallel refuses after an incomplete first."""
    model, rank = model_of(case), dist.get_rank()
    wrapped = wrap(model)
    for _ in range(2):
        loss(wrapped, rank, control[rank]).backward()
    return gap(model, whole(case, control))


def own_scalar() -> float:
    """A number without a dimension of a mixer of a user's own, in our sharding, which averages its gradient."""
    model, expected = model_of("flow"), model_of("flow")
    for each in (model, expected):
        each.scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    shard(SimpleNamespace(model=model), init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",)))
    (model.scalar * loss(model, dist.get_rank(), False)).backward()
    (expected.scalar * sum(loss(expected, part, False) for part in (0, 1)) / 2).backward()
    return gap(model, gradients(expected))


def rank_of_two(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gaps = {f"{case}:ddp": measure(case, DistributedDataParallel) for case in MODELS}
    gaps |= {f"{case}:fully_shard": measure(case, fully_shard) for case in MODELS}
    gaps |= {"mixed:ddp": measure("flow", DistributedDataParallel, MIXED), "own-scalar:shard": own_scalar()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(gaps))
    dist.destroy_process_group()


def compute_whole() -> None:
    """Before the processes are forked, so that this is done once, and kernels are compiled once."""
    for case in MODELS:
        whole(case)
    whole("flow", MIXED)
