"""Many blocks for a forward that is given a mask and positions in place of their anchors."""

import torch
from torch import Tensor

from .block_visibility import block_visibility


def block_attention_mask(
    anchor_positions: Tensor, block_keep_mask: Tensor, context_length: int, block_size: int, **rule
) -> Tensor:
    """[`~BlockVisibility.dense_mask`] of the blocks that [`block_visibility`], with the same arguments, describes."""
    return block_visibility(anchor_positions, block_keep_mask, context_length, block_size, **rule).dense_mask()


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as the addend of attention scores: 0 where visible, -inf (weight exactly 0) elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))


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
