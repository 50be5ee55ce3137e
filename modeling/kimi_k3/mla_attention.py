"""Causal self-attention of the Kimi K3 text model: gated NoPE MLA."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ...configuration.configuration_kimi_k3 import KimiK3TextConfig
from .kimi_k3_layers import KimiK3LatentAttention

# Multiplications that absorbing has to save in a layer: what its further operations on the queries cost.
WORTH_ABSORBING = 1_000_000


class KimiK3MLAttention(KimiK3LatentAttention):
    """Every token attends to itself and to those before it."""

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = True

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, cache: Cache | None = None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """`[B, S, H]`, normed -> `[B, S, H]` and, where the implementation knows them, the weights `[B, N, S, past +
        S]`. `attention_mask` is as the implementation takes it, `None`: causal; `cache` gets the S rows and gives
        those before them."""
        latents, shared_keys = self.latents(hidden_states)
        if cache is not None:
            latents, shared_keys = cache.update(latents, shared_keys, self.layer_idx)
        queries = self.queries(hidden_states)
        absorbs = self._absorbs(queries, latents, attention_mask)
        output, weights = self.attend(queries, latents, shared_keys, attention_mask, absorbs, **kwargs)
        return self.gate_and_project(output, hidden_states), weights

    def _absorbs(self, queries: Tensor, latents: Tensor, attention_mask: Tensor | None) -> bool:
        """Whether few queries over many rows are to be computed by [`attend_absorbed`]: where it saves enough."""
        config, (length, rows) = self.config, (queries.shape[2], latents.shape[2])
        if torch.is_grad_enabled() or config._attn_implementation != "sdpa":
            return False
        if not self.has_plain_weight(latents):
            return False
        if attention_mask is None and length > 1:  # the kernel's own causal mask counts queries, not heads
            return False
        nope, values, rank = config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        expanded = rows * rank * (nope + values) + length * rows * (config.qk_head_dim + values)
        absorbed = length * rank * (nope + values) + length * rows * (2 * rank + config.qk_rope_head_dim)
        return self.num_heads * len(queries) * (expanded - absorbed) > WORTH_ABSORBING
