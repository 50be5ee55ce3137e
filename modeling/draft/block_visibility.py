"""Which keys the queries of a draft block may see: the one rule, of which every mask is a view.

A draft attends over `[context | blocks]`: S rows made of the target's features, then N blocks of `block_size` noise
tokens. Block n stands at anchor `a[n]`: its slot j takes the place of sequence position `a[n] + j`. A query sees

- the context strictly before its own anchor (and inside the window and the document, where there are any),
- every slot of its own block, in both directions (or up to itself, in a causal block), and never another block.

So what a slot sees of the context is one interval of rows. A padded block (`block_keep_mask` False) sees only itself:
no row of a mask is ever empty and no softmax gives NaN.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.shapes import check_shape


@dataclass(frozen=True)
class BlockVisibility:
    """What the slots of many blocks see, in the layers that have one window.

    Attributes:
        first (`[B, N, block_size or 1]` int64): first context row that each slot sees; 1: the same for all slots of a
            block.
        last (`[B, N]` int64): end of the context rows that a block's slots see. `first == last`: no context.
        context_length (`int`): S.
        block_size (`int`): slots of a block.
        causal (`bool`): slots see only themselves and the earlier slots of their block.
    """

    first: Tensor
    last: Tensor
    context_length: int
    block_size: int
    causal: bool

    def to(self, device: torch.device, non_blocking: bool = True):
        """The same on another device. The host does not wait for the copies."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=non_blocking) for name, value in tensors.items()})

    def dense_mask(self, context_positions: Tensor | None = None) -> Tensor:
        """The rule as a mask `[B, 1, N * block_size, S + N * block_size]` bool, True where a query (rows) sees a key
        (columns). `context_positions` `[B, S]` int64 are the rows' numbers in `first` and `last`, -1 for rows that
        nobody sees; default: 0, 1, ..."""
        (batch, blocks), size, device = self.last.shape, self.block_size, self.last.device
        if context_positions is None:
            context_positions = torch.arange(self.context_length, device=device)[None]
        rows = context_positions[:, None, None]
        in_context = (rows >= self.first[..., None]) & (rows < self.last[..., None, None])
        in_context = in_context.expand(-1, -1, size, -1).flatten(1, 2)
        slots = torch.arange(blocks * size, device=device)
        in_block = slots // size == slots[:, None] // size
        if self.causal:
            in_block = in_block & (slots <= slots[:, None])
        return torch.cat([in_context, in_block.expand(batch, -1, -1)], dim=-1)[:, None]


def block_visibility(
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    context_length: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    window_per_query: bool = True,
    causal: bool = False,
    document_ids: Tensor | None = None,
) -> BlockVisibility:
    """The visibility rule of this module, applied to the blocks of a batch.

    Args:
        anchor_positions (`[B, N]` int64): anchors, 0 for padded blocks.
        block_keep_mask (`[B, N]` bool): False for padded blocks.
        context_length (`int`): S, the number of context rows.
        block_size (`int`): slots of a block.
        sliding_window (`int`, *optional*): W, the context kept in sight. It never applies inside the block.
        window_per_query (`bool`): True (DFlash): slot j at anchor a sees context s with `a + j - s < W`, so the window
            slides along the block. False (DSpark): every slot of the block sees `a - W <= s < a`.
        causal (`bool`): slots see only themselves and the earlier slots of their block.
        document_ids (`[B, S]` int, *optional*): packed rows, each document's tokens together; a block sees the context
            of its anchor's document only.

    Raises:
        ValueError: if shapes do not fit.
    """
    batch, blocks = check_shape("anchor_positions", anchor_positions, "B", "N")
    check_shape("block_keep_mask", block_keep_mask, batch, blocks, reason="one for each of `anchor_positions`")
    if document_ids is not None:
        check_shape("document_ids", document_ids, batch, context_length, reason="one for each row of the context")
    last = torch.where(block_keep_mask, anchor_positions.clamp(max=context_length), 0)
    first = torch.zeros_like(last)[..., None]
    if document_ids is not None:
        first = document_starts(document_ids).gather(1, anchor_positions)[..., None]
    if sliding_window is not None:
        oldest = anchor_positions[..., None] - sliding_window
        if window_per_query:
            oldest = oldest + 1 + torch.arange(block_size, device=last.device)
        first = torch.maximum(first, oldest)
    return BlockVisibility(torch.minimum(first, last[..., None]), last, context_length, block_size, causal)


def document_starts(document_ids: Tensor) -> Tensor:
    """Where the document of each position begins, `[B, S]` int64, from `[B, S]` ids of contiguous documents."""
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts = torch.zeros_like(document_ids, dtype=torch.int64)
    starts[:, 1:] = torch.where(document_ids[:, 1:] != document_ids[:, :-1], positions[1:], 0)
    return starts.cummax(-1).values


@dataclass(frozen=True)
class BlockPlan:
    """
    Where the blocks of a batch stand and what the layers see of the context, made once from their anchors by
    [`~DraftPreTrainedModel.plan_blocks`]: on the CPU and before the target's forward, so that nothing waits for the
    device behind it.

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


def last_block_mask(padding_mask: Tensor, block_size: int, **rule) -> Tensor:
    """The rule for one block behind its whole context, as in decoding.

    Args:
        padding_mask (`[B, S + block_size]`): 0 for padding, which takes no place, on whichever side it is: windows
            count real tokens.
        block_size (`int`): slots of this block.
        rule: `sliding_window`, `window_per_query` and `causal` of [`block_visibility`].

    Returns:
        `[B, 1, block_size, S + block_size]` bool.
    """
    context, block = padding_mask.bool().split([padding_mask.shape[1] - block_size, block_size], dim=1)
    anchors = context.sum(1, keepdim=True)
    visible = block_visibility(anchors, torch.ones_like(anchors).bool(), context.shape[1], block_size, **rule)
    mask = visible.dense_mask(torch.where(context, context.cumsum(1) - 1, -1))
    mask[..., context.shape[1] :] &= block[:, None, None]
    return mask
