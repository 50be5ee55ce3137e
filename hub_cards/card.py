"""The model card of a saved draft."""

import os
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from ..modeling.atomic_save import staged_directory

TEMPLATE = Path(__file__).parent / "draft_card.md"
TRANSFORMERS_VERSION = "5.24"
TAGS = ["speculative-decoding", "draft-model", "blockdraft"]
KIMI_K3_TYPES = ("kimi_k3", "kimi_k3_text")
ENGINES = {
    "kimi_k3_dflash": "vLLM 0.33.0 and SGLang 0.5.23 do not serve MLA drafts without rotary embedding.",
}


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
        needs_blockdraft=target.get("model_type") in KIMI_K3_TYPES,
        transformers_version=TRANSFORMERS_VERSION,
        drafted=config.block_size - 1,
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
    facts = {
        "draft layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "block size": f"{config.block_size} (the last known token and {config.block_size - 1} proposals)",
        "target layers read": f"{config.target_layer_ids} of {config.num_target_layers}, zero-based, their outputs",
        "mask token id": config.mask_token_id,
        "within the block": "each slot sees the earlier ones" if config.is_causal else "all slots see each other",
        "context window": config.sliding_window or "whole context",
        "target revision": revision,
    }
    return {name: _cell(value) for name, value in facts.items() if value is not None}


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
    if config.model_type == "kimi_k3_dflash" and not config.is_causal and config.sliding_window is None:
        limits.append("Its masked slots carry no position, so all of them propose the same token.")
    if config.model_type in ENGINES:
        limits.append(ENGINES[config.model_type])
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
