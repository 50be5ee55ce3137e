"""What the `blockdraft` command does, step by step; a script can call the same functions."""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from transformers.utils import CONFIG_NAME, logging

from ..configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from ..configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from ..configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from ..hub_cards.measurements import ADAPTER_CONFIG
from ..modeling.decoding.cost_table import CostTable, measure_cost_table
from ..modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from ..modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from ..modeling.saving.atomic_save import staged_directory
from ..modeling.target.mask_tokens import propose_mask_token_ids
from .adapters import check_resumable, is_adapter, load_merged
from .draft_trainer import DraftTrainer
from .dspark_trainer import DSparkTrainer
from .evaluation.decoding import eval_mode
from .evaluation.run_report import remove_reports

logger = logging.get_logger(__name__)

MEASURED_STEPS = 5  # of training, after a first one that is slower, for the time estimate


@dataclass(frozen=True)
class DraftType:
    """What a draft is made of."""

    config: type
    model: type
    trainer: type[DraftTrainer]


DRAFT_TYPES = {
    "dflash": DraftType(KimiK3DFlashConfig, KimiK3DFlashDraftModel, DraftTrainer),
    "dspark": DraftType(DeepseekV41DSparkConfig, DeepseekV41DSparkModel, DSparkTrainer),
}


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


def load_draft(
    name: str, dtype: torch.dtype | str = "auto", trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedModel:
    """A saved draft, or a base draft with a saved adapter merged into it, in evaluation mode, on a GPU where there is
    one. `revision` is a commit, branch or tag of the draft's, or the adapter's, repository."""
    check_draft(name, revision)
    load = load_merged if is_adapter(name, revision) else AutoModel.from_pretrained
    draft = load(name, dtype=dtype, trust_remote_code=trust_remote_code, revision=revision)
    return draft.to(default_device()).eval()


def new_draft(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft_type: str = "dflash",
    mask_token_id: int | None = None,
    rows: Iterable[Mapping] | None = None,
    **shape,
) -> PreTrainedModel:
    """
    An untrained fp32 draft for a target.

    Args:
        mask_token_id: default: the first of [`propose_mask_token_ids`], which is printed.
        rows: the data, for a target whose vocabulary has no token that is free in any text.
        shape: that of the configuration's `from_target_config`.
    """
    kind = DRAFT_TYPES[draft_type]
    # A DeepSeek V4.1 target names the mask token of its DSpark draft.
    named = draft_type == "dspark" and isinstance(target.config.get_text_config(), DeepseekV41TextConfig)
    if mask_token_id is None and not named:
        mask_token_id = propose_mask_token_ids(tokenizer, len(target.get_input_embeddings().weight), rows)[0]
        token = tokenizer.convert_ids_to_tokens(mask_token_id) or "a row of the embedding without a token"
        print(f"mask_token_id: {mask_token_id}, {token}", flush=True)
    return kind.model(kind.config.from_target_config(target.config, mask_token_id=mask_token_id, **shape))


def new_trainer(draft: PreTrainedModel, *args, **kwargs) -> DraftTrainer:
    """The trainer of a draft's type; the arguments are those of [`DraftTrainer`]."""
    return _type_of(draft.config).trainer(draft, *args, **kwargs)


def _type_of(config) -> DraftType:
    """By name: a draft that was loaded with the code beside it has classes of its own."""
    [kind] = [kind for kind in DRAFT_TYPES.values() if kind.config.model_type == config.model_type]
    return kind


def cost_table(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int = 64
) -> CostTable:
    """What rounds cost on this machine, measured on answers to a prompt."""
    input_ids = torch.tensor([list(prompt)], device=target.device)
    with eval_mode(target, draft):
        return measure_cost_table(target, draft, input_ids, max_new_tokens)


def check_path(setting: str, name: str) -> None:
    """A mistyped directory is an error of its own, before the Hub is asked for it."""
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"`{setting}`: there is no directory {name}")


def check_draft(name: str, revision: str | None) -> None:
    """[`check_path`] of a draft; warns of a revision beside a directory."""
    check_path("draft", name)
    if revision and os.path.isdir(name):
        logger.warning(f"`draft_revision` is ignored: `draft` is a directory, {name}.")


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
    """Trains to the end, from the last complete checkpoint in `output_dir` if any. Only checkpoints are saved;
    reports and plots of the weights that come to be replaced are deleted. With `load_best_model_at_end` the trainer
    then holds the best weights that were saved.

    Raises:
        ValueError: if `output_dir` holds a run of another draft, or a draft without checkpoints.
    """
    output_dir = Path(trainer.args.output_dir)
    if overwrite_output_dir:
        if trainer.args.should_save:
            (output_dir / TRAINER_STATE_NAME).unlink(missing_ok=True)
            for old in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                shutil.rmtree(old)
        if trainer.publisher:
            trainer.publisher.forget()
        trainer.accelerator.wait_for_everyone()  # no process goes on from what another one deletes
    checkpoint = get_last_checkpoint(output_dir) if output_dir.is_dir() else None
    if checkpoint is None:
        saved = _config_name(trainer)
        [other] = {CONFIG_NAME, ADAPTER_CONFIG} - {saved}
        if (output_dir / other).exists():
            raise ValueError(
                f"`output_dir`: {output_dir} holds {other}; a draft and an adapter in one directory would be taken "
                "for each other. Choose another one."
            )
        if (output_dir / saved).exists() and not overwrite_output_dir:
            raise ValueError(
                f"`output_dir`: {output_dir} holds a model and no checkpoint to go on from; choose another directory, "
                "or `overwrite_output_dir` to replace it."
            )
        remove_reports(output_dir)
        trainer.train()
        return
    check_resumable(trainer.adapter or trainer.draft, checkpoint)
    state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
    max_steps = _max_steps(trainer)
    if state.global_step < max_steps:
        print(f"Going on from {checkpoint}, {max_steps - state.global_step} of {max_steps} steps to go.", flush=True)
        remove_reports(output_dir)
        trainer.train(resume_from_checkpoint=checkpoint)
    else:  # `train` would take one step more
        print(f"{checkpoint} has all of {max_steps} steps.", flush=True)
        if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
            best = output_dir / Path(state.best_model_checkpoint).name  # wherever the run lies by now
            checkpoint = state.best_model_checkpoint = str(best) if best.is_dir() else checkpoint
        trainer._load_from_checkpoint(checkpoint)
        trainer.state = state
        trainer._finish_current_push()  # what the run owes the Hub, if it was cut off


def save_finished(trainer: DraftTrainer) -> None:
    """Saves the trained draft in `output_dir`, and last the state of its training, which [`is_finished`] looks for."""
    trainer.save_model()
    if trainer.args.should_save:
        with staged_directory(trainer.args.output_dir) as staging:
            trainer.state.save_to_json(str(staging / TRAINER_STATE_NAME))


def is_finished(trainer: DraftTrainer) -> bool:
    """Whether `output_dir` holds the draft of all steps, by [`save_finished`], calibrated and measured since or not.

    Raises:
        ValueError: if it is another draft.
    """
    output_dir = Path(trainer.args.output_dir)
    if not all((output_dir / name).exists() for name in (_config_name(trainer), TRAINER_STATE_NAME)):
        return False
    check_resumable(trainer.adapter or trainer.draft, output_dir)
    state = TrainerState.load_from_json(str(output_dir / TRAINER_STATE_NAME))
    return state.global_step >= _max_steps(trainer)


def _config_name(trainer: DraftTrainer) -> str:
    """The file that says what the trainer saves."""
    return CONFIG_NAME if trainer.adapter is None else ADAPTER_CONFIG


def _max_steps(trainer: DraftTrainer) -> int:
    return trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
