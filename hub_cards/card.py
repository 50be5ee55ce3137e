"""The model card of a saved draft, or of an adapter of one."""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..configuration.configuration_draft import ANCHOR_FIRST, LAYER_OUTPUT
from ..modeling.saving.atomic_save import staged_directory
from .plots import write_acceptance_plot
from .results import FIGURES, DecodingResult, eval_results, read_results
from .rules import check_datasets, check_license, is_hub_id, validate_card
from .serving import OWN_TARGET_TYPES, decoding_limits, serving

CARD, METRICS, ACCEPTANCE_PLOT = "README.md", "metrics.json", "acceptance.png"
TRANSFORMERS_VERSION = "5.24"
TAGS = ["speculative-decoding", "draft-model", "blockdraft"]
# By model type: the method, its paper, and the family that the layers come from.
METHODS = {
    "kimi_k3_dflash": ("DFlash", "https://arxiv.org/abs/2602.06036", "kimi_k3"),
    "deepseek_v41_dspark": ("DSpark", "https://arxiv.org/abs/2607.05147", "deepseek_v41"),
}
LABELS = {
    "fixed_anchor": "the tokens of the data",
    "variable_prefix": "the tokens of the data",
    "dspark": "the tokens of the data and the target's own distribution",
}
NOT_IN_TABLE = ("license", "datasets")

logger = logging.get_logger(__name__)
_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def write_card(
    directory: str | os.PathLike,
    config: PreTrainedConfig,
    metrics: Mapping[str, Mapping] | None = None,
    license: str | None = None,
) -> Path:
    """
    Writes `README.md` of a draft, `metrics.json` with what was measured, and `acceptance.png` if acceptance by slot is
    known: the same bytes for the same arguments.

    Args:
        directory (`str` or `os.PathLike`):
            The saved draft.
        config (`DraftConfig`):
            The draft's config. From it come target, objective and recipe, and with that `license` and `datasets`.
        metrics (`Mapping[str, Mapping]`, *optional*):
            By data set, what `DecodingReport.headline()` returns, or a list of such, one for each protocol.
        license (`str`, *optional*):
            The Hub's name of the weights' licence, in place of the config's. Without any, the card points to the
            target's terms.

    Returns:
        `Path`: the card.

    Raises:
        ValueError: if licence, data sets or metrics cannot stand in a card; the message says why.
    """
    return _write(directory, make_card(config, metrics, license), metrics)


def write_adapter_card(
    directory: str | os.PathLike,
    config: PreTrainedConfig,
    adapter: Mapping,
    metrics: Mapping[str, Mapping] | None = None,
    license: str | None = None,
) -> Path:
    """
    Writes the card of an adapter, as [`write_card`] does that of a draft.

    Args:
        config (`DraftConfig`):
            The base draft's, with the adapter's recipe in `training`.
        adapter (`Mapping`):
            `base` and `base_revision` (the base draft on the Hub, and its commit), `peft_type` ("LoRA" or "DoRA"),
            `r`, `trainable_parameters`, `total_parameters`.
    """
    return _write(directory, make_adapter_card(config, adapter, metrics, license), metrics)


def rewrite_card(directory: str | os.PathLike, config: PreTrainedConfig) -> None:
    """Writes the card of a saved draft anew for a config that is about to replace the one that lies there, with the
    metrics that lie there. A card that was edited by hand is kept beside it."""
    _keep_edited(directory, type(config).from_pretrained(directory))
    write_card(directory, config, _saved_metrics(directory))


def add_to_card(directory: str | os.PathLike, config: PreTrainedConfig, data: str, headline: Mapping) -> None:
    """
    Adds a measurement to the card of a saved draft, in place of one of the same data set by the same protocol. A card
    that was edited by hand is kept beside it.

    Args:
        directory, config: the saved draft and its config.
        data (`str`): name of the data set.
        headline (`Mapping`): what `DecodingReport.headline()` returns.
    """
    _keep_edited(directory, config)
    metrics = _saved_metrics(directory)
    earlier = metrics.get(data, [])
    earlier = [earlier] if isinstance(earlier, Mapping) else earlier
    kept = [result for result in earlier if result["protocol"] != headline["protocol"]]
    write_card(directory, config, metrics | {data: [*kept, headline]})


def _keep_edited(directory: str | os.PathLike, config: PreTrainedConfig) -> None:
    """Copies a card that is not the one that config and metrics give, before another one replaces it, and warns."""
    card = Path(directory) / CARD
    if card.exists() and card.read_bytes() != make_card(config, _saved_metrics(directory)).encode():
        edited = shutil.copy2(card, f"{card}.edited")
        logger.warning(f"The card is written anew. It had been edited: what it was is kept, unpublished, as {edited}.")


def _saved_metrics(directory: str | os.PathLike) -> dict:
    file = Path(directory) / METRICS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _write(directory: str | os.PathLike, page: str, metrics: Mapping[str, Mapping] | None) -> Path:
    curves = [(f"{result.data}, {tau}", result.acceptance) for result, tau in _with_acceptance(read_results(metrics))]
    with staged_directory(directory) as staging:
        (staging / CARD).write_text(page, encoding="utf-8")
        if metrics:
            (staging / METRICS).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        if curves:
            write_acceptance_plot(staging / ACCEPTANCE_PLOT, curves)
    for name, written in ((METRICS, metrics), (ACCEPTANCE_PLOT, curves)):
        if not written:  # what lies there is of other weights
            (Path(directory) / name).unlink(missing_ok=True)
    return Path(directory) / CARD


def make_card(
    config: PreTrainedConfig, metrics: Mapping[str, Mapping] | None = None, license: str | None = None
) -> str:
    """Text of a draft's card; the arguments are those of [`write_card`]."""
    target, results = _target(config), read_results(metrics)
    # The Hub knows adapter, merge, quantized and finetune. A draft is what an adapter is, a small part that is trained
    # beside a frozen model and is nothing without it. Listed as a finetune it would be offered in the model's place.
    data = _metadata(config, target, target, "transformers", results, license)
    loop = {"loop_id": "draft_id", "loop_commit": "commit", "loop_owner": "this repository"}
    return _render("draft_card.md", config, target, data, results, facts=_facts(config), **loop)


def make_adapter_card(
    config: PreTrainedConfig,
    adapter: Mapping,
    metrics: Mapping[str, Mapping] | None = None,
    license: str | None = None,
) -> str:
    """Text of an adapter's card; the arguments are those of [`write_adapter_card`]."""
    target, results, kind = _target(config), read_results(metrics), " ".join(adapter["peft_type"].split())
    base = adapter["base"] if is_hub_id(adapter["base"]) else None
    revision = adapter["base_revision"] if base else None
    trained, total = adapter["trainable_parameters"], adapter["total_parameters"]
    share = f"{trained / total:.2%}"
    facts = {
        "base draft": base,
        "its revision": revision,
        "adapter": f"{kind}, rank {adapter['r']}",
        "trained": f"{trained:,} of {total:,} parameters ({share})",
    }
    data = _metadata(config, target, base, "peft", results, license, tags=[kind.lower()])
    return _render(
        "adapter_card.md",
        config,
        target,
        data,
        results,
        loop_id="base_id",
        loop_commit="base_commit",
        loop_owner="the base draft's repository",
        facts={name: text(value) for name, value in facts.items() if value} | _facts(config),
        peft_type=text(kind),
        base_id=base or "path/to/the/base/draft",
        base_link=_link(base) if base else "it was trained on",
        base_revision=_git_revision(revision),
        trained=share,
    )


def _metadata(
    config: PreTrainedConfig,
    target: str | None,
    base_model: str | None,
    library: str,
    results: list[DecodingResult],
    license: str | None,
    tags: Sequence[str] = (),
) -> ModelCardData:
    recorded = config.training or {}
    license, datasets = license or recorded.get("license"), recorded.get("datasets")
    if license:
        check_license(license)
        terms = {"license": license}
    elif base_model or target:
        link = f"https://huggingface.co/{base_model or target}"
        terms = {"license": "other", "license_name": "terms-of-the-base-model", "license_link": link}
    else:
        terms = {"license": "unknown"}
    check_datasets(datasets or [])
    method, _, family = METHODS[config.model_type]
    entries = eval_results(results)
    return ModelCardData(
        base_model=base_model,
        base_model_relation="adapter" if base_model else None,
        datasets=datasets or None,
        eval_results=entries or None,
        model_name=f"{(target or 'target').split('/')[-1]}-{method}" if entries else None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=[*TAGS, method.lower(), config.model_type, family, *tags],
        **terms,
    )


def _render(
    template: str,
    config: PreTrainedConfig,
    target: str | None,
    data: ModelCardData,
    results: list[DecodingResult],
    **values,
) -> str:
    record = config.target or {}
    unnamed = f"a {text(record.get('architecture') or 'causal')} language model"
    method, paper, _ = METHODS[config.model_type]
    revision = _git_revision(record.get("revision")) if target else None
    plotted = [f"{result.data}: {_shares(result)}" for result, _ in _with_acceptance(results)]
    page = _templates.get_template(template).render(
        metadata=data.to_yaml(),
        method=method,
        paper=paper,
        target_name=target or unnamed,
        target_link=_link(target) if target else unnamed,
        target_id=target or "path/to/the/target",
        revision=f', revision="{revision}"' if revision else "",
        confidence=config.model_type == "deepseek_v41_dspark" and config.confidence_head,
        needs_blockdraft=record.get("model_type") in OWN_TARGET_TYPES,
        native_path=not decoding_limits(config),
        transformers_version=TRANSFORMERS_VERSION,
        drafted=config.num_drafted,
        results=results,
        figures={name: label for name, label in FIGURES.items() if any(name in r.figures for r in results)},
        plot="; ".join(plotted),
        plot_name=ACCEPTANCE_PLOT,
        serving=serving(config),
        training=_recipe(config),
        limits=_limits(config, revision),
        license_note=_license_note(data),
        **values,
    )
    page = re.sub(r"\n{3,}", "\n\n", page).rstrip("\n") + "\n"
    validate_card(page)
    return page


def card_of_repository(card: str, repo_id: str) -> str:
    """A card whose code names the repository that it lies in."""
    for written, published in (
        ('draft_id, commit = "user/draft"', f'draft_id, commit = "{repo_id}"'),
        ("blockdraft export user/draft ", f"blockdraft export {repo_id} "),
        ('"user/adapter", revision=', f'"{repo_id}", revision='),
    ):
        card = card.replace(written, published)
    return card


def text(value) -> str:
    """A value in one line of Markdown that shows as it is, whatever it holds."""
    line = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|$!~])", r"\\\1", line)


_templates.filters["text"] = text


def _link(repo_id: str) -> str:
    return f"[{repo_id}](https://huggingface.co/{repo_id})"


def _target(config: PreTrainedConfig) -> str | None:
    """The target's id. A local path says nothing to readers and much about its author's machine."""
    name = (config.target or {}).get("name_or_path")
    return name if is_hub_id(name) else None


def _git_revision(revision: str | None) -> str | None:
    """Only what can stand between quotes in code."""
    return revision if re.fullmatch(r"[\w.][\w./-]*", revision or "") else None


def _with_acceptance(results: list[DecodingResult]) -> list[tuple[DecodingResult, str]]:
    """Results whose acceptance by slot is known, and what else to say of their curve."""
    return [
        (result, f"tau {result.figures['tau']:.2f}" if "tau" in result.figures else result.protocol["decoding"])
        for result in results
        if result.acceptance
    ]


def _shares(result: DecodingResult) -> str:
    return ", ".join(f"{100 * share:.0f}" for share in result.acceptance) + " %"


def _facts(config: PreTrainedConfig) -> dict[str, str]:
    captured = "what enters their attention, the mean over its streams"
    if config.capture_point == LAYER_OUTPUT:
        captured = "their outputs"
    slots = f"{config.block_size - config.num_drafted} known, {config.num_drafted} drafted"
    if config.slot_layout == ANCHOR_FIRST:
        slots = "the first slot reads the last known token, every slot drafts the token after its own"
    record = config.target or {}
    fingerprints = {part: (record.get(f"{part}_sha256") or "")[:16] for part in ("weights", "embedding", "tokenizer")}
    facts = {
        "draft layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "block": f"{config.block_size} slots: {slots}",
        "mask token id": config.mask_token_id,
        "within the block": "each slot sees the earlier ones" if config.is_causal else "all slots see each other",
        "context window": _context_window(config),
        "target layers read": f"{', '.join(map(str, config.target_layer_ids))} of {config.num_target_layers}, "
        f"zero-based: {captured}",
        "target's class": record.get("architecture"),
        "target's revision": _git_revision(record.get("revision")) if _target(config) else None,
        "target in training": ", ".join(_loaded_as(record)),
        "target's fingerprint": ", ".join(f"{part} {sha}" for part, sha in fingerprints.items() if sha),
    }
    if config.model_type == "deepseek_v41_dspark":
        facts |= _dspark_facts(config)
    return {name: text(value) for name, value in facts.items() if value is not None and value != ""}


def _loaded_as(record: Mapping) -> list[str]:
    """The form that the target had: features of another one are other features."""
    quantization, adapters = record.get("quantization"), record.get("adapters")
    words = [record.get("dtype"), quantization and f"quantised ({quantization})"]
    return [str(word) for word in [*words, adapters and f"with adapters ({_cell(adapters)})"] if word]


def _dspark_facts(config: PreTrainedConfig) -> dict[str, str | None]:
    """What only a DSpark draft has."""
    confidence = temperatures = None
    if config.confidence_head:
        where = "after" if config.confidence_input == "post_norm" else "before"
        confidence = f"reads the state {where} the final norm ({config.confidence_input})"
        fitted = config.confidence_temperatures
        temperatures = ", ".join(f"{value:.3g}" for value in fitted) if fitted else "not calibrated"
    return {
        "experts": f"{config.n_routed_experts} in each layer, {config.num_experts_per_tok} of them and a shared one a "
        "token",
        "Markov head": f"rank {config.markov_rank}" if config.markov_rank else "none",
        "confidence head": confidence or "none",
        "confidence temperatures by slot": temperatures,
    }


def _recipe(config: PreTrainedConfig) -> dict[str, str]:
    """Objective and recipe as table cells, sorted: reading a config back may change the order."""
    objective, recipe = config.objective or {}, config.training or {}
    values = {"labels": LABELS.get(objective.get("loss_type"))}
    values |= dict(sorted(objective.items())) | dict(sorted(recipe.items()))
    cells = {name: _cell(value) for name, value in values.items() if name not in NOT_IN_TABLE}
    table = {text(name.replace("_", " ")): text(cell) for name, cell in cells.items() if cell}
    if datasets := recipe.get("datasets"):
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
    if isinstance(value, str) and re.match(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[/\\]|file:", value):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _context_window(config: PreTrainedConfig) -> str:
    if config.sliding_window is None:
        return "whole context"
    window = f"{config.sliding_window} tokens"
    if config.model_type != "kimi_k3_dflash" or not (full := config.num_full_attention_layers):
        return window
    return f"{window}; the last {'layer sees' if full == 1 else f'{full} layers see'} the whole context"


def _limits(config: PreTrainedConfig, revision: str | None) -> list[str]:
    exactly = " at this revision" if revision else ""
    limits = [
        f"Made for this target{exactly}: with another model, finetune or revision the text stays right, but fewer "
        "tokens are accepted.",
        *decoding_limits(config),
    ]
    if (config.target or {}).get("adapters"):
        limits.append("Its target had a PEFT adapter in training: load the target with the same one.")
    if config.model_type == "kimi_k3_dflash" and not config.is_causal and config.sliding_window is None:
        limits.append("Its masked slots carry no position, so all of them propose the same token.")
    if config.model_type == "deepseek_v41_dspark" and config.confidence_head and not config.confidence_temperatures:
        limits.append("Its confidence is not calibrated: `blockdraft calibrate` fits a temperature for each slot.")
    return limits


def _license_note(data: ModelCardData) -> str:
    if data.license == "other":
        return f"The weights come with no licence of their own: those of [the base model]({data.license_link}) apply."
    if data.license == "unknown":
        return "The licence of the weights has not been stated; the target's terms apply to what is made from it."
    return f"The weights are licensed under {data.license}."
