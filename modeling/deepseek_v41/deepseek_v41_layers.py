"""Layers that the DeepSeek V4.1 target and its DSpark draft share: norm, rotary embedding, hyper-connections, experts,
window attention with sinks."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init
from transformers.integrations import use_experts_implementation
from transformers.utils.generic import maybe_autocast

from ...configuration.configuration_deepseek_v41_base import DeepseekV41BaseConfig
from ..ops.cache_rounding import round_to_fp8
from ..ops.elementwise import RMSNorm, last_axis_chunks, wide_dtype
from ..ops.expert_products import EXPERT_PRODUCTS
from ..ops.fp32 import Fp32Weight, KeepsFp32
from .hyper_connections import normed_projection, sinkhorn

# Channels that carry the sink through scaled_dot_product_attention: two are used, eight keep rows aligned.
SINK_CHANNELS = 8


class DeepseekV41RMSNorm(RMSNorm):
    """Root mean square norm in fp32, multiplied by the weight, **then** cast back to the input's dtype."""

    cast_first = False


@lru_cache(maxsize=32)
def rope_frequencies(
    dim: int, theta: float, yarn: tuple[float, float, float, int] | None = None, device: torch.device | None = None
) -> Tensor:
    """Rotary frequencies `[dim / 2]` fp32, `1 / theta^(2i / dim)`, with YaRN (arXiv 2309.00071, section 3.2) where
    `yarn` is given: `(factor, beta_fast, beta_slow, original_max_position_embeddings)`. It changes the frequencies
    only, there is no factor on the magnitude."""
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if yarn is None:
        return frequencies
    factor, beta_fast, beta_slow, original = yarn

    def channel(rotations: float) -> float:
        return dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = max(math.floor(channel(beta_fast)), 0), min(math.ceil(channel(beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def rope_rotations(positions: Tensor, frequencies: Tensor) -> Tensor:
    """`[..., R / 2]` complex64: what [`rotate`] multiplies the channel pairs of the given positions `[...]` with."""
    with maybe_autocast(positions.device.type, enabled=False):
        angles = positions.float()[..., None] * frequencies
        return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotations: Tensor, inverse: bool = False) -> Tensor:
    """Rotates the last R channels of `x` `[..., D]`, adjacent ones as a pair, by [`rope_rotations`], broadcastable to
    `[..., R / 2]`, or back where `inverse`; the others pass through."""
    plain, rotated = x.split([x.shape[-1] - 2 * rotations.shape[-1], 2 * rotations.shape[-1]], dim=-1)
    pairs = torch.view_as_complex(rotated.float().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * (rotations.conj() if inverse else rotations))
    return torch.cat([plain, turned.flatten(-2).to(x.dtype)], dim=-1)


class HyperConnectionMix(NamedTuple):
    """Coefficients of one sublayer, fp32.

    Attributes:
        pre (`[..., s]`): how the streams are summed up for the **next** sublayer.
        post (`[..., s]`): how this sublayer's output is added to the streams.
        comb (`[..., s, s]`): how the streams are mixed, from (rows) and to (columns).
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


class DeepseekV41HyperConnection(KeepsFp32):
    """Coefficients of a sublayer from the residual streams: manifold-constrained hyper-connections (arXiv 2512.24880),
    in one pass; the mixing matrix is made doubly stochastic by Sinkhorn iterations. Parameters and maths are fp32."""

    fp32_names = ("fn", "base", "scale")

    def __init__(self, config: DeepseekV41BaseConfig):
        super().__init__()
        self.config, streams = config, config.hc_mult
        width, outputs = streams * config.hidden_size, streams * (streams + 2)
        self.fn = nn.Parameter(torch.empty(outputs, width, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(outputs, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, streams: Tensor) -> HyperConnectionMix:
        """`[..., s, H]` streams in the model's dtype -> coefficients."""
        s, eps = self.config.hc_mult, self.config.hc_eps
        with maybe_autocast(streams.device.type, enabled=False):
            mixed = normed_projection(streams.flatten(-2), self.fn, self.config.rms_norm_eps)
            parts = zip(*(x.split([s, s, s * s], dim=-1) for x in (self.base, mixed)), self.scale, strict=True)
            pre, post, comb = (torch.addcmul(base, part, scale) for base, part, scale in parts)
            comb = sinkhorn(comb.unflatten(-1, (s, s)), self.config.hc_sinkhorn_iters, eps)
            return HyperConnectionMix(pre.sigmoid() + eps, 2 * post.sigmoid(), comb)


class DeepseekV41Router(KeepsFp32):
    """Scores tokens against experts in fp32, `sqrt(softplus(logit))`. The correction biases, one for text and one for
    image tokens, steer which experts are chosen, not their weights."""

    fp32_names = ("e_score_correction_bias", "bias_vl")

    def __init__(self, config: DeepseekV41BaseConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        for name in self.fp32_names:
            self.register_buffer(name, torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def forward(self, hidden_states: Tensor, is_image: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, H]`, `[T]` bool -> logits `[T, E]`, weights `[T, k]`, chosen experts `[T, k]`; the floats in fp32."""
        with maybe_autocast(hidden_states.device.type, enabled=False):
            logits = nn.functional.linear(hidden_states.float(), self.weight.float())
        scores = nn.functional.softplus(logits).sqrt()
        bias = self.e_score_correction_bias
        if is_image is not None:
            bias = torch.where(is_image.unsqueeze(-1), self.bias_vl, bias)
        experts = (scores + bias).topk(self.config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.config.norm_topk_prob and self.config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.config.routed_scaling_factor, experts


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


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` of `[..., n]`, in fp32; 0: no limit."""
    return _ClampedSwiGLU.apply(gate, up, limit)


@use_experts_implementation(experts_interface=EXPERT_PRODUCTS, is_transposed=True)
class DeepseekV41Experts(nn.Module):
    """Routed experts. The router's weight multiplies **before** the down projection, as in the reference; the other
    implementations of transformers' interface multiply after it, which differs by rounding only."""

    def __init__(self, config: DeepseekV41BaseConfig):
        super().__init__()
        self.num_experts = config.n_routed_experts
        width, hidden_size = config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, hidden_size, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, width, hidden_size))
        self.limit = config.swiglu_limit

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return clamped_swiglu(*gate_up.chunk(2, dim=-1), self.limit).to(gate_up.dtype)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, H]` tokens, `[T, k]` experts and fp32 weights -> `[T, H]`."""
        output = torch.zeros_like(hidden_states, dtype=wide_dtype(hidden_states))
        for expert in top_k_index.unique().tolist():
            tokens, slots = torch.where(top_k_index == expert)
            gate_up = hidden_states[tokens] @ self.gate_up_proj[expert]
            activated = clamped_swiglu(*gate_up.chunk(2, dim=-1), self.limit) * top_k_weights[tokens, slots, None]
            output.index_add_(0, tokens, (activated.to(gate_up.dtype) @ self.down_proj[expert]).to(output.dtype))
        return output.to(hidden_states.dtype)


class DeepseekV41MLP(nn.Module):
    """The shared expert: a clamped SwiGLU feed-forward that every token passes."""

    def __init__(self, config: DeepseekV41BaseConfig):
        super().__init__()
        width = config.moe_intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.limit = config.swiglu_limit

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = self.gate_proj(hidden_states)
        return self.down_proj(clamped_swiglu(gate, self.up_proj(hidden_states), self.limit).to(gate.dtype))


class DeepseekV41MoE(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: DeepseekV41BaseConfig):
        super().__init__()
        self.gate = DeepseekV41Router(config)
        self.experts = DeepseekV41Experts(config)
        self.shared_experts = DeepseekV41MLP(config)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, vision_token_types: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            hidden_states: `[B, S, H]`.
            padding_mask: `[B, S]` bool, True = padding, which passes the shared expert only.
            vision_token_types: `[B, S]` int, -1 = text, others image tokens; `None`: all text.
        """
        tokens = hidden_states.flatten(0, -2)
        _, weights, experts = self.gate(
            tokens, None if vision_token_types is None else vision_token_types.flatten() >= 0
        )
        routed = self.experts(tokens, experts, weights)
        if padding_mask is not None:
            routed = routed.masked_fill(padding_mask.reshape(-1, 1), 0.0)
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)


class AttentionSinks(Fp32Weight):
    """A logit for each head `[n]` that takes part in its softmax and has no value."""


class GroupedLinear(nn.Module):
    """Each group of input channels has its own weight: `[..., groups, in]` -> `[..., groups, out]`."""

    def __init__(self, in_features: int, out_features: int, groups: int):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * out_features, in_features))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.einsum("...gi,goi->...go", hidden_states, self.weight.unflatten(0, (self.groups, -1)))


class DeepseekV41WindowAttention(nn.Module):
    """
    Attention whose heads share one key, which is also the value: compressed queries, rotary embedding that is taken
    back from the output, a sink logit in the softmax, an output projection by groups of heads. Keys are rounded to the
    FP8 numbers that a cache holds; the gradient passes through the rounding.
    """

    def __init__(self, config: DeepseekV41BaseConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        heads, width = config.num_attention_heads, config.head_dim
        self.wq_a = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_norm = DeepseekV41RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.wkv = nn.Linear(config.hidden_size, width, bias=False)
        self.kv_norm = DeepseekV41RMSNorm(width, config.rms_norm_eps)
        self.wo_a = GroupedLinear(heads * width // config.o_groups, config.o_lora_rank, config.o_groups)
        self.wo_b = nn.Linear(config.o_groups * config.o_lora_rank, config.hidden_size, bias=False)
        self.sinks_param = AttentionSinks(heads)
        self.scaling = width**-0.5

    def queries(self, hidden_states: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, H]` -> the compressed query `[B, S, r]` and the queries `[B, S, n, D]`."""
        latents = self.q_norm(self.wq_a(hidden_states))
        queries = self.wq_b(latents).unflatten(-1, (self.config.num_attention_heads, -1))
        return latents, rotate(queries, rotations.unsqueeze(-2))

    def keys(self, hidden_states: Tensor, rotations: Tensor) -> Tensor:
        """`[B, S, H]` -> `[B, S, D]`, keys and values at once."""
        return round_to_fp8(rotate(self.kv_norm(self.wkv(hidden_states)), rotations))

    def attend(self, queries: Tensor, keys: Tensor, visible: Tensor | None) -> Tensor:
        """
        Args:
            queries: `[B, S, n, D]`; keys: `[B, K, D]`.
            visible: `[B or 1, 1, S, K]` bool, or additive; `None`: every query sees every key.

        Returns:
            `[B, S, n, D]` in the queries' dtype, zero where a query sees nothing.
        """
        attention = eager_sink_attention if self.config._attn_implementation == "eager" else sdpa_sink_attention
        dropout = self.config.attention_dropout if self.training else 0.0
        with maybe_autocast(queries.device.type, enabled=False):
            return attention(queries, keys, visible, self.sinks_param(), self.scaling, dropout)

    def project_output(self, attended: Tensor, rotations: Tensor) -> Tensor:
        """`[B, S, n, D]` -> `[B, S, H]`."""
        attended = rotate(attended, rotations.unsqueeze(-2), inverse=True)
        return self.wo_b(self.wo_a(attended.flatten(-2).unflatten(-1, (self.config.o_groups, -1))).flatten(-2))


def eager_sink_attention(
    queries: Tensor, keys: Tensor, visible: Tensor | None, sinks: Tensor, scaling: float, dropout: float = 0.0
) -> Tensor:
    """Attention with sinks by its definition, in fp32; arguments as in [`DeepseekV41WindowAttention.attend`]."""
    batch, length, heads, _ = queries.shape
    shared = keys.float()
    # All heads read the same keys, so they are further queries of one head.
    scores = queries.float().flatten(1, 2) @ shared.transpose(1, 2) * scaling
    scores = scores.unflatten(1, (length, heads)).transpose(1, 2)  # [B, n, S, K]
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf) if visible.dtype == torch.bool else scores + visible
    virtual = sinks.float()[:, None, None].expand(batch, heads, length, 1)
    weights = torch.cat([scores, virtual], dim=-1).softmax(-1)[..., :-1]
    weights = nn.functional.dropout(weights, p=dropout) if dropout else weights
    return (weights.transpose(1, 2).flatten(1, 2) @ shared).unflatten(1, (length, heads)).to(queries.dtype)


def sdpa_sink_attention(
    queries: Tensor, keys: Tensor, visible: Tensor | None, sinks: Tensor, scaling: float, dropout: float = 0.0
) -> Tensor:
    """
    The same with `scaled_dot_product_attention`, which knows no sinks: a further key, zero but for channels of its
    own, meets the sink's logit in those channels of the queries; its value is zero.
    """
    batch, length, heads, width = queries.shape
    logits = sinks.float() / scaling
    high = logits.to(queries.dtype)
    low = (logits - high.float()).to(queries.dtype)  # what half precision leaves over
    extra = nn.functional.pad(torch.stack([high, low], dim=-1), (0, SINK_CHANNELS - 2))
    queries = torch.cat([queries, extra.expand(batch, length, -1, -1)], dim=-1).transpose(1, 2)
    values = nn.functional.pad(keys, (0, SINK_CHANNELS, 0, 1)).unsqueeze(1)
    virtual = torch.zeros_like(values[:1, :, :1])
    virtual[..., width : width + 2] = 1
    keys = torch.cat([values[:, :, :-1], virtual.expand(batch, -1, -1, -1)], dim=2)
    if visible is not None:
        visible = nn.functional.pad(visible, (0, 1), value=visible.dtype == torch.bool)
        visible = visible if visible.dtype == torch.bool else visible.to(queries.dtype)
    output = nn.functional.scaled_dot_product_attention(
        queries,
        keys.expand(-1, heads, -1, -1),
        values.expand(-1, heads, -1, -1),
        attn_mask=visible,
        dropout_p=dropout,
        scale=scaling,
    )
    return output[..., :width].transpose(1, 2)


class DeepseekV41ModelMixin:
    """What the target and its draft, as a `PreTrainedModel`, say of these layers."""

    _keep_in_fp32_modules_strict = ["attn_hc", "ffn_hc", "sinks_param", "e_score_correction_bias", "bias_vl"]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts' decorator in the model's file

    def _grouped_mm_can_dispatch(self) -> bool:
        """The grouped kernel wants rows of a multiple of 16 bytes."""
        if self.config.moe_intermediate_size % 8 or self.config.hidden_size % 8:
            raise ValueError(
                'experts_implementation="grouped_mm" needs `moe_intermediate_size` and `hidden_size` to be multiples '
                'of 8; use experts_implementation="eager".'
            )
        return super()._grouped_mm_can_dispatch()

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, DeepseekV41HyperConnection):
            init.normal_(module.fn, mean=0.0, std=std)
            init.zeros_(module.base)
            init.ones_(module.scale)
        elif isinstance(module, (nn.Linear, GroupedLinear, DeepseekV41Router)):
            init.normal_(module.weight, mean=0.0, std=std)
            if isinstance(module, DeepseekV41Router):
                init.zeros_(module.e_score_correction_bias)
                init.zeros_(module.bias_vl)
        elif isinstance(module, DeepseekV41Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, AttentionSinks):
            init.zeros_(module.weight)
        else:
            super()._init_weights(module)
