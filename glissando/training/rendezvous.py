"""How processes that torchrun has started find each other, after a restart too.

torchrun keeps one store of keys for all its starts. A process group writes its addresses there under names that count
from 0 in every process, so that after a restart a process may read an address of one that has died: it is refused, or
waits until the group's timeout. Each start therefore has a prefix of its own. Nothing that torchrun gives a process is
that prefix: TORCHELASTIC_RESTART_COUNT differs between nodes, since a node whose own processes are well restarts them
without counting it. See https://github.com/pytorch/pytorch/issues/135712.
"""

from __future__ import annotations

import os
from uuid import uuid4

import torch

from glissando.errors import TrainingError

#: the queue that the first process reads
MESSAGES = "glissando/start"


def make_group(device: torch.device) -> None:
    """Make the default process group, where torchrun has started several processes on a store that outlives them.

    Fabric uses a group that exists, and makes one itself in all other cases.

    Raises TrainingError if a process is missing.
    """
    from torch import distributed
    from torch.distributed.constants import default_pg_timeout

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # torchrun without the store of its own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) has a new one for each start.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or world_size == 1 or distributed.is_initialized():
        return
    address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    store = distributed.TCPStore(address, port, is_master=False, timeout=default_pg_timeout)
    distributed.init_process_group(
        distributed.get_default_backend_for_device(device),
        store=distributed.PrefixStore(agree(store, rank, world_size), store),
        rank=rank, world_size=world_size, timeout=default_pg_timeout,
        device_id=None if device.type == "cpu" else device,
    )  # fmt: skip


def agree(store: torch.distributed.TCPStore, rank: int, world_size: int) -> str:
    """A name that the `world_size` processes of this start share, and that no process before them had.

    Others ask the first process under a name of their own, which it answers, and confirm the answer. It also answers
    what processes that have died asked, which nobody reads, and counts confirmations of its own name alone.

    Raises TrainingError if the store's timeout passes.
    """
    mine = uuid4().hex
    try:
        if rank > 0:
            store.queue_push(MESSAGES, f"ask {mine}")
            name = store.get(f"{MESSAGES}/{mine}").decode()
            store.queue_push(MESSAGES, f"confirm {name}")
            return name
        confirmed = 1
        while confirmed < world_size:
            kind, name = store.queue_pop(MESSAGES).decode().split()
            if kind == "ask":
                store.set(f"{MESSAGES}/{name}", mine)
            elif name == mine:
                confirmed += 1
        return mine
    except torch.distributed.DistStoreError as error:
        raise TrainingError(
            f"process {rank} of the {world_size} that torchrun has started waited for the others until the timeout: "
            "look for the error of the process that did not start, and start the job again"
        ) from error
