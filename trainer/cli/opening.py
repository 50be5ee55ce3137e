"""What commands open: targets, drafts, prompts."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.decoding.confidence_schedule import ConfidenceThreshold
from ...modeling.decoding.cost_table import CostTable
from ...modeling.target.pairing import check_pair
from ...modeling.target.target_identity import loaded_commit
from ..data.dataset import prepare_dataset
from ..evaluation.decoding import cost_table, held_out_prompts
from ..loading import load_draft, load_target
from .arguments import ScheduleArguments, TargetArguments


def open_target(args: TargetArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer."""
    return load_target(
        args.target, args.target_revision, args.target_dtype, args.target_device_map, args.trust_remote_code
    )


def target_commit(args: TargetArguments) -> str | None:
    """The commit the target was loaded at; a branch may have moved on since."""
    return loaded_commit(args.target, args.target_revision)


def open_draft(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_args: TargetArguments,
    name: str,
    revision: str | None = None,
) -> PreTrainedModel:
    """A saved draft, checked against its target."""
    draft = load_draft(name, trust_remote_code=target_args.trust_remote_code, revision=revision)
    check_pair(target, draft, tokenizer, target_commit(target_args))
    return draft


def open_prompts(args, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of `args.num_prompts` prompts of the chat rows in `args.data`; says what became of the rows."""
    rows, report = prepare_dataset(args.data, tokenizer, args.max_length, template_kwargs=args.template_kwargs)
    print(f"data: {report}")
    return held_out_prompts(rows, args.num_prompts)


def open_schedule(
    args: ScheduleArguments, target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int]
) -> ConfidenceThreshold | CostTable | None:
    """How to choose what is verified, a cost table being measured on answers to `prompt`; `None`: all of it."""
    if args.confidence_cost_table:
        return cost_table(target, draft, prompt)
    return None if args.confidence_threshold is None else ConfidenceThreshold(args.confidence_threshold)
