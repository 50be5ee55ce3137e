"""Sums of a loss over slots, chunk by chunk, so that what a slot needs over the vocabulary never exists for all.

Logits are the memory of block-parallel training, and making them is much of its time. So the gradient of a chunk is
formed at once, in the forward pass, while its logits are there. What stays is the gradient of each slot's states and
of trained heads; the backward pass only multiplies them by the number it is given.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .slot_targets import SlotTargets

# Measured on a CPU (head of 32,768 x 512, fp32, 1,024 slots and more), processor time: 16 MB cost 1.5 times what 64 MB
# do, as each product copies the head's matrix into its own layout first; 256 MB gain another eighth.
CPU_CHUNK_BYTES = 64 * 2**20
ACCELERATOR_CHUNK_BYTES = 256 * 2**20
# With fewer, that copy is the cost.
FEWEST_SLOTS = 64


class SlotLoss(NamedTuple):
    """The loss of n slots, and how it depends on their predictions."""

    loss: Tensor  # `[n]`, without gradient
    outputs: Sequence[Tensor]  # predictions that require a gradient, of any shape; none under `torch.no_grad`
    gradients: Sequence[Tensor]  # of the summed loss, for each of `outputs`
    kept: Sequence[Tensor]  # `[n]` tensors to hand on, without gradient


def default_chunk_size(vocab_size: int, device_type: str) -> int:
    """Slots whose fp32 logits over a vocabulary are held at once, unless the user says how many."""
    size = CPU_CHUNK_BYTES if device_type == "cpu" else ACCELERATOR_CHUNK_BYTES
    return max(size // (4 * vocab_size), FEWEST_SLOTS)


def sum_over_slots(
    slot_loss: Callable[..., SlotLoss],
    targets: SlotTargets,
    inputs: Sequence[Tensor],
    chunk_size: int,
    recompute: bool = False,
) -> tuple[Tensor, ...]:
    """Sums a loss over the supervised slots of `targets`, `chunk_size` of them at a time. The sum has a gradient,
    once, for `inputs` and for every leaf that `slot_loss` reads beside them, such as a trained head's parameters.

    Args:
        slot_loss: maps n slots of `inputs` to their loss.
        inputs: tensors `[B * N * block_size, ...]`.
        recompute (`bool`): run each chunk again in the backward pass instead. For parameters that are whole only while
            their module runs, as FSDP and ZeRO-3 have them.

    Returns:
        The sum (`[]`), and each kept tensor as `[B, N, block_size]`, zero in unsupervised slots.
    """
    index, shape = targets.index, targets.supervised.shape
    run = _recomputed if recompute and torch.is_grad_enabled() else _fused
    # Without a supervised slot there is one empty chunk: a zero that still reaches the draft's parameters, so that no
    # rank of a data-parallel run waits for the gradients of another.
    total, kept = run(slot_loss, index.split(chunk_size), inputs)
    joined = map(torch.cat, zip(*kept, strict=True))
    return total, *(values.new_zeros(shape.numel()).index_put_((index,), values).view(shape) for values in joined)


def _fused(
    slot_loss: Callable[..., SlotLoss], chunks: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, list[Sequence[Tensor]]]:
    """The sum, with the gradient that its chunks had, and what they keep."""
    losses, kept = [], []
    input_gradients: dict[int, Tensor] = {}
    head_gradients: dict[Tensor, Tensor] = {}

    def run_chunk(rows: Tensor) -> None:  # a function, so that nothing of a chunk outlives it
        parts = [values.detach()[rows].requires_grad_(values.requires_grad) for values in inputs]
        found = slot_loss(*parts)
        losses.append(found.loss)
        kept.append(found.kept)
        if not found.outputs:
            return
        leaves = _graph_leaves(found.outputs)
        gradients = torch.autograd.grad(found.outputs, leaves, found.gradients, allow_unused=True)
        reached = {leaf: gradient for leaf, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
        for i, part in enumerate(parts):
            if part in reached:
                if i not in input_gradients:
                    input_gradients[i] = torch.zeros_like(inputs[i])
                input_gradients[i][rows] = reached.pop(part)
        for leaf, gradient in reached.items():
            if leaf in head_gradients:
                head_gradients[leaf] += gradient
            else:
                head_gradients[leaf] = in_fp32(gradient)  # a sum over many chunks

    for rows in chunks:
        run_chunk(rows)
    total = torch.cat(losses).sum()
    gradients = [gradient.to(leaf.dtype) for leaf, gradient in head_gradients.items()]
    sources = [inputs[i] for i in input_gradients] + list(head_gradients)
    return _KnownGradient.apply(total, [*input_gradients.values(), *gradients], *sources), kept


def _recomputed(
    slot_loss: Callable[..., SlotLoss], chunks: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, list[Sequence[Tensor]]]:
    """The same by activation checkpointing."""

    def differentiable(*parts: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        found = slot_loss(*parts)
        return _KnownGradient.apply(found.loss.sum(), found.gradients, *found.outputs), found.kept

    parts = ([values[rows] for values in inputs] for rows in chunks)
    sums, kept = zip(*(checkpoint(differentiable, *part, use_reentrant=False) for part in parts), strict=True)
    return torch.stack(sums).sum(), list(kept)


class _KnownGradient(torch.autograd.Function):
    """A number whose gradient for each of `sources` is known before the backward pass, which there is once."""

    @staticmethod
    def forward(ctx, number: Tensor, gradients: Sequence[Tensor], *sources: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return number.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, factor: Tensor) -> tuple[Tensor | None, ...]:
        # In place: of a large vocabulary's trained head, a copy would be the peak of the step's memory. Torch refuses
        # a second pass over what has changed since it was saved.
        return None, None, *(gradient.mul_(factor) for gradient in ctx.saved_tensors)


def _graph_leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose gradients a backward pass from `outputs` would leave behind."""
    leaves = dict.fromkeys(output for output in outputs if output.is_leaf)
    waiting, seen = [output.grad_fn for output in outputs if not output.is_leaf], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # it accumulates a leaf's gradient
            leaves[node.variable] = None
        waiting += [before for before, _ in node.next_functions]
    return list(leaves)


def in_fp32(values: Tensor) -> Tensor:
    """Half-precision values go to fp32, so that a sum over many loses nothing more to rounding."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
