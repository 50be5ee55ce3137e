"""What [`DraftTrainer`] puts on the Hub and when: checkpoints while it trains, the saved draft at the end."""

import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import RLock

from huggingface_hub import CommitInfo
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import logging

from ..hub_cards.upload import (
    PublishError,
    checkpoint_files,
    prepare_repository,
    publish,
    published_files,
    with_retries,
)
from .adapters import check_publishable

logger = logging.get_logger(__name__)

# In the run's directory: links to the files of checkpoints that are on their way to the Hub.
UNPUBLISHED = "unpublished"
WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


class CheckpointPublisher:
    """
    Publishes checkpoints in a thread of its own, one after another. One that fails, or that comes while another is on
    its way, is owed: it goes up with the next one, or at the end. A newer checkpoint replaces an owed one, unless all
    are to be kept (`hub_strategy="all_checkpoints"`): then what a run that was cut off owes is owed by the next one.

    Attributes:
        failures (`int`): pushes that did not succeed.
        error (`PublishError` or `ValueError`, *optional*): why the last push did not succeed; `None` if it did.
        published (`CommitInfo`, *optional*): the last one that did.
    """

    def __init__(self, args, repo_id: str):
        self.failures = 0
        self.error: Exception | None = None
        self.published: CommitInfo | None = None
        self._strategy, self._always = args.hub_strategy, args.hub_always_push
        self._publish = partial(publish, repo_id=repo_id, private=args.hub_private_repo, revision=args.hub_revision)
        self._repo_id = repo_id
        self._staging = Path(args.output_dir) / UNPUBLISHED
        self._owed = self._left_by_an_earlier_run()  # oldest first
        self._lock = RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._job: Future | None = None

    def submit(self, checkpoint: str | os.PathLike) -> None:
        """Starts to publish a complete checkpoint, which may be deleted from then on."""
        try:
            snapshot = self._snapshot(Path(checkpoint))
        except Exception as error:  # whatever happens to a push, training goes on
            self._failed(error)
            return
        if self._job is not None and not self._job.done() and not self._always:
            self._owe([snapshot])
        else:
            self._job = self._thread.submit(self._run, snapshot)

    def finish(self) -> None:
        """Waits for what is on its way and tries once more what is owed."""
        self.wait()
        if self._owed:
            self._run(self._owed.pop())
        if self._owed:
            logger.warning(
                f"Not on the Hub: {_names(self._owed)}. `blockdraft push DIR {self._repo_id}` publishes a checkpoint."
            )
        self.forget()

    def forget(self) -> None:
        """Drops what is owed."""
        self._drop(self._owed)
        self._owed = []

    def wait(self) -> None:
        if self._job is not None:
            self._job.result()

    def publish(self, directory: str | os.PathLike, **kwargs) -> CommitInfo:
        """Publishes a saved draft; the arguments are those of [`publish`]. Raises what that raises."""
        self.wait()
        try:
            self.published, self.error = self._publish(directory, **kwargs), None
        except (PublishError, ValueError) as error:
            self.error = error
            raise
        return self.published

    def start(self, directory: str | os.PathLike, **kwargs) -> Future:
        """[`~CheckpointPublisher.publish`] in the thread, after what is on its way."""
        return self._thread.submit(self._publish, directory, **kwargs)

    def _run(self, snapshot: Path) -> None:
        with self._lock:
            owed, self._owed = self._owed, []
        folders = {}
        if self._strategy == HubStrategy.CHECKPOINT:
            folders = {"last-checkpoint": snapshot}
        elif self._strategy == HubStrategy.ALL_CHECKPOINTS:
            folders = {path.name: path for path in (*owed, snapshot)}
        step = snapshot.name.rpartition("-")[-1]
        try:
            commit = self._publish(snapshot, commit_message=f"Training in progress, step {step}", checkpoints=folders)
        except Exception as error:  # whatever happens to a push, training goes on
            self._owe([*owed, snapshot], before=True)
            self._failed(error)
        else:
            self.published, self.error = commit, None
            self._drop([*owed, snapshot])

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.error = error
        logger.warning(f"A push failed, the next one makes up for it: {error}")

    def _owe(self, snapshots: list[Path], before: bool = False) -> None:
        with self._lock:
            self._owed = [*snapshots, *self._owed] if before else [*self._owed, *snapshots]
            if self._strategy != HubStrategy.ALL_CHECKPOINTS:
                self._drop(self._owed[:-1])
                self._owed = self._owed[-1:]

    def _snapshot(self, checkpoint: Path) -> Path:
        """The checkpoint's files under the same name elsewhere: deleting the checkpoint does not touch them."""
        files = published_files(checkpoint)
        if self._strategy in WITH_CHECKPOINTS:
            files = sorted({*files, *checkpoint_files(checkpoint)})
        with self._lock:
            self._staging.mkdir(exist_ok=True)
            place = Path(tempfile.mkdtemp(dir=self._staging, prefix=self._prefix))
        unfinished = place / "unfinished"
        for name in files:
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(checkpoint / name, unfinished / name)
            except OSError:  # a file system without hard links
                shutil.copy2(checkpoint / name, unfinished / name)
        return unfinished.rename(place / checkpoint.name)

    @property
    def _prefix(self) -> str:
        """Of the repository's snapshots: what it is owed is not another one's."""
        return f"{self._repo_id.replace('/', '--')}@"

    def _left_by_an_earlier_run(self) -> list[Path]:
        """What a run that was cut off owes the repository, if all checkpoints are to be kept. The rest is deleted: a
        newer checkpoint replaces it, or it was on its way to another repository."""
        places = [*self._staging.iterdir()] if self._staging.is_dir() else []
        if self._strategy == HubStrategy.ALL_CHECKPOINTS:
            left = sorted(self._staging.glob(f"*/{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: path.stat().st_mtime)
            owed = [snapshot for snapshot in left if snapshot.parent.name.startswith(self._prefix)]
            if owed:
                logger.warning(f"An earlier run owes {self._repo_id} {_names(owed)}: it goes up with the next push.")
            if dropped := [snapshot for snapshot in left if snapshot not in owed]:
                logger.warning(f"An earlier run owed another repository {_names(dropped)}, which is dropped.")
        else:
            owed = []
        for place in {*places} - {snapshot.parent for snapshot in owed}:
            shutil.rmtree(place)
        if places and not owed:
            self._staging.rmdir()
        return owed

    def _drop(self, snapshots: list[Path]) -> None:
        with self._lock:
            for snapshot in snapshots:
                shutil.rmtree(snapshot.parent)
            if snapshots and not any(self._staging.iterdir()):
                self._staging.rmdir()


def _names(snapshots: list[Path]) -> str:
    return ", ".join(snapshot.name for snapshot in snapshots)


class HubPushing:
    """
    The Hub part of [`~transformers.Trainer`], for drafts: complete checkpoints with code and card and without pickled
    arguments, in the background, and no failure that ends a training.
    """

    publisher: CheckpointPublisher | None = None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        Makes the repository `args.hub_model_id`, or one named as `args.output_dir`, if there is none.

        Raises:
            PublishError: if the Hub refuses. A Hub that does not answer is warned about: the first push tries again.
            ValueError: if an adapter is trained whose base is not on the Hub, or lies in that repository.
        """
        repo_id = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        if self.adapter is not None:
            check_publishable(self.adapter, repo_id)
        if not self.is_world_process_zero():
            return
        private = self.args.hub_private_repo if private is None else private
        try:
            repo_id = with_retries(partial(prepare_repository, repo_id=repo_id, private=private), repo_id, token)
        except PublishError as error:
            if not error.temporary:
                raise
            logger.warning(f"{error} Training starts all the same.")
        self.hub_model_id = repo_id
        self.publisher = CheckpointPublisher(self.args, repo_id)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        create_pr: bool = False,
        **kwargs,
    ) -> CommitInfo | Future | None:
        """
        Saves the draft into `args.output_dir` and publishes it with its card.

        Args:
            commit_message (`str`, *optional*): title of the commit.
            blocking (`bool`, *optional*, defaults to `True`): wait for the upload.
            token (`str`, *optional*): best left out: log in with `hf auth login`, or set HF_TOKEN.
            revision (`str`, *optional*): branch, `args.hub_revision` if not given.
            private (`bool`, *optional*): whether a new repository is private, `args.hub_private_repo` if not given.
            create_pr (`bool`, *optional*, defaults to `False`): open a pull request instead.
            kwargs: those of `create_model_card`, not used: the card is made of config and metrics.

        Returns:
            [`~huggingface_hub.CommitInfo`], or without `blocking` a `Future` of it; `None` on other processes.

        Raises:
            PublishError: if the Hub refuses or stays out of reach; the draft is saved nevertheless.
            ValueError: if it is an adapter whose base is not on the Hub, or lies in the same repository.
        """
        if kwargs:
            logger.warning(f"Not used for a draft's card: {', '.join(sorted(kwargs))}.")
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.publisher is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        upload = self.publisher.publish if blocking else self.publisher.start
        given = {"token": token, "revision": revision, "private": private}
        given = {name: value for name, value in given.items() if value is not None}
        return upload(self.args.output_dir, commit_message=commit_message, create_pr=create_pr, **given)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the draft and, with `args.push_to_hub`, publishes it; where that fails, a warning says so."""
        super().save_model(output_dir, _internal_call=True)
        if _internal_call or not self.args.push_to_hub or not self.is_world_process_zero():
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        try:
            self.publisher.publish(output_dir or self.args.output_dir, commit_message="Model save")
        except (PublishError, ValueError) as error:
            logger.warning(f"The draft is saved, but not on the Hub: {error}")

    def create_model_card(self, *args, **kwargs) -> None:
        """Saves the draft with its card, which is made of config and metrics; the arguments are not used."""
        if given := [*map(str, args), *sorted(kwargs)]:
            logger.warning(f"Not used for a draft's card: {', '.join(given)}.")
        self.save_model(_internal_call=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._saving:  # called again as soon as the checkpoint has its name
            return
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.publisher.submit(checkpoint_folder)

    def _finish_current_push(self) -> None:
        if self.publisher is not None:
            self.publisher.finish()
