"""Training arguments of block-parallel drafts; the defaults are the papers'."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .objectives import OBJECTIVES


def default_loss_decay_gamma(block_size: int) -> float:
    """Decay length in slots that DFlash (arXiv 2602.06036) trains a block size with: 7 at 16, 5 at 10, 4 at 8."""
    return 4.0 if block_size <= 8 else 5.0 if block_size <= 10 else 7.0


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with the settings of block-parallel training. Learning rate, warm-up, weight
    decay and clipping default to DSpark's (arXiv 2607.05147), anchors and decay to DFlash's (arXiv 2602.06036).

    Raises:
        ValueError: if a setting cannot be; the message names it.
    """

    loss_type: str = field(
        default="fixed_anchor",
        metadata={"help": "Objective: fixed_anchor (DFlash) or variable_prefix.", "choices": list(OBJECTIVES)},
    )
    num_anchors: int = field(default=512, metadata={"help": "Blocks trained at once, at most, in each row."})
    loss_decay_gamma: float | None = field(
        default=None,
        metadata={"help": "Decay of the loss over a block's slots, in slots. Default: by block size; 0: no decay."},
    )
    prefix_weight_base: float = field(
        default=0.9, metadata={"help": "variable_prefix: a prefix one token longer is this much as likely."}
    )
    loss_chunk_size: int = field(
        default=1024, metadata={"help": "Supervised slots whose logits are in memory at the same time."}
    )
    eval_decode_prompts: int = field(
        default=16, metadata={"help": "Held-out prompts that evaluation decodes for real; 0 for the loss alone."}
    )
    eval_max_new_tokens: int = field(default=64, metadata={"help": "Longest answer of such a decode."})

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up steps; below 1, a share of all steps."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay false: row ids and loss masks are columns that no forward names."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type not in OBJECTIVES:
            raise ValueError(f"`loss_type` is {self.loss_type!r}; choose one of {', '.join(OBJECTIVES)}.")
        for name in ("num_anchors", "loss_chunk_size", "prefix_weight_base"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be positive.")
        for name in ("eval_decode_prompts", "eval_max_new_tokens", "loss_decay_gamma"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must not be negative.")
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be false: anchors are drawn by the column `row_id`.")
        if self.n_gpu > 1:
            raise ValueError(
                "Several GPUs in one process (DataParallel) are not supported. Start with `accelerate launch` or "
                "`torchrun`, or show one GPU with CUDA_VISIBLE_DEVICES=0."
            )

    def gamma(self, block_size: int) -> float | None:
        """The decay in force for a block size; `None` is no decay."""
        if self.loss_decay_gamma is None:
            return default_loss_decay_gamma(block_size)
        return self.loss_decay_gamma or None
