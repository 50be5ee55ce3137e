"""Where the blocks of a training row stand.

DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147) train on many random anchors of a row at once; they differ in
where an anchor may be. Here the draw of a row depends on the seed, the global step and the row's id alone: never on
its batch-mates, its padding, its place in the batch, the rank or the global random state. So a resumed or differently
distributed run draws the same blocks.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.shapes import check_shape


class Anchors(NamedTuple):
    """Anchors of a batch: `positions` `[B, N]` int64, ascending in each row, 0 in padded places, where `keep` `[B, N]`
    bool is False. N is 0 where no row has a legal anchor."""

    positions: Tensor
    keep: Tensor


def legal_anchors(
    loss_mask: Tensor, block_size: int, lengths: Tensor | None = None, document_remaining: Tensor | None = None
) -> Tensor:
    """Marks the positions at which a DFlash block may stand.

    A position is legal if it is supervised and a whole block fits after it in the row (position 0 of a shorter row is
    legal too: its block is cut by the label mask) and in its document.

    Args:
        loss_mask (`[B, S]`): supervised where above 0.5.
        block_size (`int`): slots of a block.
        lengths (`[B]` int, *optional*): each row's own length without padding; S where not given.
        document_remaining (`[B, S]` int, *optional*): packed rows, see `documents`.

    Returns:
        `[B, S]` bool.
    """
    batch, width = check_shape("loss_mask", loss_mask, "B", "S")
    positions = torch.arange(width, device=loss_mask.device)
    lengths = torch.full((batch,), width, device=loss_mask.device) if lengths is None else lengths
    last = (lengths - block_size).clamp(min=0)
    legal = (loss_mask > 0.5) & (positions <= last[:, None]) & (positions < lengths[:, None])
    if document_remaining is not None:
        legal &= document_remaining >= block_size - 1
    return legal


def legal_dspark_anchors(
    loss_mask: Tensor, lengths: Tensor | None = None, document_remaining: Tensor | None = None
) -> Tensor:
    """Marks the positions at which a DSpark block may stand: supervised ones whose next token is supervised too.

    Slot 0 predicts that next token, so a block has a label at least there; the label mask cuts what is beyond the row.
    In packed rows the next token has to be of the same document.

    Args:
        loss_mask, lengths, document_remaining: as in [`legal_anchors`].

    Returns:
        `[B, S]` bool, never true in the last column.
    """
    _, width = check_shape("loss_mask", loss_mask, "B", "S")
    positions = torch.arange(width, device=loss_mask.device)
    supervised = loss_mask > 0.5
    if lengths is not None:
        supervised = supervised & (positions < lengths[:, None])
    legal = torch.zeros_like(supervised)
    legal[:, :-1] = supervised[:, :-1] & supervised[:, 1:]
    if document_remaining is not None:
        legal &= document_remaining >= 1
    return legal


def row_generator(purpose: str, seed: int, step: int, row_id: int | str) -> torch.Generator:
    """A CPU generator that is a function of its four keys (through BLAKE2, since Python's own hash is salted)."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{step}/{row_id}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def sample_anchors(
    legal: Tensor, num_anchors: int, seed: int, step: int, row_ids: Sequence[int | str], width: int | None = None
) -> Anchors:
    """Draws up to `num_anchors` legal positions of each row, uniformly and without replacement.

    Args:
        legal (`[B, S]` bool): from [`legal_anchors`] or [`legal_dspark_anchors`].
        num_anchors (`int`): most anchors of a row.
        seed (`int`), step (`int`): the run's seed and its global step.
        row_ids (`Sequence`, length B): stable id of each row in the dataset.
        width (`int`, *optional*): pad to exactly this many, at least `num_anchors`.

    Returns:
        [`Anchors`] on the device of `legal`. Without `width` they are as wide as the richest row needs, at most
        `num_anchors`; N = 0 reports that no row has a legal anchor.

    Raises:
        ValueError: `num_anchors` below 1, or above `width`.
    """
    if num_anchors < 1:
        raise ValueError(f"num_anchors must be at least 1, got {num_anchors}.")
    if width is not None and width < num_anchors:
        raise ValueError(f"width is {width}: it must hold num_anchors, {num_anchors}.")
    assert len(row_ids) == len(legal), "one id for each row"
    drawn = []
    for row, row_id in zip(legal.cpu(), row_ids, strict=True):
        candidates = row.nonzero().flatten()
        order = torch.randperm(len(candidates), generator=row_generator("anchors", seed, step, row_id))
        drawn.append(candidates[order[:num_anchors]].sort().values)
    counts = torch.tensor([len(row) for row in drawn])
    positions = torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True)
    if width is not None:
        positions = torch.nn.functional.pad(positions, (0, width - positions.shape[1]))
    keep = torch.arange(positions.shape[1]) < counts[:, None]
    return Anchors(positions.to(legal.device), keep.to(legal.device))
