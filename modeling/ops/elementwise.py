"""
Norms and gated activations as single steps of autograd. The numbers are those of the plain chain of operations, but
only the inputs are saved for backward, and a CPU does all of a step to a few rows while they are in its cache.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd.function import once_differentiable

# Numbers of a tensor that a CPU works on at a time: a megabyte in fp32, shared by its cores.
CHUNK_SIZE = 2**18


def row_chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Slices of `[rows, ...]` tensors, the first of which decides how many rows; all rows at once but on CPUs."""
    first = tensors[0]
    if first.device.type != "cpu":
        return iter([tensors])
    rows = max(1, CHUNK_SIZE // first.shape[1:].numel())
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype to compute in: fp32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def _last_axis_chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """`[..., n]` tensors, as rows; those that are written to have to be contiguous."""
    return row_chunks(*(tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors))


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        output = gate.new_empty(gate.shape)
        for g, u, out in _last_axis_chunks(gate, up, output):
            g, u = g.to(wide_dtype(g)), u.to(wide_dtype(u))
            activated = (g / beta).tanh_().mul_(beta).mul_(g.sigmoid())
            if linear_beta is not None:
                u = (u / linear_beta).tanh_().mul_(linear_beta)
            out.copy_(activated.mul_(u))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        gate_gradient, up_gradient = gate.new_empty(gate.shape), up.new_empty(up.shape)
        for g, u, d, dg, du in _last_axis_chunks(gate, up, gradient, gate_gradient, up_gradient):
            g, u = g.to(wide_dtype(g)), u.to(wide_dtype(u))
            bounded, opened = (g / beta).tanh_(), g.sigmoid()
            activated = bounded * opened * beta
            d_activated, d_up = opened * (1 - bounded * bounded) + activated * (1 - opened), d * activated
            if linear_beta is not None:
                u = (u / linear_beta).tanh_()
                d_up.mul_(1 - u * u)
                u.mul_(linear_beta)
            du.copy_(d_up)
            dg.copy_(d_activated.mul_(u).mul_(d))
        return gate_gradient, up_gradient, None, None


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """
    SiTU, Kimi K3's bounded gated activation:
    `beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)`.

    Args:
        gate, up: `[..., n]`.
        beta: bound of the gate; `None` or 0 means 1.
        linear_beta: bound of the linear half; `None` leaves it unbounded.

    Returns:
        `[..., n]` in the inputs' dtype, computed in fp32.
    """
    return _Situ.apply(gate, up, beta or 1.0, linear_beta)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, limit):
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        output = gate.new_empty(gate.shape, dtype=wide_dtype(gate))
        for g, u, out in _last_axis_chunks(gate, up, output):
            g, u = g.to(out.dtype), u.to(out.dtype)
            if limit:
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            torch.mul(nn.functional.silu(g), u, out=out)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        limit = ctx.limit or float("inf")
        gate_gradient, up_gradient = gate.new_empty(gate.shape), up.new_empty(up.shape)
        for g, u, d, dg, du in _last_axis_chunks(gate, up, gradient, gate_gradient, up_gradient):
            g, u = g.to(d.dtype), u.to(d.dtype)
            passed_gate, passed_up = g <= limit, u.abs() <= limit
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            opened = g.sigmoid()
            activated = g * opened
            du.copy_(d * activated * passed_up)
            dg.copy_((1 - opened).mul_(activated).add_(opened).mul_(u).mul_(d).mul_(passed_gate))
        return gate_gradient, up_gradient, None


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` of `[..., n]`, in fp32; 0: no limit."""
    return _ClampedSwiGLU.apply(gate, up, limit)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, cast_first):
        dtype = torch.promote_types(x.dtype, weight.dtype) if cast_first else x.dtype
        output = x.new_empty(x.shape, dtype=dtype)
        factors = x.new_empty(*x.shape[:-1], 1, dtype=wide_dtype(x))
        scale = weight if cast_first else weight.to(factors.dtype)
        for rows, factor, out in _last_axis_chunks(x, factors, output):
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
        for rows, factor, d, dx in _last_axis_chunks(x, factors, gradient, x_gradient):
            normed = rows.to(factor.dtype) * factor
            product = d * normed
            weight_gradient.add_((d * normed.to(x.dtype) if ctx.cast_first else product).sum(0))
            d_normed = d * scale
            along = product.mul_(scale).mean(-1, keepdim=True)
            dx.copy_(d_normed.sub_(normed.mul_(along)).mul_(factor))
        return x_gradient, weight_gradient.to(weight.dtype), None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool) -> torch.Tensor:
    """
    Root mean square norm over the last axis, in fp32.

    Args:
        x: `[..., n]`; weight: `[n]`.
        cast_first: whether the normed rows are cast to `x`'s dtype before the weight multiplies them (Kimi K3) or
            the product is (DeepSeek V4.1).
    """
    return _RMSNorm.apply(x, weight, eps, cast_first)
