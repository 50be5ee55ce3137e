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
from torch.nn.attention.flex_attention import BlockMask

FLEX_TILE = 128  # FlexAttention skips keys by tiles of so many queries and keys


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


class VisibleContext(NamedTuple):
    """The context that the slots of blocks see: for each an interval of rows.

    Attributes:
        first (`[B, N, block_size or 1]` int64): first row that the slots see; 1: the same for all of a block.
        last (`[B, N]` int64): end of what the block's slots see. `first == last`: no context.
    """

    first: Tensor
    last: Tensor


def visible_context(
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    context_length: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    window_per_query: bool = True,
    document_ids: Tensor | None = None,
) -> VisibleContext:
    """The rule of [`block_mask_mod`] for the context, as intervals; documents have to be contiguous.

    Args: those of [`block_mask_mod`].
    """
    last = torch.where(block_keep_mask, anchor_positions.clamp(max=context_length), 0)
    first = torch.zeros_like(last)[..., None]
    if document_ids is not None:
        positions = torch.arange(context_length, device=last.device)
        begins = torch.zeros_like(document_ids, dtype=torch.bool)
        begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        starts = torch.where(begins, positions, 0).cummax(-1).values
        first = starts.gather(1, anchor_positions)[..., None]
    if sliding_window is not None:
        oldest = anchor_positions[..., None] - sliding_window
        if window_per_query:
            oldest = oldest + 1 + torch.arange(block_size, device=last.device)
        first = torch.maximum(first, oldest)
    return VisibleContext(torch.minimum(first, last[..., None]), last)


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


def flex_block_mask(
    anchor_positions: Tensor, block_keep_mask: Tensor, context_length: int, block_size: int, **rule
) -> BlockMask:
    """The same rule as a FlexAttention `BlockMask`, made from the tiles that it touches, without a dense mask.

    Args are those of [`block_mask_mod`]. FlexAttention compiles for each shape, see [`padded_block_mask`]; what the
    rule says of the context is in tensors, so that layers with and without a window share what is compiled.
    """
    batch, num_blocks = anchor_positions.shape
    queries, device = num_blocks * block_size, anchor_positions.device
    in_context = {name: value for name, value in rule.items() if name != "causal"}
    first, last = visible_context(anchor_positions, block_keep_mask, context_length, block_size, **in_context)
    last = last[..., None].expand(-1, -1, block_size).flatten(1)
    first = first.expand(-1, -1, block_size).flatten(1)

    def by_tile(bound: Tensor, reduce: Callable, past_the_end: int) -> Tensor:
        padding = (0, -queries % FLEX_TILE)
        bound = torch.nn.functional.pad(bound, padding, value=past_the_end)
        return reduce(bound.unflatten(1, (-1, FLEX_TILE)), -1)[..., None]  # [B, tiles of queries, 1]

    whole = context_length + queries
    keys = torch.arange(0, whole, FLEX_TILE, device=device)  # where each tile of keys begins
    touched = (by_tile(torch.where(first < last, first, whole), torch.amin, whole) < keys + FLEX_TILE) & (
        by_tile(last, torch.amax, 0) > keys
    )
    full = (by_tile(first, torch.amax, 0) <= keys) & (by_tile(last, torch.amin, whole) >= keys + FLEX_TILE)
    rows = torch.arange(0, queries, FLEX_TILE, device=device)[:, None]
    own_from = context_length + rows // block_size * block_size
    own_to = context_length + ((rows + FLEX_TILE).clamp(max=queries) - 1) // block_size * block_size + block_size
    partial = (touched | ((own_from < keys + FLEX_TILE) & (own_to > keys))) & ~full

    def ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
        tiles = tiles[:, None].to(torch.int32)
        return tiles.sum(-1, dtype=torch.int32), tiles.argsort(dim=-1, descending=True, stable=True).to(torch.int32)

    causal, last_query = rule.get("causal", False), queries - 1

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = query.clamp(max=last_query)  # FlexAttention asks for whole tiles
        in_context = (key >= first[batch, row]) & (key < last[batch, row])
        noise = key - context_length
        in_block = (noise >= 0) & (noise // block_size == query // block_size)
        if causal:
            in_block = in_block & (noise <= query)
        return in_context | in_block

    return BlockMask.from_kv_blocks(
        *ordered(partial), *ordered(full), BLOCK_SIZE=FLEX_TILE, mask_mod=visible, seq_lengths=(queries, whole)
    )


class PaddedBlockMask(NamedTuple):
    """A `BlockMask` of few shapes, so that FlexAttention rarely compiles anew.

    Attributes:
        mask (`BlockMask`): over `[context, padding | blocks, padding]`; no real query sees padding.
        context_length, query_length (`int`): lengths with padding.
    """

    mask: BlockMask
    context_length: int
    query_length: int

    def pad_queries(self, queries: Tensor) -> Tensor:
        """`[B, n, Q, d]` -> `[B, n, query_length, d]`."""
        return torch.nn.functional.pad(queries, (0, 0, 0, self.query_length - queries.shape[2]))

    def pad_keys(self, keys: Tensor, query_length: int) -> Tensor:
        """`[B, n, S + Q, d]`, Q = `query_length` -> `[B, n, context_length + self.query_length, d]`."""
        context, blocks = keys.split([keys.shape[2] - query_length, query_length], dim=2)
        between = context.new_zeros(*context.shape[:2], self.context_length - context.shape[2], context.shape[3])
        return torch.cat([context, between, self.pad_queries(blocks)], dim=2)


def padded_block_mask(
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    context_length: int,
    block_size: int,
    document_ids: Tensor | None = None,
    **rule,
) -> PaddedBlockMask:
    """[`flex_block_mask`] with the context's length and the number of blocks padded to powers of two."""

    def pad(tensor: Tensor, length: int) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, length - tensor.shape[1]))

    length, blocks = (1 << max(size - 1, 0).bit_length() for size in (context_length, anchor_positions.shape[1]))
    if document_ids is not None:
        rule["document_ids"] = pad(document_ids, length)
    anchors = (pad(anchor_positions, blocks), pad(block_keep_mask, blocks))
    return PaddedBlockMask(flex_block_mask(*anchors, length, block_size, **rule), length, blocks * block_size)
