"""Layers that the Kimi K3 target and its DFlash draft share: RMSNorm, SiTU MLP, the parts of gated NoPE MLA."""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...configuration.configuration_kimi_k3_base import KimiK3BaseConfig
from ..ops.elementwise import RMSNorm, last_axis_chunks, wide_dtype

# The norms inside MLA use this whatever `rms_norm_eps` says.
MLA_NORM_EPS = 1e-6


class KimiK3RMSNorm(RMSNorm):
    """Root mean square norm in fp32, cast back to the input's dtype, **then** multiplied by the weight."""

    cast_first = True


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


def situ(gate: Tensor, up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """SiTU, Kimi K3's bounded gated activation, of `[..., n]`, in fp32:
    `beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)`. A `beta` of `None` or 0 means 1;
    a `linear_beta` of `None` leaves the linear half unbounded."""
    return _Situ.apply(gate, up, beta or 1.0, linear_beta)


class KimiK3MLP(nn.Module):
    """Dense SiTU feed-forward of width `intermediate_size` (the config's by default)."""

    def __init__(self, config: KimiK3BaseConfig, intermediate_size: int | None = None):
        super().__init__()
        width = intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(hidden_states), self.up_proj(hidden_states), *self.betas))


class KimiK3LatentAttention(nn.Module):
    """
    The parts of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1) without positional
    encoding and with a sigmoid output gate, of which target and draft make their forwards.

    What is cached for a token is its latent row (`kv_lora_rank` numbers, normed) and the key slice that all heads
    share (`qk_rope_head_dim` numbers, which despite its name is not rotated), each stored as one head.
    """

    def __init__(self, config: KimiK3BaseConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_heads, self.num_key_value_groups = config.num_attention_heads, 1
        self.scaling = config.qk_head_dim**-0.5
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, num_heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = KimiK3RMSNorm(config.q_lora_rank, MLA_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, num_heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = KimiK3RMSNorm(config.kv_lora_rank, MLA_NORM_EPS)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, num_heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(hidden_size, num_heads * config.v_head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * config.v_head_dim, hidden_size, bias=False)

    def queries(self, hidden_states: Tensor) -> Tensor:
        """`[B, Q, H]` -> `[B, N, Q, qk_head_dim]`."""
        if self.config.q_lora_rank is None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        return queries.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, H]` -> cached rows: latents `[B, 1, S, kv_lora_rank]`, shared keys `[B, 1, S, qk_rope_head_dim]`."""
        sizes = [self.config.kv_lora_rank, self.config.qk_rope_head_dim]
        latents, shared_keys = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1).split(sizes, dim=-1)
        return self.kv_a_layernorm(latents), shared_keys

    def keys_and_values(self, latents: Tensor, shared_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Cached rows to keys `[B, N, S, qk_head_dim]` and values `[B, N, S, v_head_dim]`."""
        sizes = [self.config.qk_nope_head_dim, self.config.v_head_dim]
        expanded = self.kv_b_proj(latents.squeeze(1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        keys, values = expanded.split(sizes, dim=-1)
        return torch.cat([keys, shared_keys.expand(-1, self.num_heads, -1, -1)], dim=-1), values

    def attend(
        self,
        queries: Tensor,
        latents: Tensor,
        shared_keys: Tensor,
        attention_mask: Tensor | None,
        absorbs: bool,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """`[B, N, Q, qk_head_dim]` queries over cached rows, by [`attend_absorbed`] where `absorbs`: `[B, Q, N,
        v_head_dim]` and, where the implementation knows them, the weights."""
        if absorbs:
            return self.attend_absorbed(queries, latents, shared_keys, attention_mask, **kwargs), None
        keys, values = self.keys_and_values(latents, shared_keys)
        return self._run_attention(queries, keys, values, attention_mask, **kwargs)

    def gate_and_project(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        """`[B, Q, N, v_head_dim]` and the layer's input `[B, Q, H]` -> `[B, Q, H]`."""
        output = output.flatten(2)
        if self.config.mla_use_output_gate:
            output = output * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(output)

    def has_plain_weight(self, latents: Tensor) -> bool:
        """Whether `kv_b_proj` is one plain weight beside `latents`: neither adapted, quantised nor offloaded."""
        if type(self.kv_b_proj) is not nn.Linear:
            return False
        weight = self.kv_b_proj.weight
        return type(weight) is nn.Parameter and weight.device == latents.device

    def attend_absorbed(
        self, queries: Tensor, latents: Tensor, shared_keys: Tensor, attention_mask: Tensor | None, **kwargs
    ) -> Tensor:
        """Attention with `kv_b_proj` on the few queries and outputs of a block: no cached row is expanded again, in
        each forward, to the keys and values of all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1). The mask is
        `[B, 1, Q, S]`, bool or additive, or `None` where every query sees every row. Returns `[B, Q, N,
        v_head_dim]`."""
        sizes = [self.config.qk_nope_head_dim, self.config.v_head_dim]
        to_keys, to_values = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split(sizes, dim=1)
        nope, shared = queries.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        # All heads read the same rows, so they become further queries of one head: `[B, 1, N * Q, r + dr]`.
        queries = torch.cat([nope @ to_keys, shared], dim=-1).flatten(1, 2).unsqueeze(1)
        keys = torch.cat([latents, shared_keys], dim=-1)
        if attention_mask is not None:
            attention_mask = attention_mask.repeat(1, 1, self.num_heads, 1)
        output, _ = self._run_attention(queries, keys, latents, attention_mask, **kwargs | {"is_causal": False})
        output = output.squeeze(2).unflatten(1, (self.num_heads, -1)) @ to_values.transpose(1, 2)
        return output.transpose(1, 2)

    def _run_attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None,
        implementation: str | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """`[B, n, Q, d]` queries -> `[B, Q, n, dv]` and, where the implementation knows them, the weights."""
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            implementation or self.config._attn_implementation, eager_attention
        )
        dropout = self.config.attention_dropout if self.training else 0.0
        kwargs |= {"dropout": dropout, "scaling": self.scaling}
        return attention(self, queries, keys, values, attention_mask, **kwargs)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, softmax in fp32; `[B, N, Q, d]` queries give `[B, Q, N, dv]` and the weights."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
