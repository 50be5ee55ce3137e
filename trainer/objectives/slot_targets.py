"""What the slots of blocks learn: labels, which of them count, and how much."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...modeling.draft.block_targets import per_block


class SlotTargets(NamedTuple):
    """What the slots of a batch's blocks learn; made once a batch, before any forward."""

    token_ids: Tensor  # `[B, N, block_size]` int64: each slot's label
    supervised: Tensor  # `[B, N, block_size]` float32: loss mask of the labels, 0 in the known prefix of each block
    weights: Tensor  # `[B, N, block_size]` float32: of each slot in the loss
    index: Tensor  # `[n]` int64: places of the n supervised slots among all `B * N * block_size`

    def to(self, device: torch.device, non_blocking: bool = True) -> "SlotTargets":
        """The same on another device. The host does not wait for the copies."""
        return SlotTargets(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


def slot_targets(
    token_ids: Tensor, mask: Tensor, prefix_lengths: Tensor | int = 1, gamma: float | None = None
) -> SlotTargets:
    """Weighs the labels of a batch, the `token_ids` and `mask` of [`build_block_targets`] or [`build_dspark_targets`],
    as [`slot_weights`] does, and finds those that count. On the CPU: other devices are waited for."""
    supervised = supervised_slots(mask, prefix_lengths)
    weights = slot_weights(mask, prefix_lengths, gamma)
    return SlotTargets(token_ids, supervised, weights, supervised.flatten().nonzero().flatten())


def supervised_slots(mask: Tensor, prefix_lengths: Tensor | int = 1) -> Tensor:
    """The label mask (`[B, N, block_size]`) without the known slots of each block."""
    slots = torch.arange(mask.shape[-1], device=mask.device)
    return mask * (slots >= per_block(prefix_lengths))


def slot_weights(mask: Tensor, prefix_lengths: Tensor | int = 1, gamma: float | None = None) -> Tensor:
    """Loss weights: `exp(-(j - prefix) / gamma)` on the supervised slots (DFlash, arXiv 2602.06036). Late slots only
    count where the early ones were right, hence the decay.

    Args:
        mask (`[B, N, block_size]` float32): loss mask of the labels.
        prefix_lengths (`[B, N]` int64 or `int`): known slots of each block: 1 where the anchor alone is known, 0 where
            slot 0 predicts too.
        gamma (`float`, *optional*): decay length in slots; none: no decay.

    Returns:
        `[B, N, block_size]` float32.

    Raises:
        ValueError: `gamma` not above 0.
    """
    supervised = supervised_slots(mask, prefix_lengths)
    if gamma is None:
        return supervised
    if gamma <= 0:
        raise ValueError(f"loss_decay_gamma must be above 0, got {gamma}; None switches the decay off.")
    slots = torch.arange(mask.shape[-1], device=mask.device)
    distance = (slots - per_block(prefix_lengths)).clamp(min=0)
    return supervised * torch.exp(-distance / gamma)
