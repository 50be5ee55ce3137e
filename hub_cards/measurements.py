"""Which files hold measurements of a draft, and whether a draft is still the one that was measured."""

import filecmp
import json
import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

from .card import EVALUATION, METRICS

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Files of an earlier push that would be loaded with the model of a later one, or in its place.
LOADED = (*WEIGHTS, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
MODEL = ("config.json", *LOADED)
# They belong to the model beside them: a push of another model deletes those that it does not replace. Other plots may
# be the owner's.
MEASURED = (
    METRICS,
    EVALUATION,
    "report.json",
    "report.md",
    "calibration.json",
    "calibration.md",
    "all_results.json",
    "eval_results.json",
    "train_results.json",
    "acceptance.png",
    "acceptance_by_slot.png",
    "acceptance_in_training.png",
    "accepted_lengths.png",
    "expert_load.png",
    "loss.png",
    "reliability.png",
    "round_time.png",
)


def is_one_of(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file has such a name; patterns are for files beside the weights, not in folders."""
    return any(name == pattern or "/" not in name and fnmatch(name, pattern) for pattern in patterns)


def measured_in(directory: str | os.PathLike, saved: Path) -> dict | None:
    """`metrics.json` of the directory that a draft was loaded from, if the draft there is the one `saved` now: its
    weights byte for byte, and its configuration but for the versions that wrote it."""
    metrics, config = Path(directory, METRICS), Path(directory, "config.json")
    if not (metrics.is_file() and config.is_file()):
        return None
    weights = {path.name for path in saved.iterdir() if is_one_of(path.name, WEIGHTS)}
    same, *_ = filecmp.cmpfiles(directory, saved, weights, shallow=False)
    if _settings(config.read_bytes()) != _settings((saved / "config.json").read_bytes()) or set(same) != weights:
        return None
    return json.loads(metrics.read_text(encoding="utf-8"))


def measured_on_the_hub(repo: str, saved: Iterable[CommitOperationAdd], api: HfApi) -> dict | None:
    """[`measured_in`] for the head of a repository's default branch."""
    try:
        commit = api.model_info(repo).sha
        metrics = api.hf_hub_download(repo, METRICS, revision=commit)
    except (RepositoryNotFoundError, RemoteEntryNotFoundError):  # gone since then, or nothing was measured
        return None
    return json.loads(Path(metrics).read_text(encoding="utf-8")) if is_model_of(api, repo, commit, saved) else None


def is_model_of(api: HfApi, repo: str, commit: str, saved: Iterable[CommitOperationAdd]) -> bool:
    """Whether the model at a commit is the one that was saved, compared as in [`measured_in`]."""
    there = {file.path: file for file in api.list_repo_tree(repo, revision=commit) if is_one_of(file.path, MODEL)}
    here = {addition.path_in_repo: addition for addition in saved if is_one_of(addition.path_in_repo, MODEL)}

    def is_same(name: str) -> bool:
        if name.endswith(".json"):
            settings = Path(api.hf_hub_download(repo, name, revision=commit)).read_bytes()
            with here[name].as_file() as file:
                return _settings(file.read()) == _settings(settings)
        large = there[name].lfs
        return large is not None and large.sha256 == here[name].upload_info.sha256.hex()

    return there.keys() == here.keys() and all(map(is_same, here))


def _settings(content: bytes) -> dict | None:
    """A configuration without the versions that wrote it; `None` if it is damaged."""
    try:
        settings = json.loads(content)
    except ValueError:
        return None
    return {name: value for name, value in settings.items() if name not in ("transformers_version", "peft_version")}
