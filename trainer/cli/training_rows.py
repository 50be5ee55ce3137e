"""The rows of `blockdraft train`, from its settings: to train on, and held out."""

from functools import partial

from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.dataset import mix, prepare_dataset, prepare_stream
from ..data.packing import pack_rows
from ..training_args import DraftTrainingArguments
from .arguments import DataArguments

logger = logging.get_logger(__name__)


def training_rows(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, training: DraftTrainingArguments
) -> tuple[Dataset | IterableDataset, Dataset]:
    """Rows to train on and held-out ones; says what became of the rows that were read.

    Raises:
        ValueError: if `streaming` data has no `max_steps`, or no row is left to train on.
    """
    if args.streaming and training.max_steps < 1:
        raise ValueError("`streaming` data has no length: set `max_steps`.")
    if not args.streaming and args.shuffle_buffer != DataArguments.shuffle_buffer:
        logger.warning("`shuffle_buffer` is not used: without `streaming`, a row is drawn from all of them.")
    if args.eval_data and args.eval_fraction != DataArguments.eval_fraction:
        logger.warning("`eval_fraction` is not used: `eval_data` is held out, and all of `train_data` is trained on.")
    names = ("max_length", "max_bad_fraction", "assistant_turns", "stop_token_ids", "template_kwargs")
    settings = {name: getattr(args, name) for name in (*names, "train_on_thinking")}
    if args.thinking_tags:
        settings["thinking_tags"] = args.thinking_tags
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


def hold_out(rows: Dataset, fraction: float, seed: int) -> dict[str, Dataset]:
    """`train` and `test` rows: a share of them, at least one, is held out."""
    held_out = max(1, round(fraction * len(rows)))
    if held_out == len(rows):
        raise ValueError("`train_data` has one row: none is left to hold out; give more rows, or `eval_data`.")
    return rows.train_test_split(test_size=held_out, seed=seed)
