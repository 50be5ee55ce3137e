"""What the blocks of a training row hold, and what their slots predict."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.shapes import check_shape


class BlockTargets(NamedTuple):
    """What the slots of the blocks predict.

    Attributes:
        label_indices (`[B, N, block_size]` int64): sequence position of the label, possibly past the end.
        token_ids (`[B, N, block_size]` int64): token at that position (at the last one, past the end).
        mask (`[B, N, block_size]` float32): loss mask at that position; 0 past the end and in padded blocks.
    """

    label_indices: Tensor
    token_ids: Tensor
    mask: Tensor


def build_block_inputs(
    input_ids: Tensor,
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    block_size: int,
    mask_token_id: int,
    prefix_lengths: Tensor | int = 1,
    document_remaining: Tensor | None = None,
) -> Tensor:
    """Token ids of the noise blocks: the known prefix, then masks; masks alone in padded blocks.

    Args:
        input_ids (`[B, S]` int64): the rows.
        anchor_positions (`[B, N]` int64), block_keep_mask (`[B, N]` bool): the anchors.
        block_size (`int`), mask_token_id (`int`): slots of a block and the token of the unknown ones.
        prefix_lengths (`[B, N]` int64 or `int`): known slots of each block, the anchor included.
        document_remaining (`[B, S]` int, *optional*): packed rows: nothing is known past the anchor's document.

    Returns:
        `[B, N * block_size]` int64.
    """
    _check_blocks(input_ids, anchor_positions, block_keep_mask)
    slots = torch.arange(block_size, device=input_ids.device)
    positions = anchor_positions[..., None] + slots
    known = block_keep_mask[..., None] & (slots < per_block(prefix_lengths)) & (positions < input_ids.shape[1])
    if document_remaining is not None:
        known = known & (slots <= document_remaining.gather(1, anchor_positions)[..., None])
    return torch.where(known, _gather(input_ids, positions), mask_token_id).flatten(1)


def build_block_targets(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    block_size: int,
    label_start: int = 0,
    document_remaining: Tensor | None = None,
) -> BlockTargets:
    """Labels of the blocks: slot j of the block at anchor a predicts token `a + label_start + j`.

    Args:
        input_ids, anchor_positions, block_keep_mask, block_size: as in [`build_block_inputs`].
        loss_mask (`[B, S]`): which tokens of the rows are supervised.
        label_start (`int`): 0 where slot 0 holds the anchor's own place (1+N), 1 where it predicts the next token (N).
        document_remaining (`[B, S]` int, *optional*): tokens after each position in its document; labels past the end
            of the anchor's document are dropped.
    """
    assert label_start in (0, 1)
    _check_blocks(input_ids, anchor_positions, block_keep_mask)
    check_shape("loss_mask", loss_mask, *input_ids.shape, reason="one for each of `input_ids`")
    offsets = label_start + torch.arange(block_size, device=input_ids.device)
    label_indices = anchor_positions[..., None] + offsets
    supervised = block_keep_mask[..., None] & (label_indices < input_ids.shape[1])
    if document_remaining is not None:
        supervised = supervised & (offsets <= document_remaining.gather(1, anchor_positions)[..., None])
    mask = _gather(loss_mask, label_indices).float() * supervised
    return BlockTargets(label_indices, _gather(input_ids, label_indices), mask)


def per_block(prefix_lengths: Tensor | int) -> Tensor | int:
    return prefix_lengths if isinstance(prefix_lengths, int) else prefix_lengths[..., None]


def _check_blocks(input_ids: Tensor, anchor_positions: Tensor, block_keep_mask: Tensor) -> None:
    batch, _ = check_shape("input_ids", input_ids, "B", "S")
    shape = check_shape("anchor_positions", anchor_positions, batch, "N")
    check_shape("block_keep_mask", block_keep_mask, *shape, reason="one for each of `anchor_positions`")


def _gather(rows: Tensor, positions: Tensor) -> Tensor:
    """`rows` (`[B, S]`) at `positions` (`[B, N, block_size]`), those past the end taken from the last column."""
    positions = positions.clamp(max=rows.shape[1] - 1)
    return rows.gather(1, positions.flatten(1)).view_as(positions)


class DSparkTargets(NamedTuple):
    """What the slots of the blocks predict, and after which token.

    Attributes:
        token_ids (`[B, N, block_size]` int64): token `a + 1 + k` (the row's last one past its end; the row's first one
            in padded blocks).
        previous_token_ids (`[B, N, block_size]` int64): the token before: the anchor, then `token_ids` of the slot
            before.
        mask (`[B, N, block_size]` float32): 1 where a slot is supervised: up to the first label that is not.
    """

    token_ids: Tensor
    previous_token_ids: Tensor
    mask: Tensor


def build_dspark_targets(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchor_positions: Tensor,
    block_keep_mask: Tensor,
    block_size: int,
    document_remaining: Tensor | None = None,
) -> DSparkTargets:
    """Labels of the blocks. Unlike DFlash's, a slot whose label is not supervised switches off all that follow.

    Args:
        loss_mask (`[B, S]`): which tokens of the rows are supervised (> 0.5).
        input_ids, anchor_positions, block_keep_mask, block_size, document_remaining: as in [`build_block_targets`].
    """
    blocks = (anchor_positions, block_keep_mask, block_size)
    labels = build_block_targets(input_ids, loss_mask, *blocks, 1, document_remaining)
    token_ids = torch.where(block_keep_mask[..., None], labels.token_ids, input_ids[:, :1, None])
    anchors = input_ids.gather(1, anchor_positions)
    previous = torch.cat([anchors[..., None], token_ids[..., :-1]], dim=-1)
    return DSparkTargets(token_ids, previous, (labels.mask > 0.5).float().cumprod(-1))
