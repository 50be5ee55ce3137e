"""DSpark training objective (arXiv 2607.05147): cross entropy, distance to the target's distribution, confidence.

Slot k of the block at anchor a predicts token `a + 1 + k`; the Markov head is told the true token before it (teacher
forcing). With p and q the distributions of draft and target, d their L1 distance and c = 1 - d/2 the probability that
rejection sampling accepts the draft's token, a supervised slot of weight w = exp(-k / gamma) counts

    ce_alpha * w * -log p(label)  +  l1_alpha * w * d  +  confidence_alpha * w * BCE(confidence, c)

Everything is fp32 and comes back as sums, see [`blockdraft.trainer.objectives.dflash`], whose parts are used here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunked_loss import SlotLoss, default_chunk_size, in_fp32, sum_over_slots
from .dflash import BlockLoss, block_acceptance, block_sums, cross_entropy_gradient, survival, token_probabilities
from .slot_targets import SlotTargets


class DSparkAlphas(NamedTuple):
    """Weights of the three terms; the defaults are the paper's. A term of weight 0 is left out: with `confidence=0`
    the confidence head is not evaluated, and with `l1=0` too nothing needs the target's logits."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0

    @property
    def need_teacher(self) -> bool:
        return self.l1 > 0 or self.confidence > 0


class SlotPredictions(NamedTuple):
    """Predictions of n slots."""

    logits: Tensor  # `[n, vocabulary]`: the draft's, Markov head included
    teacher_logits: Tensor | None = None  # `[n, vocabulary]`: the target's for the same token, if a term needs them
    confidence: Tensor | None = None  # `[n]`: logit of the confidence head, if its term is on


@dataclass
class DSparkLoss(BlockLoss):
    """[`BlockLoss`] with the weighted sum of the three terms as `loss_sum`, and more sums. Those from `slot_compared`
    on compare distributions; they are 0 where there is no teacher, the confidence ones also without a confidence head.

    Attributes:
        ce_sum, l1_sum, confidence_sum (`[]`): the terms without their alphas, to be divided by `weight`.
        slot_compared (`[block_size]`): supervised slots.
        slot_accept_rate (`[block_size]`): of these, the sum of c.
        accept_length (`[]`): tokens that rejection sampling would commit by verifying each block once, the bonus
            included, summed over blocks.
        compared_blocks (`[]`): blocks with a supervised slot.
        confidence_abs_error, confidence_bias (`[]`): weighted |s - c| and s - c, s being the predicted confidence.
        confidence_cumulative_bias (`[]`): the same difference of their products over the slots so far.
        confidence_weight (`[]`): what to divide those three by.
    """

    ce_sum: Tensor
    l1_sum: Tensor
    confidence_sum: Tensor
    slot_compared: Tensor
    slot_accept_rate: Tensor
    accept_length: Tensor
    compared_blocks: Tensor
    confidence_abs_error: Tensor
    confidence_bias: Tensor
    confidence_cumulative_bias: Tensor
    confidence_weight: Tensor

    @property
    def cross_entropy(self) -> Tensor:
        return self.ce_sum / (self.weight + 1e-6)

    def metrics(self) -> dict[str, float]:
        """Also the terms, acceptance by slot under the target's distribution, and how far the confidence is off."""
        weight = self.weight + 1e-6
        metrics = super().metrics() | {"ce_loss": self.cross_entropy.item()}
        if self.compared_blocks:
            metrics["l1_loss"] = (self.l1_sum / weight).item()
            metrics["estimated_tau_sampled"] = (self.accept_length / self.compared_blocks).item()
            metrics["accept_rate"] = (self.slot_accept_rate.sum() / self.slot_compared.sum()).item()
            for slot in self.slot_compared.nonzero().flatten().tolist():
                rate = self.slot_accept_rate[slot] / self.slot_compared[slot]
                metrics[f"accept_rate_slot_{slot}"] = rate.item()
        if self.confidence_weight:
            metrics["confidence_loss"] = (self.confidence_sum / weight).item()
            for name in ("abs_error", "bias", "cumulative_bias"):
                value = getattr(self, f"confidence_{name}") / self.confidence_weight
                metrics[f"confidence_{name}"] = value.item()
        return metrics


def dspark_loss(
    predict: Callable[..., SlotPredictions],
    inputs: Sequence[Tensor],
    targets: SlotTargets,
    alphas: DSparkAlphas,
    chunk_size: int | None = None,
    recompute: bool = False,
) -> DSparkLoss:
    """The three terms over the supervised slots of a batch, with the acceptance diagnostics. Logits of draft and
    teacher exist for `chunk_size` slots at a time, see [`sum_over_slots`].

    Args:
        predict: maps n slots of `inputs` to [`SlotPredictions`].
        inputs: what it reads, each `[B, N, block_size, ...]`.
        targets ([`SlotTargets`]): labels and weights, without a known prefix.
        alphas: weights of the terms; they also say which terms there are.
        chunk_size (`int`, *optional*): most slots whose logits are held at once. Default: [`default_chunk_size`].
        recompute (`bool`): make the logits once more in the backward pass, see [`sum_over_slots`].

    Returns:
        [`DSparkLoss`], whose `loss_sum` has a gradient for `inputs` and for what `predict` trains.
    """
    mask, weights = targets.supervised, targets.weights
    compared = mask * alphas.need_teacher
    confidence_weights = weights * (alphas.confidence > 0)

    def slot_loss(labels: Tensor, weight: Tensor, *values: Tensor) -> SlotLoss:
        logits, teacher_logits, confidence = predict(*values)
        logits, outputs, gradients = in_fp32(logits), [], []
        difference = None
        bce = distance = accept = predicted = torch.zeros_like(weight)
        with torch.no_grad():
            probabilities, nll, best = token_probabilities(logits, labels)
            if alphas.need_teacher:
                difference = in_fp32(teacher_logits).softmax(-1)
                del teacher_logits
                torch.sub(probabilities, difference, out=difference)
                distance = difference.abs().sum(-1)
                accept = (1 - distance / 2).clamp(0, 1)
            if alphas.confidence > 0:
                score = in_fp32(confidence)
                predicted = score.sigmoid()
                bce = F.binary_cross_entropy_with_logits(score, accept, reduction="none")
                if confidence.requires_grad:
                    outputs.append(confidence)
                    gradients.append((alphas.confidence * weight * (predicted - accept)).to(confidence.dtype))
            if logits.requires_grad:
                outputs.append(logits)
                gradients.append(_logits_gradient(probabilities, difference, labels, weight, alphas))
            # Without its term the distance is only the confidence's label.
            terms = [nll * weight, distance * weight * (alphas.l1 > 0), bce * weight]
            loss = sum(alpha * term for alpha, term in zip(alphas, terms, strict=True))
        return SlotLoss(loss, outputs, gradients, [*terms, best == labels, accept, predicted])

    flat = [values.flatten(0, 2) for values in (targets.token_ids, weights, *inputs)]
    if chunk_size is None:
        # Not under `no_grad`: autocast would keep the heads' matrices, cast without a gradient, for the chunks.
        logits = predict(*(values[:1].detach() for values in flat[2:])).logits
        chunk_size = default_chunk_size(logits.shape[-1], logits.device.type)
    loss_sum, *terms, correct, accept, predicted = sum_over_slots(slot_loss, targets, flat, chunk_size, recompute)
    slot_survival, compared_blocks = block_acceptance(accept, compared)
    return DSparkLoss(
        **block_sums(loss_sum, correct, targets),
        ce_sum=terms[0].sum(),
        l1_sum=terms[1].sum(),
        confidence_sum=terms[2].sum(),
        slot_compared=compared.sum((0, 1)),
        slot_accept_rate=accept.sum((0, 1)),
        accept_length=slot_survival.sum() + compared_blocks,
        compared_blocks=compared_blocks,
        confidence_abs_error=(confidence_weights * (predicted - accept).abs()).sum(),
        confidence_bias=(confidence_weights * (predicted - accept)).sum(),
        confidence_cumulative_bias=(confidence_weights * (survival(predicted, mask) - survival(accept, mask))).sum(),
        confidence_weight=confidence_weights.sum(),
    )


def _logits_gradient(
    probabilities: Tensor, difference: Tensor | None, labels: Tensor, weight: Tensor, alphas: DSparkAlphas
) -> Tensor:
    """Of cross entropy and distance with respect to the logits, in the memory of `probabilities` and `difference`
    `[n, V]`. With p the draft's distribution and s the difference's sign, the distance's is `p * (s - <p, s>)`."""
    if alphas.l1 == 0:
        return cross_entropy_gradient(probabilities, labels, alphas.ce * weight)
    signed = difference.sign_().mul_(probabilities)
    l1_weight = (alphas.l1 * weight)[:, None].to(signed)
    # Both terms hold p times a number for each slot.
    number = alphas.ce * weight[:, None] - l1_weight * signed.sum(-1, keepdim=True)
    gradient = probabilities.mul_(number).add_(signed.mul_(l1_weight))
    return gradient.scatter_add_(1, labels[:, None], -(alphas.ce * weight)[:, None].to(gradient))
