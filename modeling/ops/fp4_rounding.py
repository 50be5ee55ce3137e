"""Rounding to FP4 numbers, for cached keys of a compressed context; see [`round_to_fp8`] for those of a window."""

import torch

from .cache_rounding import SMALLEST_NORMAL, RoundStraightThrough, next_power_of_two, round_to_e4m3

E2M1_MAX = 6.0  # largest magnitude of FP4


def round_to_fp4(x: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 number of each fp32 element. Ties go to the even code, magnitudes above 6 to 6; the sign stays."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp(-E2M1_MAX, E2M1_MAX)


def round_to_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """As [`round_to_fp8`], to E2M1 with a power-of-two scale for every 32 channels."""
    return RoundStraightThrough.apply(x, 32, _round_groups_to_mxfp4)


def round_to_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """As [`round_to_fp8`], to E2M1 with an E4M3 scale for every 16 channels."""
    return RoundStraightThrough.apply(x, 16, _round_groups_to_nvfp4)


def _round_groups_to_mxfp4(groups: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    scale = next_power_of_two(maximum.clamp(min=E2M1_MAX * SMALLEST_NORMAL) * (1 / E2M1_MAX))
    return round_to_fp4(groups / scale) * scale


def _round_groups_to_nvfp4(groups: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    scale = round_to_e4m3(maximum.clamp(min=E2M1_MAX * 2**-9) / E2M1_MAX).float()
    return round_to_fp4(groups / scale) * scale
