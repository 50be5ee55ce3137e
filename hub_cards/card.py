"""The model card of a saved draft, or of an adapter of one: templates filled with what its configuration states and
what was measured."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData, eval_result_entries_to_yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..modeling.families import family_of
from ..modeling.saving.atomic_save import staged_directory
from .facts import git_revision, recipe, target_class, target_id, text
from .plots import write_acceptance_plot
from .results import FEW_PROMPTS, FIGURES, DecodingResult, benchmark_entries, model_index, read_results
from .rules import OTHER, check_datasets, check_license, is_hub_id
from .serving import OWN_TARGET_TYPES, decoding_limits, engine_misfits_of, masked_slots_are_alike

CARD, METRICS, ACCEPTANCE_PLOT = "README.md", "metrics.json", "acceptance.png"
EVALUATION = ".eval_results/tau.yaml"  # where the Hub looks for figures of its benchmarks
# What a card calls its own repository. No repository can have this name, so a push fills it in wherever it is.
THIS_REPOSITORY = "<this repository>"
TARGETS_TERMS = "terms-of-the-base-model"
TRANSFORMERS_VERSION = "5.24"
TAGS = ["speculative-decoding", "draft-model", "blockdraft"]

logger = logging.get_logger(__name__)
_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_templates.filters["text"] = text


def write_card(
    directory: str | os.PathLike,
    config: PreTrainedConfig,
    metrics: Mapping[str, Mapping] | None = None,
    adapter: Mapping | None = None,
    **terms: str,
) -> Path:
    """Writes `README.md` of a draft, or of an adapter of one, and, where there are figures, `metrics.json` with them,
    `acceptance.png` if acceptance by slot is known, and `.eval_results/tau.yaml` for benchmarks of the Hub: the same
    bytes for the same arguments.

    Args:
        directory: The saved draft or adapter.
        config: The draft's config; for an adapter the base draft's, with the adapter's recipe in `training`. From it
            come target, objective and recipe, and with that licence and data sets.
        metrics: By data set, what `DecodingReport.headline()` returns, or a list of such, one for each protocol; see
            [`~blockdraft.hub_cards.results.read_results`].
        adapter: Of an adapter: `base` and `base_revision` (the base draft on the Hub, and its commit), `peft_type`
            ("LoRA" or "DoRA"), `r`, `trainable_parameters`, `total_parameters`.
        terms: `license`, and for `"other"` `license_name` and `license_link`, in place of the config's; see
            [`~blockdraft.hub_cards.rules.check_license`]. Without any, the card points to the terms of the target, or
            of the base draft.

    Returns:
        The card's path.

    Raises:
        ValueError: if licence, data sets or metrics cannot go into a card; the message says why.
    """
    directory, page, results = Path(directory), make_card(config, metrics, adapter, **terms), read_results(metrics)
    curves = [(result.curve_label, result.acceptance) for result in results if result.acceptance]
    entries = eval_result_entries_to_yaml(benchmark_entries(results))
    with staged_directory(directory) as staging:
        (staging / CARD).write_text(page, encoding="utf-8")
        if metrics:
            (staging / METRICS).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        if curves:
            write_acceptance_plot(staging / ACCEPTANCE_PLOT, curves)
        if entries:
            (staging / EVALUATION).parent.mkdir()
            (staging / EVALUATION).write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    for name, written in ((METRICS, metrics), (ACCEPTANCE_PLOT, curves), (EVALUATION, entries)):
        if not written:  # what is there belongs to other weights
            (directory / name).unlink(missing_ok=True)
    return directory / CARD


def rewrite_card(directory: str | os.PathLike, config: PreTrainedConfig) -> None:
    """Writes the card of a saved draft again, for a config that is about to replace the one in the directory and with
    the metrics there. A card that was edited by hand is kept beside it."""
    _keep_edited(directory, type(config).from_pretrained(directory))
    write_card(directory, config, saved_metrics(directory))


def add_to_card(directory: str | os.PathLike, config: PreTrainedConfig, data: str, *headlines: Mapping) -> None:
    """Adds measurements to the card of a saved draft, each in place of one of the same data set (`data`) by the same
    protocol; `headlines` are what `DecodingReport.headline()` returns. A card that was edited by hand is kept beside
    it."""
    _keep_edited(directory, config)
    metrics = saved_metrics(directory)
    earlier = metrics.get(data, [])
    earlier = [earlier] if isinstance(earlier, Mapping) else earlier
    protocols = [headline["protocol"] for headline in headlines]
    kept = [result for result in earlier if result["protocol"] not in protocols]
    write_card(directory, config, metrics | {data: [*kept, *headlines]})


def _keep_edited(directory: str | os.PathLike, config: PreTrainedConfig) -> None:
    """Copies a card that is not the one that config and metrics give, before another one replaces it, and warns."""
    card = Path(directory) / CARD
    if card.exists() and card.read_bytes() != make_card(config, saved_metrics(directory)).encode():
        edited = shutil.copy2(card, f"{card}.edited")
        logger.warning(f"The card is replaced. It had been edited: the edited one is kept, unpublished, as {edited}.")


def saved_metrics(directory: str | os.PathLike) -> dict:
    """`metrics.json` beside a card; empty if nothing was measured."""
    file = Path(directory) / METRICS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def make_card(
    config: PreTrainedConfig,
    metrics: Mapping[str, Mapping] | None = None,
    adapter: Mapping | None = None,
    **terms: str,
) -> str:
    """Text of a card; the arguments are those of [`write_card`]."""
    results, record, target, family = read_results(metrics), config.target or {}, target_id(config), family_of(config)
    if adapter is not None:
        base = adapter["base"] if is_hub_id(adapter["base"]) else None  # no place on its author's machine
        adapter = {**adapter, "base": base, "base_revision": git_revision(adapter["base_revision"]) if base else None}
    page = _templates.get_template("draft_card.md" if adapter is None else "adapter_card.md").render(
        config=config,
        settings=config.to_dict(),
        record=record,
        method=family.method,
        backbone=family.backbone,
        metadata=_metadata(config, results, adapter, terms),
        repository=THIS_REPOSITORY,
        target=target,
        target_name=target or f"a {text(record.get('architecture') or 'causal')} language model",
        revision=git_revision(record.get("revision")) if target else None,
        adapter=adapter,
        target_class=target_class(config),
        needs_blockdraft=record.get("model_type") in OWN_TARGET_TYPES,
        transformers_version=TRANSFORMERS_VERSION,
        results=results,
        few_prompts=FEW_PROMPTS,
        has_few_prompts=any(result.protocol["prompts"] < FEW_PROMPTS for result in results),
        figures={name: label for name, label in FIGURES.items() if any(name in r.figures for r in results)},
        plot="; ".join(f"{result.data}: {result.shares_text}" for result in results if result.acceptance),
        plot_name=ACCEPTANCE_PLOT,
        misfits=engine_misfits_of(config),
        training=recipe(config),
        limits=decoding_limits(config),
        slots_are_alike=masked_slots_are_alike(config),
        targets_terms=TARGETS_TERMS,
    )
    return re.sub(r"\n{3,}", "\n\n", page).rstrip("\n") + "\n"


def _metadata(
    config: PreTrainedConfig, results: list[DecodingResult], adapter: Mapping | None, terms: Mapping[str, str]
) -> ModelCardData:
    recorded, target, family = config.training or {}, target_id(config), family_of(config)
    check_datasets(datasets := recorded.get("datasets") or [])
    # The Hub knows adapter, merge, quantized and finetune. A draft is what an adapter is, a small part that is trained
    # beside a frozen model and is nothing without it. Listed as a finetune it would be offered in the model's place.
    base, entries = target if adapter is None else adapter["base"], model_index(results)
    kinds = [] if adapter is None else [" ".join(adapter["peft_type"].split()).lower()]
    return ModelCardData(
        base_model=base,
        base_model_relation="adapter" if base else None,
        datasets=datasets or None,
        eval_results=entries or None,
        model_name=f"{(target or 'target').split('/')[-1]}-{family.method.name}" if entries else None,
        library_name="transformers" if adapter is None else "peft",
        pipeline_tag="text-generation",
        tags=[*TAGS, family.method.name.lower(), config.model_type, family.backbone, *kinds],
        **_terms(terms or recorded, base or target),
    )


def _terms(stated: Mapping[str, str], base: str | None) -> dict[str, str]:
    """Licence, and for `other` its name and link: what is stated, or else a link to the base model's."""
    terms = {name: stated[name] for name in ("license", "license_name", "license_link") if stated.get(name)}
    check_license(**({"license": None} | terms))
    if terms:
        return terms
    if base is None:
        return {"license": "unknown"}
    return {"license": OTHER, "license_name": TARGETS_TERMS, "license_link": f"https://huggingface.co/{base}"}


def check_card(page: str) -> None:
    """Raises a `ValueError` unless a card has metadata that can be read; what they say, the Hub validates."""
    try:
        metadata = ModelCard(page).data.to_dict()
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"The card's metadata is not valid: {' '.join(str(error).split())}") from error
    if not metadata:
        raise ValueError("The card has no metadata: a README.md begins with a YAML block between two lines of `---`.")
