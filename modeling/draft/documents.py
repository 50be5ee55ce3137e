"""Where the tokens of packed rows stand in their documents."""

import torch
from torch import Tensor

from .block_visibility import document_starts


def document_remaining(document_ids: Tensor, lengths: Tensor) -> Tensor:
    """Counts the real tokens after each position inside its own document.

    Args:
        document_ids (`[B, S]` int): document of every position, documents contiguous.
        lengths (`[B]` int): real tokens of each row; what follows is padding.

    Returns:
        `[B, S]` int64, 0 at padding.
    """
    width = document_ids.shape[1]
    positions = torch.arange(width, device=document_ids.device)
    last = positions == lengths[:, None] - 1
    last[:, :-1] |= document_ids[:, 1:] != document_ids[:, :-1]
    ends = torch.where(last & (positions < lengths[:, None]), positions, width)
    next_end = ends.flip(-1).cummin(-1).values.flip(-1)
    return torch.where(next_end < width, next_end - positions, 0)


def document_positions(document_ids: Tensor) -> Tensor:
    """Position of each token in its own document, `[B, S]` int64, from `[B, S]` ids of contiguous documents."""
    return torch.arange(document_ids.shape[1], device=document_ids.device) - document_starts(document_ids)
