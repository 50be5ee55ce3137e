"""SwiGLU with bounded halves, as in DeepSeek V4.1's experts, as a single step of autograd."""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .elementwise import last_axis_chunks, wide_dtype


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, limit):
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        output = gate.new_empty(gate.shape, dtype=wide_dtype(gate))
        for g, u, out in last_axis_chunks(gate, up, output):
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
        for g, u, d, dg, du in last_axis_chunks(gate, up, gradient, gate_gradient, up_gradient):
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
