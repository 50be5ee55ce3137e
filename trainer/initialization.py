"""How a new draft may start: fitted to the scale of its target's features and of its target's head.

Channels of a language model's hidden states differ thousands of times in magnitude, and the few large ones drown the
others in the draft's projection of them. A frozen head turns the draft's normed states into logits whose spread has
nothing to do with how little a new draft knows: with tied embeddings it is sure that each masked slot holds the mask
token.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

# A new draft may be this much worse than guessing evenly, in nats a token; what is more is overconfidence.
EXCESS_LOSS = 3.0
SMALLEST_SCALE = 2.0**-6


def channel_rms(features: Iterable[Tensor]) -> Tensor:
    """`[C]` fp32: root mean square of each channel over all rows of `features`, tensors `[n, C]`; 0 without a row.

    Raises:
        ValueError: if a feature is not finite.
    """
    total, rows = torch.zeros(()), 0
    for part in features:
        total = total + part.float().square().sum(0)
        rows += len(part)
    if not torch.isfinite(total).all():
        raise ValueError("The target's features are not finite: load it with `dtype` bfloat16 or float32.")
    return (total / max(rows, 1)).sqrt()


@torch.no_grad()
def even_out_channels(projection: nn.Linear, rms: Tensor) -> None:
    """Divides the columns of a new draft's feature projection by their channels' RMS `[C]`, so that all count alike.

    Channels that are always 0 are left alone. The result is scaled to keep the size of the weights.
    """
    weight, rms = projection.weight, rms.to(projection.weight.device)
    size = weight.float().norm()
    weight /= torch.where(rms > 0, rms, 1.0)
    weight *= size / weight.float().norm()


@torch.no_grad()
def calm_output(norm: nn.Module, loss: Callable[[], float], vocab_size: int) -> float:
    """Scales the weight of the norm in front of the target's head until the loss is near that of an even guess.

    Args:
        norm: the draft's final norm.
        loss: gives the cross entropy of the draft as it is, in nats a token.
        vocab_size: an even guess costs `log(vocab_size)`.

    Returns:
        The factor: 1 where the draft was not overconfident.
    """
    scale = 1.0
    while loss() > math.log(vocab_size) + EXCESS_LOSS and scale > SMALLEST_SCALE:
        norm.weight /= math.sqrt(2)
        scale /= math.sqrt(2)
    return scale
