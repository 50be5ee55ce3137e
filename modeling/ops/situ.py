"""SiTU, the bounded gated activation of Kimi K3, as a single step of autograd."""

import torch
from torch.autograd.function import once_differentiable

from .elementwise import last_axis_chunks, wide_dtype


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        output = gate.new_empty(gate.shape)
        for g, u, out in last_axis_chunks(gate, up, output):
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
        for g, u, d, dg, du in last_axis_chunks(gate, up, gradient, gate_gradient, up_gradient):
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
