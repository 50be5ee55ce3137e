import pytest
import torch
from torch.utils.checkpoint import checkpoint

from blockdraft.modeling.deepseek_v41.hyper_connections import (
    collapse_streams,
    expand_streams,
    normed_projection,
    sinkhorn,
)
from blockdraft.modeling.ops import elementwise as fused_elementwise


def plain_projection(x, weight, eps):
    factors = torch.rsqrt(x.to(weight.dtype).square().mean(-1, keepdim=True) + eps)
    return torch.nn.functional.linear(x.to(weight.dtype), weight) * factors


def plain_sinkhorn(logits, iterations, eps):
    mixing = logits.softmax(-1) + eps
    mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mixing = mixing / (mixing.sum(-1, keepdim=True) + eps)
        mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
    return mixing


def plain_collapse(streams, pre):
    return (pre.unsqueeze(-1) * streams.to(pre.dtype)).sum(-2).to(streams.dtype)


def plain_expand(output, streams, post, comb):
    mixed = comb.transpose(-1, -2) @ streams.to(comb.dtype)
    return (post.unsqueeze(-1) * output.to(comb.dtype).unsqueeze(-2) + mixed).to(streams.dtype)


# Shapes of the inputs; those in the model's dtype come first, with "+" after the last of them.
PARTS = {
    "projection": (normed_projection, plain_projection, [(2, 5, 12), "+", (7, 12)], (1e-3,)),
    "sinkhorn": (sinkhorn, plain_sinkhorn, ["+", (2, 5, 3, 3)], (6, 1e-3)),
    "one normalisation": (sinkhorn, plain_sinkhorn, ["+", (2, 5, 3, 3)], (1, 1e-3)),
    "collapse": (collapse_streams, plain_collapse, [(2, 5, 3, 4), "+", (2, 5, 3)], ()),
    "expand": (expand_streams, plain_expand, [(2, 5, 4), (2, 5, 3, 4), "+", (2, 5, 3), (2, 5, 3, 3)], ()),
}
parts = pytest.mark.parametrize("part, plain, shapes, settings", PARTS.values(), ids=PARTS)


@pytest.fixture(params=[24, fused_elementwise.CHUNK_SIZE], ids=["many chunks", "one chunk"])
def chunk_size(request, monkeypatch):
    monkeypatch.setattr(fused_elementwise, "CHUNK_SIZE", request.param)


def inputs(shapes, dtype=torch.float32) -> list[torch.Tensor]:
    last = shapes.index("+")
    dtypes = [dtype] * last + [torch.promote_types(dtype, torch.float32)] * (len(shapes) - last - 1)
    shapes = shapes[:last] + shapes[last + 1 :]
    return [torch.randn(shape).to(one).requires_grad_() for shape, one in zip(shapes, dtypes, strict=True)]


@parts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_the_plain_chain(part, plain, shapes, settings, dtype, chunk_size):
    given = inputs(shapes, dtype)
    output, expected = part(*given, *settings), plain(*given, *settings)
    assert output.dtype == expected.dtype
    tolerance = 1e-6 if output.dtype == torch.float32 else 0
    assert (output - expected).abs().max() <= tolerance * expected.abs().max()
    cotangent = torch.randn(output.shape).to(output.dtype)
    gradients = torch.autograd.grad(output, given, cotangent)
    references = torch.autograd.grad(expected, given, cotangent)
    for gradient, reference in zip(gradients, references, strict=True):
        assert gradient.dtype == reference.dtype
        tolerance = 1e-5 if reference.dtype == torch.float32 else 2**-7
        assert (gradient - reference).norm() < tolerance * reference.norm()


@parts
def test_gradients_in_float64(part, plain, shapes, settings, chunk_size):
    assert torch.autograd.gradcheck(lambda *given: part(*given, *settings), inputs(shapes, torch.float64))


@parts
def test_inputs_without_gradient(part, plain, shapes, settings):
    """The first stage's streams are embeddings, which are frozen."""
    given = inputs(shapes)
    expected = torch.autograd.grad(part(*given, *settings).square().sum(), given)
    for one in range(len(given)):
        some = [tensor.detach().requires_grad_(i == one) for i, tensor in enumerate(given)]
        part(*some, *settings).square().sum().backward()
        assert torch.equal(some[one].grad, expected[one])


@parts
def test_no_rows(part, plain, shapes, settings):
    given = inputs(shapes)
    is_weight = [part is normed_projection and tensor.dim() == 2 for tensor in given]
    given = [tensor if kept else tensor[:, :0] for tensor, kept in zip(given, is_weight, strict=True)]
    assert part(*given, *settings).shape == plain(*given, *settings).shape


@parts
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_gradient_checkpointing(part, plain, shapes, settings, use_reentrant):
    given = inputs(shapes)
    expected = torch.autograd.grad(part(*given, *settings).square().sum(), given)
    checkpoint(part, *given, *settings, use_reentrant=use_reentrant).square().sum().backward()
    for tensor, gradient in zip(given, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_sinkhorn_keeps_no_iterate():
    logits, saved = torch.randn(6, 4, 4, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        sinkhorn(logits, 20, 1e-6)
    assert [tensor.data_ptr() for tensor in saved] == [logits.data_ptr()]
