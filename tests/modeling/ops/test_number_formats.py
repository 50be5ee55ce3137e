import pytest
import torch

from blockdraft.modeling.ops.number_formats import (
    E2M1_MAGNITUDES,
    dequantize_fp4,
    dequantize_fp8_block,
    dequantize_fp8_rows,
    dtype_name,
    quantize_fp4,
    quantize_fp8_block,
    round_to_fp4,
)

DTYPES = [torch.float32, torch.bfloat16]
DEQUANTIZERS = {"fp8_block": dequantize_fp8_block, "fp8_rowwise": dequantize_fp8_rows}


def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 number by number."""
    rows = []
    for codes, exponents in zip(packed.view(torch.uint8).tolist(), scale.view(torch.uint8).tolist(), strict=True):
        nibbles = [nibble for byte in codes for nibble in (byte % 16, byte // 16)]
        rows.append(
            [
                (-1) ** (n // 8) * E2M1_MAGNITUDES[n % 8] * 2.0 ** (exponents[c // 32] - 127)
                for c, n in enumerate(nibbles)
            ]
        )
    return torch.tensor(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["fp8_block", "fp8_rowwise"])
def test_fp8_weights_equal_the_reference(golden, case, dtype):
    golden = golden("dequantize_weight")
    weight = golden[f"in.{case}.weight_u8"].view(torch.float8_e4m3fn)
    scale = golden[f"in.{case}.scale_u8"].view(torch.float8_e8m0fnu)
    actual = DEQUANTIZERS[case](weight, scale, dtype)
    assert actual.dtype == dtype and torch.equal(actual, golden[f"out.{case}.{dtype_name(dtype)}"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case, code_type", [("fp4", torch.int8), ("k3_mxfp4", torch.uint8)])
def test_fp4_weights_equal_the_reference(golden, case, code_type, dtype):
    golden = golden("dequantize_weight")
    scale = golden[f"in.{case}.scale_u8"].view(torch.float8_e8m0fnu)
    actual = dequantize_fp4(golden[f"in.{case}.weight_u8"].view(code_type), scale, dtype)
    assert actual.dtype == dtype and torch.equal(actual, golden[f"out.{case}.{dtype_name(dtype)}"])


def test_fp4_covers_every_code_and_scale():
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1)
    for byte in (0, 1, 100, 127, 250, 252):
        scales = torch.full((1, 16), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        assert torch.equal(dequantize_fp4(codes, scales, torch.float32), decoded(codes, scales).float())


def test_shapes_must_belong_together():
    codes, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1)
    with pytest.raises(ValueError, match="no MXFP4 pair"):
        dequantize_fp4(codes, scale, torch.float32)
    weight = torch.zeros(40, 70).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"32x32 numbers it is \(2, 3\)"):
        dequantize_fp8_block(weight, torch.ones(1, 3), torch.float32)
    with pytest.raises(ValueError, match=r"1x32 numbers it is \(40, 3\)"):
        dequantize_fp8_rows(weight, torch.ones(2, 3), torch.float32)
    with pytest.raises(ValueError, match="multiple of 32 numbers, `weight` has 48"):
        quantize_fp4(torch.zeros(2, 48))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(32, 64), (45, 70), (1, 5)])
def test_fp8_quantisation_is_close_and_stable(shape, dtype):
    weight = (torch.randn(shape) * torch.logspace(-3, 3, shape[1])).to(dtype)
    codes, scale = quantize_fp8_block(weight)
    assert codes.shape == shape and codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    values = dequantize_fp8_block(codes, scale, dtype)
    # Three mantissa bits: half a unit of the last place, or half the smallest subnormal number of the block.
    smallest = dequantize_fp8_block(torch.full(shape, 2.0**-9).to(torch.float8_e4m3fn), scale, torch.float32)
    assert ((values.float() - weight.float()).abs() <= torch.maximum(weight.float().abs() / 16, smallest / 2)).all()
    again = dequantize_fp8_block(*quantize_fp8_block(values), dtype)
    assert torch.equal(again, values)


def test_fp8_scale_is_the_smallest_that_fits():
    weight = torch.zeros(64, 32)
    weight[0, 0], weight[32, 0] = 448 * 2.0**-5, -449 * 2.0**-5
    codes, scale = quantize_fp8_block(weight)
    assert scale.float().tolist() == [[2.0**-5], [2.0**-4]] and codes[0, 0] == 448
    assert not quantize_fp8_block(torch.zeros(3, 3))[0].float().any()


@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 32)])
def test_fp4_quantisation_is_close_and_stable(shape):
    weight = torch.randn(shape) * torch.logspace(-2, 2, shape[-1])
    packed, scale = quantize_fp4(weight)
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and packed.dtype == torch.int8
    assert scale.shape == (*shape[:-1], shape[-1] // 32) and scale.dtype == torch.float8_e8m0fnu
    values = dequantize_fp4(packed, scale, torch.float32)
    spread = scale.float().repeat_interleave(32, -1)
    assert torch.equal(values, round_to_fp4(weight / spread) * spread)
    assert (weight.abs() <= 6 * spread).all()
    assert torch.equal(dequantize_fp4(*quantize_fp4(values), torch.float32), values)


def test_fp4_codes_survive_both_ways():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(1, -1)
    scale = torch.full((1, 16), 2.0**3).to(torch.float8_e8m0fnu)
    packed, again = quantize_fp4(dequantize_fp4(codes, scale, torch.bfloat16))
    assert torch.equal(packed, codes) and torch.equal(again.float(), scale.float())


def test_fp4_takes_the_nearest_number_and_the_even_code_on_ties():
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert round_to_fp4(torch.tensor(midpoints)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    x = torch.linspace(-7, 7, 4001)
    levels = torch.tensor(E2M1_MAGNITUDES)
    nearest = levels[(x.abs()[:, None] - levels).abs().argmin(1)]
    is_midpoint = torch.isin(x.abs(), torch.tensor(midpoints))
    assert torch.equal(round_to_fp4(x)[~is_midpoint], nearest.copysign(x)[~is_midpoint])
    assert round_to_fp4(torch.tensor([-0.1, -0.0])).signbit().all()
