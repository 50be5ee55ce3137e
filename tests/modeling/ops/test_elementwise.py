"""Every step that is made of chunks, those of the families included."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from blockdraft.modeling.deepseek_v41.deepseek_v41_layers import clamped_swiglu
from blockdraft.modeling.kimi_k3.kimi_k3_layers import situ
from blockdraft.modeling.ops import elementwise
from blockdraft.modeling.ops.elementwise import rms_norm


def plain_situ(gate, up, beta, linear_beta):
    activated = beta * torch.tanh(gate.float() / beta) * torch.sigmoid(gate.float())
    up = up.float() if linear_beta is None else linear_beta * torch.tanh(up.float() / linear_beta)
    return (activated * up).to(gate.dtype)


def plain_swiglu(gate, up, limit):
    gate, up = gate.float(), up.float()
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return nn.functional.silu(gate) * up


def plain_norm(x, weight, eps, cast_first):
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if cast_first else (weight.float() * normed).to(x.dtype)


STEPS = {
    "situ": (situ, plain_situ, (4.0, 25.0)),
    "situ, linear half unbounded": (situ, plain_situ, (0.8, None)),
    "swiglu": (clamped_swiglu, plain_swiglu, (2.0,)),
    "swiglu, no limit": (clamped_swiglu, plain_swiglu, (0.0,)),
    "norm, cast first": (rms_norm, plain_norm, (1e-5, True)),
    "norm, cast last": (rms_norm, plain_norm, (1e-5, False)),
}
# Rows of whole vectors: others end in scalar code, which rounds differently.
WIDTH = 64
steps = pytest.mark.parametrize("step, plain, settings", STEPS.values(), ids=STEPS)


@pytest.fixture(params=[WIDTH, elementwise.CHUNK_SIZE], ids=["many chunks", "one chunk"])
def chunk_size(request, monkeypatch):
    monkeypatch.setattr(elementwise, "CHUNK_SIZE", request.param)


def inputs(step, dtype, width=WIDTH) -> list[torch.Tensor]:
    shapes = [(2, 7, width), (width,) if step is rms_norm else (2, 7, width)]
    return [(2 * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


@steps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_the_plain_chain(step, plain, settings, dtype, chunk_size):
    given = inputs(step, dtype)
    output, expected = step(*given, *settings), plain(*given, *settings)
    assert output.dtype == expected.dtype and torch.equal(output, expected)
    cotangent = torch.randn(output.shape).to(output.dtype)
    gradients = torch.autograd.grad(output, given, cotangent)
    references = torch.autograd.grad(expected, given, cotangent)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for gradient, reference in zip(gradients, references, strict=True):
        assert gradient.dtype == dtype
        assert (gradient - reference).norm() < tolerance * reference.norm()


@steps
def test_gradients_in_float64(step, plain, settings, chunk_size):
    assert torch.autograd.gradcheck(lambda *given: step(*given, *settings), inputs(step, torch.float64, 3))


@steps
def test_only_the_inputs_are_saved(step, plain, settings):
    given, saved = inputs(step, torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        step(*given, *settings)
    own = {tensor.data_ptr() for tensor in given}
    others = [tensor for tensor in saved if tensor.data_ptr() not in own]
    # A norm keeps one number for each row.
    assert sum(tensor.numel() for tensor in others) <= (14 if step is rms_norm else 0)


@steps
def test_strided_rows_and_single_rows(step, plain, settings):
    wide = torch.randn(3, 5, 2 * WIDTH)
    for x in (wide[..., WIDTH:], wide[:, ::2, :WIDTH], wide[0, 0, :WIDTH], wide[:0, :, :WIDTH]):
        other = torch.randn(WIDTH) if step is rms_norm else torch.randn(x.shape)
        assert torch.equal(step(x, other, *settings), plain(x, other, *settings))


@steps
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_gradient_checkpointing(step, plain, settings, use_reentrant):
    given = inputs(step, torch.float32)
    expected = torch.autograd.grad(step(*given, *settings).square().sum(), given)
    checkpoint(step, *given, *settings, use_reentrant=use_reentrant).square().sum().backward()
    for tensor, gradient in zip(given, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_clamped_halves_get_no_gradient():
    gate, up = torch.tensor([-9.0, 2.0, 9.0, 1.0]), torch.tensor([1.0, -2.0, 1.0, 9.0])
    gate, up = gate.requires_grad_(), up.requires_grad_()
    clamped_swiglu(gate, up, 2.0).sum().backward()
    assert gate.grad[2] == 0 and up.grad[3] == 0
    assert gate.grad[[0, 1, 3]].all() and up.grad[:3].all()  # no lower limit; a limit itself is inside


def test_norm_keeps_a_weight_in_fp32():
    x, weight = torch.randn(4, 12).bfloat16().requires_grad_(), torch.rand(12, requires_grad=True)
    output = rms_norm(x, weight, 1e-5, cast_first=True)
    assert output.dtype == torch.float32 and torch.equal(output, plain_norm(x, weight, 1e-5, True))
    output.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32


def test_situ_is_bounded_and_computed_in_fp32():
    gate, up = 100 * torch.randn(2, 5, 4, dtype=torch.bfloat16)
    output = situ(gate, up, 4.0, 25.0)
    assert output.dtype == torch.bfloat16 and output.abs().max() <= 4 * 25
    assert torch.equal(output, situ(gate.float(), up.float(), 4.0, 25.0).bfloat16())
    assert torch.equal(situ(gate, up, 0, None), situ(gate, up, None, None))


def test_swiglu_limits():
    gate = up = torch.tensor([-20.0, 0.5, 20.0])
    silu = nn.functional.silu
    limited = clamped_swiglu(gate.bfloat16(), up.bfloat16(), 2.0)
    assert limited.dtype == torch.float32  # the gate has no lower limit
    assert torch.allclose(limited, silu(torch.tensor([-20.0, 0.5, 2.0])) * torch.tensor([-2.0, 0.5, 2.0]))
    assert torch.allclose(clamped_swiglu(gate, up, 0.0), silu(gate) * up)
