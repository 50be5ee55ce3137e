"""`blockdraft export`."""

import sys
from dataclasses import dataclass
from warnings import catch_warnings, simplefilter

from ..training_settings import setting
from .arguments import DRAFT_REVISION, ENGINES


@dataclass
class ExportArguments:
    """A draft's weights under the names of a released checkpoint."""

    draft: str = setting("The draft: a directory or a Hub id.")
    output: str | None = setting("Folder to write; not needed with `into`.", default=None)
    draft_revision: str | None = setting(DRAFT_REVISION, default=None)
    format: str = setting(
        "deepseek: `mtp.*` tensors as DeepSeek V4.1 releases them.", default="deepseek", choices=("deepseek",)
    )
    quantize: bool = setting("FP8 blocks and FP4 experts, as released, instead of bf16.", default=False)
    into: str | None = setting(
        "Target checkpoint, a directory, to add the draft to: a shard and a merged index; its other files are kept.",
        default=None,
    )
    engine: str | None = setting(
        "Engine to check the draft for: vllm or sglang.", default=None, choices=ENGINES, aliases=["--for"]
    )

    def __post_init__(self):
        if self.output is None and self.into is None:
            raise ValueError("Give the folder to write, `output`, or the target's, `into`.")


SETTINGS = {"Export": ExportArguments}
POSITIONALS = ("draft", "output")


def run(args: ExportArguments) -> None:
    """Writes a DSpark draft as the `mtp.*` tensors of a released DeepSeek V4.1 checkpoint: into a folder of its own,
    or beside the files of its target, which are kept as they are."""
    from ...modeling.deepseek_v41.deepseek_v41_release import export_deepseek
    from ..loading import load_draft

    draft = load_draft(args.draft, revision=args.draft_revision)
    with catch_warnings():
        simplefilter("ignore")  # they are returned as well
        misfits = export_deepseek(draft, args.output, args.quantize, args.into, args.engine)
    for misfit in misfits:
        print("warning:", misfit, file=sys.stderr)
    print(f"Written into {' and '.join(place for place in (args.output, args.into) if place)}.")
