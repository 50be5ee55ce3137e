"""Which files of a saved draft, or of an adapter of one, go to its repository, and which of them are the model."""

import json
import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.trainer_utils import get_last_checkpoint

from .card import EVALUATION, METRICS

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TRAINING_ARGUMENTS = "training_args.json"
# Files of an earlier push that would be loaded with the model of a later one, or in its place.
LOADED = (*WEIGHTS, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
MODEL = ("config.json", *LOADED)
# They belong to the model beside them: a push of another model deletes those that it does not replace. Other plots may
# be the owner's.
MEASURED = (
    METRICS,
    EVALUATION,
    TRAINING_ARGUMENTS,
    *"report.json report.md calibration.json calibration.md".split(),
    *"all_results.json eval_results.json train_results.json".split(),
    *"acceptance.png acceptance_by_slot.png acceptance_in_training.png accepted_lengths.png".split(),
    *"expert_load.png loss.png reliability.png round_time.png".split(),
)
# With the modules that `auto_map` leads to, all that is published.
PUBLISHED = (
    *MODEL,
    *"generation_config.json README.md LICENSE*".split(),
    *"tokenizer.json tokenizer_config.json tokenizer.model tiktoken.model spiece.model".split(),
    *"special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt".split(),
    *"chat_template.jinja additional_chat_templates/*.jinja".split(),
    *"custom_generate/*.py custom_generate/requirements.txt".split(),
    *MEASURED,
    *"*_results.json *.png".split(),
)
NEVER_PUBLISHED = "training_args.bin"  # a pickle of every setting


def is_one_of(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file has such a name; patterns are for files beside the weights, not in folders."""
    return any(name == pattern or "/" not in name and fnmatch(name, pattern) for pattern in patterns)


def is_local_path(name: str) -> bool:
    return name.startswith((".", "~")) or "\\" in name or os.path.isabs(name) or os.path.exists(name)


def published_files(directory: str | os.PathLike) -> list[str]:
    """Which files of a directory that `DraftTrainer` or `save_pretrained` wrote belong in its repository.

    Returns:
        Config, weights, code, card, tokenizer, metrics and plots, as sorted paths relative to `directory`. All others
        are left out: optimizer states, pickles, whatever else is there.

    Raises:
        ValueError: if the directory is no complete draft, or holds links instead of files.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"There is no directory {directory}.")
    found = {path for pattern in PUBLISHED for path in directory.glob(pattern) if path.is_file() or path.is_symlink()}
    files = {path.relative_to(directory).as_posix() for path in found}
    (_check_adapter if ADAPTER_CONFIG in files else _check_draft)(directory, files)
    for name in sorted(files & {"config.json", "tokenizer_config.json"}):
        files |= code_files(directory / name)
    if "README.md" not in files:
        raise ValueError(
            f"{directory} has no model card (README.md): write one with `blockdraft.hub_cards.card.write_card`, or "
            "push the draft itself, `draft.push_to_hub(repo_id)`."
        )
    for name in sorted(files):
        if (directory / name).resolve() != directory.resolve() / name:
            raise ValueError(f"{directory / name} is a link: push a directory that holds the files themselves.")
    return sorted(files)


def _check_draft(directory: Path, files: set[str]) -> None:
    if "config.json" not in files:
        if last := get_last_checkpoint(directory):
            raise ValueError(
                f"{directory} is a training run without a final model: push a checkpoint, the last is {last}."
            )
        raise ValueError(f"{directory} holds no config.json: give the directory of a saved draft.")
    if "model.safetensors.index.json" in files:
        shards = _read(directory / "model.safetensors.index.json")["weight_map"].values()
        if missing := sorted(set(shards) - files):
            raise ValueError(f"{directory} lacks {missing[0]}, which its weights' index names: save the draft again.")
    elif "model.safetensors" not in files:
        raise ValueError(f"{directory} holds no weights (model.safetensors): save the draft again.")
    if "AutoModel" not in (_read(directory / "config.json").get("auto_map") or {}):
        raise ValueError(
            f"{directory / 'config.json'} names no code of a draft (`auto_map`): give a directory that a draft's own "
            "`save_pretrained` wrote."
        )


def _check_adapter(directory: Path, files: set[str]) -> None:
    if ADAPTER_WEIGHTS not in files:
        raise ValueError(f"{directory} holds no weights ({ADAPTER_WEIGHTS}): save the adapter again.")
    base = _read(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or is_local_path(base):
        raise ValueError(
            f"`base_model_name_or_path` in {directory / ADAPTER_CONFIG} names no repository ({base or 'nothing'}): "
            "push the base draft first, and train the adapter on it under that name."
        )
    if any(is_one_of(name, WEIGHTS) for name in files):
        raise ValueError(f"{directory} holds a draft and an adapter: push each from a directory of its own.")


def _read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def code_files(config: Path) -> set[str]:
    """Names of the Python files that the `auto_map` of a configuration leads to, and of what they import.

    Raises:
        ValueError: if one is not beside the configuration.
    """
    modules = set()
    for names in (_read(config).get("auto_map") or {}).values():
        for name in [names] if isinstance(names, str) else names:
            if name is None or "--" in name:  # code of another repository
                continue
            file = config.parent / f"{name.split('.')[0]}.py"
            try:
                modules |= {file.name, *(Path(path).name for path in get_relative_import_files(file))}
            except FileNotFoundError as error:
                lacking = Path(error.filename).name
                raise ValueError(
                    f"{config.parent} lacks {lacking}, which {config.name} leads to: save the draft again."
                ) from error
    return modules


def checkpoint_files(directory: str | os.PathLike) -> list[str]:
    """All files that resuming needs, relative to the checkpoint; no pickled arguments, nothing hidden, no links."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file() and not path.is_symlink()]
    names = [path.relative_to(directory) for path in paths if path.name != NEVER_PUBLISHED]
    return sorted(name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts))


# ---- which model is it? ---------------------------------------------------------------------------------------------


def model_in(additions: Iterable[CommitOperationAdd]) -> dict[str, dict | str | None]:
    """What makes the model that files are of, by file name: its weights' SHA-256, and its settings without the
    versions that wrote them."""
    found = {}
    for addition in additions:
        if is_one_of(name := addition.path_in_repo, MODEL):
            with addition.as_file() as file:
                found[name] = _settings(file.read()) if name.endswith(".json") else addition.upload_info.sha256.hex()
    return found


def model_at(api: HfApi, repo: str, commit: str) -> dict[str, dict | str | None]:
    """[`model_in`] of a commit on the Hub."""
    found = {}
    for file in api.list_repo_tree(repo, revision=commit):
        if is_one_of(file.path, MODEL):
            found[file.path] = file.lfs and file.lfs.sha256
            if file.path.endswith(".json"):
                found[file.path] = _settings(Path(api.hf_hub_download(repo, file.path, revision=commit)).read_bytes())
    return found


def _settings(content: bytes) -> dict | None:
    """`None` if they are damaged."""
    try:
        settings = json.loads(content)
    except ValueError:
        return None
    return {name: value for name, value in settings.items() if name not in ("transformers_version", "peft_version")}
