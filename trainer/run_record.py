"""What is recorded of a run beside its weights, and by it whether a folder holds this run or another one."""

import hashlib
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from datasets import IterableDataset
from transformers import AutoConfig, PreTrainedModel, TrainingArguments
from transformers.trainer_utils import has_length

from ..hub_cards.facts import LOCAL_PATH
from ..hub_cards.repository_files import ADAPTER_WEIGHTS, TRAINING_ARGUMENTS
from ..modeling.saving.atomic_save import staged_directory
from ..modeling.target.pairing import compared_weights
from ..modeling.target.target_identity import is_other_revision, weights_fingerprint
from .adapters import read_record

# Training arguments that decide about the weights, recorded under their names in the draft's configuration.
RECIPE = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "optim_target_modules",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "train_sampling_strategy",
    "seed",
    "data_seed",
)
# How rows are made, as far as it is known: a difference is a reason for other rows, and no other run by itself.
DATA_SETTINGS = (
    "max_length",
    "assistant_turns",
    "train_on_thinking",
    "thinking_tags",
    "stop_token_ids",
    "template_kwargs",
    "packing",
    "streaming",
    "data_mix",
    "shuffle_buffer",
)
# Of a batch its size counts, not how it is shared out over ranks and time.
COMPARED = {"muon", "dtype", "initial_weights", "metric_for_best_model"} | set(RECIPE) - {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
}
COLUMNS = ("input_ids", "loss_mask", "row_id", "document_ids", "document_row_ids")  # of rows, what is trained on
ROWS_COMPARED = 256
RANDOM = "random"  # the initial weights of a new draft
# Arguments of one machine, account or call.
NOT_KEPT = {"output_dir", "resume_from_checkpoint", "hub_token", "local_rank"}


def recipe_of(args: TrainingArguments) -> dict:
    """The arguments in `RECIPE`, as JSON has them."""
    return {name: _plain(getattr(args, name)) for name in RECIPE}


def write_arguments(directory: str | os.PathLike, args: TrainingArguments) -> None:
    """Writes `training_args.json`, atomically: all arguments but secrets, places on this machine and what belongs to
    one call."""
    kept = {name: _public(value) for name, value in args.to_dict().items() if name not in NOT_KEPT}
    for name in ("deepspeed", "fsdp_config"):
        if isinstance(kept[name], str):  # the path of a file
            kept[name] = None
    with staged_directory(directory) as staging:
        text = json.dumps(kept, indent=2, sort_keys=True, default=str) + "\n"
        (staging / TRAINING_ARGUMENTS).write_text(text, encoding="utf-8")


def rows_fingerprint(rows) -> str | None:
    """SHA-256 of rows to train on: of a set all, or 256 evenly spaced ones, of a stream the first; `None` for a stream
    that is not one of `datasets`, and could perhaps be read but once."""
    if isinstance(rows, IterableDataset):
        sample = rows.take(ROWS_COMPARED)
    elif has_length(rows):
        sample = (rows[i] for i in range(0, len(rows), max(1, -(-len(rows) // ROWS_COMPARED))))
    else:
        return None
    digest = hashlib.sha256()
    for row in sample:
        digest.update(json.dumps({name: row[name] for name in COLUMNS if name in row}, default=repr).encode())
    return digest.hexdigest()


def initial_weights(draft: PreTrainedModel, output_dir: str | os.PathLike) -> str | None:
    """What training starts from: the fingerprint of a draft that was loaded or trained before, or `RANDOM`. One that
    was loaded from a checkpoint of the run in `output_dir` has its start in its configuration."""
    name, training = draft.name_or_path, draft.config.training
    if name and Path(name).resolve().is_relative_to(Path(output_dir).resolve()):
        return (training or {}).get("initial_weights", RANDOM)
    return weights_fingerprint(draft) if name or training else RANDOM


def read_run(folder: str | os.PathLike) -> dict[str, dict]:
    """`target`, `objective` and `training`, as a saved draft or adapter records them."""
    if (adapter := Path(folder) / ADAPTER_WEIGHTS).exists():
        record = read_record(adapter)
    else:
        record = AutoConfig.from_pretrained(folder).to_dict()
    return {name: record.get(name) or {} for name in ("target", "objective", "training")}


def run_differences(then: Mapping[str, dict], now: Mapping[str, dict]) -> list[str]:
    """
    What makes two runs different ones, in words. The number of steps does not: a run may be prolonged.

    Args:
        then, now: what [`read_run`] returns. What an older version did not record is not compared.
    """
    found = _target_differences(then["target"], now["target"])
    objective = {name for name in then["objective"] if name in now["objective"]}
    found += _changed(sorted(objective), then["objective"], now["objective"])
    before, here = then["training"], now["training"]
    whole = "optim" in before
    found += _changed([name for name in sorted(COMPARED) if whole or name in before], before, here)
    rows = [name for name in ("train_rows", "data_sha256") if whole or name in before]
    if _changed(rows, before, here):
        found.append(
            f"the rows to train on are others ({before.get('train_rows', 'a stream')} then, "
            f"{here.get('train_rows', 'a stream')} now)"
        )
        found += _changed([name for name in DATA_SETTINGS if whole], before, here)
    return found


def batch_difference(before: Mapping, here: Mapping) -> str | None:
    """What another number of rows a step does to a run that is resumed, in numbers, given the `training` of both; by
    themselves, other numbers of ranks do nothing. `None` where a step has as many."""
    old, new, steps = before.get("batch_size"), here["batch_size"], before.get("global_step", 0)
    if old in (None, new):
        return None
    read, taken = steps * old, steps * new
    effect = f"{read - taken} rows would be read again" if taken < read else f"{taken - read} rows would be left out"
    factors = ("per_device_train_batch_size", "gradient_accumulation_steps", "ranks")

    def product(record: Mapping) -> str:
        if any(name not in record for name in factors):
            return ""
        return " = {} rows x {} accumulated x {} ranks".format(*(record[name] for name in factors))

    a_rank = here["per_device_train_batch_size"] * here["ranks"]
    remedy = f"Set `gradient_accumulation_steps` to {old // a_rank}" if old % a_rank == 0 else f"Train on {old} again"
    return (
        f"a step had {old} rows{product(before)}, and has {new} now{product(here)}: after {steps} steps {read} rows "
        f"had been read, this run would take them for {taken}, and {effect}. {remedy}, or `ignore_data_skip` to go on "
        "with the beginning of an epoch"
    )


def _target_differences(then: Mapping, now: Mapping) -> list[str]:
    names = {name: f"the target's {name}" for name in ("dtype", "quantization", "adapters") if name in then}
    found = [f"{text} was {then[name]}, now {now[name]}" for name, text in names.items() if then[name] != now[name]]
    places = (then.get("name_or_path"), now["name_or_path"])
    if compared := compared_weights(then, now):
        if any(then[name] != now[name] for name in compared):
            found.append("the target's weights are others ({} then, {} now)".format(*places))
    elif then and places[0] != places[1]:
        found.append("the target was {}, now {}".format(*places))
    elif is_other_revision(then.get("revision"), now["revision"]):
        found.append(f"the target's revision was {then['revision']}, now {now['revision']}")
    for name in ("tokenizer_sha256", "tokenization_sha256"):
        if then.get(name) and now[name] and then[name] != now[name]:
            found.append("the tokenizer is another one")
            break
    return found


def _changed(names: list[str], then: Mapping, now: Mapping) -> list[str]:
    pairs = ((name, then.get(name), now.get(name)) for name in names)
    return [f"`{name}` was {before}, now {here}" for name, before, here in pairs if before != here]


def _plain(value):
    return value.value if isinstance(value, Enum) else value


def _public(value):
    """A setting without what names a place on this machine."""
    if isinstance(value, Mapping):
        return {name: _public(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    return None if isinstance(value, str) and LOCAL_PATH.match(value) else value
