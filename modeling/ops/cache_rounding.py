"""Rounding of cached keys to FP8 numbers, in training and in decoding."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

E4M3_MAX = 448.0  # largest magnitude of FP8
# A lower bound of each group's maximum keeps its scale a normal number.
SMALLEST_NORMAL = 2.0**-126


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below `x`; `x` is fp32, positive and normal."""
    mantissa = 0x7FFFFF
    return ((x.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def round_to_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 number of each element, magnitudes above 448 to 448; float8_e4m3fn."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


class RoundStraightThrough(torch.autograd.Function):
    """Rounds groups of channels; the gradient passes through unchanged."""

    @staticmethod
    def forward(ctx, x: Tensor, group: int, round_groups: Callable[[Tensor, Tensor], Tensor]):
        channels = x.shape[-1]
        padded = nn.functional.pad(x.float(), (0, -channels % group)) if channels % group else x.float()
        groups = padded.unflatten(-1, (-1, group))
        rounded = round_groups(groups, groups.abs().amax(-1, keepdim=True))
        return rounded.flatten(-2)[..., :channels].to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


def round_to_fp8(x: Tensor) -> Tensor:
    """Rounds `x` `[..., channels]`, in any float dtype, to the numbers that an FP8 KV cache can hold: E4M3, with a
    power-of-two scale for every 32 channels (the last group may be short); computed in fp32. The model is trained with
    the rounding in place (DeepSeek V4.1), through which the gradient passes unchanged."""
    return RoundStraightThrough.apply(x, 32, _round_groups_to_fp8)


def _round_groups_to_fp8(groups: Tensor, maximum: Tensor) -> Tensor:
    scale = next_power_of_two(maximum.clamp(min=1e-4) * (1 / E4M3_MAX))
    return round_to_e4m3(groups / scale).float() * scale
