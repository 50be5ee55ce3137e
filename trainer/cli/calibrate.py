"""`blockdraft calibrate`."""

from dataclasses import asdict, dataclass
from pathlib import Path

from ..training_settings import setting
from .arguments import (
    DRAFT_DTYPE,
    DTYPES,
    HELD_OUT_ROWS,
    MAX_LENGTH,
    TEMPLATE_KWARGS,
    SamplingArguments,
    TargetArguments,
)


@dataclass
class CalibrateArguments:
    """Held-out prompts, from which is learned how often a slot of a given confidence is accepted."""

    draft: str = setting("The draft, a directory: the fitted temperatures are written into its configuration.")
    data: list[str] = setting(HELD_OUT_ROWS)
    draft_dtype: str | None = setting(DRAFT_DTYPE, default=None, choices=DTYPES)
    num_prompts: int = setting("Most prompts, evenly spaced over the data; a part is fitted on.", default=4000)
    rounds: int = setting("Rounds to measure on; half as many are fitted on.", default=5000)
    max_new_tokens: int = setting("Longest answer in tokens.", default=256)
    max_length: int = setting(MAX_LENGTH, default=4096)
    template_kwargs: dict | None = setting(TEMPLATE_KWARGS, default=None)
    output: str | None = setting("Folder for the figures and the reliability plot (the draft's).", default=None)

    def __post_init__(self):
        if self.num_prompts < 2 or self.rounds < 1:
            name, least = ("num_prompts", 2) if self.num_prompts < 2 else ("rounds", 1)
            raise ValueError(f"`{name}` is {getattr(self, name)}: it must be at least {least}.")


SETTINGS = {"Target": TargetArguments, "Calibration": CalibrateArguments, "Sampling": SamplingArguments}
POSITIONALS = ("target", "draft")


def run(target_args: TargetArguments, args: CalibrateArguments, sampling_args: SamplingArguments) -> None:
    """Fits a temperature to each slot of a draft's confidence head on decoded prompts, writes them into the draft's
    configuration, and reports on other prompts how well confidence meets acceptance, before and after. Sample as the
    draft will be served."""
    from transformers import GenerationConfig, set_seed

    from ...modeling.target.target_identity import weights_fingerprint
    from ..evaluation.calibration import calibrate, save_temperatures, split_prompts
    from ..evaluation.report_folder import check_calibration, write_calibration
    from ..run_record import rows_fingerprint
    from .opening import check_room, check_writable, longest_row, open_pair, open_prompts

    if not Path(args.draft).is_dir():
        raise ValueError(f"`draft` is {args.draft!r}: give a directory, its configuration is rewritten.")
    check_writable("draft", Path(args.draft))
    target, tokenizer, draft = open_pair(target_args, args.draft, dtype=args.draft_dtype)
    args.max_length = longest_row(target, args.max_length)
    prompts, conversations = open_prompts(args, tokenizer)
    check_room(target, prompts, args.max_new_tokens)
    fit, test = split_prompts(prompts, conversations=conversations)
    settings = {name: getattr(args, name) for name in ("rounds", "max_new_tokens")} | asdict(sampling_args)
    measured = settings | {
        "draft_sha256": weights_fingerprint(draft),
        "target_sha256": weights_fingerprint(target),
        "prompts_sha256": rows_fingerprint([{"input_ids": prompt} for prompt in sorted(fit + test)]),
    }
    folder = Path(args.output or args.draft)
    own = folder.exists() and folder.samefile(args.draft)
    if changed := check_calibration(folder, measured, own):
        print(f"The calibration in {folder} is replaced: {'; '.join(changed)}.")
    set_seed(sampling_args.seed)
    config = GenerationConfig(**sampling_args.generation())
    report = calibrate(target, draft, fit, test, args.max_new_tokens, args.rounds, config)
    saved = save_temperatures(draft, report.temperatures, args.draft)
    print(report.table(), report.summary(), sep="\n\n")
    path = write_calibration(folder, report, measured=measured)
    print(f"The temperatures are in {saved}, the figures in {path}.")
