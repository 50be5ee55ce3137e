"""Training runs in a folder: begun, resumed, finished once."""

import os
import shutil
import time
from pathlib import Path

from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
from transformers.utils import CONFIG_NAME

from ..hub_cards.repository_files import ADAPTER_CONFIG
from ..modeling.saving.atomic_save import staged_directory
from .draft_trainer import DraftTrainer
from .evaluation.report_folder import remove_reports
from .saving_trainer import check_has_state
from .training_log import minutes, say

MEASURED_STEPS = 5  # of training, after a first one that is slower, for the time estimate


class TimeEstimate(TrainerCallback):
    """Says after the first steps how long training will take."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.first = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        done = state.global_step - self.first
        if done == 1:
            self.started = time.perf_counter()
        elif done == 1 + MEASURED_STEPS and state.is_world_process_zero:
            step = (time.perf_counter() - self.started) / MEASURED_STEPS
            left = state.max_steps - state.global_step
            say(f"{left} steps to go at {step:.2f} s each: about {minutes(left * step)}.")


def train_draft(trainer: DraftTrainer, overwrite_output_dir: bool = False) -> None:
    """Trains to the end, from `args.resume_from_checkpoint` or the last complete checkpoint in `output_dir` on, if
    there is one. Only checkpoints are saved; reports and plots of weights that are about to be replaced are deleted.
    With `load_best_model_at_end` the trainer then holds the best weights that were saved. Raises a `ValueError` if
    `output_dir` or the checkpoint holds another run, or a draft without checkpoints."""
    output_dir, checkpoint = Path(trainer.args.output_dir), trainer.args.resume_from_checkpoint
    if overwrite_output_dir:
        if checkpoint:
            raise ValueError(
                "`overwrite_output_dir` and `resume_from_checkpoint` exclude each other: give one of them."
            )
        if trainer.args.should_save:
            (output_dir / TRAINER_STATE_NAME).unlink(missing_ok=True)
            for old in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                shutil.rmtree(old)
        if trainer.publisher:
            trainer.publisher.forget()
        trainer.accelerator.wait_for_everyone()  # no process resumes from what another one deletes
    if last := get_last_checkpoint(output_dir) if output_dir.is_dir() else None:
        trainer.check_same_run(last)
    checkpoint = checkpoint or last
    if checkpoint is None:
        saved = _config_name(trainer)
        [other] = {CONFIG_NAME, ADAPTER_CONFIG} - {saved}
        if (output_dir / other).exists():
            raise ValueError(
                f"`output_dir`: {output_dir} holds {other}; a draft and an adapter in one directory would be mistaken "
                "for each other. Choose another directory."
            )
        if (output_dir / saved).exists() and not overwrite_output_dir:
            raise ValueError(
                f"`output_dir`: {output_dir} holds a model and no checkpoint to resume from; choose another "
                "directory, or `overwrite_output_dir` to replace it."
            )
        remove_reports(output_dir)
        trainer.train()
        return
    state, max_steps = _state_in(checkpoint, trainer), _max_steps(trainer)
    if state.global_step < max_steps:
        trainer.check_checkpoint(checkpoint)
        print(f"Resuming from {checkpoint}, {max_steps - state.global_step} of {max_steps} steps to go.", flush=True)
        remove_reports(output_dir)
        trainer.train(resume_from_checkpoint=checkpoint)
    else:  # `train` would take one step more
        trainer.check_same_run(checkpoint)
        print(f"{checkpoint} has all of the {max_steps} steps.", flush=True)
        if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
            best = output_dir / Path(state.best_model_checkpoint).name  # the folder may have been moved
            checkpoint = state.best_model_checkpoint = str(best) if best.is_dir() else checkpoint
        trainer.load_checkpoint(checkpoint)
        trainer.state = state
        if trainer.publisher:
            trainer.publisher.finish()  # an upload that was cut off


def save_finished(trainer: DraftTrainer) -> None:
    """Saves the trained draft in `output_dir`, and last the state of its training, by which [`is_finished`] knows."""
    trainer.save_model()
    if trainer.args.should_save:
        with staged_directory(trainer.args.output_dir) as staging:
            trainer.state.save_to_json(str(staging / TRAINER_STATE_NAME))


def is_finished(trainer: DraftTrainer) -> bool:
    """Whether `output_dir` holds the fully trained draft that [`save_finished`] saved; it may have been calibrated or
    measured since. Raises a `ValueError` that names what differs if it is the draft of another run."""
    output_dir = Path(trainer.args.output_dir)
    if not all((output_dir / name).exists() for name in (_config_name(trainer), TRAINER_STATE_NAME)):
        return False
    trainer.check_same_run(output_dir)
    return _state_in(output_dir, trainer).global_step == _max_steps(trainer)


def _state_in(folder: str | os.PathLike, trainer: DraftTrainer) -> TrainerState:
    """The state of the training that a folder holds; a `ValueError` if it has gone further than this run does."""
    check_has_state(folder)
    state, max_steps = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME)), _max_steps(trainer)
    if state.global_step > max_steps:
        raise ValueError(
            f"{folder} holds another run: it has taken {state.global_step} steps, and this one ends after {max_steps} "
            "(`max_steps`, `num_train_epochs`). Choose another `output_dir`, or start anew with "
            "`overwrite_output_dir`."
        )
    return state


def _config_name(trainer: DraftTrainer) -> str:
    """The configuration file of what the trainer saves."""
    return CONFIG_NAME if trainer.adapter is None else ADAPTER_CONFIG


def _max_steps(trainer: DraftTrainer) -> int:
    return trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
