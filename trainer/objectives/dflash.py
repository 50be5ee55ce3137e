"""DFlash training objectives: inputs and labels of the blocks, weighted cross entropy, and acceptance metrics.

Both objectives are one formula. Of a block at anchor a, `prefix` slots are known and the others are predicted:

- fixed anchor (DFlash, arXiv 2602.06036): the prefix is the anchor alone, `prefix = 1`;
- variable prefix: a random prefix of 2 or more tokens, see
  [`blockdraft.modeling.draft.anchors.sample_prefix_lengths`].

Slot j is supervised where j >= prefix and the loss mask has its label, with weight `exp(-(j - prefix) / gamma)`; the
loss is the weighted mean over the whole batch. A layout whose slot 0 predicts too has `prefix = 0`, `label_start = 1`:
its objective, with three terms, is in [`blockdraft.trainer.objectives.dspark`] and uses the parts that are here.

Everything comes back as sums, so that a caller can divide by a weight gathered over accumulation steps and ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .chunked_loss import SlotLoss, default_chunk_size, in_fp32, sum_over_slots


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


@dataclass
class BlockLoss:
    """Sums over a batch of blocks; all are detached but `loss_sum`.

    Attributes:
        loss_sum (`[]`): sum of weight times negative log-likelihood.
        weight (`[]`): sum of the weights.
        slot_valid (`[block_size]` float32): supervised labels of each slot.
        slot_correct (`[block_size]` float32): of these, labels that are the draft's best token.
        slot_accepted (`[block_size]` float32): of these, labels that are right together with all before them.
        valid_blocks (`[]`): blocks with a supervised slot.
    """

    loss_sum: Tensor
    weight: Tensor
    slot_valid: Tensor
    slot_correct: Tensor
    slot_accepted: Tensor
    valid_blocks: Tensor

    @classmethod
    def zeros(cls, block_size: int, device: torch.device) -> Self:
        """What sums over many batches start from, in float64 (Apple's GPUs have none: float32); the fields named
        `slot_*` have an entry a slot."""
        dtype = torch.float32 if device.type == "mps" else torch.float64
        shapes = [[block_size] if field.name.startswith("slot_") else [] for field in fields(cls)]
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes))

    def __add__(self, other: Self) -> Self:
        """Sums over both batches, for reports: the result is detached."""
        names = [field.name for field in fields(self)]
        return type(self)(*(getattr(self, name).detach() + getattr(other, name).detach() for name in names))

    @property
    def loss(self) -> Tensor:
        """Weighted mean of this batch alone."""
        return self.loss_sum / (self.weight + 1e-6)

    @property
    def cross_entropy(self) -> Tensor:
        """Weighted mean cross entropy of this batch with its labels, in nats."""
        return self.loss

    @property
    def accept_len_sum(self) -> Tensor:
        """Estimated tokens committed by verifying each block once, the target's bonus included, summed over blocks."""
        return self.slot_accepted.sum() + self.valid_blocks

    def metrics(self) -> dict[str, float]:
        """Teacher-forced estimates. Only real decoding tells tau: known context and labels make these optimistic."""
        return {
            "accuracy": (self.slot_correct.sum() / self.slot_valid.sum().clamp(min=1)).item(),
            "accept_len": (self.accept_len_sum / self.valid_blocks.clamp(min=1)).item(),
        }


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
    slots = torch.arange(block_size, device=input_ids.device)
    positions = anchor_positions[..., None] + slots
    known = block_keep_mask[..., None] & (slots < _per_block(prefix_lengths)) & (positions < input_ids.shape[1])
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
        input_ids (`[B, S]` int64), loss_mask (`[B, S]`): the rows and which of their tokens are supervised.
        anchor_positions (`[B, N]` int64), block_keep_mask (`[B, N]` bool): the anchors.
        block_size (`int`): slots of a block.
        label_start (`int`): 0 where slot 0 holds the anchor's own place (1+N), 1 where it predicts the next token (N).
        document_remaining (`[B, S]` int, *optional*): tokens after each position in its document; labels past the end
            of the anchor's document are dropped.
    """
    assert label_start in (0, 1)
    offsets = label_start + torch.arange(block_size, device=input_ids.device)
    label_indices = anchor_positions[..., None] + offsets
    supervised = block_keep_mask[..., None] & (label_indices < input_ids.shape[1])
    if document_remaining is not None:
        supervised = supervised & (offsets <= document_remaining.gather(1, anchor_positions)[..., None])
    mask = _gather(loss_mask, label_indices).float() * supervised
    return BlockTargets(label_indices, _gather(input_ids, label_indices), mask)


def supervised_slots(mask: Tensor, prefix_lengths: Tensor | int = 1) -> Tensor:
    """The label mask (`[B, N, block_size]`) without the known slots of each block."""
    slots = torch.arange(mask.shape[-1], device=mask.device)
    return mask * (slots >= _per_block(prefix_lengths))


def slot_weights(mask: Tensor, prefix_lengths: Tensor | int = 1, gamma: float | None = None) -> Tensor:
    """Loss weights: `exp(-(j - prefix) / gamma)` on the supervised slots.

    Early slots decide about the later ones, hence the decay. Known before any forward pass, so that a trainer can sum
    the weights of an accumulation window first.

    Args:
        mask (`[B, N, block_size]` float32): label mask of [`build_block_targets`].
        prefix_lengths (`[B, N]` int64 or `int`): known slots of each block: 1 for the fixed anchor.
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
    distance = (slots - _per_block(prefix_lengths)).clamp(min=0)
    return supervised * torch.exp(-distance / gamma)


def survival(accepted: Tensor, supervised: Tensor) -> Tensor:
    """How likely verification gets past each slot.

    Args:
        accepted (`[B, N, block_size]` bool or float): acceptance, or its probability, of each slot.
        supervised (`[B, N, block_size]`): non-zero where a slot counts.

    Returns:
        `[B, N, block_size]` float32: product over the supervised slots up to and with this one. Unsupervised slots
        (prefix, holes in the loss mask) do not stop it and are 0 themselves.
    """
    counted = supervised != 0
    return torch.where(counted, accepted.float(), 1.0).cumprod(-1) * counted


def block_acceptance(accepted: Tensor, supervised: Tensor) -> tuple[Tensor, Tensor]:
    """How far verification would follow each block: [`survival`], summed.

    Args:
        accepted, supervised: those of [`survival`].

    Returns:
        `slot_accepted` (`[block_size]` float32), summed over blocks, and `valid_blocks` (`[]` int64), the number of
        blocks with a supervised slot. Their tokens for each verification are `1 + slot_accepted.sum() / valid_blocks`.
    """
    return survival(accepted, supervised).sum((0, 1)), (supervised != 0).any(-1).sum()


def block_loss(
    hidden_states: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    targets: BlockTargets,
    prefix_lengths: Tensor | int = 1,
    gamma: float | None = None,
    chunk_size: int | None = None,
) -> BlockLoss:
    """Weighted cross entropy of the draft's blocks, with its metrics.

    Logits exist for supervised slots only, see [`~blockdraft.trainer.objectives.chunked_loss.sum_over_slots`].

    Args:
        hidden_states (`[B, N * block_size, H]`): the draft's last hidden state.
        compute_logits: maps `[n, H]` hidden states to `[n, vocabulary]` logits.
        targets: from [`build_block_targets`].
        prefix_lengths, gamma: as in [`slot_weights`].
        chunk_size (`int`, *optional*): most slots whose logits are held at once. Default: by vocabulary and device,
            see [`~blockdraft.trainer.objectives.chunked_loss.default_chunk_size`].
    """
    mask = supervised_slots(targets.mask, prefix_lengths)
    weights = slot_weights(targets.mask, prefix_lengths, gamma)

    def slot_loss(hidden: Tensor, labels: Tensor, weight: Tensor) -> SlotLoss:
        logits = in_fp32(compute_logits(hidden))
        with torch.no_grad():
            probabilities, nll, best = token_probabilities(logits, labels)
            kept = [best == labels]
            if not logits.requires_grad:
                return SlotLoss(nll * weight, (), (), kept)
            gradient = cross_entropy_gradient(probabilities, labels, weight)
        return SlotLoss(nll * weight, [logits], [gradient], kept)

    flat = hidden_states.flatten(0, 1)
    if chunk_size is None:
        chunk_size = default_chunk_size(compute_logits(flat[:1]).shape[-1], flat.device.type)
    inputs = (flat, targets.token_ids.flatten(), weights.flatten())
    loss_sum, correct = sum_over_slots(slot_loss, mask, inputs, chunk_size)
    slot_accepted, valid_blocks = block_acceptance(correct, mask)
    return BlockLoss(
        loss_sum=loss_sum,
        weight=weights.sum(),
        slot_valid=mask.sum((0, 1)),
        slot_correct=(mask * correct).sum((0, 1)),
        slot_accepted=slot_accepted,
        valid_blocks=valid_blocks,
    )


def token_probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[n, V]` and labels `[n]` -> probabilities `[n, V]`, `-log p(label)` `[n]` and the best token `[n]`."""
    best = logits.argmax(-1, keepdim=True)
    probabilities = logits.softmax(-1)
    # The best token's probability is never too small for its logarithm, as the label's may be.
    nll = logits.gather(1, best) - logits.gather(1, labels[:, None]) - probabilities.gather(1, best).log()
    return probabilities, nll.squeeze(1), best.squeeze(1)


def cross_entropy_gradient(probabilities: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Of the sum of `weight * -log p(label)` with respect to the logits, `weight * (p - onehot)`, in the memory of
    `probabilities`; `labels` and `weight` are `[n]`."""
    return probabilities.mul_(weight[:, None]).scatter_add_(1, labels[:, None], -weight[:, None].to(probabilities))


def _per_block(prefix_lengths: Tensor | int) -> Tensor | int:
    return prefix_lengths if isinstance(prefix_lengths, int) else prefix_lengths[..., None]


def _gather(rows: Tensor, positions: Tensor) -> Tensor:
    """`rows` (`[B, S]`) at `positions` (`[B, N, block_size]`), those past the end taken from the last column."""
    positions = positions.clamp(max=rows.shape[1] - 1)
    return rows.gather(1, positions.flatten(1)).view_as(positions)
