"""How many tokens of a block are known, for DFlash's variable-prefix objective."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .anchors import row_generator


def prefix_length_probabilities(block_size: int, base: float) -> tuple[int, Tensor]:
    """Shortest prefix and the probabilities of it and the longer ones: Pr(l) ~ base**l on min(2, bs - 1)..bs - 1.

    Raises:
        ValueError: `base` not above 0.
    """
    if base <= 0:
        raise ValueError(f"prefix_weight_base must be above 0, got {base}; below 1 it favours short prefixes.")
    shortest = min(2, block_size - 1)
    weights = base ** torch.arange(block_size - shortest, dtype=torch.float64)
    return shortest, weights / weights.sum()


def sample_prefix_lengths(
    keep: Tensor, block_size: int, base: float, seed: int, step: int, row_ids: Sequence[int | str]
) -> Tensor:
    """Draws how many tokens of each block are known, for the variable-prefix objective.

    Args:
        keep (`[B, N]` bool): from [`sample_anchors`].
        block_size (`int`): slots of a block, at least 2.
        base (`float`): `prefix_weight_base`, see [`prefix_length_probabilities`].
        seed, step, row_ids: as in [`sample_anchors`]; the two draws are independent of each other.

    Returns:
        `[B, N]` int64 on the device of `keep`, the shortest length in padded places.
    """
    shortest, probabilities = prefix_length_probabilities(block_size, base)
    upper = probabilities.cumsum(0)[:-1]
    lengths = torch.full(keep.shape, shortest)
    for row, kept, row_id in zip(lengths, keep.cpu(), row_ids, strict=True):
        # One number for each block of the row's own, so that the batch's width changes nothing.
        generator = row_generator("prefix", seed, step, row_id)
        uniform = torch.rand(int(kept.sum()), dtype=torch.float64, generator=generator)
        row[kept] += torch.bucketize(uniform, upper, right=True)
    return lengths.to(keep.device)
