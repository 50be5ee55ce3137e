"""Many blocks by a mask, for a forward that is given one in place of their anchors."""

import torch
from torch import Tensor

from blockdraft.modeling.draft.block_visibility import block_visibility


def block_attention_mask(
    anchor_positions: Tensor, block_keep_mask: Tensor, context_length: int, block_size: int, **rule
) -> Tensor:
    """The dense mask of the blocks that `block_visibility`, with the same arguments, describes."""
    return block_visibility(anchor_positions, block_keep_mask, context_length, block_size, **rule).dense_mask()


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as the addend of attention scores: 0 where visible, -inf (weight exactly 0) elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))
