"""The chat target's shape, and how it is written."""

from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.modeling_kimi_k3 import KimiK3ForCausalLM


def target_config(tokenizer: PreTrainedTokenizerBase) -> KimiK3TextConfig:
    """The target's shape: 6 layers, the third and the last with full attention, all but the first with 8 experts."""
    return KimiK3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=128,
        routed_expert_hidden_size=96,
        attn_res_block_size=3,
        linear_attn_config={
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": [3, 6],
            "kda_layers": [1, 2, 4, 5],
        },
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def save_target(model: KimiK3ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes bf16 weights (what Kimi K3 keeps in fp32 stays so), config, tokenizer and greedy generation settings."""
    model.config.use_cache = True  # the Trainer switches it off
    model.save_pretrained(folder)
    saved = KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    saved.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=128,
    )
    saved.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
