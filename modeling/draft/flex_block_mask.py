"""What blocks see as a FlexAttention `BlockMask`, made from the tiles that it touches, without a dense mask."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from .block_visibility import BlockVisibility

FLEX_TILE = 128  # FlexAttention skips keys by tiles of so many queries and keys


def flex_block_mask(visible: BlockVisibility) -> BlockMask:
    """
    The rule as a `BlockMask` over `[N * block_size, S + N * block_size]` queries and keys.

    FlexAttention compiles for each shape, see [`padded_block_mask`]; what the rule says of the context is in tensors,
    so that layers with and without a window share what is compiled. The tensors of its `mask_mod` stay on the device
    of `visible`: make the mask where it is used.
    """
    (_, num_blocks), context_length, block_size = visible.last.shape, visible.context_length, visible.block_size
    queries, device = num_blocks * block_size, visible.last.device
    last = visible.last[..., None].expand(-1, -1, block_size).flatten(1)
    first = visible.first.expand(-1, -1, block_size).flatten(1)

    def by_tile(bound: Tensor, reduce: Callable, past_the_end: int) -> Tensor:
        bound = pad(bound, (0, -queries % FLEX_TILE), value=past_the_end)
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

    causal, last_query = visible.causal, queries - 1

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = query.clamp(max=last_query)  # FlexAttention asks for whole tiles
        in_context = (key >= first[batch, row]) & (key < last[batch, row])
        noise = key - context_length
        in_block = (noise >= 0) & (noise // block_size == query // block_size)
        if causal:
            in_block = in_block & (noise <= query)
        return in_context | in_block

    return BlockMask.from_kv_blocks(
        *ordered(partial), *ordered(full), BLOCK_SIZE=FLEX_TILE, mask_mod=mask_mod, seq_lengths=(queries, whole)
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
        return pad(queries, (0, 0, 0, self.query_length - queries.shape[2]))

    def pad_keys(self, keys: Tensor, query_length: int) -> Tensor:
        """`[B, n, S + Q, d]`, Q = `query_length` -> `[B, n, context_length + self.query_length, d]`."""
        context, blocks = keys.split([keys.shape[2] - query_length, query_length], dim=2)
        between = context.new_zeros(*context.shape[:2], self.context_length - context.shape[2], context.shape[3])
        return torch.cat([context, between, self.pad_queries(blocks)], dim=2)


def padded_block_mask(visible: BlockVisibility) -> PaddedBlockMask:
    """[`flex_block_mask`] with the context's length and the number of blocks padded to powers of two."""
    blocks = visible.last.shape[1]
    length, width = (1 << max(size - 1, 0).bit_length() for size in (visible.context_length, blocks))
    first, last = pad(visible.first, (0, 0, 0, width - blocks)), pad(visible.last, (0, width - blocks))
    padded = replace(visible, first=first, last=last, context_length=length)
    return PaddedBlockMask(flex_block_mask(padded), length, width * visible.block_size)
