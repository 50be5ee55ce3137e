"""The part of the drafts' Trainer that saves: whole checkpoints, cards, adapters, pushes to the Hub."""

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitInfo
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    HubStrategy,
    get_last_checkpoint,
    has_length,
    rotate_checkpoints,
)
from transformers.utils import logging

from ..hub_cards.background import CheckpointPublisher
from ..hub_cards.card import write_card
from ..hub_cards.retries import PublishError, with_retries
from ..hub_cards.upload import prepare_pushes, prepare_repository
from ..modeling.saving.atomic_save import sync
from .adapters import base_draft, check_publishable, check_resumable, describe, recipe, save_adapter
from .run_record import (
    batch_difference,
    initial_weights,
    read_run,
    recipe_of,
    rows_fingerprint,
    run_differences,
    write_arguments,
)

logger = logging.get_logger(__name__)

# Resuming looks for `checkpoint-N`: what is in this folder was not finished.
UNFINISHED_CHECKPOINTS = "unfinished"


class SavingTrainer(Trainer):
    """
    [`~transformers.Trainer`] of a draft, or of an adapter of one. What it saves is whole: weights, a configuration
    that says how they were trained (`answers`: whose answers the rows hold; `data_settings`: how the rows were made),
    code, tokenizer and a card, the training arguments as JSON, and nothing pickled. A checkpoint has its name only
    when it is complete, and only its own run goes on from it. Pushes run in the background, and none that fails ends
    a training.
    """

    publisher: CheckpointPublisher | None = None  # with `push_to_hub`, on the main process
    takes_muon = False  # whether weight matrices are trained with it

    def __init__(self, *args, answers: str | None = None, data_settings: Mapping | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.draft_config = self.draft.config
        self._answers, self._data_settings = answers, dict(data_settings or {})
        self._given_optimizer = None if self.optimizer is None else type(self.optimizer).__name__
        self._initial_weights = None if self.adapter else initial_weights(self.draft, self.args.output_dir)
        self._decoded: tuple[int, dict[str, dict]] = (-1, {})  # the step of the weights, and what each data set gave

    @property
    def draft(self) -> PreTrainedModel:
        """The draft itself, with its adapter's layers in it where it has one."""
        return base_draft(self.accelerator.unwrap_model(self.model))

    @property
    def adapter(self) -> PeftModel | None:
        """The draft with its adapter, if an adapter is what is trained."""
        model = self.accelerator.unwrap_model(self.model)
        return model if isinstance(model, PeftModel) else None

    def record_decoding(self, headlines: dict[str, dict]) -> None:
        """Keeps what decoding with the present weights gave, the [`DecodingReport.headline`] of each data set by name,
        for the card that is saved with them."""
        self._decoded = (self._state_of_weights().global_step, headlines)

    @property
    def evaluation_sets(self) -> list:
        """The sets of evaluation rows, named or not; empty if there is none."""
        rows = self.eval_dataset
        return list(rows.values()) if isinstance(rows, dict) else [] if rows is None else [rows]

    # ---- runs ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """The base class's, by default from `args.resume_from_checkpoint` on; waits at its end for what is on its way
        to the Hub. Raises a `ValueError` for a checkpoint that [`~SavingTrainer.check_checkpoint`] refuses."""
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # an error of the base class
        if resume_from_checkpoint and resume_from_checkpoint is not True:
            self.check_checkpoint(resume_from_checkpoint)
        _ = self._rows_fingerprint  # before training: a stream should not be read twice at a time
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        if self.publisher:
            self.publisher.finish()
        return output

    def check_checkpoint(self, checkpoint: str | os.PathLike) -> None:
        """Raises a `ValueError` unless a checkpoint holds all that resuming needs, and is one of this run."""
        check_has_state(checkpoint := Path(checkpoint))
        by_deepspeed = any(checkpoint.glob("global_step*"))
        parts = {"optimizer": "*optimizer*", "schedule": SCHEDULER_NAME}
        if lacking := [part for part, name in parts.items() if not (by_deepspeed or any(checkpoint.glob(name)))]:
            raise ValueError(
                f"`resume_from_checkpoint`: {checkpoint} lacks the state of the {' and the '.join(lacking)}, as "
                "`save_only_model` leaves it: warm-up and averages would start anew in the middle of the run. Train "
                "its weights on in a run of their own: give it as `draft`, with another `output_dir`."
            )
        self.check_same_run(checkpoint)

    def check_same_run(self, folder: str | os.PathLike) -> None:
        """Raises a `ValueError` that names what differs, unless the draft or adapter in a folder was trained as this
        run would: for the same target, on the same rows, with the same arguments, as far as its configuration says."""
        check_resumable(self.adapter or self.draft, folder)
        config, training = self.draft_config, self._training_record(self.state)
        then, now = read_run(folder), {"target": config.target, "objective": config.objective, "training": training}
        found = run_differences(then, now)
        batch = batch_difference(then["training"], training)
        if batch and not self.args.auto_find_batch_size:  # which finds it anew
            if self.args.ignore_data_skip:
                logger.warning_once(f"{folder}: {batch}, as was asked for.")
            else:
                found.append(batch)
        if found:
            raise ValueError(
                f"{folder} holds another run: {'; '.join(found)}. Choose another `output_dir`, or start anew with "
                "`overwrite_output_dir`."
            )

    def load_checkpoint(self, checkpoint: str | os.PathLike) -> None:
        """Loads the weights of a checkpoint of this draft or adapter; a `ValueError` for that of another one."""
        check_resumable(self.adapter or self.draft, checkpoint)
        self._load_from_checkpoint(str(checkpoint))

    # ---- saving -------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the draft with its tokenizer and card, or the adapter and its card, each file atomically."""
        directory, state = Path(output_dir or self.args.output_dir), self._state_of_weights()
        decoded_at, headlines = self._decoded
        metrics = headlines if decoded_at == state.global_step else None
        self.draft_config.training = self._training_record(state)
        if self.adapter is not None:
            if self.args.should_save:
                save_adapter(directory, self.adapter, state_dict)
                write_card(directory, self.draft_config, metrics, describe(self.adapter))
                write_arguments(directory, self.args)
            return
        super()._save(str(directory), state_dict)
        if self.args.should_save:
            (directory / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            write_card(directory, self.draft_config, metrics)
            write_arguments(directory, self.args)

    @cached_property
    def _rows_fingerprint(self) -> str | None:
        return rows_fingerprint(self.train_dataset) if self.train_dataset is not None else None

    def _state_of_weights(self) -> TrainerState:
        """The training's state at the present weights: after training that of the best ones, if these were loaded."""
        best = self.state.best_model_checkpoint
        if self.is_in_train or not (self.args.load_best_model_at_end and best and os.path.isdir(best)):
            return self.state
        return TrainerState.load_from_json(os.path.join(best, TRAINER_STATE_NAME))

    def _training_record(self, state: TrainerState) -> dict:
        """How the weights were trained, for `training` of the draft's configuration."""
        args = self.args
        record = recipe_of(args) | {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "batch_size": self.get_total_train_batch_size(args),
            "per_device_train_batch_size": self._train_batch_size,
            "ranks": args.world_size,
            "muon": self.takes_muon,
            "metric_for_best_model": args.metric_for_best_model if args.load_best_model_at_end else None,
            "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            "versions": {name: version(name) for name in ("blockdraft", "transformers", "torch")},
            "train_rows": len(self.train_dataset) if has_length(self.train_dataset) else None,
            "data_sha256": self._rows_fingerprint,
            "initial_weights": self._initial_weights,
            "license": args.license,
            "license_name": args.license_name,
            "license_link": args.license_link,
            "datasets": args.datasets,
            "adapter": None if self.adapter is None else recipe(self.adapter),
            "answers": self._answers,
        }
        record |= self._data_settings
        if self._given_optimizer:
            record["optim"] = self._given_optimizer
        return {name: value for name, value in record.items() if value is not None}

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        """Writes a checkpoint aside, gives it its name when it is complete, publishes it, and deletes older ones."""
        run_dir = Path(self._get_output_dir(trial))
        checkpoint = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished = run_dir / UNFINISHED_CHECKPOINTS
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if best == checkpoint or best.is_dir():  # not every best step is one that is saved
            self.state.best_model_checkpoint = str(best)
        if trial is None:
            self.store_flos()
        try:
            self._write_checkpoint(str(unfinished / checkpoint.name))
        except (OSError, RuntimeError, SafetensorError) as error:  # how the writers report a full disk
            shutil.rmtree(unfinished, ignore_errors=True)  # it may be what fills it
            message = f"{checkpoint.name} could not be saved ({error}); the checkpoints before it are complete."
            raise OSError(message) from error
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            _complete(unfinished / checkpoint.name, checkpoint)
            shutil.rmtree(unfinished)
            if self.args.push_to_hub and self.publisher and self.args.hub_strategy != HubStrategy.END:
                self.callback_handler.on_push_begin(self.args, self.state, self.control)
                self.publisher.submit(checkpoint)
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()  # all ranks load the best one, which may be this one

    def _write_checkpoint(self, directory: str) -> None:
        """All that resuming needs, by the base class's own writers; called on all ranks."""
        self.save_model(directory, _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(directory)
            self._save_scaler(directory)
            self._save_rng_state(directory)
        if self.args.should_save:
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, ExportableState):
                    saved, name = self.state.stateful_callbacks, type(callback).__name__
                    if isinstance(saved[name], list):
                        saved[name].append(callback.state())
                    else:
                        saved[name] = callback.state()
            self.state.save_to_json(os.path.join(directory, TRAINER_STATE_NAME))

    # ---- the Hub ------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository `args.hub_model_id`, or one named as `args.output_dir`, if there is none. Raises a
        `PublishError` if the Hub refuses, or will refuse pushes; one that does not answer is warned about, as the
        first push tries again. Raises a `ValueError` for an adapter whose base is not on the Hub, or is in that
        repository."""
        repo_id = self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        if self.adapter is not None:
            check_publishable(self.adapter, repo_id)
        if not self.is_world_process_zero():
            return
        private = self.args.hub_private_repo if private is None else private
        prepare = prepare_pushes if self.args.push_to_hub else prepare_repository  # a pull request needs no rights
        try:
            repo_id = with_retries(partial(prepare, repo_id=repo_id, private=private), repo_id, token)
        except PublishError as error:
            if not error.temporary:
                raise
            logger.warning(f"{error} Training starts all the same.")
        self.hub_model_id = repo_id
        self.publisher = CheckpointPublisher(self.args, repo_id)

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
            commit_message, blocking: title of the commit; whether to wait for the upload.
            token (`str`, *optional*): best left out: log in with `hf auth login`, or set HF_TOKEN.
            revision, private: branch, and whether a new repository is private; defaults: `args.hub_revision`,
                `args.hub_private_repo`.
            create_pr: open a pull request instead.
            kwargs: those of `create_model_card`, not used: the card is made of config and metrics.

        Returns:
            [`~huggingface_hub.CommitInfo`], or without `blocking` a `Future` of it; `None` on other processes.

        Raises:
            PublishError: if the Hub refuses or stays out of reach; the draft is saved nevertheless.
            ValueError: if it is an adapter whose base is not on the Hub, or is in the same repository.
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

    def create_model_card(self, *args, **kwargs) -> None:
        """Saves the draft with its card, which is made of config and metrics; the arguments are not used."""
        if given := [*map(str, args), *sorted(kwargs)]:
            logger.warning(f"Not used for a draft's card: {', '.join(given)}.")
        self.save_model(_internal_call=True)


def check_has_state(checkpoint: str | os.PathLike) -> None:
    """Raises a `ValueError` unless there is a checkpoint of a training."""
    if not Path(checkpoint, TRAINER_STATE_NAME).is_file():
        raise ValueError(
            f"`resume_from_checkpoint`: {checkpoint} is no checkpoint of a training: it has no {TRAINER_STATE_NAME}."
        )


def _complete(staging: Path, checkpoint: Path) -> None:
    """Syncs a checkpoint's files to disk, then gives it its name in one rename; one of that name is replaced."""
    for path in (staging, *staging.rglob("*")):
        sync(path)
    shutil.rmtree(checkpoint, ignore_errors=True)
    os.replace(staging, checkpoint)
    sync(checkpoint.parent)
