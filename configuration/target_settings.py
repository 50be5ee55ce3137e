"""What a draft takes from any target's configuration: widths, special tokens, how embeddings and logits are scaled,
and which layers it reads."""

import math

import torch
from transformers import PreTrainedConfig

from .configuration_draft import ATTENTION_INPUT_MEAN, LAYER_OUTPUT, last_layer_id

# Configurations say the same under different names. Each tuple holds those of one thing; the first that is set counts.
EMBEDDING_WIDTHS = ("word_embed_proj_dim", "embedding_size")  # where embedding and head are narrower than the layers
MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
# The target multiplies its embedding in front of the first layer. One that its embedding module applies by itself, as
# Gemma's does, is no setting of the draft, which calls that module.
EMBEDDING_FACTORS = ("embedding_multiplier", "embedding_scale")
# The target multiplies, or divides, what its head returns. A factor on what the head reads (MiniCPM3, Inkling) is no
# setting of the draft either, whose own states are what the head reads.
LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
LOGIT_DIVISORS = ("logits_scaling",)
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Multimodal models have the head themselves. These scale and cap its logits as their text configuration says; all
# others leave them as they are, also where the same text model would on its own.
SCALING_WRAPPERS = (
    "cohere_compass",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "granite4_vision",
    "granite_docling",
    "hyperclovax_vision_v2",
    "inkling2",
    "inkling2_loop",
    "mistral_large4",
    "muse_glimmer",
    "muse_spark",
    "paligemma",
)


def embedding_scale(text_config: PreTrainedConfig) -> float:
    """What the target multiplies the output of `get_input_embeddings()` with in front of its first layer."""
    width = text_config.hidden_size
    match text_config.model_type:
        case "recurrent_gemma":  # stated nowhere; the target rounds it to bfloat16
            return torch.tensor(width**0.5, dtype=torch.bfloat16).item()
        case "afmoe":
            return math.sqrt(width) if text_config.mup_enabled else 1.0
        case "inkling_text":  # `embedding_multiplier` is another name of the divisor in front of its head
            return 1.0
    return float(_first(text_config, EMBEDDING_FACTORS, 1.0))


def logit_multiplier(text_config: PreTrainedConfig) -> float:
    """What the target multiplies the output of its head with, before any soft cap."""
    match text_config.model_type:
        case "hyperclovax":  # multiplies where Granite, whose name it took, divides
            return float(text_config.logits_scaling)
        case "minicpm3" | "mpt":  # the one divides the state in front of the head, the other never reads its setting
            return 1.0
    return float(_first(text_config, LOGIT_FACTORS, 1.0)) / float(_first(text_config, LOGIT_DIVISORS, 1.0))


def target_settings(target_config: PreTrainedConfig) -> dict:
    """
    The settings of a draft that its target decides.

    Args:
        target_config: the target's configuration; a multimodal one is read through `get_text_config()`.

    Returns:
        Fields of [`DraftConfig`] and of its backbone: `hidden_size` is the width of the target's embedding and head;
        heads are one for 64 channels where the target has no attention.
    """
    text_config = target_config.get_text_config(decoder=True)
    scales_logits = text_config is target_config or target_config.model_type in SCALING_WRAPPERS
    width = text_config.hidden_size
    embedding_width = _first(text_config, EMBEDDING_WIDTHS, width)
    return {
        "hidden_size": embedding_width,
        "target_hidden_size": None if embedding_width == width else width,
        "vocab_size": text_config.vocab_size,
        "num_attention_heads": _first(text_config, ("num_attention_heads",), max(1, embedding_width // 64)),
        "num_target_layers": text_config.num_hidden_layers,
        # Layers with hyper-connections have no single output.
        "capture_point": ATTENTION_INPUT_MEAN if hasattr(text_config, "hc_mult") else LAYER_OUTPUT,
        "output_multiplier": logit_multiplier(text_config) if scales_logits else 1.0,
        "final_logit_softcapping": _first(text_config, LOGIT_CAPS, None) if scales_logits else None,
        "input_embedding_scale": embedding_scale(text_config),
        "pad_token_id": text_config.pad_token_id,
        "bos_token_id": text_config.bos_token_id,
        "eos_token_id": text_config.eos_token_id,
    }


def mlp_width(text_config: PreTrainedConfig) -> int:
    """Width of the target's MLP, or four times its hidden size where it has none of one width."""
    width = _first(text_config, MLP_WIDTHS, None)
    return width if isinstance(width, int) else 4 * text_config.hidden_size


def _first(config: PreTrainedConfig, names: tuple[str, ...], default):
    """The first of several settings that the configuration has and that is not null."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), default)


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """
    Default layers to read features from: evenly spaced from the second to the third-last layer (DFlash,
    arXiv 2602.06036, section 4), rounded half to even. Ids repeat where the target is very shallow.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def default_target_layer_ids(
    num_target_layers: int, num_draft_layers: int, capture_point: str = LAYER_OUTPUT
) -> list[int]:
    """
    [`build_target_layer_ids`] where these are layers that can be tapped and differ; on shallower targets, that many
    layers, or as many as there are, evenly spaced from the first to the last one that can be tapped.
    """
    layer_ids = build_target_layer_ids(num_target_layers, num_draft_layers)
    last = last_layer_id(num_target_layers, capture_point)
    if len(set(layer_ids)) == num_draft_layers and 0 <= min(layer_ids) and max(layer_ids) <= last:
        return sorted(layer_ids)
    if last < 0:
        raise ValueError(
            f"The target has {num_target_layers} layer(s), of which serving engines can tap none: a draft needs a "
            "deeper target."
        )
    count = min(num_draft_layers, last + 1)
    return [round(i * last / (count - 1)) for i in range(count)] if count > 1 else [last // 2]
