"""`blockdraft evaluate`."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..training_settings import setting
from .arguments import (
    DRAFT_DTYPE,
    DRAFT_REVISION,
    DTYPES,
    HELD_OUT_ROWS,
    MAX_LENGTH,
    TEMPLATE_KWARGS,
    SamplingArguments,
    ScheduleArguments,
    TargetArguments,
)


@dataclass
class EvaluateArguments:
    """Held-out prompts to decode."""

    draft: str = setting("The draft: a directory or a Hub id.")
    data: list[str] = setting(HELD_OUT_ROWS)
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    draft_dtype: str | None = setting(DRAFT_DTYPE, default=None, choices=DTYPES)
    block_size: int | None = setting(
        "Tokens of a block, at most the trained number, which is the default.", default=None
    )
    skip_baselines: bool = setting(
        "Decode with the draft alone, for slow targets: no speed-up, no comparison with greedy decoding.",
        default=False,
    )
    num_prompts: int = setting("Prompts to decode, evenly spaced over the data.", default=32)
    max_new_tokens: int = setting("Longest answer in tokens.", default=128)
    max_length: int = setting(MAX_LENGTH, default=4096)
    template_kwargs: dict | None = setting(TEMPLATE_KWARGS, default=None)
    output: str | None = setting("JSON file to write the figures to.", default=None)
    card: str | None = setting(
        "Name of the data, e.g. owner/name or HumanEval: puts the figures into the card of `draft`, a directory.",
        default=None,
    )
    benchmark_task: str | None = setting(
        "Where `card` is a benchmark of the Hub that ranks drafts by tau: its task, as in its eval.yaml. The Hub then "
        "reads tau from .eval_results as well.",
        default=None,
    )

    def __post_init__(self):
        from ...hub_cards.rules import is_hub_id  # which imports transformers

        if self.benchmark_task and not is_hub_id(self.card):
            raise ValueError(
                f"`benchmark_task` belongs to a benchmark on the Hub, and `card` is {self.card!r}: name one there."
            )


SETTINGS = {
    "Target": TargetArguments,
    "Evaluation": EvaluateArguments,
    "Sampling": SamplingArguments,
    "Confidence schedule": ScheduleArguments,
}
POSITIONALS = ("target", "draft")


def run(
    target_args: TargetArguments,
    args: EvaluateArguments,
    sampling_args: SamplingArguments,
    schedule_args: ScheduleArguments,
) -> None:
    """Decodes held-out prompts with the draft, with `generate()` and with the same loop without a draft, and with the
    draft at temperature 1."""
    from transformers import GenerationConfig, set_seed

    from ...hub_cards.card import CARD, add_to_card
    from ..evaluation.decoding import evaluate_decoding, served_block_size
    from .opening import check_room, check_writable, longest_row, open_pair, open_prompts, open_schedule

    if args.card and not Path(args.draft, "config.json").is_file():
        raise ValueError(f"`card` writes into a saved draft: `draft` is {args.draft!r}, give its directory.")
    if args.output:
        check_writable("output", Path(args.output).parent)
    if args.card:
        check_writable("draft", Path(args.draft))
    target, tokenizer, draft = open_pair(target_args, args.draft, args.draft_revision, args.draft_dtype)
    args.max_length = longest_row(target, args.max_length)
    prompts, _ = open_prompts(args, tokenizer)
    check_room(target, prompts, args.max_new_tokens)
    set_seed(sampling_args.seed)
    with served_block_size(draft, draft.config.block_size if args.block_size is None else args.block_size):
        report = evaluate_decoding(
            target,
            draft,
            prompts,
            args.max_new_tokens,
            GenerationConfig(**sampling_args.generation()),
            compare_with_plain=not args.skip_baselines,
            confidence_schedule=open_schedule(schedule_args, target, draft, prompts[0]),
            at_temperature_1=True,
        )
    print(report.table())
    if args.output:
        Path(args.output).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    if args.card:
        task = {"benchmark_task": args.benchmark_task} if args.benchmark_task else {}
        sampled = [report.at_temperature_1.headline()] if report.at_temperature_1 else []
        add_to_card(args.draft, draft.config, args.card, report.headline() | task, *sampled)
        print(f"The figures are in {Path(args.draft) / CARD}.")
