"""Many blocks of a batch, planned once from their anchors: what the layers of a draft see of the context."""

from dataclasses import dataclass

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
        visible (`dict[int | None, BlockVisibility]`): by `sliding_window`, what layers with it see;
            [`~blockdraft.modeling.draft.visible_attention.VisibleKeys`] for `attn_implementation="sdpa"`.
    """

    anchor_positions: Tensor
    visible: dict[int | None, BlockVisibility]

    @property
    def context_length(self) -> int:
        """S, the context rows that the plan is for."""
        return next(iter(self.visible.values())).context_length

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return next(iter(self.visible.values())).block_size

    def to(self, device: torch.device, non_blocking: bool = True) -> "BlockPlan":
        """The plan with its tensors on another device. The host does not wait for the copies."""
        visible = {window: visible.to(device, non_blocking) for window, visible in self.visible.items()}
        return BlockPlan(self.anchor_positions.to(device, non_blocking=non_blocking), visible)


def check_blocks(
    anchor_positions: Tensor, block_keep_mask: Tensor | None, context_length: int, document_ids: Tensor | None
) -> None:
    """Raises a `ValueError` unless the blocks' tensors fit each other; see [`~DraftPreTrainedModel.plan_blocks`]."""
    if block_keep_mask is not None and block_keep_mask.shape != anchor_positions.shape:
        raise ValueError(
            f"`block_keep_mask` has the shape {tuple(block_keep_mask.shape)}, `anchor_positions` "
            f"{tuple(anchor_positions.shape)}."
        )
    if document_ids is None:
        return
    rows = (len(anchor_positions), context_length)
    if document_ids.shape != rows:
        raise ValueError(f"`document_ids` has the shape {tuple(document_ids.shape)}; the context's rows are {rows}.")
    runs, documents = ((ids[:, 1:] != ids[:, :-1]).sum() for ids in (document_ids, document_ids.sort(-1).values))
    if runs != documents:
        raise ValueError("`document_ids` come back to a document: the tokens of each have to stand together.")
