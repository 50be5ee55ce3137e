"""Publishing saved drafts on the Hugging Face Hub: which files, in one commit, and errors that say what to do."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelInfo,
    get_token,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from .card import CARD, card_of_repository, write_card
from .measurements import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LOADED,
    MEASURED,
    MODEL,
    WEIGHTS,
    is_model_of,
    is_one_of,
    measured_in,
    measured_on_the_hub,
)
from .rules import is_hub_id, validate_card

logger = logging.get_logger(__name__)

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
WAITS = (2.0, 4.0, 8.0)  # seconds between tries; the client waits on its own within one


class PublishError(OSError):
    """
    A push that did not succeed; the message is one line with the repository, the cause and what to do.

    Attributes:
        temporary (`bool`): whether the same push may succeed later.
    """

    def __init__(self, message: str, temporary: bool = False):
        super().__init__(message)
        self.temporary = temporary


def published_files(directory: str | os.PathLike) -> list[str]:
    """
    What of a saved draft, or of an adapter of one, belongs into its repository.

    Args:
        directory (`str` or `os.PathLike`):
            A directory that `DraftTrainer` or `save_pretrained` wrote.

    Returns:
        `list[str]`: config, weights, code, card, tokenizer, metrics and plots, as sorted paths relative to
        `directory`. Other files are left out: optimizer states, pickles, whatever else lies there.

    Raises:
        ValueError: if the directory is not a whole draft or holds links in place of files.
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
    if not base or _is_local_path(base):
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


def publish(
    directory: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: str | bool | None = None,
    checkpoints: Mapping[str, str | os.PathLike] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CommitInfo:
    """
    Uploads a saved draft in one commit. What an earlier push left there of another model, shards, an adapter,
    measurements and plots, is deleted in it.

    Server errors, broken connections and pushes that came in between are tried again, with growing waits.

    Args:
        directory (`str` or `os.PathLike`):
            The saved draft; of it goes what [`published_files`] lists.
        repo_id (`str`):
            `name` or `owner/name`. The repository is made if there is none.
        private (`bool`, *optional*):
            Whether a new repository is private. `True` also refuses to write into one that is public.
        revision (`str`, *optional*):
            Branch; made from the default branch if there is none.
        create_pr (`bool`, *optional*, defaults to `False`):
            Open a pull request instead.
        commit_message, commit_description (`str`, *optional*):
            Title and text of the commit.
        token (`str` or `bool`, *optional*):
            As in [`~huggingface_hub.HfApi`]. Best left out: log in with `hf auth login`, or set HF_TOKEN.
        checkpoints (`Mapping[str, str or os.PathLike]`, *optional*):
            Checkpoints to upload whole, to resume from, by their folder in the repository.
        sleep (`Callable[[float], None]`, *optional*):
            Waits between tries.

    Returns:
        [`~huggingface_hub.CommitInfo`]: of the commit, or of the branch's head where nothing has changed.

    Raises:
        ValueError: if the directory is not a whole draft, its card is not valid, or `repo_id` cannot be one.
        PublishError: if the Hub refuses or stays out of reach, or an adapter would come to lie beside a draft.
    """
    directory = Path(directory)
    files = published_files(directory)
    card = (directory / CARD).read_text(encoding="utf-8")
    validate_card(card)

    def push(api: HfApi) -> CommitInfo:
        repo = prepare_repository(api, repo_id, private)
        head = _head(api, repo, revision)
        there = [file.rfilename for file in head.siblings]
        if ADAPTER_CONFIG in files and any(is_one_of(name, WEIGHTS) for name in there):
            raise PublishError(
                f"{repo} was not published: it holds a whole model, which nobody could load without the adapter then. "
                "Push the adapter to another repository."
            )
        additions = [_addition(directory, name) for name in files if name != CARD]
        additions.append(CommitOperationAdd(CARD, card_of_repository(card, repo).encode()))
        for folder, checkpoint in (checkpoints or {}).items():
            additions += [_addition(Path(checkpoint), name, folder) for name in checkpoint_files(checkpoint)]
        new = {addition.path_in_repo for addition in additions}
        folders = tuple(f"{folder}/" for folder in checkpoints or {})
        left = [name for name in there if name not in new]
        stale = [name for name in left if name.startswith(folders) or is_one_of(name, LOADED)]
        measured = [name for name in left if is_one_of(name, MEASURED)]
        if measured and not is_model_of(api, repo, head.sha, additions):
            stale += measured
        return api.create_commit(
            repo,
            [*additions, *(CommitOperationDelete(path_in_repo=name) for name in stale)],
            commit_message=commit_message or "Upload draft",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            # Files that have not changed are not sent: on another parent, the draft would be a mixture of two pushes.
            parent_commit=head.sha,
        )

    return with_retries(push, repo_id, token, sleep)


def publish_model(
    draft: PreTrainedModel,
    repo_id: str,
    *,
    tags: Iterable[str] | None = None,
    max_shard_size: int | str = "50GB",
    **kwargs,
) -> CommitInfo:
    """
    Saves a draft with a fresh card and publishes it; `draft.push_to_hub` does this. The card has the measurements that
    lie where the draft was loaded from, if its weights and settings are still those: in a directory, or in the default
    branch of a repository.

    Args:
        draft ([`DraftPreTrainedModel`]): the draft.
        repo_id (`str`): `name` or `owner/name`.
        tags (`Iterable[str]`, *optional*): more tags for the card.
        max_shard_size (`int` or `str`, *optional*): as in `save_pretrained`.
        kwargs: those of [`publish`].
    """
    with tempfile.TemporaryDirectory() as directory:
        draft.save_pretrained(directory, max_shard_size=max_shard_size)
        metrics = _measured(draft.name_or_path, Path(directory), repo_id, kwargs.get("token"))
        path = write_card(directory, draft.config, metrics)
        if tags:
            card = ModelCard.load(path, ignore_metadata_errors=False)
            card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *tags]))
            card.save(path)
        return publish(directory, repo_id, **kwargs)


def _measured(source: str, saved: Path, repo_id: str, token: str | bool | None) -> dict | None:
    """`metrics.json` of the place that a draft was loaded from, if what is `saved` of it now is what lies there."""
    if os.path.isdir(source):
        return measured_in(source, saved)
    if not is_hub_id(source):
        return None
    additions = [_addition(saved, path.name) for path in saved.iterdir() if is_one_of(path.name, MODEL)]
    return with_retries(partial(measured_on_the_hub, source, additions), repo_id, token)


def prepare_repository(api: HfApi, repo_id: str, private: bool | None) -> str:
    """Makes the repository if there is none. Returns its full name."""
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo).private:
        raise PublishError(
            f"{repo} was not published: `private` is set, but the repository is public. Make it private in its "
            "settings, or take another one."
        )
    return repo


def _head(api: HfApi, repo: str, revision: str | None) -> ModelInfo:
    """The commit to build on, with its files."""
    try:
        return api.model_info(repo, revision=revision)
    except RevisionNotFoundError:
        api.create_branch(repo, branch=revision, exist_ok=True)
        return api.model_info(repo, revision=revision)


def _addition(directory: Path, name: str, folder: str = "") -> CommitOperationAdd:
    path = directory / name
    content = _without_local_paths(path) if name in ("config.json", "trainer_state.json") else None
    return CommitOperationAdd(
        path_in_repo=f"{folder}/{name}" if folder else name, path_or_fileobj=str(path) if content is None else content
    )


def _without_local_paths(path: Path) -> bytes | None:
    """The file without the target's or the best checkpoint's place on this machine; `None` if it names none."""
    values = json.loads(path.read_text(encoding="utf-8"))
    for record, key in ((values.get("target") or {}, "name_or_path"), (values, "best_model_checkpoint")):
        if record.get(key) and _is_local_path(record[key]):
            record[key] = os.path.basename(os.path.abspath(record[key]))
            return (json.dumps(values, indent=2) + "\n").encode()
    return None


def _is_local_path(name: str) -> bool:
    return name.startswith((".", "~")) or "\\" in name or os.path.isabs(name) or os.path.exists(name)


def with_retries(
    push: Callable[[HfApi], CommitInfo],
    repo_id: str,
    token: str | bool | None = None,
    sleep: Callable[[float], None] = time.sleep,
):
    """What `push` returns; it is tried again where that can help.

    Raises:
        ValueError: if `repo_id` cannot be a repository.
        PublishError: for everything else that the Hub, the client or the disk reports.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"`repo_id` is {repo_id!r}: give `name` or `owner/name`.") from error
    api = HfApi(token=token, library_name="blockdraft", library_version=version("blockdraft"))
    for tries, wait in enumerate((*WAITS, None), start=1):
        try:
            return push(api)
        except PublishError:
            raise
        except (OSError, ValueError, RuntimeError, HTTPError) as error:
            cause, temporary = _explain(error)
            if not temporary or wait is None:
                tried = f", tried {tries} times" if tries > 1 else ""
                message = f"{repo_id} was not published{tried}: {_scrub(cause, token)}"
                raise PublishError(message, temporary) from error
            logger.info(f"{repo_id}: {_scrub(cause, token)} Trying again in {wait:g} s.")
            sleep(wait)


def _explain(error: Exception) -> tuple[str, bool]:
    """Cause and mend of a failed push in one line, and whether to try again."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return "offline mode is on. Unset HF_HUB_OFFLINE and publish again.", False
    if isinstance(error, ValueError) and not isinstance(error, (HfHubHTTPError, json.JSONDecodeError)):
        return " ".join(str(error).split()), False
    for link in chain:
        if isinstance(link, HfHubHTTPError):
            return _explain_status(link.response.status_code, link.server_message)
        if found := re.search(r"HTTP status \w+ error \((\d{3})", str(link)):  # of hf_xet, within a ConnectionError
            return _explain_status(int(found[1]), None)
        if isinstance(link, LocalTokenNotFoundError) or (isinstance(link, PermissionError) and link.errno is None):
            return _explain_status(401, None)
    local = next((link for link in chain if isinstance(link, OSError) and link.errno and link.filename), None)
    if local is not None:
        return f"{Path(local.filename).name} could not be read ({local.strerror}).", False
    return f"the connection to the Hub broke ({type(chain[-1]).__name__}). Publish again later.", True


def _explain_status(status: int, said: str | None) -> tuple[str, bool]:
    said = f", {' '.join(said.split())}" if said else ""
    if status == 401:
        state = "the token is wrong or has expired" if get_token() else "nobody is logged in"
        return f"{state} (401). Log in with `hf auth login`, or set HF_TOKEN, and publish again.", False
    if status == 403:
        return f"no right to write there (403{said}). Take a token or a repository with write access.", False
    if status == 404:
        return f"the Hub does not find it (404{said}). Check its name, and that the token may read it.", False
    if status in (409, 412):
        return "another push came in between. Publish again.", True
    if status in (408, 429) or status >= 500:
        return f"the Hub did not answer ({status}{said}). Publish again later.", True
    return f"the Hub refused ({status}{said}).", False


def _scrub(message: str, token: str | bool | None) -> str:
    """Without tokens and folders of this machine, whoever put them into the message."""
    for secret in {token, get_token()}:
        if isinstance(secret, str) and secret:
            message = message.replace(secret, "***")
    message = re.sub(r"\bhf_\w{8,}", "***", message)
    return re.sub(r"(?<![\w:/.*])(?:/[^\s/'\"]+)+/", "", message)
