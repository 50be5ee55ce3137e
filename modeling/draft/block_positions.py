"""Positions of the rows that a draft with a positional encoding attends over."""

import torch
from torch import Tensor


def block_position_ids(anchor_positions: Tensor, context_length: int, block_size: int) -> Tensor:
    """Positions of `[context | blocks]`: slot j of the block at anchor a stands at a + j.

    Args:
        anchor_positions (`[B, N]` int64): anchors, 0 for padded blocks.
        context_length (`int`): S.
        block_size (`int`): slots of a block.

    Returns:
        `[B, S + N * block_size]` int64.
    """
    device = anchor_positions.device
    context = torch.arange(context_length, device=device).expand(len(anchor_positions), -1)
    blocks = anchor_positions[..., None] + torch.arange(block_size, device=device)
    return torch.cat([context, blocks.flatten(1)], dim=1)
