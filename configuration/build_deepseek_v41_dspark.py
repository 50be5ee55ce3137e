"""Builds the configuration of a DSpark draft with DeepSeek V4.1 stages from its target's."""

import math
from dataclasses import fields

from transformers import PreTrainedConfig

from .configuration_deepseek_v41 import DeepseekV41TextConfig
from .configuration_deepseek_v41_base import DeepseekV41BaseConfig
from .configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from .configuration_draft import ATTENTION_INPUT_MEAN
from .target_settings import default_target_layer_ids, target_settings
from .validation import require


def from_target_config(
    cls: type[DeepseekV41DSparkConfig],
    target_config: PreTrainedConfig,
    mask_token_id: int | None,
    num_draft_layers: int | None,
    block_size: int | None,
    target_layer_ids: list[int] | None,
    **overrides,
) -> DeepseekV41DSparkConfig:
    """
    A draft for any causal language model.

    For a DeepSeek V4.1 target every setting that is not given is what its own `dspark_*` settings say. For another
    one: 3 stages that draft 5 tokens, the layers of [`default_target_layer_ids`], the target's hidden size H,
    vocabulary, special tokens, number of heads and scaling of embeddings and logits (see [`target_settings`]); heads
    of 32 channels for every 256 of H, at least 32 and at most 512, of which half, at most 64, are rotated; a query
    rank of H/4; up to 8 groups of heads whose outputs are compressed to 1.6 H in all; 8 experts of width H/2, 2 for a
    token, and the shared one; a Markov rank of H/4, at most 256; a window of 128.

    Arguments and errors are those of [`DraftConfig.from_target_config`].
    """
    text_config = target_config.get_text_config(decoder=True)
    given = {
        "mask_token_id": mask_token_id,
        "num_hidden_layers": num_draft_layers,
        "block_size": block_size,
        "target_layer_ids": target_layer_ids,
    }
    given = {name: value for name, value in given.items() if value is not None} | overrides
    if isinstance(text_config, DeepseekV41TextConfig):
        return cls(**(_settings_of_v41_target(text_config) | given))
    stages, inherited = given.get("num_hidden_layers", 3), target_settings(target_config)
    defaults = inherited | _stage_shape(inherited) | {"num_hidden_layers": stages, "block_size": 5}
    if "target_layer_ids" not in given:
        depth, capture_point = inherited["num_target_layers"], inherited["capture_point"]
        defaults["target_layer_ids"] = default_target_layer_ids(depth, stages, capture_point)
    return cls(**(defaults | given))


def build_deepseek_v41_dspark_draft_config(
    target_config: DeepseekV41TextConfig,
    num_draft_layers: int | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    markov_rank: int | None = None,
    target_layer_ids: list[int] | None = None,
    attention_backend: str = "sdpa",
    **overrides,
) -> DeepseekV41DSparkConfig:
    """
    The draft that a DeepSeek V4.1 target's configuration describes. Whatever of its shape is given has to agree with
    the target, from which engines read it.

    Args:
        target_config: configuration of a V4.1 target (a multimodal one is read through its text side).
        num_draft_layers, block_size, mask_token_id, markov_rank, target_layer_ids: default to, and must equal, the
            target's `num_nextn_predict_layers`, `dspark_block_size`, `dspark_noise_token_id`, `dspark_markov_rank` and
            `dspark_target_layer_ids`.
        attention_backend: `"eager"` or `"sdpa"`.
        overrides: fields that no target states: `confidence_head`, `confidence_input`, ...

    Raises:
        ValueError: if `target_config` is not a V4.1 configuration, describes no draft, or disagrees.
    """
    target_config, builder = target_config.get_text_config(), "DeepseekV41DSparkConfig.from_target_config"
    if not isinstance(target_config, DeepseekV41TextConfig):
        raise ValueError(
            f"`target_config` has the model type {target_config.model_type!r}, not a DeepSeek V4.1's. `{builder}` "
            "builds a draft for any other target."
        )
    depth, stages = target_config.num_hidden_layers, target_config.num_nextn_predict_layers
    require(stages > 0, "num_nextn_predict_layers", stages, "the target describes no draft")
    ratios = target_config.compress_ratios
    reason = f"behind the target's {depth} layers it needs an entry of 0 for each of the draft's {stages} stages"
    require(ratios[depth : depth + stages] == [0] * stages, "compress_ratios", ratios, reason)
    given = {
        "num_nextn_predict_layers": num_draft_layers,
        "dspark_block_size": block_size,
        "dspark_noise_token_id": mask_token_id,
        "dspark_markov_rank": markov_rank,
        "dspark_target_layer_ids": target_layer_ids,
    }
    for name, value in given.items():
        expected, own_name = getattr(target_config, name), DeepseekV41DSparkConfig.engine_view[name]
        reason = f"the target's `{name}` is {expected}. `{builder}` builds other drafts"
        require(value is None or value == expected, own_name, value, reason)
    settings = _settings_of_v41_target(target_config) | {
        "architectures": ["DeepseekV41DSparkModel"],
        "attention_backend": attention_backend,
    }
    return DeepseekV41DSparkConfig(**(settings | overrides))


def _settings_of_v41_target(target_config: DeepseekV41TextConfig) -> dict:
    general = {field.name for field in fields(PreTrainedConfig)}
    names = {field.name: field.name for field in fields(DeepseekV41BaseConfig) if field.name not in general}
    names |= {ours: name for name, ours in DeepseekV41DSparkConfig.engine_view.items()}
    settings = {ours: getattr(target_config, name) for ours, name in names.items()}
    depth = target_config.num_hidden_layers
    return settings | {"num_target_layers": depth, "capture_point": ATTENTION_INPUT_MEAN}


def _stage_shape(inherited: dict) -> dict:
    """A stage for a target that is no V4.1, in proportion to its hidden size; see [`target_settings`]."""
    hidden_size, heads = inherited["hidden_size"], inherited["num_attention_heads"]
    head_dim = 32 * min(16, max(1, hidden_size // 256))
    groups = math.gcd(heads, 8)
    return {
        "head_dim": head_dim,
        "qk_rope_head_dim": min(64, head_dim // 2),
        "q_lora_rank": max(8, hidden_size // 4),
        "o_groups": groups,
        "o_lora_rank": max(8, 8 * hidden_size // (5 * groups)),
        "moe_intermediate_size": max(8, hidden_size // 2),
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "markov_rank": min(256, max(8, hidden_size // 4)),
        "rms_norm_eps": 1e-6,
    }
