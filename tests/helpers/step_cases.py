"""Cases of the step benchmark, small enough for tests."""

from benchmarks.training_step import Case, k3_config, v41_config

TINY = {
    "dflash": {
        "vocab_size": 199,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "block_size": 4,
    },
    "dspark": {
        "vocab_size": 199,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 20,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 12,
        "o_lora_rank": 10,
        "o_groups": 2,
        "sliding_window": 16,
        "markov_rank": 8,
        "initializer_range": 0.3,
    },
}


CONFIGS = {"dflash": k3_config, "dspark": v41_config}


def tiny_case(draft: str, tokens: int = 96, anchors: int = 12, **settings) -> Case:
    return Case(CONFIGS[draft](**(TINY[draft] | settings)), tokens, anchors)
