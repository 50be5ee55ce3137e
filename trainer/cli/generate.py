"""`blockdraft generate`."""

from dataclasses import dataclass

from ..training_settings import setting
from .arguments import DRAFT_DTYPE, DRAFT_REVISION, DTYPES, SamplingArguments, ScheduleArguments, TargetArguments


@dataclass
class GenerateArguments:
    """One prompt."""

    draft: str = setting("The draft: a directory or a Hub id.")
    prompt: str = setting("What the user says; the chat template is applied if the tokenizer has one.")
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    draft_dtype: str | None = setting(DRAFT_DTYPE, default=None, choices=DTYPES)
    max_new_tokens: int = setting("Longest answer in tokens.", default=256)
    template_kwargs: dict | None = setting("JSON for the chat template.", default=None)


SETTINGS = {
    "Target": TargetArguments,
    "Prompt": GenerateArguments,
    "Sampling": SamplingArguments,
    "Confidence schedule": ScheduleArguments,
}
POSITIONALS = ("target", "draft", "prompt")


def run(
    target_args: TargetArguments,
    args: GenerateArguments,
    sampling_args: SamplingArguments,
    schedule_args: ScheduleArguments,
) -> None:
    """Answers one prompt, token by token as they come, and says how many tokens the draft brought per round."""
    import torch
    from transformers import TextStreamer, set_seed

    from ...modeling.decoding.block_decoding import block_decode
    from ..data.rendering import served_prompt
    from .opening import check_room, open_pair, open_schedule

    target, tokenizer, draft = open_pair(target_args, args.draft, args.draft_revision, args.draft_dtype)
    set_seed(sampling_args.seed)
    messages = [{"role": "user", "content": args.prompt}]
    row = {"prompt": args.prompt} if tokenizer.chat_template is None else {"messages": messages}
    prompt, _ = served_prompt(row, tokenizer, args.template_kwargs)
    input_ids = torch.tensor([prompt], device=target.device)
    check_room(target, [prompt], args.max_new_tokens)
    schedule = open_schedule(schedule_args, target, draft, prompt)
    output = block_decode(
        target,
        input_ids,
        draft=draft,
        confidence_schedule=schedule,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        max_new_tokens=args.max_new_tokens,
        return_dict_in_generate=True,
        **sampling_args.generation(),
    )
    new, rounds = output.sequences.shape[1] - input_ids.shape[1], len(output.accepted_lengths)
    tau = f"tau {sum(output.accepted_lengths) / rounds:.2f}, " if rounds else ""
    print(f"\n[{new} tokens in {rounds} rounds: {tau}{new / output.seconds['total']:.1f} tokens/s]")
