"""Publishing a saved draft on the Hugging Face Hub, in one commit."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelInfo
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import PreTrainedModel

from .card import CARD, METRICS, THIS_REPOSITORY, check_card, saved_metrics, write_card
from .repository_files import (
    ADAPTER_CONFIG,
    LOADED,
    MEASURED,
    MODEL,
    WEIGHTS,
    checkpoint_files,
    is_local_path,
    is_one_of,
    model_at,
    model_in,
    published_files,
)
from .retries import PublishError, with_retries
from .rules import is_hub_id


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
    """Uploads a saved draft in one commit, which also deletes what an earlier push left of another model: shards, an
    adapter, measurements and plots. After server errors, broken connections and other people's pushes it tries again,
    with growing waits.

    Args:
        directory: The saved draft; [`published_files`] lists what is uploaded.
        repo_id: `name` or `owner/name`. The repository is made if there is none.
        private: Whether a new repository is private. `True` also refuses to write into one that is public.
        revision: Branch; made from the default branch if there is none of that name.
        create_pr: Open a pull request instead.
        commit_message, commit_description: Title and text of the commit.
        token: As in [`~huggingface_hub.HfApi`]. Best left out: log in with `hf auth login`, or set HF_TOKEN.
        checkpoints: Whole checkpoints to upload as well, to resume from, by their folder in the repository.
        sleep: Waits between tries.

    Returns:
        [`~huggingface_hub.CommitInfo`]: of the commit, or of the branch's head where nothing has changed.

    Raises:
        ValueError: if the directory is not a whole draft, its card is not valid, or `repo_id` cannot be one.
        PublishError: if the Hub refuses or cannot be reached, or if an adapter is pushed to a draft's repository.
    """
    directory = Path(directory)
    files = published_files(directory)
    card = (directory / CARD).read_text(encoding="utf-8")
    check_card(card)

    def push(api: HfApi) -> CommitInfo:
        repo = prepare_repository(api, repo_id, private)
        head = _head(api, repo, revision)
        there = [file.rfilename for file in head.siblings]
        if ADAPTER_CONFIG in files and any(is_one_of(name, WEIGHTS) for name in there):
            raise PublishError(
                f"{repo} was not published: it holds a whole model, which nobody could then load without the adapter. "
                "Push the adapter to another repository."
            )
        additions = [_addition(directory, name) for name in files if name != CARD]
        additions.append(CommitOperationAdd(CARD, card.replace(THIS_REPOSITORY, repo).encode()))
        for folder, checkpoint in (checkpoints or {}).items():
            additions += [_addition(Path(checkpoint), name, folder) for name in checkpoint_files(checkpoint)]
        new = {addition.path_in_repo for addition in additions}
        folders = tuple(f"{folder}/" for folder in checkpoints or {})
        left = [name for name in there if name not in new]
        stale = [name for name in left if name.startswith(folders) or is_one_of(name, LOADED)]
        measured = [name for name in left if is_one_of(name, MEASURED)]
        if measured and model_at(api, repo, head.sha) != model_in(additions):
            stale += measured
        return api.create_commit(
            repo,
            [*additions, *(CommitOperationDelete(path_in_repo=name) for name in stale)],
            commit_message=commit_message or "Upload draft",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
            # Files that have not changed are not sent: on another parent, the commit would mix two pushes.
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
    """Saves a draft with a new card and publishes it; this is `draft.push_to_hub`. While the draft's weights and
    settings are those that it was loaded with, the card keeps the measurements of the place it was loaded from: a
    directory, or the default branch of a repository.

    Args:
        tags: more tags for the card.
        max_shard_size: as in `save_pretrained`.
        repo_id, kwargs: those of [`publish`].
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
    """`metrics.json` of the place that a draft was loaded from, if the draft there is the one that was `saved` now."""

    def on_the_hub(api: HfApi) -> dict | None:
        try:
            commit = api.model_info(source).sha
            metrics = saved_metrics(Path(api.hf_hub_download(source, METRICS, revision=commit)).parent)
        except (RepositoryNotFoundError, RemoteEntryNotFoundError):  # gone since then, or nothing was measured
            return None
        return metrics if model_at(api, source, commit) == _model(saved) else None

    if os.path.isdir(source):
        metrics = saved_metrics(source)
        return metrics if metrics and _model(Path(source)) == _model(saved) else None
    return with_retries(on_the_hub, repo_id, token) if is_hub_id(source) else None


def _model(directory: Path) -> dict:
    return model_in(_addition(directory, file.name) for file in directory.iterdir() if is_one_of(file.name, MODEL))


def prepare_repository(api: HfApi, repo_id: str, private: bool | None) -> str:
    """Makes the repository if there is none. Returns its full name."""
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo).private:
        raise PublishError(
            f"{repo} was not published: `private` is set, but the repository is public. Make it private in its "
            "settings, or take another one."
        )
    return repo


def prepare_pushes(api: HfApi, repo_id: str, private: bool | None) -> str:
    """[`prepare_repository`] for pushes to come; the Hub also says now if they may not write there."""
    repo = prepare_repository(api, repo_id, private)
    api.auth_check(repo, write=True)  # a repository that exists is found without the right to write
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
        if record.get(key) and is_local_path(record[key]):
            record[key] = os.path.basename(os.path.abspath(record[key]))
            return (json.dumps(values, indent=2) + "\n").encode()
    return None
