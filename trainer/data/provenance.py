"""Whose answers the rows of a file are: what `blockdraft regenerate` records beside them, and how it is read."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...hub_cards.rules import is_repo_id
from ...modeling.ops.number_formats import dtype_name
from ...modeling.target.target_identity import is_other_revision, weights_fingerprint

logger = logging.get_logger(__name__)

OWN_ANSWERS = "the target's own"
MUST_AGREE = ("target", "revision", "chat_template_sha256", "template_kwargs")  # in what `regenerate` recorded


def provenance_path(path: str | Path) -> Path:
    """Where `blockdraft regenerate` keeps the settings of the rows in `path`."""
    return Path(f"{path}.provenance.json")


def chat_template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a tokenizer's chat template."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()


def answers_of(
    names: Sequence[str | Path],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_revision: str | None = None,
) -> str:
    """Whose answers a draft learns from, for its card: a target is best drafted by what learned from its own. Warns of
    files by `blockdraft regenerate` that are not known to be this target's, which was loaded at `target_revision`."""
    files = {str(name) for name in names}
    written = read_provenance(sorted(files))
    if not written:
        return "those of the data"
    authors = [author(settings, target, tokenizer, target_revision) for settings in written.values()]
    answers = next((answers for answers in authors if answers != OWN_ANSWERS), OWN_ANSWERS)
    if answers != OWN_ANSWERS:
        writer = next(iter(written.values()))["target"]  # of all of them
        logger.warning(
            f"The answers in {', '.join(written)} are {answers}: `blockdraft regenerate` wrote them with "
            f"{writer}, the target is {target.config.name_or_path}. Where that makes a difference, the draft learns "
            "what its target would not say: regenerate them with this target and its chat template."
        )
    return answers if len(written) == len(files) else f"partly {answers}"


def author(
    settings: dict, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target_revision: str | None
) -> str:
    """Whose the answers are that `blockdraft regenerate` wrote under `settings`: `OWN_ANSWERS` if they are this
    target's by its weights or, where those cannot be compared, by name (or folder) and commit; else whose, by name."""
    name, here = settings["target"], target.config.name_or_path
    folders = os.path.isdir(name) and os.path.isdir(here)
    same_name = name == here or (folders and os.path.samefile(name, here))
    # A card is published, its author's folders are not.
    shown = (name if is_repo_id(name) and not os.path.isdir(name) else Path(name).name) or "an unnamed model"
    same_dtype = settings.get("dtype") == dtype_name(target.dtype)  # a cast changes weights
    recorded = settings.get("weights_sha256") if same_dtype else None
    weights = recorded and weights_fingerprint(target)
    if weights:
        if weights != recorded:
            return f"those of {shown} with other weights" if same_name else f"those of {shown}"
    elif not same_name:
        return f"those of {shown}"
    elif is_other_revision(settings["revision"], target_revision):
        return f"those of {shown} at revision {settings['revision']}"
    if settings["chat_template_sha256"] != chat_template_digest(tokenizer):
        return f"{OWN_ANSWERS} under another chat template"
    return OWN_ANSWERS


def read_settings(path: Path) -> dict:
    """The settings in a file by `blockdraft regenerate`; raises `ValueError` if it is damaged."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        if missing := [key for key in MUST_AGREE if key not in settings]:
            raise KeyError(*missing)
        return settings
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"data: {path} is damaged ({error!r}). Restore it, or delete it: its rows are then of unknown origin."
        ) from error


def read_provenance(names: list[str]) -> dict[str, dict]:
    """The settings of those files that `blockdraft regenerate` wrote; they must agree on target and template."""
    found = {name: provenance_path(name) for name in names}
    settings = {name: read_settings(path) for name, path in found.items() if path.is_file()}
    for name, other in settings.items():
        first_name, first = next(iter(settings.items()))
        for key in MUST_AGREE:
            if other[key] != first[key]:
                raise ValueError(
                    f"data: {name} was regenerated with {key}={other[key]!r}, {first_name} with {first[key]!r}; "
                    "a draft learns one target under one template: train on sets made alike"
                )
    return settings
