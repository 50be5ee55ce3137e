import pytest
import torch

from blockdraft.modeling.ops.cache_rounding import next_power_of_two, round_to_fp8
from blockdraft.modeling.ops.number_formats import dtype_name, round_to_mxfp4, round_to_nvfp4

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = {"fp8": round_to_fp8, "mxfp4": round_to_mxfp4, "nvfp4": round_to_nvfp4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_cache_rounding_equals_the_reference(golden, cache_format, dtype):
    golden = golden("v41_quantize_cache")
    for case in ("x", "edge", "groups"):
        actual = FORMATS[cache_format](golden[f"in.{case}"].to(dtype))
        expected = golden[f"out.{case}.{cache_format}.{dtype_name(dtype)}"]
        assert actual.dtype == dtype
        assert torch.equal(actual, expected) and torch.equal(actual.signbit(), expected.signbit()), case


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_groups_have_32_channels(golden, dtype):
    golden = golden("v41_quantize_cache")
    rounded = round_to_fp8(golden["in.wide"].to(dtype)).float()
    assert torch.equal(rounded / golden["in.wide_magnitude"], golden[f"out.wide_rel.fp8.{dtype_name(dtype)}"])


@pytest.mark.parametrize("cache_format", FORMATS)
def test_cache_rounding_passes_the_gradient_through(golden, cache_format):
    golden = golden("v41_quantize_cache")
    x = golden["in.x"].requires_grad_()
    FORMATS[cache_format](x).mul(golden["in.cotangent"]).sum().backward()
    assert torch.equal(x.grad, golden["grad.x_fp8"])


def test_next_power_of_two():
    x = torch.tensor([2.0**-126, 0.75, 1.0, 1.0000001, 3.0, 4.0, 2.0**127])
    assert next_power_of_two(x).tolist() == [2.0**-126, 1, 1, 2, 4, 4, 2.0**127]
