"""`blockdraft doctor`."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..training_settings import setting
from .arguments import DRAFT_REVISION, ENGINES, MAX_LENGTH, TEMPLATE_KWARGS, TargetArguments


@dataclass
class DoctorArguments:
    """A draft with low acceptance, and rows to measure it on."""

    draft: str = setting("The draft: a directory or a Hub id; it may be broken.")
    data: list[str] | None = setting(
        "Chat rows like those of the training: .jsonl, .json or .parquet files. Without them nothing is measured.",
        default=None,
    )
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    num_prompts: int = setting("Prompts to decode, evenly spaced over the data.", default=8)
    max_new_tokens: int = setting("Longest answer in tokens.", default=64)
    max_length: int = setting(MAX_LENGTH, default=4096)
    template_kwargs: dict | None = setting(TEMPLATE_KWARGS, default=None)
    engine: str | None = setting("Engine to check a DSpark draft for: vllm or sglang.", default=None, choices=ENGINES)
    output: str | None = setting("JSON file to write the findings to.", default=None)

    def __post_init__(self):
        for name in ("num_prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be at least 1.")


SETTINGS = {"Target": TargetArguments, "Examination": DoctorArguments}
POSITIONALS = ("target", "draft", "data")


def run(target_args: TargetArguments, args: DoctorArguments) -> int:
    """Looks for what lowers a draft's acceptance: wrong settings, another target or tokenizer, broken weights, and,
    given data, what decoding and other settings show. The exit code is 1 if there is a fault."""
    from ..adapters import is_adapter
    from ..data.dataset import prepare_dataset
    from ..data.rendering import stop_tokens
    from ..diagnostics.checkpoint import draft_folder
    from ..diagnostics.doctor import doctor
    from ..diagnostics.findings import FAULT, findings_text
    from ..diagnostics.static_checks import check_provenance
    from ..evaluation.decoding import held_out_prompts
    from ..loading import load_draft
    from .opening import check_room, check_writable, longest_row, open_prompts, open_target, target_commit

    if args.output:
        check_writable("output", Path(args.output).parent)
    draft = draft_folder(args.draft, args.draft_revision)
    target, tokenizer = open_target(target_args)
    if is_adapter(str(draft)):
        draft = load_draft(str(draft), trust_remote_code=target_args.trust_remote_code)
    rows, prompts, findings, commit = None, None, [], target_commit(target_args)
    if args.data:
        settings = {"template_kwargs": args.template_kwargs, "may_be_empty": True}
        settings["stop_token_ids"] = stop_tokens(tokenizer, target.generation_config)
        args.max_length = longest_row(target, args.max_length)
        rows, report = prepare_dataset(args.data, tokenizer, args.max_length, **settings)
        print(f"data: {report}")
        if not len(rows):
            prompts, _ = open_prompts(args, tokenizer)
        decoded = held_out_prompts(rows, args.num_prompts) if prompts is None else prompts
        check_room(target, decoded, args.max_new_tokens)
        findings += check_provenance(report.provenance, target, tokenizer, args.template_kwargs, commit)
    findings += doctor(
        target,
        tokenizer,
        draft,
        rows,
        target_revision=commit,
        engine=args.engine,
        prompts=prompts,
        num_prompts=args.num_prompts,
        max_new_tokens=args.max_new_tokens,
    )
    print(findings_text(findings))
    if args.output:
        Path(args.output).write_text(json.dumps([finding.to_dict() for finding in findings], indent=2) + "\n")
    return int(any(finding.status == FAULT for finding in findings))
