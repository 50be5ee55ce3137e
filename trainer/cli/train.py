"""`blockdraft train`."""

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..training_settings import TrainingSettings, setting
from .arguments import DRAFT_REVISION, DataArguments, TargetArguments
from .launch import ProcessArguments

if TYPE_CHECKING:
    from ..training_args import DraftTrainingArguments


@dataclass
class DraftArguments:
    """An existing draft to train on, or the shape of a new one."""

    draft: str | None = setting("Draft to train on: a directory or a Hub id. Default: a new one.", default=None)
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    draft_type: str | None = setting("Kind of a new draft: dflash (the default) or dspark.", default=None)
    num_draft_layers: int | None = setting(
        "Layers of a new draft (dflash: 5; dspark: what the target says, or 3).", default=None
    )
    block_size: int | None = setting(
        "Tokens of its block, the known one included (dflash: 16; dspark: what the target says, or 5).", default=None
    )
    mask_token_id: int | None = setting("Token for positions to predict (proposed by the tokenizer).", default=None)
    target_layer_ids: list[int] | None = setting(
        "Zero-based target layers it reads (spread over the depth).", default=None
    )
    sliding_window: int | None = setting(
        "Context tokens that it sees (dflash: the block size, 0 for all; dspark: the target's, or 128).", default=None
    )
    num_full_attention_layers: int | None = setting(
        "dflash: number of last layers that see the whole context despite the window (1 of several layers, or 0).",
        default=None,
    )
    is_causal: bool | None = setting("dflash: whether a slot sees only earlier slots (true).", default=None)
    markov_rank: int | None = setting(
        "dspark: rank of the Markov head, 0 for none and no confidence head (what the target says, or 256).",
        default=None,
    )
    confidence_input: str | None = setting(
        "dspark: what the confidence head reads, post_norm (the default) or pre_norm (what engines serve).",
        default=None,
    )

    def shape(self) -> dict:
        """The settings of a new draft that were given, without `draft_type`; 0 for "none" is `None` in the config."""
        others = ("draft", "draft_revision", "draft_type")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in others}
        given = {name: value for name, value in given.items() if value is not None}
        return given | {name: None for name in ("sliding_window", "markov_rank") if given.get(name) == 0}

    def __post_init__(self):
        if self.draft is None and self.draft_revision is not None:
            raise ValueError("`draft_revision` belongs to an existing draft: name it as `draft`.")
        fixed = [*self.shape(), *(["draft_type"] if self.draft_type else [])]
        if self.draft is not None and fixed:
            raise ValueError(f"`draft` is given, whose shape is fixed: leave out {', '.join(fixed)}.")


@dataclass
class LoraArguments:
    """An adapter of `draft`, under the names of peft's `LoraConfig`; without `lora_r` the draft itself is trained."""

    lora_r: int | None = setting(
        "Rank of a LoRA adapter, which is trained and saved instead of the draft.", default=None
    )
    lora_alpha: int | None = setting("The adapter is scaled by lora_alpha / lora_r (lora_r).", default=None)
    lora_dropout: float | None = setting("Dropout of the adapter's input (0).", default=None)
    use_dora: bool = setting("DoRA: the adapter learns magnitudes apart from directions.", default=False)
    target_modules: list[str] | None = setting("Linear layers that are adapted, e.g. o_proj (all).", default=None)
    modules_to_save: list[str] | None = setting(
        "Modules that are trained and saved whole, e.g. norm or markov_head (none).", default=None
    )

    def __post_init__(self):
        if self.lora_r is None and (given := self._given()):
            raise ValueError(f"`{next(iter(given))}` belongs to an adapter: give its rank, `lora_r`, too.")
        if self.lora_r is not None and self.lora_r < 1:
            raise ValueError(f"`lora_r` is {self.lora_r}: it must be at least 1.")

    def lora_config(self) -> dict | None:
        """Arguments of `LoraConfig`; `None` without an adapter."""
        if self.lora_r is None:
            return None
        given = self._given()
        return {"r": given.pop("lora_r"), "lora_alpha": self.lora_r} | given

    def _given(self) -> dict:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


@dataclass
class RunArguments:
    """What to do with an earlier run in `output_dir`; by default, it is resumed, if it is this one."""

    overwrite_output_dir: bool = setting("Start anew: deletes the checkpoints in output_dir.", default=False)


SETTINGS = {
    "Target": TargetArguments,
    "Draft": DraftArguments,
    "Adapter": LoraArguments,
    "Data": DataArguments,
    "Earlier run": RunArguments,
    "Processes": ProcessArguments,
    "Training": TrainingSettings,
}
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
    import torch
    from peft import LoraConfig
    from transformers import set_seed

    from ...modeling.families import DSPARK, FAMILIES
    from ...modeling.target.pairing import check_pair
    from ..data.provenance import answers_of
    from ..data.rows import hub_datasets
    from ..draft_trainer import HELD_OUT
    from ..evaluation.decoding import held_out_prompts
    from ..evaluation.report_folder import write_report
    from ..interrupt import SaveOnInterrupt
    from ..loading import check_shape, load_draft, new_draft, new_trainer
    from ..runs import TimeEstimate, is_finished, save_finished, train_draft
    from ..trial import noted
    from .opening import check_room, data_settings, longest_row, open_target, open_training_rows, target_commit

    lora, shape = lora_args.lora_config(), draft_args.shape()
    draft_type = draft_args.draft_type or "dflash"
    if lora and not draft_args.draft:
        raise ValueError("`lora_r` adapts a draft that has been saved: name it as `draft`.")
    if args.do_eval and args.eval_strategy == "no":
        raise ValueError("`do_eval` says nothing of when: set `eval_strategy` and `eval_steps` instead.")
    check_shape(draft_type, shape)
    set_seed(args.seed)
    target, tokenizer = open_target(target_args)
    commit = target_commit(target_args)
    data_args.max_length = longest_row(target, data_args.max_length)
    train_set, eval_set = open_training_rows(data_args, target, tokenizer, args)
    if args.eval_decode_prompts:
        prompts = held_out_prompts(eval_set, args.eval_decode_prompts)
        check_room(target, prompts, args.eval_max_new_tokens, "eval_max_new_tokens")
    args.datasets = args.datasets or hub_datasets(data_args.train_data) or None
    answers = answers_of(data_args.train_data, target, tokenizer, commit)
    if draft_args.draft:
        draft = load_draft(draft_args.draft, torch.float32, target_args.trust_remote_code, draft_args.draft_revision)
        check_pair(target, draft, tokenizer, commit)
    else:
        if FAMILIES[draft_type].method == DSPARK and args.confidence_head_alpha == 0:
            shape["confidence_head"] = False  # it would not be trained
        draft = new_draft(target, tokenizer, draft_type, rows=train_set, **shape)
    trainer = new_trainer(
        draft,
        target,
        args,
        target_revision=commit,
        peft_config=LoraConfig(**lora, revision=draft_args.draft_revision) if lora else None,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        callbacks=[SaveOnInterrupt(), TimeEstimate()],
        answers=answers,
        data_settings=data_settings(data_args),
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
                report = trainer.decode(eval_set)
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
