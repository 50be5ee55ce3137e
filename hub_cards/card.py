"""The model card of a saved draft."""

import os
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from ..configuration.configuration_draft import ANCHOR_FIRST, ATTENTION_INPUT_MEAN
from ..modeling.atomic_save import staged_directory

TEMPLATE = Path(__file__).parent / "draft_card.md"
TRANSFORMERS_VERSION = "5.24"
TAGS = ["speculative-decoding", "draft-model", "blockdraft"]
V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
OWN_TARGET_TYPES = ("kimi_k3", "kimi_k3_text", *V41_TYPES)


def write_card(
    directory: str | os.PathLike,
    config: PreTrainedConfig,
    metrics: dict[str, dict[str, float]] | None = None,
    license: str | None = None,
) -> Path:
    """
    Writes `README.md` of a draft, the same for the same arguments.

    Args:
        directory (`str` or `os.PathLike`):
            The saved draft.
        config (`DraftConfig`):
            The draft's config; target, objective and recipe are read from it.
        metrics (`dict[str, dict[str, float]]`, *optional*):
            Numbers of real decoding: by data set, then by name.
        license (`str`, *optional*):
            The Hub's name of the weights' licence. Without it the card says that the target's terms apply.

    Returns:
        `Path`: the card.
    """
    with staged_directory(directory) as staging:
        (staging / "README.md").write_text(make_card(config, metrics, license), encoding="utf-8")
    return Path(directory) / "README.md"


def make_card(
    config: PreTrainedConfig, metrics: dict[str, dict[str, float]] | None = None, license: str | None = None
) -> str:
    """Text of the card; the arguments are those of [`write_card`]."""
    target = config.target or {}
    base_model = target.get("name_or_path")
    # A local path says nothing to readers and much about the author's machine.
    base_model = base_model if base_model and is_hub_id(base_model) else None
    revision = target.get("revision") if base_model else None
    metric_names = list(dict.fromkeys(name for values in (metrics or {}).values() for name in values))
    licensing = {"license": license} if license else {"license": "other", "license_name": "terms-of-the-target-model"}
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_model,
            base_model_relation="adapter" if base_model else None,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=[*TAGS, config.model_type],
            **licensing,
        ),
        template_path=str(TEMPLATE),
        target_name=f"`{base_model}`" if base_model else f"a {target.get('architecture', 'causal')} language model",
        target_id=base_model or "path/to/the/target",
        revision=f', revision="{revision}"' if revision else "",
        needs_blockdraft=target.get("model_type") in OWN_TARGET_TYPES,
        native_path=config.slot_layout != ANCHOR_FIRST,
        transformers_version=TRANSFORMERS_VERSION,
        drafted=config.num_drafted,
        facts=_facts(config, revision),
        objective=_table(config.objective),
        training=_table(config.training),
        metric_names=metric_names,
        metrics={data: [_cell(values.get(name)) for name in metric_names] for data, values in (metrics or {}).items()},
        limits=_limits(config),
    )
    return card.content


def is_hub_id(name: str) -> bool:
    """Whether `name` can be a Hub repository (`owner/name`) and is no directory here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not os.path.exists(name)


def _facts(config: PreTrainedConfig, revision: str | None) -> dict[str, str]:
    captured = "what enters their attention, the mean over its streams"
    if config.capture_point != ATTENTION_INPUT_MEAN:
        captured = "their outputs"
    slots = f"the last known token and {config.num_drafted} proposals"
    if config.slot_layout == ANCHOR_FIRST:
        slots = "the first slot reads the last known token, every slot proposes the token after its own"
    facts = {
        "draft layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "block size": f"{config.block_size} ({slots})",
        "target layers read": f"{config.target_layer_ids} of {config.num_target_layers}, zero-based, {captured}",
        "mask token id": config.mask_token_id,
        "within the block": "each slot sees the earlier ones" if config.is_causal else "all slots see each other",
        "context window": config.sliding_window or "whole context",
        "target revision": revision,
    }
    if config.model_type == "deepseek_v41_dspark":
        facts |= _dspark_facts(config)
    return {name: _cell(value) for name, value in facts.items() if value is not None}


def _dspark_facts(config: PreTrainedConfig) -> dict[str, str]:
    """What only a DSpark draft has."""
    confidence = temperatures = None
    if config.confidence_head:
        where = "after" if config.confidence_input == "post_norm" else "before"
        confidence = f"reads the state {where} the final norm (`{config.confidence_input}`)"
        fitted = config.confidence_temperatures
        temperatures = ", ".join(f"{value:.3g}" for value in fitted) if fitted else "not calibrated"
    return {
        "experts": f"{config.n_routed_experts} in each layer, {config.num_experts_per_tok} of them and a shared one a "
        "token",
        "Markov head": f"rank {config.markov_rank}" if config.markov_rank else "none",
        "confidence head": confidence or "none",
        "confidence temperatures by slot": temperatures,
    }


def _limits(config: PreTrainedConfig) -> list[str]:
    limits = []
    if config.input_embedding_scale != 1:
        limits.append(
            f"It reads block embeddings multiplied by {config.input_embedding_scale:g}, which "
            '`speculation_type="dflash"` does not do: use `block_decode`, or fewer tokens are accepted.'
        )
    if "variable_prefix" in (config.objective or {}).values():
        limits.append(
            "It was trained on blocks with at least two known tokens (variable prefix), while "
            '`speculation_type="dflash"` gives it one: use `block_decode`, or fewer tokens are accepted.'
        )
    if config.model_type == "kimi_k3_dflash":
        if not config.is_causal and config.sliding_window is None:
            limits.append("Its masked slots carry no position, so all of them propose the same token.")
        limits.append("vLLM 0.33.0 and SGLang 0.5.23 do not serve MLA drafts without rotary embedding.")
    if config.model_type == "deepseek_v41_dspark":
        limits += _dspark_limits(config)
    return limits


def _dspark_limits(config: PreTrainedConfig) -> list[str]:
    limits = [
        '`speculation_type="dflash"` of transformers reads another slot layout: with it, hardly a token is accepted.'
    ]
    if config.confidence_head and not config.confidence_temperatures:
        limits.append("Its confidence is not calibrated: `blockdraft calibrate` fits a temperature for each slot.")
    if (config.target or {}).get("model_type") not in V41_TYPES:
        limits.append("vLLM 0.33.0 and SGLang 0.5.23 serve such a draft for DeepSeek V4.1 targets only.")
        return limits
    limits.append(
        "vLLM 0.33.0 and SGLang 0.5.23 read it from the target's own checkpoint: `blockdraft export --format deepseek "
        "--into TARGET_DIR` puts it there."
    )
    if config.confidence_head and config.confidence_input == "post_norm":
        limits.append(
            "Both give the confidence head the state before the final norm, this one reads the state after it: leave "
            "adaptive verification off there."
        )
    return limits


def _table(values: dict | None) -> dict[str, str]:
    """Names to table cells, sorted: reading a config back may change the order."""
    return {_cell(name): _cell(value) for name, value in sorted((values or {}).items())}


def _cell(value) -> str:
    """One table cell."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in sorted(value.items()))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
