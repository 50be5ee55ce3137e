"""Many blocks of a batch, planned once from their anchors: what the layers of a draft see of the context."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .block_visibility import BlockVisibility


@dataclass(frozen=True)
class BlockPlan:
    """
    Where the blocks of a batch stand and what they see, for all layers, made by [`~DraftPreTrainedModel.plan_blocks`]:
    from CPU tensors and before the target's forward, so that nothing waits for the device behind it:

    ```python
    plan = draft.plan_blocks(anchor_positions, block_keep_mask, context_length).to(draft.device)
    ```

    Attributes:
        anchor_positions (`[B, N]` int64): 0 for padded blocks.
        context_length (`int`), block_size (`int`): S, the context rows that the plan is for, and slots of a block.
        visible (`dict[int | None, BlockVisibility]`): by `sliding_window`, what layers with it see;
            [`~blockdraft.modeling.draft.visible_attention.VisibleKeys`] for `attn_implementation="sdpa"`.
    """

    anchor_positions: Tensor
    context_length: int
    block_size: int
    visible: dict[int | None, BlockVisibility]

    def to(self, device: torch.device, non_blocking: bool = True) -> "BlockPlan":
        """The plan with its tensors on another device. The host does not wait for the copies."""
        visible = {window: visible.to(device, non_blocking) for window, visible in self.visible.items()}
        anchor_positions = self.anchor_positions.to(device, non_blocking=non_blocking)
        return replace(self, anchor_positions=anchor_positions, visible=visible)
