"""
The maths of manifold-constrained hyper-connections (arXiv 2512.24880), each part a single step of autograd, which
saves its inputs only; a CPU does all of a part to a few rows while they are in its cache.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.utils.generic import maybe_autocast

from ..ops.elementwise import row_chunks


class _NormedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        projected = nn.functional.linear(x.to(weight.dtype), weight)
        factors = projected.new_empty(len(x), 1)
        for rows, factor in row_chunks(x, factors):
            factor.copy_(rows.to(factor.dtype).square().mean(-1, keepdim=True).add_(eps).rsqrt_())
        ctx.save_for_backward(x, weight, projected, factors)
        return projected * factors

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, weight, projected, factors = ctx.saved_tensors
        d_projected = gradient * factors
        d_weight = d_projected.t() @ x.to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None
        d_x = torch.empty_like(x)
        # Of the factor (mean(x^2) + eps)^(-1/2): -factor^3 x / n.
        shares = (gradient * projected).sum(-1, keepdim=True) * factors.pow(3) / -x.shape[-1]
        for rows, d, share, out in row_chunks(x, d_projected, shares, d_x):
            out.copy_((d @ weight).addcmul_(rows.to(share.dtype), share))
        return d_x, d_weight, None


def normed_projection(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows `[..., n]` over their root mean square, times `weight` `[m, n]`: `[..., m]`, in the weight's dtype."""
    return _NormedProjection.apply(x.flatten(0, -2), weight, eps).view(*x.shape[:-1], len(weight))


class _Sinkhorn(torch.autograd.Function):
    # Rows are the last axis here: sums over a first axis are sums of vectors.

    @staticmethod
    def forward(ctx, logits, iterations, eps):
        ctx.save_for_backward(logits)
        ctx.axes, ctx.eps = (0, *(1, 0) * (iterations - 1)), eps
        mixing = logits.movedim(0, -1).contiguous().softmax(1).add_(eps)
        for axis in ctx.axes:
            mixing.div_(mixing.sum(axis, keepdim=True).add_(eps))
        return mixing.movedim(-1, 0).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        start = ctx.saved_tensors[0].movedim(0, -1).contiguous().softmax(1)
        mixing, steps = start + ctx.eps, []
        for axis in ctx.axes:
            total = mixing.sum(axis, keepdim=True).add_(ctx.eps)
            mixing = mixing / total
            steps.append((axis, mixing, total))
        d = gradient.movedim(0, -1).contiguous()
        for axis, mixing, total in reversed(steps):
            d = d.sub((d * mixing).sum(axis, keepdim=True)).div_(total)
        d = d.sub((d * start).sum(1, keepdim=True)).mul_(start)
        return d.movedim(-1, 0).contiguous(), None, None


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices from `[..., s, s]` logits, from (rows) and to (columns): a softmax over "to"
    and a normalisation over "from", then normalisations over "to" and "from", `iterations` in all; `eps` is added to
    the softmax and to each sum."""
    return _Sinkhorn.apply(logits.flatten(0, -3), iterations, eps).view_as(logits)


class _CollapseStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, pre):
        ctx.save_for_backward(streams, pre)
        output = streams.new_empty(len(streams), streams.shape[-1])
        for x, weights, out in row_chunks(streams, pre, output):
            out.copy_((weights.unsqueeze(-1) * x.to(weights.dtype)).sum(-2))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        streams, pre = ctx.saved_tensors
        d_streams, d_pre = torch.empty_like(streams), torch.empty_like(pre)
        for x, weights, d, d_x, d_weights in row_chunks(streams, pre, gradient, d_streams, d_pre):
            d = d.to(weights.dtype).unsqueeze(-2)
            d_x.copy_(weights.unsqueeze(-1) * d)
            d_weights.copy_((x.to(weights.dtype) * d).sum(-1))
        return d_streams, d_pre


def collapse_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the streams `[..., s, H]`, weights `[..., s]`, computed in the dtype of these (fp32), autocast
    or not: `[..., H]` in the streams' dtype."""
    with maybe_autocast(streams.device.type, enabled=False):
        collapsed = _CollapseStreams.apply(streams.flatten(0, -3), pre.flatten(0, -2))
    return collapsed.view(*pre.shape[:-1], streams.shape[-1])


class _ExpandStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, streams, post, comb):
        ctx.save_for_backward(output, streams, post, comb)
        expanded = torch.empty_like(streams)
        for y, x, weights, mixing, out in row_chunks(output, streams, post, comb, expanded):
            mixed = mixing.transpose(1, 2) @ x.to(mixing.dtype)
            # Two operations: a fused one rounds differently from the reference.
            out.copy_((weights.unsqueeze(-1) * y.to(mixing.dtype).unsqueeze(1)).add_(mixed))
        return expanded

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        saved = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in saved]
        for y, x, weights, mixing, d, d_y, d_x, d_weights, d_mixing in row_chunks(*saved, gradient, *gradients):
            d = d.to(mixing.dtype)
            d_y.copy_((weights.unsqueeze(1) @ d).squeeze(1))
            d_weights.copy_((d * y.to(mixing.dtype).unsqueeze(1)).sum(-1))
            d_mixing.copy_(x.to(mixing.dtype) @ d.transpose(1, 2))
            if ctx.needs_input_grad[1]:
                d_x.copy_(mixing @ d)
        gradients[1] = gradients[1] if ctx.needs_input_grad[1] else None
        return tuple(gradients)


def expand_streams(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams `[..., s, H]` after a sublayer, in their dtype: mixed among each other by `comb` `[..., s, s]`, from
    (rows) and to (columns), plus the sublayer's output `[..., H]` for each with its weight, `post` `[..., s]`;
    computed in the dtype of these two (fp32), autocast or not."""
    rows = (output.flatten(0, -2), streams.flatten(0, -3), post.flatten(0, -2), comb.flatten(0, -3))
    with maybe_autocast(streams.device.type, enabled=False):
        return _ExpandStreams.apply(*rows).view_as(streams)
