"""Publishing checkpoints while training goes on."""

import os
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import RLock

from huggingface_hub import CommitInfo
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import logging

from .repository_files import checkpoint_files, published_files
from .upload import publish

logger = logging.get_logger(__name__)

# In the run's directory: links to the files of checkpoints that wait for their upload.
UNPUBLISHED = "unpublished"


class CheckpointPublisher:
    """Uploads checkpoints in a thread of its own, one after another. A checkpoint that comes while another one is on
    its way waits, and takes the place of one that waits already; one whose upload failed waits for the next upload, or
    for the end.

    With `hub_strategy="all_checkpoints"` all that wait go up together, those that an earlier run left behind too. With
    `hub_always_push` they go up one by one, as long as none fails.

    Args:
        args: `hub_strategy`, `hub_always_push`, `hub_private_repo`, `hub_revision` and `output_dir` are read.
        repo_id: `owner/name` of the repository.

    Attributes:
        failures: number of uploads that did not succeed.
        error: why the last upload did not succeed; `None` if it did.
        published: the last one that did.
    """

    def __init__(self, args: TrainingArguments, repo_id: str):
        self.failures = 0
        self.error: Exception | None = None
        self.published: CommitInfo | None = None
        self._strategy, self._one_by_one = HubStrategy(args.hub_strategy), args.hub_always_push
        self._publish = partial(publish, repo_id=repo_id, private=args.hub_private_repo, revision=args.hub_revision)
        self._repo_id = repo_id
        # Of the folders of this repository's snapshots: what waits for another repository is not for this one.
        self._prefix = f"{repo_id.replace('/', '--')}@"
        self._staging = Path(args.output_dir) / UNPUBLISHED
        self._waiting = self._left_by_an_earlier_run()  # snapshots, oldest first
        self._lock = RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")

    def submit(self, checkpoint: str | os.PathLike) -> None:
        """Queues the upload of a complete checkpoint, which may be deleted from then on."""
        try:
            self._add([self._snapshot(Path(checkpoint))])
        except Exception as error:  # whatever happens to an upload, training goes on
            self._failed(error)
        else:
            self._thread.submit(self._upload)

    def wait(self) -> None:
        """Returns when no upload is on its way."""
        self._thread.submit(lambda: None).result()

    def finish(self) -> None:
        """Waits for what is on its way, tries once more what still waits, and drops what does not succeed."""
        self._thread.submit(self._upload).result()
        if names := _names(self._waiting):
            logger.warning(f"Not on the Hub: {names}. `blockdraft push DIR {self._repo_id}` publishes a checkpoint.")
        self.forget()

    def forget(self) -> None:
        """Drops what waits."""
        with self._lock:
            self._drop(self._waiting)
            self._waiting = []

    def publish(self, directory: str | os.PathLike, **kwargs) -> CommitInfo:
        """Publishes a saved draft after what is on its way; arguments and errors are those of [`publish`]."""
        return self.start(directory, **kwargs).result()

    def start(self, directory: str | os.PathLike, **kwargs) -> Future:
        """[`~CheckpointPublisher.publish`] in the thread."""
        return self._thread.submit(self._push, directory, **kwargs)

    def _push(self, directory: str | os.PathLike, **kwargs) -> CommitInfo:
        try:
            self.published, self.error = self._publish(directory, **kwargs), None
        except Exception as error:
            self.error = error
            raise
        return self.published

    def _upload(self) -> None:
        """Uploads the newest checkpoint that waits; with `all_checkpoints`, those before it beside it."""
        with self._lock:
            count = 1 if self._one_by_one and self.error is None else len(self._waiting)
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
        if not batch:
            return
        newest, folders = batch[-1], {}
        if self._strategy == HubStrategy.CHECKPOINT:
            folders = {"last-checkpoint": newest}
        elif self._strategy == HubStrategy.ALL_CHECKPOINTS:
            folders = {snapshot.name: snapshot for snapshot in batch}
        message = f"Training in progress, step {newest.name.rpartition('-')[-1]}"
        try:
            self._push(newest, commit_message=message, checkpoints=folders)
        except Exception as error:  # whatever happens to an upload, training goes on
            self._failed(error)
            self._add(batch, first=True)
        else:
            self._drop(batch)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.error = error
        logger.warning(f"A push failed, the next one makes up for it: {error}")

    def _add(self, snapshots: list[Path], first: bool = False) -> None:
        """Lets snapshots wait. Unless every checkpoint is to go up, the newest one alone waits."""
        with self._lock:
            self._waiting = [*snapshots, *self._waiting] if first else [*self._waiting, *snapshots]
            if self._strategy != HubStrategy.ALL_CHECKPOINTS and not (self._one_by_one and self.error is None):
                self._drop(self._waiting[:-1])
                self._waiting = self._waiting[-1:]

    def _snapshot(self, checkpoint: Path) -> Path:
        """The checkpoint's files under the same name elsewhere: deleting the checkpoint does not touch them."""
        files = {*published_files(checkpoint)}
        if self._strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            files |= {*checkpoint_files(checkpoint)}
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

    def _left_by_an_earlier_run(self) -> list[Path]:
        """What a run that was cut off did not publish, if every checkpoint is to go up. The rest is deleted: a newer
        checkpoint replaces it, or it was on its way to another repository."""
        places, waiting = [*self._staging.glob("*")], []
        if self._strategy == HubStrategy.ALL_CHECKPOINTS:
            left = sorted(self._staging.glob(f"*/{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: path.stat().st_mtime)
            waiting = [snapshot for snapshot in left if snapshot.parent.name.startswith(self._prefix)]
            if waiting:
                logger.warning(
                    f"An earlier run did not publish {_names(waiting)} in {self._repo_id}: the next push does."
                )
            if dropped := [snapshot for snapshot in left if snapshot not in waiting]:
                logger.warning(f"An earlier run did not publish {_names(dropped)} in another repository: dropped.")
        for place in {*places} - {snapshot.parent for snapshot in waiting}:
            shutil.rmtree(place)
        if places and not waiting:
            self._staging.rmdir()
        return waiting

    def _drop(self, snapshots: list[Path]) -> None:
        with self._lock:
            for snapshot in snapshots:
                shutil.rmtree(snapshot.parent)
            if snapshots and not any(self._staging.iterdir()):
                self._staging.rmdir()


def _names(snapshots: list[Path]) -> str:
    return ", ".join(snapshot.name for snapshot in snapshots)
