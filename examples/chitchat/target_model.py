"""The chat targets: small models of two architectures with one tokenizer, and how they are written."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.deepseek_v41.engram import compressed_token_map

from .train_tokenizer import RESERVED


def kimi_k3_config(tokenizer: PreTrainedTokenizerBase) -> KimiK3TextConfig:
    """6 layers, the third and the last with full attention, all but the first with 8 experts."""
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


def deepseek_v41_config(tokenizer: PreTrainedTokenizerBase) -> DeepseekV41TextConfig:
    """6 layers: one that sees its window only, two Full ones, one Reindex, two Reuse; Engram in the second layer."""
    return DeepseekV41TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        head_dim=64,
        max_position_embeddings=tokenizer.model_max_length,
        qk_rope_head_dim=16,
        q_lora_rank=96,
        o_lora_rank=48,
        o_groups=3,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        compress_rope_theta=1e4,
        rope_scaling={},
        sliding_window=32,
        compress_ratios=[0, 2, 2, 2, 1, 1, 0],  # the last one is the draft stage's
        kv_source_layer_ids=[1, 4],
        index_source_layer_ids=[1, 3, 4],
        index_n_heads=4,
        index_head_dim=32,
        index_topk=16,
        candidate_source_layer_id=-1,
        hc_mult=2,
        hc_sinkhorn_iters=5,
        engram_layer_ids=[1],
        engram_vocab_size=2048,
        engram_num_embeddings=[8266],  # the first four primes from 2048 on: two n-gram sizes, two heads
        engram_max_ngram_size=3,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_pad_token_id=tokenizer.pad_token_id,
        engram_compressed_vocab_size=int(compressed_token_map(tokenizer).max()) + 1,
        num_nextn_predict_layers=1,
        dspark_block_size=5,
        dspark_noise_token_id=tokenizer.convert_tokens_to_ids(RESERVED[0]),
        dspark_target_layer_ids=[1, 3, 5],
        dspark_markov_rank=64,
        dspark_n_routed_experts=8,
        dspark_num_experts_per_tok=2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


@dataclass(frozen=True)
class ChatTarget:
    """What differs from target to target: its `config` for a tokenizer, and what its card says."""

    title: str
    config: Callable[[PreTrainedTokenizerBase], PreTrainedConfig]
    shape: str


CHAT_TARGETS = {
    "kimi_k3": ChatTarget(
        "Kimi K3",
        kimi_k3_config,
        "6 layers (4 of Kimi Delta Attention, 2 of gated NoPE MLA), 8 routed experts of which 2 are active, attention "
        "residuals",
    ),
    "deepseek_v41": ChatTarget(
        "DeepSeek V4.1",
        deepseek_v41_config,
        "6 layers (one with a window only; CSA2: 2 Full, 1 Reindex, 2 Reuse), 8 routed experts of which 2 are active, "
        "2 hyper-connection streams, Engram on bigrams and trigrams",
    ),
}


def target_dir(name: str) -> Path:
    """Where the repository keeps a target."""
    return Path(os.path.relpath(Path(__file__).parent / "targets" / name))


def new_target(name: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """An untrained fp32 target; Engram's hash comes from the tokenizer."""
    model = AutoModelForCausalLM.from_config(CHAT_TARGETS[name].config(tokenizer), dtype=torch.float32)
    if name == "deepseek_v41":
        model.set_tokenizer(tokenizer)
    return model


def load_target(folder: str | Path) -> PreTrainedModel:
    """A saved target in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes bf16 weights (what the model keeps in fp32 stays so), config, tokenizer and settings of generation."""
    model.config.use_cache = True  # the Trainer switches it off
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    saved.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=128,
    )
    saved.save_pretrained(folder)
