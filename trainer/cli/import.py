"""`blockdraft import`."""

from dataclasses import dataclass
from pathlib import Path

from ..training_settings import setting


@dataclass
class ImportArguments:
    """A DSpark draft as DeepSeek V4.1 releases it, and where to save it as a draft of this library."""

    source: str = setting("A checkpoint with `mtp.*` tensors: a directory or a Hub id.")
    output: str = setting("Folder to write.")
    source_revision: str | None = setting("Commit, tag or branch of the source on the Hub.", default=None)
    format: str = setting(
        "deepseek: `mtp.*` tensors, plain or FP8 and FP4, as `blockdraft export` writes them.",
        default="deepseek",
        choices=("deepseek",),
    )
    dtype: str = setting(
        "Dtype of the draft: bfloat16 or float32.", default="bfloat16", choices=("bfloat16", "float32")
    )

    def __post_init__(self):
        if Path(self.source).resolve() == Path(self.output).resolve():
            raise ValueError("`output` is the `source`, whose config.json it would replace: choose another folder.")


SETTINGS = {"Import": ImportArguments}
POSITIONALS = ("source", "output")


def run(args: ImportArguments) -> None:
    """Saves the DSpark draft of a released DeepSeek V4.1 checkpoint, or of what `export` wrote, as a draft that
    `AutoModel` and the other commands load."""
    import torch

    from ...modeling.deepseek_v41.deepseek_v41_release import load_deepseek, released_folder
    from ..loading import check_path

    check_path("source", args.source)
    draft = load_deepseek(released_folder(args.source, args.source_revision), getattr(torch, args.dtype))
    draft.save_pretrained(args.output)
    print(f"Saved in {args.output}.")
