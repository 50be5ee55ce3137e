"""Kimi K3 text model: KDA and gated NoPE MLA layers, latent mixture of experts, attention residuals."""

import copy
import math

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.generic import maybe_autocast, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ...configuration.configuration_kimi_k3 import KIMI_DELTA_ATTENTION, KimiK3TextConfig
from ..ops.elementwise import wide_dtype
from ..ops.expert_products import EXPERT_PRODUCTS
from ..ops.fp32 import KeepsFp32
from ..ops.shapes import check_shape
from ..target.causal_lm import CausalLMForward
from ..target.decoded_weights import load_decoded, with_text_config
from .conversion_kimi_k3 import register_kimi_k3_conversion
from .kimi_delta_attention import KimiDeltaAttention, ShortConvolution
from .kimi_k3_layers import KimiK3MLP, KimiK3RMSNorm, situ
from .mla_attention import KimiK3MLAttention


def mix_attention_residuals(
    prefix: Tensor, blocks: Tensor, norm_weight: Tensor, score_weight: Tensor, eps: float
) -> Tensor:
    """
    Learned mixture of the residual stream and its earlier snapshots, per token (Kimi K3's attention residuals).

    Args:
        prefix: `[..., H]`, the current residual stream; blocks: `[..., n, H]`, the snapshots, oldest first.
        norm_weight: `[H]`; score_weight: `[1, H]`.

    Returns:
        `[..., H]` in the stream's dtype: softmax-weighted sum of the un-normalised entries, computed in fp32.
    """
    with maybe_autocast(prefix.device.type, enabled=False):
        entries = torch.cat([blocks, prefix.unsqueeze(-2)], dim=-2).float()
        scores = entries @ (norm_weight.float() * score_weight.float().squeeze(0)).to(entries.device)
        scores = scores * torch.rsqrt(entries.square().mean(-1) + eps)
        return (scores.softmax(-1).unsqueeze(-2) @ entries).squeeze(-2).to(prefix.dtype)


class MixerProjection(nn.Module):
    """Score vector `[1, H]` of a mixer. A call returns it: hooks that bring offloaded weights do so for calls."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self) -> Tensor:
        return self.weight


class MixerRMSNorm(KimiK3RMSNorm):
    """Norm of a mixer, which uses its weight `[H]` only; a call returns it."""

    def forward(self) -> Tensor:
        return self.weight


class KimiK3Router(KeepsFp32):
    """Scores tokens against experts in fp32. The correction bias steers the choice of experts, not their weights."""

    fp32_names = ("e_score_correction_bias",)

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[T, H]` -> logits `[T, E]`, weights `[T, k]`, chosen experts `[T, k]`; the floats in fp32."""
        config = self.config
        with maybe_autocast(hidden_states.device.type, enabled=False):
            logits = nn.functional.linear(hidden_states.float(), self.weight.float())
        scores = logits.sigmoid() if config.moe_router_activation_func == "sigmoid" else logits.softmax(-1)
        choice = scores + self.e_score_correction_bias
        if config.num_expert_group > config.topk_group:
            grouped = choice.unflatten(-1, (config.num_expert_group, -1))
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept.scatter_(-1, group_scores.topk(config.topk_group, dim=-1).indices, True)
            choice = grouped.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(-2)
        experts = choice.topk(config.num_experts_per_token, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if config.num_experts_per_token > 1 and config.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * config.routed_scaling_factor, experts


@use_experts_implementation(experts_interface=EXPERT_PRODUCTS)
class KimiK3Experts(nn.Module):
    """Routed SiTU experts in the latent space; the router weight multiplies **after** the down projection, in fp32."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        self.num_experts = config.num_experts
        width, hidden_size = config.moe_intermediate_size, config.routed_expert_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden_size, width))
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return situ(*gate_up.chunk(2, dim=-1), *self.betas)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, M]` tokens, `[T, k]` experts and fp32 weights -> `[T, M]`."""
        output = torch.zeros_like(hidden_states, dtype=wide_dtype(hidden_states))
        for expert in top_k_index.unique().tolist():
            tokens, slots = torch.where(top_k_index == expert)
            gate_up = nn.functional.linear(hidden_states[tokens], self.gate_up_proj[expert])
            expert_output = nn.functional.linear(self._apply_gate(gate_up), self.down_proj[expert])
            output.index_add_(0, tokens, expert_output.to(output.dtype) * top_k_weights[tokens, slots, None])
        return output.to(hidden_states.dtype)


class KimiK3MoE(nn.Module):
    """Latent mixture of experts: routed experts between a down and an up projection, plus one shared MLP."""

    def __init__(self, config: KimiK3TextConfig):
        super().__init__()
        hidden_size, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = KimiK3Router(config)
        self.routed_expert_down_proj = nn.Linear(hidden_size, latent, bias=False)
        self.experts = KimiK3Experts(config)
        self.routed_expert_norm = KimiK3RMSNorm(latent, config.rms_norm_eps) if config.latent_moe_use_norm else None
        self.routed_expert_up_proj = nn.Linear(latent, hidden_size, bias=False)
        shared_width = (config.num_shared_experts or 0) * config.moe_intermediate_size
        self.shared_experts = KimiK3MLP(config, shared_width) if shared_width else None

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """`[B, S, H]` -> `[B, S, H]`; in training, `padding_mask` (`[B, S]`, True = padding) skips the experts."""
        tokens = hidden_states.flatten(0, -2)
        _, weights, experts = self.gate(tokens)
        routed = self.experts(self.routed_expert_down_proj(tokens), experts, weights)
        if padding_mask is not None and self.training:
            routed = routed.masked_fill(padding_mask.reshape(-1, 1), 0.0)
        if self.routed_expert_norm is not None:
            routed = self.routed_expert_norm(routed)
        output = self.routed_expert_up_proj(routed).view_as(hidden_states)
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states)


class DocumentRows:
    """
    Rearranges a padded or packed batch so that a recurrence sees each document alone, padding on its left.

    Args:
        document_ids: `[B, S]` int; 0 = padding, 1.. = documents of a row. A 0/1 mask is the one-document case.
    """

    def __init__(self, document_ids: Tensor):
        documents = torch.arange(1, int(document_ids.max()) + 1, device=document_ids.device)
        valid = (document_ids[:, None] == documents[:, None]).flatten(0, 1)  # [B * documents, S]
        length = int(valid.sum(-1).max())
        columns = valid.long().argsort(dim=-1, stable=True)[:, -length:]
        rows = torch.arange(len(document_ids), device=document_ids.device).repeat_interleave(len(documents))
        self.valid = valid.gather(-1, columns)
        self.source = (rows[:, None] * document_ids.shape[1] + columns)[self.valid]
        self.shape = document_ids.shape

    def to(self, device: torch.device | str | int) -> "DocumentRows":
        """For layers on another device, to which accelerate's hooks move it."""
        rows = copy.copy(self)
        rows.valid, rows.source = self.valid.to(device), self.source.to(device)
        return rows

    def gather(self, hidden_states: Tensor) -> Tensor:
        """`[B, S, H]` -> `[documents, longest, H]`, zero at padding."""
        rows = hidden_states.new_zeros(*self.valid.shape, hidden_states.shape[-1])
        rows[self.valid] = hidden_states.flatten(0, 1)[self.source]
        return rows

    def scatter(self, rows: Tensor) -> Tensor:
        """The inverse of `gather`: `[B, S, H]`, zero at padding."""
        output = rows.new_zeros(self.shape[0] * self.shape[1], rows.shape[-1])
        output[self.source] = rows[self.valid]
        return output.unflatten(0, self.shape)


class KimiK3DecoderLayer(GradientCheckpointingLayer):
    """One layer: attention, then feed-forward, on the residual stream or on mixtures of it with its snapshots."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__()
        self.is_kda = config.layer_types[layer_idx] == KIMI_DELTA_ATTENTION
        self.self_attn = (KimiDeltaAttention if self.is_kda else KimiK3MLAttention)(config, layer_idx)
        self.is_sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.mlp = KimiK3MoE(config) if self.is_sparse else KimiK3MLP(config)
        self.input_layernorm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixes = config.attn_res_block_size is not None
        if self.mixes:
            self.takes_snapshot = layer_idx % config.attn_res_block_size == 0
            self.self_attention_res_norm = MixerRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.self_attention_res_proj = MixerProjection(config.hidden_size)
            self.mlp_res_norm = MixerRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp_res_proj = MixerProjection(config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        blocks: Tensor | None = None,
        attention_mask: Tensor | None = None,
        document_rows: DocumentRows | None = None,
        padding_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream since the last snapshot `[B, S, H]`, and the snapshots so far `[B, S, n, H]` (`None`
        before the first or without attention residuals) -> both after this layer."""
        mixed = prefix = hidden_states
        if self.mixes:
            if blocks is not None:
                mixed = self._mix(prefix, blocks, self.self_attention_res_norm, self.self_attention_res_proj)
            if self.takes_snapshot:
                snapshot = prefix.unsqueeze(-2)
                blocks = snapshot if blocks is None else torch.cat([blocks, snapshot], dim=-2)
                prefix = None  # the stream restarts
        normed = self.input_layernorm(mixed)
        if not self.is_kda:
            attended, _ = self.self_attn(normed, attention_mask, cache, **kwargs)
        elif document_rows is None:
            attended = self.self_attn(normed, cache)
        else:
            attended = document_rows.scatter(self.self_attn(document_rows.gather(normed), cache))
        prefix = attended if prefix is None else prefix + attended
        mixed = self._mix(prefix, blocks, self.mlp_res_norm, self.mlp_res_proj) if self.mixes else prefix
        mixed = self.post_attention_layernorm(mixed)
        return prefix + (self.mlp(mixed, padding_mask) if self.is_sparse else self.mlp(mixed)), blocks

    def _mix(self, prefix, blocks, norm: MixerRMSNorm, proj: MixerProjection) -> Tensor:
        return mix_attention_residuals(prefix, blocks, norm(), proj(), norm.eps)


class KimiK3PreTrainedModel(PreTrainedModel):
    config_class = KimiK3TextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3DecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = False
    _is_stateful = False  # the KDA cache layer rolls back, see KimiDeltaAttentionCacheLayer
    _can_record_outputs = {
        "router_logits": OutputRecorder(KimiK3Router, index=0),
        "hidden_states": KimiK3DecoderLayer,
        "attentions": KimiK3MLAttention,
    }
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "conv1d", "o_norm", "e_score_correction_bias"]
    _keys_to_ignore_on_load_unexpected = [r"^vision_tower\.", r"^mm_projector\."]

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As in transformers; `config` may be that of the multimodal checkpoint. Raises a `ValueError` for quantised
        weights that are not decoded."""
        return load_decoded(super().from_pretrained, *args, **with_text_config(kwargs))

    def _grouped_mm_can_dispatch(self) -> bool:
        """The grouped kernel wants rows of a multiple of 16 bytes; other widths run expert by expert."""
        config = self.config
        if config.num_experts and (config.moe_intermediate_size % 8 or config.routed_expert_hidden_size % 8):
            raise ValueError(
                'experts_implementation="grouped_mm" needs `moe_intermediate_size` and `routed_expert_hidden_size` to '
                'be multiples of 8; use experts_implementation="eager".'
            )
        return super()._grouped_mm_can_dispatch()

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, KimiDeltaAttention):
            init.copy_(module.A_log, init.uniform_(module.A_log, a=1.0, b=16.0).log())
            init.zeros_(module.dt_bias)
        elif isinstance(module, ShortConvolution):
            bound = module.weight.shape[-1] ** -0.5
            init.uniform_(module.weight, a=-bound, b=bound)
        elif isinstance(module, (KimiK3Router, MixerProjection)):
            init.normal_(module.weight, mean=0.0, std=std)
            if isinstance(module, KimiK3Router):
                init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, KimiK3Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        else:
            super()._init_weights(module)


class KimiK3Model(KimiK3PreTrainedModel):
    """
    The Kimi K3 text backbone: [`KimiK3DecoderLayer`]s of KDA (Kimi Linear, arXiv 2510.26692) or gated NoPE MLA, dense
    or with a latent mixture of experts, between an embedding and a final norm.
    """

    def __init__(self, config: KimiK3TextConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = MixerRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = MixerProjection(config.hidden_size)
        self.norm = KimiK3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """
        Args:
            input_ids: `[B, S]` int64, or in their place inputs_embeds `[B, S, H]`.
            attention_mask: `[B, past + S]`, 1 = token, 0 = padding, on either side.
            position_ids: accepted and unused: no K3 layer has a positional encoding.
            document_ids: `[B, S]` int64, 0 = padding, 1.. = documents packed into a row; each is processed alone.
                Replaces `attention_mask`, not together with a cache.
            cache, use_cache: a `DynamicCache(config=config)`, and whether to make one where none is given.

        Returns:
            [`~transformers.modeling_outputs.MoeModelOutputWithPast`]: `last_hidden_state` `[B, S, H]` after the final
            norm, and `cache`.

        Raises:
            ValueError: if inputs contradict each other, or their shapes do not fit.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            check_shape("input_ids", input_ids, "B", "S")
            inputs_embeds = self.embed_tokens(input_ids)
        batch, length, _ = check_shape("inputs_embeds", inputs_embeds, "B", "S", self.config.hidden_size)
        if document_ids is not None:
            check_shape("document_ids", document_ids, batch, length, reason="one for each token")
        if document_ids is not None and (cache is not None or attention_mask is not None):
            raise ValueError(
                "`document_ids` cannot be combined with `cache` or `attention_mask`; it replaces the mask."
            )
        if use_cache and cache is None and document_ids is None:
            cache = DynamicCache(config=self.config)

        if attention_mask is not None and attention_mask.ndim == 2:
            past = 0 if cache is None else cache.get_seq_length()
            check_shape("attention_mask", attention_mask, batch, past + length, reason="cached tokens are in it, too")
        mask_2d = attention_mask if document_ids is None else (document_ids > 0).long()
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=mask_2d,
            cache=cache,
            and_mask_function=None if document_ids is None else packed_sequence_mask_function(document_ids),
        )
        document_rows, padding_mask = self._document_rows(document_ids, attention_mask, length, cache)

        hidden_states, blocks = inputs_embeds, None
        for layer in self.layers:
            hidden_states, blocks = layer(
                hidden_states,
                blocks,
                attention_mask=causal_mask,
                document_rows=document_rows,
                padding_mask=padding_mask,
                cache=cache,
                **kwargs,
            )
        if blocks is not None:
            norm, proj = self.output_attn_res_norm, self.output_attn_res_proj
            hidden_states = mix_attention_residuals(hidden_states, blocks, norm(), proj(), norm.eps)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _document_rows(
        self, document_ids: Tensor | None, attention_mask: Tensor | None, length: int, cache: Cache | None
    ) -> tuple[DocumentRows | None, Tensor | None]:
        """What the recurrent layers need of the mask: nothing where every token of this forward is real."""
        if document_ids is None:
            if attention_mask is not None and attention_mask.ndim != 2:
                raise ValueError(
                    f"`attention_mask` has {attention_mask.ndim} dimensions: the recurrent layers cannot follow a "
                    "mask of queries and keys. Pass one of 2, or `document_ids` for packed rows."
                )
            if attention_mask is None or bool(attention_mask[:, -length:].all()):
                return None, None
            document_ids = (attention_mask[:, -length:] != 0).long()
            seen = attention_mask[:, :-length].any(-1)
            if cache is not None and bool((seen & ~document_ids.bool().all(-1)).any()):
                raise ValueError(
                    "`attention_mask` has padding behind tokens that are already in the cache; a recurrent layer "
                    "cannot skip it. Pad prompts on the left, or run them without padding."
                )
        return DocumentRows(document_ids), document_ids == 0


class KimiK3ForCausalLM(CausalLMForward, KimiK3PreTrainedModel, GenerationMixin):
    """
    The Kimi K3 text model with its language modeling head, which is not tied to the embedding. Released checkpoints
    load as they are, their MXFP4 experts decoded; their vision side is left out. See [`CausalLMForward`] and
    [`KimiK3Model`] for the arguments of the forward.
    """

    _tied_weights_keys = {}
    cache_implementations = (None, "dynamic", "offloaded")

    def __init__(self, config: KimiK3TextConfig):
        super().__init__(config)
        self.model = KimiK3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.lm_head:
            std = self.config.hidden_size**-0.5
            init.trunc_normal_(module.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)
        else:
            super()._init_weights(module)


register_kimi_k3_conversion()
