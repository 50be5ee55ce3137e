"""Targets, drafts and their trainers: loaded by name, or new."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields

import torch
from peft import PeftConfig
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, logging

from ..configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from ..modeling.families import DFLASH, DSPARK, FAMILIES, family_of
from ..modeling.target.decoded_weights import load_decoded
from ..modeling.target.embedding_and_head import load_embedding_and_head
from ..modeling.target.mask_tokens import propose_mask_token_ids
from ..modeling.target.pairing import check_is_draft
from .adapters import is_adapter, load_merged
from .draft_trainer import DraftTrainer
from .dspark_trainer import DSparkTrainer
from .sharding import apart_from_zero3

logger = logging.get_logger(__name__)

TRAINERS = {DFLASH: DraftTrainer, DSPARK: DSparkTrainer}


@apart_from_zero3()
def load_target(
    name: str,
    revision: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    layers: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in evaluation mode, on a GPU where there is one, and its tokenizer; without `layers` only what
    [`load_embedding_and_head`] loads. Raises a `ValueError` for a local path that does not exist, or weights that
    nothing decodes, an `OSError` for what the Hub does not have."""
    check_path("target", name)
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    known_by = auto_class(name, **where)
    if not layers:
        settings = {"dtype": dtype, "device": default_device(), "auto_class": known_by}
        return load_embedding_and_head(name, **settings, **where), tokenizer
    target = load_decoded(known_by.from_pretrained, name, dtype=dtype, device_map=device_map, **where).eval()
    return (target if device_map else target.to(default_device())), tokenizer


def auto_class(name: str, **where) -> type:
    """The Auto class that knows a target: of the models that read images or sound beside text, many are not among the
    causal language models."""
    if is_adapter(name, where["revision"]) and not os.path.isfile(os.path.join(name, CONFIG_NAME)):
        # Its base's; the revision is the adapter's.
        name, where = PeftConfig.from_pretrained(name, revision=where["revision"]).base_model_name_or_path, {}
    config = type(AutoConfig.from_pretrained(name, **where))
    is_multimodal = config in MODEL_FOR_MULTIMODAL_LM_MAPPING and config not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM


@apart_from_zero3()
def load_draft(
    name: str, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedModel:
    """A saved draft, or a base draft with a saved adapter merged into it, in evaluation mode, on a GPU where there is
    one. `revision` is a commit, branch or tag of the repository that holds the draft or the adapter. Raises a
    `ValueError` for a local path that does not exist or holds no draft, an `OSError` for what the Hub does not
    have."""
    check_draft(name, revision)
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "revision": revision}
    if is_adapter(name, revision):
        draft = load_merged(name, **options)
    else:
        check_is_draft(name, revision)
        draft = load_decoded(AutoModel.from_pretrained, name, **options)
    return draft.to(default_device()).eval()


def new_draft(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft_type: str = "dflash",
    mask_token_id: int | None = None,
    rows: Iterable[Mapping] | None = None,
    **shape,
) -> PreTrainedModel:
    """
    An untrained fp32 draft for a target.

    Args:
        draft_type: a name in [`~blockdraft.modeling.families.FAMILIES`].
        mask_token_id: default: the first of [`propose_mask_token_ids`], which is printed.
        rows: the data, for a target whose vocabulary has no token that is free in any text.
        shape: that of the configuration's `from_target_config`.

    Raises:
        ValueError: if a setting of the shape cannot be, or is not one of this family's.
    """
    check_shape(draft_type, shape)
    family = FAMILIES[draft_type]
    # A DeepSeek V4.1 target names the mask token of its DSpark draft.
    named = family.method == DSPARK and isinstance(target.config.get_text_config(), DeepseekV41TextConfig)
    if mask_token_id is None and not named:
        mask_token_id = propose_mask_token_ids(tokenizer, len(target.get_input_embeddings().weight), rows)[0]
        token = tokenizer.convert_ids_to_tokens(mask_token_id) or "a row of the embedding without a token"
        print(f"mask_token_id: {mask_token_id}, {token}", flush=True)
    return family.model(family.config.from_target_config(target.config, mask_token_id=mask_token_id, **shape))


def check_shape(draft_type: str, shape: Iterable[str]) -> None:
    """Raises a `ValueError` if there is no such family of drafts, or a setting in `shape` is not one of its, which
    `from_target_config` would keep as an attribute without a meaning."""
    if draft_type not in FAMILIES:
        raise ValueError(f"`draft_type` is {draft_type!r}; choose one of {', '.join(FAMILIES)}.")
    # What `from_target_config` takes beside the target's configuration.
    settings = {
        name: {"num_draft_layers"} | {field.name for field in fields(family.config)}
        for name, family in FAMILIES.items()
    }
    for name in shape:
        if name not in settings[draft_type]:
            owners = [owner for owner, known in settings.items() if name in known]
            whose = f"belongs to `draft_type` {' or '.join(owners)}" if owners else "is not a setting of a draft"
            raise ValueError(f"`{name}` {whose}; this draft is a {draft_type}.")


def new_trainer(draft: PreTrainedModel, *args, **kwargs) -> DraftTrainer:
    """The trainer of a draft's method; the arguments are those of [`DraftTrainer`]."""
    return TRAINERS[family_of(draft.config).method](draft, *args, **kwargs)


def check_path(setting: str, name: str) -> None:
    """Raises a `ValueError` for a path that looks local and does not exist, before the Hub is asked for it."""
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"`{setting}`: there is no directory {name}")


def check_draft(name: str, revision: str | None) -> None:
    """[`check_path`] of a draft; warns of a revision beside a directory."""
    check_path("draft", name)
    if revision and os.path.isdir(name):
        logger.warning(f"`draft_revision` is ignored: `draft` is a directory, {name}.")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
