"""`blockdraft train`."""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..training_settings import TrainingSettings, setting
from .arguments import TRAINER, DataArguments, DraftArguments, LoraArguments, TargetArguments
from .launch import ProcessArguments

if TYPE_CHECKING:
    from ..training_args import DraftTrainingArguments


@dataclass
class RunArguments:
    """What to do with an earlier run in `output_dir`; by default, it is resumed, if it is this one."""

    overwrite_output_dir: bool = setting("Start anew: deletes the checkpoints in output_dir.", default=False)


SETTINGS = TRAINER | {"Earlier run": RunArguments, "Processes": ProcessArguments, "Training": TrainingSettings}
POSITIONALS = ()


def run(
    target_args: TargetArguments,
    draft_args: DraftArguments,
    lora_args: LoraArguments,
    data_args: DataArguments,
    run_args: RunArguments,
    process_args: ProcessArguments,
    args: "DraftTrainingArguments",
) -> None:
    """Trains a draft for a frozen target, evaluates it by real decoding, and saves it with its card and report. The
    same command resumes an interrupted run from its last checkpoint, and leaves a finished draft as it is; another
    target, other rows or settings are another run, for another `output_dir`. With `lora_r`, an adapter of an existing
    draft is trained and saved instead. With `num_processes`, several processes train together."""
    from ..draft_trainer import HELD_OUT
    from ..evaluation.report_folder import write_report
    from ..interrupt import SaveOnInterrupt
    from ..runs import TimeEstimate, is_finished, save_finished, train_draft
    from ..trial import noted
    from .opening import open_trainer

    if args.do_eval and args.eval_strategy == "no":
        raise ValueError("`do_eval` says nothing of when: set `eval_strategy` and `eval_steps` instead.")
    trainer = open_trainer(
        target_args, draft_args, lora_args, data_args, args, callbacks=[SaveOnInterrupt(), TimeEstimate()]
    )
    if not run_args.overwrite_output_dir and is_finished(trainer):
        print(f"{args.output_dir} is finished and is left as it is; `overwrite_output_dir` starts anew.")
        if trainer.publisher:
            trainer.publisher.finish()
            with suppress(OSError, ValueError):  # raised at the end
                trainer.publisher.publish(args.output_dir, commit_message="Model save")
    else:
        try:
            train_draft(trainer, run_args.overwrite_output_dir)
        except KeyboardInterrupt:
            trainer.accelerator.end_training()  # as at the end
            raise
        if args.eval_decode_prompts:
            trainer.save_model(_internal_call=True)  # whatever becomes of the measurement
        if args.eval_decode_prompts:
            note = (
                f"The draft is saved in {args.output_dir}, without figures; the same command measures again, and with "
                "`--eval_decode_prompts 0` ends the run without."
            )
            with noted(note):
                report = trainer.decode(trainer.eval_dataset)
            trainer.record_decoding({HELD_OUT: report.headline()})
            if trainer.is_world_process_zero():
                print(report.table())
                path = write_report(args.output_dir, trainer.state.log_history, {report.block_size: report})
                print(f"The figures are in {path}.")
        save_finished(trainer)
        print(f"Saved in {args.output_dir}.")
    # Processes that exit with their group open may abort.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if trainer.publisher and trainer.publisher.error:
        raise trainer.publisher.error
