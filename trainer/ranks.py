"""Work that the ranks of a training do apart, for as long as it takes, and bring together."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

# A rank that waits for others does so in a group of its own: those of training end after `ddp_timeout`.
PATIENCE = timedelta(days=30)


def on_all_ranks(work: Callable[[int, int], Result]) -> list[Result]:
    """
    Calls `work(rank, number of ranks)` on every rank at once; all ranks have to come here.

    Returns:
        What it returned on each rank, in their order; a list of one where there is one process.

    Raises:
        Exception: what `work` raised on this rank, or a `RuntimeError` with what it raised on another one (of a
            `ValueError`, a `ValueError`). No rank waits for one that has failed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [work(0, 1)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    result, fault = None, None
    try:
        result = work(rank, ranks)
    except Exception as error:
        fault = error
    told = [None] * ranks
    message = fault and f"{type(fault).__name__} on rank {rank}: {fault}"
    dist.all_gather_object(told, (result, message, isinstance(fault, ValueError)), group=group)
    dist.destroy_process_group(group)
    if fault is not None:
        raise fault
    for _, message, wrong_input in told:
        if message is not None:
            raise ValueError(message) if wrong_input else RuntimeError(message)
    return [result for result, *_ in told]
