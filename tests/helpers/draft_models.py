"""A tiny DFlash draft for the tests of drafts, saving and cards."""

import torch

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rms_norm_eps": 1e-3,
    "num_target_layers": 6,
    "target_layer_ids": [1, 3],
    "block_size": 4,
    "mask_token_id": 63,
}


def tiny_draft(attn_implementation: str = "sdpa", **settings) -> KimiK3DFlashDraftModel:
    config = KimiK3DFlashConfig(**(TINY | settings))
    return KimiK3DFlashDraftModel._from_config(config, attn_implementation=attn_implementation).eval()


def draft_inputs(draft: KimiK3DFlashDraftModel, context_length: int = 7, blocks: int = 1, batch: int = 1) -> dict:
    config = draft.config
    return {
        "noise_embeds": torch.randn(batch, blocks * config.block_size, config.hidden_size),
        "context_hidden_states": torch.randn(batch, context_length, draft.fc.in_features),
    }
