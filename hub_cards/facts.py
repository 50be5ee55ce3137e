"""What a card says of a draft, in words: read off the settings that its configuration states, whatever its family."""

import math
import re
from collections.abc import Mapping

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from .rules import is_hub_id

LABELS = {
    "fixed_anchor": "the tokens of the data",
    "variable_prefix": "the tokens of the data",
    "dspark": "the tokens of the data and the target's own distribution",
}
# Of a recipe, what stands elsewhere in the card, and what is for machines.
NOT_SHOWN = ("license", "license_name", "license_link", "datasets", "data_sha256", "initial_weights")
LOCAL_PATH = re.compile(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:")


def text(value) -> str:
    """A value in one line of Markdown that shows as it is, whatever it holds."""
    line = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|$!~])", r"\\\1", line)


def target_id(config: PreTrainedConfig) -> str | None:
    """The target's Hub id. A local path says nothing to readers and much about its author's machine."""
    name = (config.target or {}).get("name_or_path")
    return name if is_hub_id(name) else None


def target_class(config: PreTrainedConfig) -> str:
    """The Auto class that loads the target: of those that read images or sound, many are no causal language models."""
    architecture = (config.target or {}).get("architecture")
    causal, multimodal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()
    is_multimodal = architecture in multimodal and architecture not in causal
    return "AutoModelForMultimodalLM" if is_multimodal else "AutoModelForCausalLM"


def git_revision(revision: str | None) -> str | None:
    """Only what can stand between quotes in code."""
    return revision if re.fullmatch(r"[\w.][\w./-]*", revision or "") else None


def recipe(config: PreTrainedConfig) -> dict[str, str]:
    """Objective and training as table cells, sorted: reading a config back may change the order."""
    objective, training = config.objective or {}, config.training or {}
    values = {"labels": LABELS.get(objective.get("loss_type"))}
    values |= dict(sorted(objective.items())) | dict(sorted(training.items()))
    cells = {name: _cell(value) for name, value in values.items() if name not in NOT_SHOWN}
    table = {text(name.replace("_", " ")): text(cell) for name, cell in cells.items() if cell}
    if datasets := training.get("datasets"):
        table["data"] = ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in datasets)
    return table


def _cell(value) -> str:
    """A setting in words; empty for one that says nothing, or too much: a place on the author's machine."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell}" for name, item in sorted(value.items()) if (cell := _cell(item)))
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, map(_cell, value)))
    if value is None or isinstance(value, float) and not math.isfinite(value):
        return ""
    if isinstance(value, str) and LOCAL_PATH.match(value):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
