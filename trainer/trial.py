"""What a run needs at its end, tried before its first step: real decoding, and a place for what is saved."""

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy, has_length
from transformers.utils import logging

from ..modeling.decoding.block_decoding import block_decode
from .evaluation.decoding import WARM_UP_TOKENS, answer_settings, decode_prompt, eval_mode
from .ranks import on_all_ranks

logger = logging.get_logger(__name__)


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds a note to whatever error leaves the context."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def try_ending(trainer: Trainer) -> None:
    """Raises on every rank what would stop a run of a [`DraftTrainer`] at its end: a target or rows that no evaluation
    can decode, a tokenizer that cannot be saved, an `output_dir` that cannot be written to or has no room. Random
    numbers and weights stay as they are."""

    def trial(rank: int, ranks: int) -> None:
        if rank == 0:
            _try_saving(trainer)
        _try_decoding(trainer)

    on_all_ranks(trial)


def _try_decoding(trainer: Trainer) -> None:
    """Decodes a few tokens of a prompt of each evaluation set."""
    args, sets = trainer.args, trainer.evaluation_sets
    if not args.eval_decode_prompts or not sets:
        return
    note = (
        "Nothing was trained: evaluation decodes held-out prompts, which was tried before the first step. "
        "`--eval_decode_prompts 0` trains without it."
    )
    target = trainer.target
    settings = answer_settings(target, None, min(WARM_UP_TOKENS, args.eval_max_new_tokens))
    with noted(note), trainer.served_draft() as draft, eval_mode(target, draft):
        decode = partial(target.generate, custom_generate=block_decode, draft=draft)
        for rows in sets:
            decode_prompt(target, decode, trainer.decoding_prompts(rows)[0], settings)


def _try_saving(trainer: Trainer) -> None:
    """Writes a little into `output_dir`, and compares the room there with what the run will save at least."""
    args, directory = trainer.args, Path(trainer.args.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="trial-") as place:
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(place)
    free, draft = shutil.disk_usage(directory).free, _trained_bytes(trainer)
    # Of the optimizers' states, the smallest common ones are as large as the weights.
    checkpoint = draft if args.save_only_model else 2 * draft
    saves = _number_of_saves(trainer)
    if free < draft + min(saves, 1) * checkpoint:
        raise ValueError(
            f"`output_dir`: {directory} has {_size(free)} free; the draft takes {_size(draft)}"
            + (f" and a checkpoint {_size(checkpoint)} at least" if saves else "")
            + ". Free some, choose another directory, or save less (`save_only_model`, `save_strategy`)."
        )
    kept = saves if args.save_total_limit is None else min(saves, args.save_total_limit + 1)  # a new one, then rotated
    if free < draft + kept * checkpoint:
        logger.warning(
            f"`output_dir`: {directory} has {_size(free)} free, and {kept} checkpoints of at least "
            f"{_size(checkpoint)} will be there at a time: lower `save_total_limit`, or raise `save_steps`."
        )


def _trained_bytes(trainer: Trainer) -> int:
    return sum(weight.numel() * weight.element_size() for weight in trainer.model.parameters() if weight.requires_grad)


def _number_of_saves(trainer: Trainer) -> int:
    """How many checkpoints the run will write, estimated; 1 where it depends on what evaluation finds."""
    args = trainer.args
    if args.save_strategy == SaveStrategy.NO:
        return 0
    if args.save_strategy == SaveStrategy.BEST:
        return 1
    epoch = None
    if has_length(trainer.train_dataset):
        epoch = math.ceil(len(trainer.train_dataset) / trainer.get_total_train_batch_size(args))
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
    if args.save_strategy == SaveStrategy.EPOCH:
        return 1 if epoch is None else math.ceil(steps / epoch)
    return math.ceil(1 / args.save_steps) if args.save_steps < 1 else max(1, steps // int(args.save_steps))


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
