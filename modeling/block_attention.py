"""Which keys the queries of a draft block may see.

A draft attends over `[context | blocks]`: S rows made of the target's features, then N blocks of `block_size` noise
tokens. Block n stands at anchor `a[n]`: its slot j takes the place of sequence position `a[n] + j`. A query sees

- the context strictly before its own anchor (and inside the window and the document, where there are any),
- every slot of its own block, in both directions, and never another block.

A padded block (`block_keep_mask` False) sees only itself, so no row of a mask is ever empty and no softmax gives NaN.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def document_ids_from_lengths(document_lengths: Tensor, context_length: int) -> Tensor:
    """Numbers the documents of packed rows.

    Args:
        document_lengths (`[B, D]` int): lengths of each row's documents in order. A row sums to `context_length`,
            trailing padding counts to its last document, absent documents have length 0.
        context_length (`int`): S.

    Returns:
        `[B, S]` int64, 0-based document of every position.
    """
    ends = document_lengths.cumsum(-1)
    positions = torch.arange(context_length, device=document_lengths.device)
    return (ends[:, None, :] <= positions[None, :, None]).sum(-1)


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


class ContextWindows(NamedTuple):
    """The context rows that each block may see, where all of its slots see the same ones.

    Attributes:
        rows (`[B, N, W]` int64): context rows, clamped into the context.
        visible (`[B, N, W]` bool): which of them the block sees.
    """

    rows: Tensor
    visible: Tensor


def context_windows(
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    context_length: int,
    sliding_window: int,
    document_ids: Tensor | None = None,
) -> ContextWindows:
    """The rule of [`block_mask_mod`] with `window_per_query=False`, as row numbers instead of a mask over all rows.

    A block's attention then costs W + block_size keys, whatever the context and the number of blocks.

    Args: those of [`block_mask_mod`].
    """
    width = min(sliding_window, context_length)
    rows = anchor_positions[..., None] + torch.arange(-width, 0, device=anchor_positions.device)
    visible = block_keep_mask[..., None] & (rows >= 0)
    rows = rows.clamp(min=0)
    if document_ids is not None:
        documents = document_ids.gather(1, rows.flatten(1)).view_as(rows)
        visible = visible & (documents == document_ids.gather(1, anchor_positions)[..., None])
    return ContextWindows(rows, visible)


def block_mask_mod(
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    context_length: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    window_per_query: bool = True,
    causal: bool = False,
    document_ids: Tensor | None = None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The visibility rule as a FlexAttention `mask_mod`; the dense masks of this module are this function, evaluated.

    Args:
        anchor_positions (`[B, N]` int64): anchors, 0 for padded blocks.
        block_keep_mask (`[B, N]` bool): False for padded blocks.
        context_length (`int`): S, the number of context rows.
        block_size (`int`): slots of a block.
        sliding_window (`int`, *optional*): W, the context kept in sight. It never applies inside the block.
        window_per_query (`bool`): True (DFlash): slot j at anchor a sees context s with `a + j - s < W`, so the window
            slides along the block. False (DSpark): every slot of the block sees `a - W <= s < a`.
        causal (`bool`): slots see only themselves and the earlier slots of their block.
        document_ids (`[B, S]` int, *optional*): packed rows; a block sees the context of its anchor's document only.

    Returns:
        `mask_mod(batch, head, query, key) -> bool`, for indices of any shapes that broadcast. True means visible.
    """
    last_block = anchor_positions.shape[1] - 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_size, query % block_size
        # FlexAttention may ask for rows and columns past the end (lengths rounded up to its tile): clamp the indices.
        row = block.clamp(max=last_block)
        anchor = anchor_positions[batch, row]
        in_context = block_keep_mask[batch, row] & (key < anchor) & (key < context_length)
        if sliding_window is not None:
            first = anchor + slot - sliding_window + 1 if window_per_query else anchor - sliding_window
            in_context = in_context & (key >= first)
        if document_ids is not None:
            document = document_ids[batch, key.clamp(max=context_length - 1)]
            in_context = in_context & (document == document_ids[batch, anchor])

        noise = key - context_length
        in_block = (noise >= 0) & (noise // block_size == block)
        if causal:
            in_block = in_block & (noise % block_size <= slot)
        return in_context | in_block

    return visible


def block_attention_mask(
    anchor_positions: Tensor, block_keep_mask: Tensor, context_length: int, block_size: int, **rule
) -> Tensor:
    """Dense visibility mask, the same on every device and for every attention implementation.

    Args are those of [`block_mask_mod`].

    Returns:
        `[B, 1, N * block_size, S + N * block_size]` bool, True where a query (rows) sees a key (columns).
    """
    visible = block_mask_mod(anchor_positions, block_keep_mask, context_length, block_size, **rule)
    batch, num_blocks = anchor_positions.shape
    device = anchor_positions.device
    rows = torch.arange(batch, device=device)[:, None, None, None]
    queries = torch.arange(num_blocks * block_size, device=device)[:, None]
    keys = torch.arange(context_length + num_blocks * block_size, device=device)
    return visible(rows, torch.zeros_like(rows), queries, keys)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as the addend of attention scores: 0 where visible, -inf (weight exactly 0) elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))


def flex_block_mask(anchor_positions: Tensor, block_keep_mask: Tensor, context_length: int, block_size: int, **rule):
    """The same rule as a FlexAttention `BlockMask`, for drafts that attend through `flex_attention`.

    Args are those of [`block_mask_mod`]. Shapes follow the number of anchors and the context length: pad both to few
    distinct values, since FlexAttention compiles for each.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    visible = block_mask_mod(anchor_positions, block_keep_mask, context_length, block_size, **rule)
    batch, num_blocks = anchor_positions.shape
    queries = num_blocks * block_size
    return create_block_mask(
        visible, B=batch, H=None, Q_LEN=queries, KV_LEN=context_length + queries, device=anchor_positions.device
    )
