"""`blockdraft cache-features`."""

from typing import TYPE_CHECKING

from ..training_settings import TrainingSettings
from .arguments import TRAINER, DataArguments, DraftArguments, LoraArguments, TargetArguments

if TYPE_CHECKING:
    from ..training_args import DraftTrainingArguments

SETTINGS = TRAINER | {"Training": TrainingSettings}
POSITIONALS = ()


def run(
    target_args: TargetArguments,
    draft_args: DraftArguments,
    lora_args: LoraArguments,
    data_args: DataArguments,
    args: "DraftTrainingArguments",
) -> None:
    """Writes the target's states of all rows into `features`, for `blockdraft train` with the same settings. Prints
    first how much that is. The same command goes on where it was interrupted, adds the rows of other data, and writes
    damaged files again. Processes that `accelerate launch` starts share the rows."""
    from .opening import open_trainer

    if args.features is None:
        raise ValueError("`features` is missing: the folder to write the target's states into.")
    args.cache_features, args.eval_decode_prompts = True, 0
    trainer = open_trainer(target_args, draft_args, lora_args, data_args, args)
    trainer.cache_features()
    print(f"The features of all rows are in {args.features}.")
    trainer.accelerator.end_training()
