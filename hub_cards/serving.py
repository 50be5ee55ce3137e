"""Who decodes with a draft: transformers' own loop, and the serving engines."""

from transformers import PreTrainedConfig

from ..configuration.configuration_draft import LAYER_OUTPUT
from ..modeling.deepseek_v41.engine_fit import ENGINES, engine_misfits
from ..modeling.families import DSPARK, family_of

# Targets whose classes come with this package.
OWN_TARGET_TYPES = ("kimi_k3", "kimi_k3_text", "deepseek_v41", "deepseek_v41_text")


def masked_slots_are_alike(config: PreTrainedConfig) -> bool:
    """Whether nothing tells the masked slots of a block apart: no position, no visible key, no token chosen before."""
    return (
        family_of(config).backbone == "kimi_k3"  # whose attention has no positional encoding
        and not config.is_causal
        and config.sliding_window is None
        and config.to_dict().get("markov_rank") is None
    )


def has_released_layout(config: PreTrainedConfig) -> bool:
    """Whether engines know drafts of this kind, in the layout that DeepSeek releases."""
    family = family_of(config)
    return family.method == DSPARK and family.backbone == "deepseek_v41"


def decoding_limits(config: PreTrainedConfig) -> list[str]:
    """Why `speculation_type="dflash"` of transformers gives this draft other blocks than it was trained on; empty
    where it gives the same."""
    native = '`speculation_type="dflash"` of transformers'
    limits = []
    if config.sample_from_anchor:
        limits.append(f"{native} reads another slot layout: with it, hardly a token is accepted.")
    elif config.capture_point != LAYER_OUTPUT:
        limits.append(f"{native} hands out outputs of layers, which this draft does not read.")
    if config.input_embedding_scale != 1:
        limits.append(
            f"It reads block embeddings multiplied by {config.input_embedding_scale:g}, which {native} does not do: "
            "fewer tokens are accepted there."
        )
    if (config.objective or {}).get("loss_type") == "variable_prefix":
        limits.append(
            f"It was trained on blocks with at least two known tokens (variable prefix), while {native} gives it one: "
            "fewer tokens are accepted there."
        )
    return limits


def engine_misfits_of(config: PreTrainedConfig) -> list[str] | None:
    """In which ways a draft does not fit the engines; `None` if they know no drafts of its kind."""
    if not has_released_layout(config):
        return None
    return [misfit for engine in ENGINES for misfit in engine_misfits(config, engine, quantized=False)]
