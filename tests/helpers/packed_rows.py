"""Packed rows as the reference numbers describe them."""

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
