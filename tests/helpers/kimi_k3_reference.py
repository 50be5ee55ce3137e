"""Kimi K3's text model once more: one sequence, float64, token by token, from the published equations."""

import torch
from torch import Tensor

from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig


class Weights:
    """Looks parameters up under a prefix, in float64."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str = ""):
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name].double()

    def under(self, name: str) -> "Weights":
        return Weights(self.tensors, f"{self.prefix}{name}.")

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self[f"{name}.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def situ(config: KimiK3TextConfig, gate: Tensor, up: Tensor) -> Tensor:
    beta, linear_beta = config.activation_situ_beta or 1.0, config.activation_situ_linear_beta
    up = up if linear_beta is None else linear_beta * (up / linear_beta).tanh()
    return beta * (gate / beta).tanh() * gate.sigmoid() * up


def mlp(config: KimiK3TextConfig, weights: Weights, x: Tensor) -> Tensor:
    return weights.linear("down_proj", situ(config, weights.linear("gate_proj", x), weights.linear("up_proj", x)))


def mla(config: KimiK3TextConfig, weights: Weights, x: Tensor) -> Tensor:
    length, heads = len(x), config.num_attention_heads
    if config.q_lora_rank is None:
        queries = weights.linear("q_proj", x)
    else:
        low = norm(weights.linear("q_a_proj", x), weights["q_a_layernorm.weight"], 1e-6)
        queries = weights.linear("q_b_proj", low)
    queries = queries.view(length, heads, -1)
    latent = weights.linear("kv_a_proj_with_mqa", x)
    shared = latent[:, config.kv_lora_rank :]
    latent = norm(latent[:, : config.kv_lora_rank], weights["kv_a_layernorm.weight"], 1e-6)
    expanded = weights.linear("kv_b_proj", latent).view(length, heads, -1)
    output = torch.zeros(length, heads, config.v_head_dim, dtype=torch.float64)
    for t in range(length):
        for head in range(heads):
            keys = torch.cat([expanded[: t + 1, head, : config.qk_nope_head_dim], shared[: t + 1]], dim=-1)
            scores = keys @ queries[t, head] / keys.shape[-1] ** 0.5
            output[t, head] = scores.softmax(0) @ expanded[: t + 1, head, config.qk_nope_head_dim :]
    output = output.view(length, -1)
    if config.mla_use_output_gate:
        output = output * weights.linear("g_proj", x).sigmoid()
    return weights.linear("o_proj", output)


def kda(config: KimiK3TextConfig, weights: Weights, x: Tensor) -> Tensor:
    length = len(x)
    shape = (length, config.linear_num_heads, config.linear_head_dim)

    def convolved(name: str) -> Tensor:
        rows, taps = weights.linear(f"{name}_proj", x), weights[f"{name}_conv1d.weight"].squeeze(1)
        output = torch.zeros_like(rows)
        for t in range(length):
            for tap in range(taps.shape[1]):
                source = t - (taps.shape[1] - 1) + tap
                if source >= 0:
                    output[t] += taps[:, tap] * rows[source]
        return (output * output.sigmoid()).view(shape)

    q, k, v = convolved("q"), convolved("k"), convolved("v")
    q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() / shape[-1] ** 0.5
    k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    z = (weights.linear("f_b_proj", weights.linear("f_a_proj", x)) + weights["dt_bias"]).view(shape)
    rate, bound = weights["A_log"].exp()[:, None], config.linear_gate_lower_bound
    g = bound * (rate * z).sigmoid() if bound is not None else -rate * torch.log1p(z.exp())
    output = delta_rule(q, k, v, g, weights.linear("b_proj", x).sigmoid())[0]
    if config.linear_use_full_rank_gate:
        gate = weights.linear("g_proj", x)
    else:
        gate = weights.linear("g_b_proj", weights.linear("g_a_proj", x))
    output = norm(output, weights["o_norm.weight"], config.rms_norm_eps) * gate.view(shape).sigmoid()
    return weights.linear("o_proj", output.view(length, -1))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`[S, heads, D]` and `[S, heads]`; outputs and the state `[heads, D, D]` after the last token."""
    length, heads, dim = q.shape
    state = torch.zeros(heads, dim, dim, dtype=q.dtype) if state is None else state
    output = torch.zeros_like(q)
    for t in range(length):
        state = g[t].exp()[:, :, None] * state
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        output[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return output, state


def moe(config: KimiK3TextConfig, weights: Weights, x: Tensor) -> Tensor:
    scores = weights.linear("gate", x).sigmoid()
    latent = weights.linear("routed_expert_down_proj", x)
    gate_up, down = weights["experts.gate_up_proj"], weights["experts.down_proj"]
    routed = torch.zeros_like(latent)
    for t in range(len(x)):
        biased = scores[t] + weights["gate.e_score_correction_bias"]
        chosen = biased.topk(config.num_experts_per_token).indices
        total = scores[t][chosen].sum()
        for expert in chosen.tolist():
            gate, up = (gate_up[expert] @ latent[t]).chunk(2)
            weight = scores[t, expert] / total * config.routed_scaling_factor
            routed[t] += weight * (down[expert] @ situ(config, gate, up))
    if config.latent_moe_use_norm:
        routed = norm(routed, weights["routed_expert_norm.weight"], config.rms_norm_eps)
    return weights.linear("routed_expert_up_proj", routed) + mlp(config, weights.under("shared_experts"), x)


def mix(config: KimiK3TextConfig, weights: Weights, name: str, prefix: Tensor, blocks: list[Tensor]) -> Tensor:
    entries = torch.stack([*blocks, prefix])
    scores = norm(entries, weights[f"{name}_norm.weight"], config.rms_norm_eps) @ weights[f"{name}_proj.weight"][0]
    return (scores.softmax(0)[..., None] * entries).sum(0)


def kimi_k3(config: KimiK3TextConfig, tensors: dict[str, Tensor], input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """`[S]` ids -> logits `[S, V]` and the output of every layer `[S, H]`, float64."""
    weights = Weights(tensors, "model.")
    stream, blocks, outputs = weights["embed_tokens.weight"][input_ids], [], []
    size = config.attn_res_block_size
    for i in range(config.num_hidden_layers):
        layer = weights.under(f"layers.{i}")
        attention = kda if i + 1 in config.linear_attn_config["kda_layers"] else mla
        feed_forward = moe if f"model.layers.{i}.mlp.gate.weight" in tensors else mlp
        mixed = mix(config, layer, "self_attention_res", stream, blocks) if blocks else stream
        restarts = size is not None and i % size == 0
        if restarts:
            blocks.append(stream)
        mixed = norm(mixed, layer["input_layernorm.weight"], config.rms_norm_eps)
        attended = attention(config, layer.under("self_attn"), mixed)
        stream = attended if restarts else stream + attended
        mixed = mix(config, layer, "mlp_res", stream, blocks) if blocks else stream
        mixed = norm(mixed, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        stream = stream + feed_forward(config, layer.under("mlp"), mixed)
        outputs.append(stream)
    if blocks:
        stream = mix(config, weights, "output_attn_res", stream, blocks)
    stream = norm(stream, weights["norm.weight"], config.rms_norm_eps)
    return stream @ tensors["lm_head.weight"].double().T, outputs
