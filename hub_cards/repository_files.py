"""Which files of a saved draft, or of an adapter of one, go to its repository."""

import json
import os
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files
from transformers.trainer_utils import get_last_checkpoint

from .measurements import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MEASURED, WEIGHTS, is_one_of

# With the modules that `auto_map` leads to, all that is published.
PUBLISHED = (
    "config.json",
    "generation_config.json",
    *WEIGHTS,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "README.md",
    "LICENSE*",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "custom_generate/*.py",
    "custom_generate/requirements.txt",
    *MEASURED,
    "*_results.json",
    "*.png",
)
NEVER_PUBLISHED = "training_args.bin"  # a pickle of every setting


def published_files(directory: str | os.PathLike) -> list[str]:
    """
    Which files of a saved draft, or of an adapter of one, belong in its repository.

    Args:
        directory (`str` or `os.PathLike`):
            A directory that `DraftTrainer` or `save_pretrained` wrote.

    Returns:
        `list[str]`: config, weights, code, card, tokenizer, metrics and plots, as sorted paths relative to
        `directory`. All others are left out: optimizer states, pickles, whatever else is there.

    Raises:
        ValueError: if the directory is no complete draft, or holds links instead of files.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"There is no directory {directory}.")
    present = {
        path.relative_to(directory).as_posix()
        for pattern in PUBLISHED
        for path in directory.glob(pattern)
        if path.is_file() or path.is_symlink()
    }
    if ADAPTER_CONFIG in present:
        _check_adapter(directory, present)
    else:
        _check_draft(directory, present)
    files = sorted(present | _modules(directory, present))
    if "README.md" not in present:
        raise ValueError(
            f"{directory} has no model card (README.md): write one with `blockdraft.hub_cards.card.write_card`, or "
            "push the draft itself, `draft.push_to_hub(repo_id)`."
        )
    for name in files:
        folder = os.path.dirname(name)
        if (directory / name).is_symlink() or (folder and (directory / folder).is_symlink()):
            raise ValueError(f"{directory / name} is a link: push a directory that holds the files themselves.")
    return files


def _check_draft(directory: Path, present: set[str]) -> None:
    if "config.json" not in present:
        if last := get_last_checkpoint(directory):
            raise ValueError(
                f"{directory} is a training run without a final model: push a checkpoint, the last is {last}."
            )
        raise ValueError(f"{directory} holds no config.json: give the directory of a saved draft.")
    if "model.safetensors.index.json" in present:
        index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
        if missing := sorted(set(index["weight_map"].values()) - present):
            raise ValueError(f"{directory} lacks {missing[0]}, which its weights' index names: save the draft again.")
    elif "model.safetensors" not in present:
        raise ValueError(f"{directory} holds no weights (model.safetensors): save the draft again.")
    if "AutoModel" not in _auto_map(directory / "config.json"):
        raise ValueError(
            f"{directory / 'config.json'} names no code of a draft (`auto_map`): give a directory that a draft's own "
            "`save_pretrained` wrote."
        )


def _check_adapter(directory: Path, present: set[str]) -> None:
    if ADAPTER_WEIGHTS not in present:
        raise ValueError(f"{directory} holds no weights ({ADAPTER_WEIGHTS}): save the adapter again.")
    base = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or is_local_path(base):
        raise ValueError(
            f"`base_model_name_or_path` in {directory / ADAPTER_CONFIG} names no repository ({base or 'nothing'}): "
            "push the base draft first, and train the adapter on it under that name."
        )
    if any(is_one_of(name, WEIGHTS) for name in present):
        raise ValueError(f"{directory} holds a draft and an adapter: push each from a directory of its own.")


def _auto_map(config: Path) -> dict:
    return json.loads(config.read_text(encoding="utf-8")).get("auto_map") or {}


def _modules(directory: Path, present: set[str]) -> set[str]:
    """Python files beside the weights."""
    configs = sorted(present & {"config.json", "tokenizer_config.json"})
    return {module for name in configs for module in code_files(directory / name)}


def code_files(config: Path) -> set[str]:
    """Names of the Python files that the `auto_map` of a configuration leads to, and of what they import.

    Raises:
        ValueError: if one is not beside the configuration.
    """
    modules = set()
    for names in _auto_map(config).values():
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
    directory = Path(directory)
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    names = (path.relative_to(directory) for path in paths)
    return sorted(
        name.as_posix()
        for name in names
        if name.name != NEVER_PUBLISHED and not any(part.startswith(".") for part in name.parts)
    )


def is_local_path(name: str) -> bool:
    return name.startswith((".", "~")) or "\\" in name or os.path.isabs(name) or os.path.exists(name)
