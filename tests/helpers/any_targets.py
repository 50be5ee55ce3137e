"""Tiny real architectures with random weights, every scaling set to something that shows."""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

VOCAB_SIZE, MASK = 64, 63
# No stop tokens, and weights wide enough for answers that neither loop at once nor end in ties.
TOKENS = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GPT = TOKENS | {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "initializer_range": 0.3}
LLAMA = GPT | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2} | {
    "mamba_chunk_size": 8
}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5}

GEMMA3N = {
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "activation_sparsity_pattern": [0.0] * 4,
    "final_logit_softcapping": 3.0,
}
INKLING = {
    "logits_mup_width_multiplier": 3.0,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 6,
    "rel_extent": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V4 = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "hc_mult": 2,
    "sliding_window": 6,
}
KIMI_LINEAR = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}


QWEN_MOE = {"shared_expert_intermediate_size": 16}
# A step of one token of these does not clamp what a forward of several clamps.
UNCLAMPED = {"time_step_min": 1e-30}
NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "chunk_size": 8,
    "n_groups": 1,
} | UNCLAMPED
ZAMBA2 = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "mamba_d_state": 8,
    "chunk_size": 8,
    "n_mamba_heads": 4,
    "num_key_value_heads": 4,
    "num_mem_blocks": 1,
    "adapter_rank": 8,
} | UNCLAMPED
MAMBA1 = TOKENS | {"hidden_size": 32, "num_hidden_layers": 4, "initializer_range": 0.3}
MAMBA2 = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}


@dataclass(frozen=True)
class Case:
    """An architecture; `takes_back` where its cache takes rejected tokens back, `embeds` where its first layer reads
    nothing but the embedding."""

    model_type: str
    settings: dict = field(default_factory=dict)
    takes_back: bool = True
    embeds: bool = True


CASES = {
    "tied": Case("llama", LLAMA | {"tie_word_embeddings": True}),
    "mistral": Case("mistral", LLAMA | {"sliding_window": 6}),
    # GPT-2-style names, learned positions, a norm behind the embedding, a narrower embedding, a bias in the head
    "gpt2": Case("gpt2", GPT, embeds=False),
    "gpt_neox": Case("gpt_neox", GPT | {"intermediate_size": 48}),
    "falcon": Case("falcon", GPT),
    "mpt": Case("mpt", GPT | {"logit_scale": 3.0, "use_cache": True}),
    "bloom": Case("bloom", GPT, embeds=False),
    "opt": Case("opt", GPT | {"word_embed_proj_dim": 24, "ffn_dim": 48, "init_std": 0.3}, embeds=False),
    "phi": Case("phi", LLAMA),
    "modernbert": Case(
        "modernbert-decoder", LLAMA | {"local_attention": 8, "bos_token_id": 1, "eos_token_id": 2}, embeds=False
    ),
    # embeddings and logits that are scaled or capped
    "gemma": Case("gemma", LLAMA),
    "gemma2": Case("gemma2", LLAMA | SLIDING | {"final_logit_softcapping": 3.0}),
    "gemma3": Case("gemma3_text", LLAMA | SLIDING | {"final_logit_softcapping": 3.0}),
    "granite": Case("granite", LLAMA | GRANITE),
    "hyperclovax": Case("hyperclovax", LLAMA | GRANITE),
    "cohere": Case("cohere", LLAMA | {"logit_scale": 0.25}),
    "minicpm3": Case("minicpm3", LLAMA | MLA | {"dim_model_base": 8, "scale_emb": 3}),
    "afmoe": Case("afmoe", LLAMA | EXPERTS | {"mup_enabled": True}),
    "nanochat": Case("nanochat", LLAMA | {"final_logit_softcapping": 3.0}, embeds=False),
    "inkling": Case("inkling_text", LLAMA | INKLING),
    # several versions of each state
    "gemma3n": Case("gemma3n_text", LLAMA | SLIDING | GEMMA3N),
    "deepseek_v4": Case("deepseek_v4", LLAMA | DEEPSEEK_V4),
    # hybrids and recurrences
    "lfm2": Case("lfm2", LLAMA | {"layer_types": ["conv", "full_attention"] * 2}),
    "qwen3_next": Case("qwen3_next", LLAMA | LINEAR | EXPERTS | QWEN_MOE),
    "kimi_linear": Case("kimi_linear", LLAMA | MLA | KIMI_LINEAR),
    "falcon_h1": Case(
        "falcon_h1",
        LLAMA | MAMBA | {"mamba_d_ssm": 64} | {"lm_head_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "granite_hybrid": Case("granitemoehybrid", LLAMA | MAMBA | GRANITE | {"layer_types": ["mamba", "attention"] * 2}),
    "recurrent_gemma": Case("recurrent_gemma", LLAMA | {"logits_soft_cap": 3.0, "lru_width": 32}, False),
    "mamba": Case("mamba", TOKENS | {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}, False),
    "gemma4": Case("gemma4_text", LLAMA | SLIDING | {"global_head_dim": 8, "hidden_size_per_layer_input": 0}),
    "rwkv": Case("rwkv", TOKENS | {"hidden_size": 32, "num_hidden_layers": 4}, False),
    "gpt1": Case("openai-gpt", GPT, embeds=False),
}

# Experts and compressed rows are all chosen, so that no two of them tie.
ALL = {"num_experts_per_tok": 4, "index_topk": 64}
# Layers that cannot be cropped, or convolutions: linear attention, Mamba 2, compressed attention.
HYBRIDS = {
    "qwen3_next": Case("qwen3_next", CASES["qwen3_next"].settings | ALL),
    "qwen3_5": Case("qwen3_5_text", LLAMA | LINEAR),
    "qwen3_5_moe": Case("qwen3_5_moe_text", LLAMA | LINEAR | EXPERTS | QWEN_MOE | ALL),
    "kimi_linear": Case("kimi_linear", CASES["kimi_linear"].settings | ALL),
    "olmo_hybrid": Case("olmo_hybrid", LLAMA | LINEAR),
    "falcon_h1": CASES["falcon_h1"],
    "granite_hybrid": CASES["granite_hybrid"],
    "bamba": Case("bamba", LLAMA | MAMBA | {"attn_layer_indices": [1, 3]}),
    "nemotron_h": Case("nemotron_h", LLAMA | NEMOTRON),
    "zamba2": Case("zamba2", LLAMA | ZAMBA2),
    "mamba2": Case(
        "mamba2", MAMBA1 | {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    ),
    "lfm2": CASES["lfm2"],
    "zaya": Case("zaya", LLAMA | EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    "deepseek_v4": Case("deepseek_v4", LLAMA | DEEPSEEK_V4 | ALL),
}
# A forward of several tokens starts their state spaces anew.
STARTING_ANEW = {
    "mamba": CASES["mamba"],
    "falcon_mamba": Case("falcon_mamba", MAMBA1 | {"state_size": 8}),
    "jamba": Case("jamba", LLAMA | JAMBA),
    "zamba": Case(
        "zamba", LLAMA | {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "num_key_value_heads": 4}
    ),
}

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
# Their vision towers are as deep as their text decoders.
MULTIMODAL = {
    "gemma3": (
        "gemma3",
        {
            "text_config": LLAMA | SLIDING,
            "vision_config": VISION | {"image_size": 8, "patch_size": 4},
            "mm_tokens_per_image": 4,
            "image_token_index": 60,
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": LLAMA | {"rope_parameters": MROPE},
            "vision_config": {"depth": 4, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32},
        },
    ),
    "granite_vision": (
        "llava_next",
        {"text_config": {"model_type": "granite"} | LLAMA | GRANITE, "vision_config": VISION},
    ),
}


def build(case: Case) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[case.model_type](**case.settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def multimodal(model_type: str, **settings) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**settings)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


def build_multimodal(name: str) -> PreTrainedModel:
    model_type, settings = MULTIMODAL[name]
    return multimodal(model_type, **settings)


class Int8Linear(nn.Module):
    """A linear layer as quantisers keep it: packed integers and scales in buffers, no `weight`, no parameter."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states, self.packed.to(states.dtype) * self.scale.to(states.dtype))


def quantise(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
