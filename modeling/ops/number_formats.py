"""FP8 and FP4: released weights, decoded and encoded; rounding of cached keys to FP4 (to FP8: [`round_to_fp8`])."""

import torch
from torch import Tensor, nn

from .cache_rounding import E4M3_MAX, SMALLEST_NORMAL, RoundStraightThrough, next_power_of_two, round_to_e4m3

E2M1_MAX = 6.0  # largest magnitude of FP4
# OCP Microscaling Formats 1.0: magnitudes of the E2M1 codes; bit 3 of a code is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# How many numbers share a scale, along a row, or along a row and a column.
SCALE_GROUP = 32


def round_to_fp4(x: Tensor) -> Tensor:
    """Nearest E2M1 number of each fp32 element. Ties go to the even code, magnitudes above 6 to 6; the sign stays."""
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(x / step) * step).clamp(-E2M1_MAX, E2M1_MAX)


def round_to_mxfp4(x: Tensor) -> Tensor:
    """As [`round_to_fp8`], to E2M1 with a power-of-two scale for every 32 channels."""
    return RoundStraightThrough.apply(x, 32, _round_groups_to_mxfp4)


def round_to_nvfp4(x: Tensor) -> Tensor:
    """As [`round_to_fp8`], to E2M1 with an E4M3 scale for every 16 channels."""
    return RoundStraightThrough.apply(x, 16, _round_groups_to_nvfp4)


def _round_groups_to_mxfp4(groups: Tensor, maximum: Tensor) -> Tensor:
    scale = next_power_of_two(maximum.clamp(min=E2M1_MAX * SMALLEST_NORMAL) * (1 / E2M1_MAX))
    return round_to_fp4(groups / scale) * scale


def _round_groups_to_nvfp4(groups: Tensor, maximum: Tensor) -> Tensor:
    scale = round_to_e4m3(maximum.clamp(min=E2M1_MAX * 2**-9) / E2M1_MAX).float()
    return round_to_fp4(groups / scale) * scale


def dequantize_fp8_block(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decodes FP8 weights `[out, in]` float8_e4m3fn with a scale for each block of 32x32 (DeepSeek V4.1's linear
    layers), `[ceil(out / 32), ceil(in / 32)]` float8_e8m0fnu: `[out, in]` in `dtype`, multiplied in fp32. Raises a
    `ValueError` if the shapes do not belong together."""
    return _dequantize_fp8(weight, scale, dtype, SCALE_GROUP)


def dequantize_fp8_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As [`dequantize_fp8_block`], with a scale for every 32 columns of each row: `[out, ceil(in / 32)]` (Engram)."""
    return _dequantize_fp8(weight, scale, dtype, 1)


def _dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype, height: int) -> Tensor:
    """With a scale for each block of `height` rows and 32 columns."""
    rows, columns = weight.shape
    expected = (-(-rows // height), -(-columns // SCALE_GROUP))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"`scale` {tuple(scale.shape)} does not belong to `weight` {tuple(weight.shape)}: with one scale for "
            f"{height}x{SCALE_GROUP} numbers it is {expected}."
        )
    scale = scale.float().repeat_interleave(height, dim=0)[:rows]
    return (weight.float() * scale.repeat_interleave(SCALE_GROUP, dim=1)[:, :columns]).to(dtype)


def dequantize_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decodes MXFP4 weights (OCP Microscaling Formats 1.0), `[..., out, in / 2]` int8 or uint8, two codes a byte, the
    even column's in the low nibble, with scales `[..., out, in / 32]` float8_e8m0fnu: `[..., out, in]` in `dtype`,
    multiplied in fp32; exact in bf16 within its range. Raises a `ValueError` if the shapes do not belong together."""
    if (*packed.shape[:-1], packed.shape[-1] * 2) != (*scale.shape[:-1], scale.shape[-1] * SCALE_GROUP):
        raise ValueError(
            f"`packed` {tuple(packed.shape)} and `scale` {tuple(scale.shape)} are no MXFP4 pair: a scale covers "
            f"{SCALE_GROUP} columns, that is {SCALE_GROUP // 2} bytes."
        )
    codes = packed.view(torch.uint8)
    codes = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2).int()
    table = torch.tensor(E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES), device=packed.device)
    values = table[codes].unflatten(-1, (-1, SCALE_GROUP))
    return (values * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of [`dequantize_fp8_block`] for `weight` `[out, in]` in any float dtype: codes and scales. A block's
    scale is the smallest power of two with which its largest magnitude fits. What was decoded is encoded to the same
    values again."""
    rows, columns = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -columns % SCALE_GROUP, 0, -rows % SCALE_GROUP))
    blocks = padded.unflatten(1, (-1, SCALE_GROUP)).unflatten(0, (-1, SCALE_GROUP))
    scale = _weight_scale(blocks.abs().amax((1, 3)), E4M3_MAX)
    codes = round_to_e4m3(blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return codes[:rows, :columns].contiguous(), scale.to(torch.float8_e8m0fnu)


def quantize_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of [`dequantize_fp4`] for `weight` `[..., out, in]`: codes (int8) and scales, which are chosen as in
    [`quantize_fp8_block`]. Raises a `ValueError` if `in` is not a multiple of 32."""
    if weight.shape[-1] % SCALE_GROUP:
        raise ValueError(
            f"FP4 needs rows of a multiple of {SCALE_GROUP} numbers, `weight` has {weight.shape[-1]}. Keep this "
            "weight unquantised, or choose sizes that are multiples."
        )
    groups = weight.float().unflatten(-1, (-1, SCALE_GROUP))
    scale = _weight_scale(groups.abs().amax(-1), E2M1_MAX)
    values = round_to_fp4(groups / scale.unsqueeze(-1)).flatten(-2)
    codes = torch.bucketize(values.abs().contiguous(), torch.tensor(E2M1_MAGNITUDES, device=values.device))
    codes = (codes + 8 * torch.signbit(values)).to(torch.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4).view(torch.int8), scale.to(torch.float8_e8m0fnu)


def _weight_scale(maximum: Tensor, largest_code: float) -> Tensor:
    return next_power_of_two(maximum.clamp(min=largest_code * SMALLEST_NORMAL) / largest_code)


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and records say it: "float32", not "torch.float32"."""
    return str(dtype).removeprefix("torch.")
