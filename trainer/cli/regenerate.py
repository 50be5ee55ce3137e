"""`blockdraft regenerate`."""

from dataclasses import dataclass

from ..training_settings import setting
from .arguments import TEMPLATE_KWARGS, TargetArguments


@dataclass
class RegenerateArguments:
    """Prompts, and how the target answers them."""

    data: list[str] = setting("Chat rows whose last answer is to be rewritten, or prompts: .jsonl, .json, .parquet.")
    output: str = setting("JSON lines to write; an interrupted file is continued.")
    max_new_tokens: int = setting("Longest answer in tokens.", default=1024)
    batch_size: int = setting("Prompts answered at the same time.", default=8)
    max_prompt_length: int | None = setting(
        "Longer prompts, in tokens, are left out (in a target with a table of positions: what max_new_tokens leaves).",
        default=None,
    )
    do_sample: bool | None = setting("Sample (true) or greedy (false); default: what the target says.", default=None)
    temperature: float | None = setting("Temperature of sampling; default: what the target says.", default=None)
    top_p: float | None = setting("Nucleus of sampling; default: what the target says.", default=None)
    template_kwargs: dict | None = setting(TEMPLATE_KWARGS, default=None)
    seed: int = setting("Seed of sampling.", default=0)


SETTINGS = {"Target": TargetArguments, "Answers": RegenerateArguments}
POSITIONALS = ("target", "data", "output")


def run(target_args: TargetArguments, args: RegenerateArguments) -> None:
    """Writes the target's own answers to the prompts of chat rows: what a draft should be trained on."""
    from transformers import GenerationConfig

    from ..data.regenerate import regenerate
    from .opening import open_target, target_commit

    target, tokenizer = open_target(target_args)
    given = {name: getattr(args, name) for name in ("do_sample", "temperature", "top_p")}
    report = regenerate(
        target,
        tokenizer,
        args.data,
        args.output,
        max_new_tokens=args.max_new_tokens,
        generation_config=GenerationConfig(**{name: value for name, value in given.items() if value is not None}),
        batch_size=args.batch_size,
        max_prompt_length=args.max_prompt_length,
        template_kwargs=args.template_kwargs,
        seed=args.seed,
        target_revision=target_commit(target_args),
    )
    print(
        f"{report.written} answers written to {args.output} ({report.stopped} ended by themselves, "
        f"{report.completion_tokens} tokens); {report.resumed} were there, {report.too_long} prompts too long."
        + (f" {report.later_turns} later `turns` were not asked." if report.later_turns else "")
    )
