"""Tiny DeepSeek V4.1 targets, what their attention hands on, and the goldens' parameters under the names used here."""

import torch
from goldens import GOLDENS, Golden
from transformers import PreTrainedTokenizerFast

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM, DeepseekV41PreTrainedModel

TINY = {
    "vocab_size": 89,
    "hidden_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "head_dim": 44,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 28,
    "o_lora_rank": 12,
    "o_groups": 3,
    "swiglu_limit": 0.9,
    "rms_norm_eps": 3e-3,
    "rope_theta": 50.0,
    "compress_rope_theta": 300.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 8,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "sliding_window": 5,
    # Window-only, Full, Reuse, Reindex, Full and candidate source, Reindex, Reuse.
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 4],
    "index_source_layer_ids": [1, 3, 4, 5],
    "index_n_heads": 5,
    "index_head_dim": 36,
    "index_topk": 4,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-3,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [170, 230],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 29,
    "engram_n_heads": 2,
    "engram_head_dim": 6,
    "engram_compressed_vocab_size": 33,
    "dspark_noise_token_id": 83,
    "dspark_target_layer_ids": [4, 5, 6],
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 2,
}
NO_ENGRAM = {"engram_layer_ids": [], "engram_num_embeddings": []}
# All layers see their window only.
WINDOWS = {
    "compress_ratios": [0] * 7,
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
    "candidate_source_layer_id": -1,
}
FP32_PARTS = (
    *(f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")),
    *("sinks_param.weight", "e_score_correction_bias", "bias_vl", "lm_head.weight"),
    *("compressor.wkv.weight", "compressor.wgate.weight"),
)


def tiny_config(**settings) -> DeepseekV41TextConfig:
    return DeepseekV41TextConfig(**(TINY | settings))


def tiny_v41(attention: str = "sdpa", experts: str = "eager", **settings) -> DeepseekV41ForCausalLM:
    """Random weights, also where a fresh model has constants; Engram knows the reference's tokenizer."""
    model = DeepseekV41ForCausalLM._from_config(
        tiny_config(**settings), attn_implementation=attention, experts_implementation=experts
    )
    model.set_tokenizer(tiny_tokenizer())
    return randomize_constants(model).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(GOLDENS / "v41_target_engram.tokenizer.json"))


def started(module: torch.nn.Module, std: float = 0.2) -> torch.nn.Module:
    """A part of a model with random weights, also where a fresh one has constants."""
    model = DeepseekV41PreTrainedModel(tiny_config(initializer_range=std))
    for part in module.modules():
        model._init_weights(part)
    return randomize_constants(module)


def randomize_constants(module: torch.nn.Module) -> torch.nn.Module:
    """Random numbers where a fresh module has constants: a constant hides an exchange."""
    for name, tensor in module.state_dict().items():
        if name.endswith(("norm.weight", "_hc.scale", "q_weight", "k_weight")):
            tensor.uniform_(0.5, 1.5)
        elif name.endswith(("_hc.base", "sinks_param.weight")):
            tensor.normal_()
        elif name.endswith(("e_score_correction_bias", "bias_vl")):
            tensor.normal_(std=0.2)
    return module


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max|actual - expected| / max|expected|"""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def check_same_computation(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of keys to few bits, which now and then falls to the other side in one of the two."""
    assert relative_error(actual, expected) < 1e-3
    assert ((actual - expected).abs().median() / expected.abs().max()).item() < 2e-6


def golden_name(name: str) -> str:
    """The reference's parameter name to ours."""
    return name.replace("gate_and_up_projs", "gate_up_proj").replace("down_projs", "down_proj")


def golden_parameters(golden: Golden) -> dict[str, torch.Tensor]:
    return {golden_name(name): tensor for name, tensor in golden.group("param").items()}


def golden_v41(golden: Golden, attention: str = "eager") -> DeepseekV41ForCausalLM:
    config = DeepseekV41TextConfig(**golden.meta["config"])
    model = DeepseekV41ForCausalLM._from_config(config, attn_implementation=attention, experts_implementation="eager")
    model.load_state_dict(golden_parameters(golden), strict=True)
    model.set_tokenizer(tiny_tokenizer())
    return model.eval()


class StateRecorder:
    """The [`CompressedState`] behind every layer, of each forward."""

    def __init__(self, model: DeepseekV41ForCausalLM):
        self.layers: list[list] = [[] for _ in model.model.layers]
        for states, layer in zip(self.layers, model.model.layers, strict=True):
            layer.attn.register_forward_hook(lambda module, args, output, states=states: states.append(output[1]))

    def take_selections(self) -> list[torch.Tensor]:
        """`[B, all S, C]` bool of every layer with compressed keys, the forwards since the last call in a row."""
        selections = []
        for states in self.layers:
            selected = [state.selected for state in states if state is not None]
            states.clear()
            if selected:
                selections.append(join_selections(selected))
        return selections


def join_selections(selected: list[torch.Tensor]) -> torch.Tensor:
    """`[B, S, C]` of consecutive forwards, in which C grows."""
    width = max(part.shape[-1] for part in selected)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in selected], dim=1)
