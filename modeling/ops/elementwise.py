"""
Chains of elementwise operations as single steps of autograd: only the inputs are saved for backward, and a CPU does
the whole step to a few rows while they are in its cache. The numbers are those of the plain chain.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# How many numbers of a tensor a CPU works on at a time: a megabyte in fp32, shared by its cores.
CHUNK_SIZE = 2**18


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices of `[rows, ...]` tensors, the first of which decides how many rows; all rows at once but on CPUs."""
    first = tensors[0]
    if first.device.type != "cpu":
        return iter([tensors])
    rows = max(1, CHUNK_SIZE // first.shape[1:].numel())
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype to compute in: fp32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def last_axis_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """`[..., n]` tensors, as rows; those that are written to have to be contiguous."""
    return row_chunks(*(tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, cast_first):
        dtype = torch.promote_types(x.dtype, weight.dtype) if cast_first else x.dtype
        output = x.new_empty(x.shape, dtype=dtype)
        factors = x.new_empty(*x.shape[:-1], 1, dtype=wide_dtype(x))
        scale = weight if cast_first else weight.to(factors.dtype)
        for rows, factor, out in last_axis_chunks(x, factors, output):
            rows = rows.to(factor.dtype)
            factor.copy_(rows.square().mean(-1, keepdim=True).add_(eps).rsqrt_())
            normed = rows * factor
            out.copy_(scale * (normed.to(x.dtype) if cast_first else normed))
        ctx.save_for_backward(x, weight, factors)
        ctx.cast_first = cast_first
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight, factors = ctx.saved_tensors
        scale = weight.to(factors.dtype)
        x_gradient, weight_gradient = x.new_empty(x.shape), torch.zeros_like(scale)
        for rows, factor, d, dx in last_axis_chunks(x, factors, gradient, x_gradient):
            normed = rows.to(factor.dtype) * factor
            product = d * normed
            weight_gradient.add_((d * normed.to(x.dtype) if ctx.cast_first else product).sum(0))
            d_normed = d * scale
            along = product.mul_(scale).mean(-1, keepdim=True)
            dx.copy_(d_normed.sub_(normed.mul_(along)).mul_(factor))
        return x_gradient, weight_gradient.to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, cast_first: bool) -> Tensor:
    """
    Root mean square norm over the last axis, in fp32.

    Args:
        x: `[..., n]`; weight: `[n]`.
        cast_first: whether the normed rows are cast to `x`'s dtype before the weight multiplies them (Kimi K3) or
            the product is (DeepSeek V4.1).
    """
    return _RMSNorm.apply(x, weight, eps, cast_first)


class RMSNorm(nn.Module):
    """[`rms_norm`] with a weight `[size]`. A subclass says whether it casts first."""

    cast_first: bool

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps, self.cast_first)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
