"""DFlash training objectives (arXiv 2602.06036): weighted cross entropy of blocks, and acceptance metrics.

Both objectives are one formula. Of a block at anchor a, `prefix` slots are known and the others are predicted:

- fixed anchor: the prefix is the anchor alone, `prefix = 1`;
- variable prefix: a random prefix of 2 or more tokens, see
  [`blockdraft.modeling.draft.prefix_lengths.sample_prefix_lengths`].

Slot j is supervised where j >= prefix and the loss mask has its label, with weight `exp(-(j - prefix) / gamma)`, see
[`blockdraft.trainer.objectives.slot_targets`]; the loss is the weighted mean over the whole batch. Everything comes
back as sums, so that a caller can divide by a weight gathered over accumulation steps and ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from .chunked_loss import SlotLoss, default_chunk_size, in_fp32, sum_over_slots
from .slot_targets import SlotTargets


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
        """Tokens that verifying each block once would commit, the target's bonus included, summed over blocks."""
        return self.slot_accepted.sum() + self.valid_blocks

    def metrics(self) -> dict[str, float]:
        """`accuracy` of the slots, and `accept_len`, tokens that a block commits. Teacher-forced, hence optimistic:
        only real decoding tells tau."""
        return {
            "accuracy": (self.slot_correct.sum() / self.slot_valid.sum().clamp(min=1)).item(),
            "accept_len": (self.accept_len_sum / self.valid_blocks.clamp(min=1)).item(),
        }


def survival(accepted: Tensor, supervised: Tensor) -> Tensor:
    """How likely verification gets past each slot, `[B, N, block_size]` float32: the product of `accepted` (bool, or a
    probability) over the slots up to and with this one that are `supervised` (non-zero). The others (prefix, holes in
    the loss mask) do not stop it and are 0 themselves."""
    counted = supervised != 0
    return torch.where(counted, accepted.float(), 1.0).cumprod(-1) * counted


def block_acceptance(accepted: Tensor, supervised: Tensor) -> tuple[Tensor, Tensor]:
    """[`survival`] summed over blocks, `[block_size]` float32, and the number of blocks with a supervised slot, `[]`
    int64. Verifying each block once commits `1 + survival.sum() / blocks` tokens."""
    return survival(accepted, supervised).sum((0, 1)), (supervised != 0).any(-1).sum()


def dflash_loss(
    hidden_states: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    targets: SlotTargets,
    chunk_size: int | None = None,
) -> BlockLoss:
    """Weighted cross entropy of the draft's blocks; logits exist for supervised slots only, see [`sum_over_slots`].

    Args:
        hidden_states (`[B, N * block_size, H]`): the draft's last hidden state.
        compute_logits: maps `[n, H]` hidden states to `[n, vocabulary]` logits.
        targets ([`SlotTargets`]): labels and weights.
        chunk_size (`int`, *optional*): most slots whose logits are held at once. Default: [`default_chunk_size`].

    Returns:
        [`BlockLoss`], whose `loss_sum` has a gradient for `hidden_states` and for what `compute_logits` trains.
    """

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
    inputs = (flat, targets.token_ids.flatten(), targets.weights.flatten())
    return BlockLoss(**block_sums(*sum_over_slots(slot_loss, targets, inputs, chunk_size), targets))


def block_sums(loss_sum: Tensor, correct: Tensor, targets: SlotTargets) -> dict[str, Tensor]:
    """The fields of [`BlockLoss`]; `correct` tells which slots `[B, N, block_size]` are right."""
    slot_accepted, valid_blocks = block_acceptance(correct, targets.supervised)
    return {
        "loss_sum": loss_sum,
        "weight": targets.weights.sum(),
        "slot_valid": targets.supervised.sum((0, 1)),
        "slot_correct": (targets.supervised * correct).sum((0, 1)),
        "slot_accepted": slot_accepted,
        "valid_blocks": valid_blocks,
    }


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
