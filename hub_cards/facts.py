"""What a card says of a draft, in words: read off the settings that its configuration states, whatever its family."""

import math
import re
from collections.abc import Mapping

from transformers import PreTrainedConfig

from ..configuration.configuration_draft import LAYER_OUTPUT
from .rules import is_hub_id

LABELS = {
    "fixed_anchor": "the tokens of the data",
    "variable_prefix": "the tokens of the data",
    "dspark": "the tokens of the data and the target's own distribution",
}
STATED_ELSEWHERE = ("license", "license_name", "license_link", "datasets")
LOCAL_PATH = re.compile(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:")


def text(value) -> str:
    """A value in one line of Markdown that shows as it is, whatever it holds."""
    line = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|$!~])", r"\\\1", line)


def target_id(config: PreTrainedConfig) -> str | None:
    """The target's Hub id. A local path says nothing to readers and much about its author's machine."""
    name = (config.target or {}).get("name_or_path")
    return name if is_hub_id(name) else None


def git_revision(revision: str | None) -> str | None:
    """Only what can stand between quotes in code."""
    return revision if re.fullmatch(r"[\w.][\w./-]*", revision or "") else None


def facts(config: PreTrainedConfig) -> dict[str, str]:
    """What a draft is, as table cells."""
    settings, record = config.to_dict(), config.target or {}
    captured = "the input of their attention, averaged over its streams"
    if config.capture_point == LAYER_OUTPUT:
        captured = "their outputs"
    slots = f"{config.block_size - config.num_drafted} known, {config.num_drafted} drafted"
    if config.sample_from_anchor:
        slots = "the first slot reads the last known token, and every slot drafts the token after its own"
    fingerprints = {part: (record.get(f"{part}_sha256") or "")[:16] for part in ("weights", "embedding", "tokenizer")}
    cells = {
        "draft layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "block": f"{config.block_size} slots: {slots}",
        "mask token id": config.mask_token_id,
        "within the block": "each slot sees the earlier ones" if config.is_causal else "all slots see each other",
        "context window": _context_window(settings),
        "target layers read": f"{', '.join(map(str, config.target_layer_ids))} of {config.num_target_layers}, "
        f"zero-based: {captured}",
        "target's class": record.get("architecture"),
        "target's revision": git_revision(record.get("revision")) if target_id(config) else None,
        "target in training": ", ".join(_loaded_as(record)),
        "target's fingerprint": ", ".join(f"{part} {sha}" for part, sha in fingerprints.items() if sha),
        **_experts_and_heads(settings),
    }
    return {name: text(value) for name, value in cells.items() if value is not None and value != ""}


def _context_window(settings: Mapping) -> str:
    if settings["sliding_window"] is None:
        return "whole context"
    window = f"{settings['sliding_window']} tokens"
    if not (full := settings.get("num_full_attention_layers")):
        return window
    return f"{window}; the last {'layer sees' if full == 1 else f'{full} layers see'} the whole context"


def _loaded_as(record: Mapping) -> list[str]:
    """The form that the target had: features of another one are other features."""
    quantization, adapters = record.get("quantization"), record.get("adapters")
    words = [record.get("dtype"), quantization and f"quantised ({quantization})"]
    return [str(word) for word in [*words, adapters and f"with adapters ({_cell(adapters)})"] if word]


def _experts_and_heads(settings: Mapping) -> dict[str, str | None]:
    """What only some drafts have."""
    cells = {}
    if "n_routed_experts" in settings:
        chosen = settings["num_experts_per_tok"]
        cells["experts"] = f"{settings['n_routed_experts']} per layer; each token uses {chosen} and a shared one"
    if "markov_rank" in settings:
        cells["Markov head"] = f"rank {settings['markov_rank']}" if settings["markov_rank"] else "none"
    if "confidence_head" in settings:
        cells["confidence head"] = "none"
    if settings.get("confidence_head"):
        where = "after" if settings["confidence_input"] == "post_norm" else "before"
        cells["confidence head"] = f"reads the state {where} the final norm ({settings['confidence_input']})"
        fitted = settings["confidence_temperatures"]
        temperatures = ", ".join(f"{value:.3g}" for value in fitted) if fitted else "not calibrated"
        cells["confidence temperatures by slot"] = temperatures
    return cells


def recipe(config: PreTrainedConfig) -> dict[str, str]:
    """Objective and training as table cells, sorted: reading a config back may change the order."""
    objective, training = config.objective or {}, config.training or {}
    values = {"labels": LABELS.get(objective.get("loss_type"))}
    values |= dict(sorted(objective.items())) | dict(sorted(training.items()))
    cells = {name: _cell(value) for name, value in values.items() if name not in STATED_ELSEWHERE}
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
