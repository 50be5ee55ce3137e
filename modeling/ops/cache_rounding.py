"""Rounding of cached keys to the numbers that a low-precision cache can hold, in training and in decoding."""

import torch
from torch import nn

E2M1_MAX, E4M3_MAX = 6.0, 448.0  # largest magnitudes of FP4 and FP8
# A lower bound of each group's maximum keeps its scale a normal number.
SMALLEST_NORMAL = 2.0**-126
CACHE_GROUPS = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}


def next_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below `x`; `x` is fp32, positive and normal."""
    mantissa = 0x7FFFFF
    return ((x.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def round_to_fp4(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 number of each fp32 element. Ties go to the even code, magnitudes above 6 to 6; the sign stays."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp(-E2M1_MAX, E2M1_MAX)


def round_to_cache_format(x: torch.Tensor, cache_format: str) -> torch.Tensor:
    """
    Rounds `x` to the numbers that a low-precision KV cache can hold (DeepSeek V4.1: the model is trained with the
    rounding in place). The gradient passes through unchanged.

    Args:
        x: `[..., channels]`, any float dtype. The last axis is cut into groups that share a scale; the last group may
            be short.
        cache_format: `"fp8"` (E4M3, groups of 32, power-of-two scale), `"mxfp4"` (E2M1, 32, power-of-two scale) or
            `"nvfp4"` (E2M1, 16, E4M3 scale).

    Returns:
        `x`'s shape and dtype, computed in fp32.
    """
    assert cache_format in CACHE_GROUPS, cache_format
    return _RoundStraightThrough.apply(x, cache_format)


class _RoundStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cache_format):
        channels, group = x.shape[-1], CACHE_GROUPS[cache_format]
        padded = nn.functional.pad(x.float(), (0, -channels % group)) if channels % group else x.float()
        groups = padded.unflatten(-1, (-1, group))
        rounded = _ROUNDING[cache_format](groups, groups.abs().amax(-1, keepdim=True))
        return rounded.flatten(-2)[..., :channels].to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _round_groups_to_fp8(groups: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    scale = next_power_of_two(maximum.clamp(min=1e-4) * (1 / E4M3_MAX))
    return round_to_e4m3(groups / scale).float() * scale


def _round_groups_to_mxfp4(groups: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    scale = next_power_of_two(maximum.clamp(min=E2M1_MAX * SMALLEST_NORMAL) * (1 / E2M1_MAX))
    return round_to_fp4(groups / scale) * scale


def _round_groups_to_nvfp4(groups: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    scale = round_to_e4m3(maximum.clamp(min=E2M1_MAX * 2**-9) / E2M1_MAX).float()
    return round_to_fp4(groups / scale) * scale


_ROUNDING = {"fp8": _round_groups_to_fp8, "mxfp4": _round_groups_to_mxfp4, "nvfp4": _round_groups_to_nvfp4}


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 number of each element, magnitudes above 448 to 448; float8_e4m3fn."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
