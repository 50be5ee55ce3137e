"""What commands open: targets, drafts, prompts, rows to train on."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.utils import logging

from ...modeling.decoding.confidence_schedule import ConfidenceThreshold
from ...modeling.decoding.cost_table import CostTable
from ...modeling.families import DSPARK, FAMILIES
from ...modeling.target.pairing import check_pair
from ...modeling.target.positions import check_length, position_limit
from ...modeling.target.target_identity import loaded_commit
from ..data.dataset import hold_out, mix, prepare_dataset, prepare_stream
from ..data.packing import pack_rows
from ..data.prompts import read_prompts
from ..data.provenance import answers_of
from ..data.rendering import stop_tokens
from ..data.rows import hub_datasets
from ..draft_trainer import DraftTrainer
from ..evaluation.decoding import cost_table, held_out_prompts
from ..loading import check_shape, load_draft, load_target, new_draft, new_trainer
from ..run_record import DATA_SETTINGS
from ..training_args import DraftTrainingArguments
from .arguments import DataArguments, DraftArguments, LoraArguments, ScheduleArguments, TargetArguments

logger = logging.get_logger(__name__)


def open_target(args: TargetArguments, layers: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target, whose answers then end with every token that stops them, and its tokenizer; without `layers` it
    cannot run."""
    target, tokenizer = load_target(
        args.target, args.target_revision, args.target_dtype, args.target_device_map, args.trust_remote_code, layers
    )
    target.generation_config.eos_token_id = stop_tokens(tokenizer, target.generation_config) or None
    return target, tokenizer


def target_commit(args: TargetArguments) -> str | None:
    """The commit the target was loaded at; a branch may have moved on since."""
    return loaded_commit(args.target, args.target_revision)


def open_pair(
    args: TargetArguments, draft: str, revision: str | None = None, dtype: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel]:
    """The target, its tokenizer and a saved draft that fits it, by default in the target's dtype."""
    target, tokenizer = open_target(args)
    model = load_draft(draft, dtype or target.dtype, args.trust_remote_code, revision)
    check_pair(target, model, tokenizer, target_commit(args))
    return target, tokenizer, model


def longest_row(target: PreTrainedModel, max_length: int) -> int:
    """Tokens at which rows are cut off: `max_length`; if that is the default, at most as many as the target has
    positions for. Raises a `ValueError` for another that is more than its table of positions has."""
    limit = position_limit(target)
    if limit is not None and max_length == DataArguments.max_length > limit:
        print(f"max_length: {limit}, as many tokens as the target has positions for.")
        return limit
    check_length(target, max_length, "`max_length`", "Lower it, or leave it out.")
    return max_length


def check_room(
    target: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, setting: str = "max_new_tokens"
) -> None:
    """Raises a `ValueError` if the target has no positions for the longest prompt and an answer to it; `setting` is
    the name of `max_new_tokens`."""
    longest = max(map(len, prompts))
    what = f"The longest prompt ({longest} tokens) with `{setting}` {max_new_tokens}"
    check_length(target, longest + max_new_tokens, what, f"Lower `{setting}`, or leave such prompts out.")


def open_prompts(args, tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], list[int | str]]:
    """Token ids of `args.num_prompts` prompts of the chat rows in `args.data`, and their conversations; says what
    became of the rows."""
    prompts, report = read_prompts(args.data, tokenizer, args.num_prompts, args.max_length, args.template_kwargs)
    print(f"data: {report}")
    return prompts, report.conversations


def check_writable(setting: str, folder: Path) -> None:
    """Raises a `ValueError` at the start if what a command finds cannot be written at its end."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"`{setting}`: {folder} is not a folder that can be written to.")


def open_schedule(
    args: ScheduleArguments, target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int]
) -> ConfidenceThreshold | CostTable | None:
    """How to choose what is verified, a cost table being measured on answers to `prompt`; `None`: all of it."""
    if args.confidence_cost_table:
        return cost_table(target, draft, prompt)
    return None if args.confidence_threshold is None else ConfidenceThreshold(args.confidence_threshold)


def open_training_rows(
    args: DataArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    training: DraftTrainingArguments,
) -> tuple[Dataset | IterableDataset, Dataset]:
    """Rows to train on and held-out ones; says what became of the rows that were read. Raises a `ValueError` if
    `streaming` data has no `max_steps`, or no row is left to train on."""
    if args.streaming and training.max_steps < 1:
        raise ValueError("`streaming` data has no length: set `max_steps`.")
    if not args.streaming and args.shuffle_buffer != DataArguments.shuffle_buffer:
        logger.warning("`shuffle_buffer` is not used: without `streaming`, a row is drawn from all of them.")
    if args.eval_data and args.eval_fraction != DataArguments.eval_fraction:
        logger.warning("`eval_fraction` is not used: `eval_data` is held out, and all of `train_data` is trained on.")
    names = ("max_length", "max_bad_fraction", "assistant_turns", "template_kwargs", "train_on_thinking")
    settings = {name: getattr(args, name) for name in (*names, "thinking_tags")}
    settings["stop_token_ids"] = args.stop_token_ids or stop_tokens(tokenizer, target.generation_config)
    stream = partial(prepare_stream, tokenizer=tokenizer, **settings)

    def prepare(name: str, data: list[str], id_prefix: str = "") -> Dataset:
        rows, report = prepare_dataset(data, tokenizer, num_proc=args.num_proc, id_prefix=id_prefix, **settings)
        print(f"{name}: {report}")
        return rows

    sources = {str(i): [name] for i, name in enumerate(args.train_data)} if args.data_mix else {"": args.train_data}
    with training.main_process_first(desc="encoding the rows"):
        eval_set = prepare("eval_data", args.eval_data) if args.eval_data else None
        if args.streaming:
            parts = [stream(data, id_prefix=prefix) for prefix, data in sources.items()]
        else:
            parts = [prepare(f"train_data {prefix}".strip(), data, prefix) for prefix, data in sources.items()]
        if eval_set is None:
            split = [hold_out(part, args.eval_fraction, training.seed) for part in parts]
            parts, eval_set = [part["train"] for part in split], concatenate_datasets([part["test"] for part in split])
            print(f"{len(eval_set)} rows of train_data are held out for evaluation.")
        train_set = mix(parts, args.data_mix, training.seed) if args.data_mix else parts[0]
        if args.streaming:
            train_set = train_set.shuffle(seed=training.seed, buffer_size=args.shuffle_buffer)
        if args.packing:
            train_set = pack_rows(train_set, args.max_length)
    return train_set, eval_set


def data_settings(args: DataArguments) -> dict:
    """How the rows to train on are made, to be recorded: `max_length`, and what is not as it is by default."""
    given = {name: getattr(args, name) for name in DATA_SETTINGS}
    return {
        name: value for name, value in given.items() if name == "max_length" or value != getattr(DataArguments, name)
    }


def open_trainer(
    target_args: TargetArguments,
    draft_args: DraftArguments,
    lora_args: LoraArguments,
    data_args: DataArguments,
    args: DraftTrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
) -> DraftTrainer:
    """The trainer of `blockdraft train`, whose target has no layers where training reads `features`. Raises a
    `ValueError` for settings that exclude each other."""
    lora, shape = lora_args.lora_config(), draft_args.shape()
    draft_type = draft_args.draft_type or "dflash"
    if lora and not draft_args.draft:
        raise ValueError("`lora_r` adapts a draft that has been saved: name it as `draft`.")
    check_shape(draft_type, shape)
    set_seed(args.seed)
    runs_target = args.served_features is None and (args.features is None or args.cache_features)
    target, tokenizer = open_target(target_args, layers=runs_target)
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
    return new_trainer(
        draft,
        target,
        args,
        target_revision=commit,
        peft_config=LoraConfig(**lora, revision=draft_args.draft_revision) if lora else None,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        callbacks=list(callbacks),
        answers=answers,
        data_settings=data_settings(data_args),
    )
