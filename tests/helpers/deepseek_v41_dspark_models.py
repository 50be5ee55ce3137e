"""Tiny DSpark drafts: the reference's cases as models, and one with inputs for everything else."""

import torch

from blockdraft.configuration.build_deepseek_v41_dspark import build_deepseek_v41_dspark_draft_config
from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 20,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 12,
    "o_lora_rank": 10,
    "o_groups": 2,
    "sliding_window": 6,
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "markov_rank": 8,
    "num_target_layers": 6,
    "target_layer_ids": [3, 5],
    "block_size": 4,
    "mask_token_id": 63,
}
# Names of the reference's state dict, and ours.
RENAMED = {"experts.gate_and_up_projs": "experts.gate_up_proj", "experts.down_projs": "experts.down_proj"}


def tiny_dspark(attn_implementation: str = "sdpa", **settings) -> DeepseekV41DSparkModel:
    config = DeepseekV41DSparkConfig(**(TINY | settings))
    return DeepseekV41DSparkModel._from_config(config, attn_implementation=attn_implementation).eval()


def dspark_inputs(draft: DeepseekV41DSparkModel, context_length: int = 9, blocks: int = 1, batch: int = 1) -> dict:
    config = draft.config
    width = len(config.target_layer_ids) * config.hidden_size
    return {
        "noise_embeds": torch.randn(batch, blocks * config.block_size, config.hidden_size),
        "context_hidden_states": torch.randn(batch, context_length, width),
    }


def our_name(name: str) -> str:
    for reference, ours in RENAMED.items():
        name = name.replace(reference, ours)
    return name


def golden_dspark_config(case, **overrides) -> DeepseekV41DSparkConfig:
    target_config = DeepseekV41TextConfig(**case.meta["config"])
    return build_deepseek_v41_dspark_draft_config(target_config, **overrides)


def golden_dspark(case, attn_implementation: str = "eager") -> DeepseekV41DSparkModel:
    """The reference's draft, with its copies of the target's embedding and head."""
    config = golden_dspark_config(case, attention_backend=attn_implementation)
    config._experts_implementation = "eager"
    draft = DeepseekV41DSparkModel(config).eval()
    weights = {our_name(name): tensor for name, tensor in case.group("param").items()}
    embed, head = weights.pop("embed_tokens.weight"), weights.pop("lm_head.weight")
    draft.to(embed.dtype)
    draft.load_state_dict(weights)
    linear = torch.nn.Linear(*reversed(head.shape), bias=False, dtype=head.dtype)
    linear.weight.data = head
    draft.initialize_embeddings_and_head(torch.nn.Embedding.from_pretrained(embed), linear)
    return draft
