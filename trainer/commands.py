"""What the `blockdraft` command does, step by step; a script can call the same functions."""

import os
import shutil
import time
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from ..configuration.configuration_draft import propose_mask_token_ids
from ..configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from ..modeling.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from .draft_trainer import DraftTrainer

MEASURED_STEPS = 5  # of training, after a first one that is slower, for the time estimate
RUN_SHAPE = ("block_size", "mask_token_id", "target_layer_ids", "num_hidden_layers", "sliding_window", "is_causal")


def load_target(
    name: str,
    revision: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in evaluation mode, on a GPU where there is one, and its tokenizer.

    Raises:
        ValueError: if a local path does not exist; `OSError` for what the Hub does not have.
    """
    check_path("target", name)
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map, **where).eval()
    return (target if device_map else target.to(default_device())), tokenizer


def load_draft(name: str, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False) -> PreTrainedModel:
    """A saved draft in evaluation mode, on a GPU where there is one."""
    check_path("draft", name)
    draft = AutoModel.from_pretrained(name, dtype=dtype, trust_remote_code=trust_remote_code)
    return draft.to(default_device()).eval()


def new_draft(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mask_token_id: int | None = None, **shape
) -> KimiK3DFlashDraftModel:
    """An untrained fp32 draft for a target; `shape` is that of [`KimiK3DFlashConfig.from_target_config`]."""
    if mask_token_id is None:
        mask_token_id = propose_mask_token_ids(tokenizer, len(target.get_input_embeddings().weight))[0]
    config = KimiK3DFlashConfig.from_target_config(target.config, mask_token_id=mask_token_id, **shape)
    return KimiK3DFlashDraftModel(config)


def check_path(setting: str, name: str) -> None:
    """A mistyped directory is an error of its own, before the Hub is asked for it."""
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"`{setting}`: there is no directory {name}")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
            print(f"{left} steps to go at {step:.2f} s each: about {minutes(left * step)}.", flush=True)


def minutes(seconds: float) -> str:
    """A duration to read."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def train_draft(trainer: DraftTrainer, overwrite_output_dir: bool = False) -> None:
    """Trains to the end, from the last complete checkpoint in `output_dir` if any. Only checkpoints are saved.

    Raises:
        ValueError: if `output_dir` holds a run of another draft, or a draft without checkpoints.
    """
    output_dir = Path(trainer.args.output_dir)
    if overwrite_output_dir:
        for old in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(old)
    checkpoint = get_last_checkpoint(output_dir) if output_dir.is_dir() else None
    if checkpoint is None:
        if (output_dir / "config.json").exists() and not overwrite_output_dir:
            raise ValueError(
                f"`output_dir`: {output_dir} holds a model and no checkpoint to go on from; choose another directory, "
                "or `overwrite_output_dir` to replace it."
            )
        trainer.train()
        return
    check_same_run(trainer, checkpoint)
    state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
    max_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
    if state.global_step < max_steps:
        print(f"Going on from {checkpoint}, {max_steps - state.global_step} of {max_steps} steps to go.", flush=True)
        trainer.train(resume_from_checkpoint=checkpoint)
    else:  # `train` would take one step more
        print(f"{checkpoint} has all of {max_steps} steps.", flush=True)
        trainer._load_from_checkpoint(checkpoint)
        trainer.state = state


def check_same_run(trainer: DraftTrainer, checkpoint: str) -> None:
    """Refuses to put a checkpoint's weights into a draft of another shape."""
    config, saved = trainer.draft_config, KimiK3DFlashConfig.from_pretrained(checkpoint)
    for name in RUN_SHAPE:
        if getattr(config, name) != getattr(saved, name):
            raise ValueError(
                f"`{name}` is {getattr(config, name)}, but {checkpoint} was trained with {getattr(saved, name)}. "
                "Choose another `output_dir`, or start anew with `overwrite_output_dir`."
            )
