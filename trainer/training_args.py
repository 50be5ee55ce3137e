"""Training arguments of block-parallel drafts; the defaults are the papers'."""

import math
import os
from dataclasses import dataclass, field, fields

from transformers import TrainingArguments

from ..hub_cards.rules import check_datasets, check_license

# Each objective with the settings that only it reads. A draft's block layout decides which objectives it can have.
OBJECTIVES = {
    "fixed_anchor": [],
    "variable_prefix": ["prefix_weight_base"],
    "dspark": [
        "ce_loss_alpha",
        "l1_loss_alpha",
        "confidence_head_alpha",
        "confidence_head_stop_gradient",
        "expert_bias_step",
    ],
}

# Settings of TrainingArguments that need labels, or token ids, in the draft's forward, and what switches them off.
NOT_TAKEN = {"include_num_input_tokens_seen": "no", "label_smoothing_factor": 0.0, "neftune_noise_alpha": None}


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

    loss_type: str | None = field(
        default=None,
        metadata={
            "help": "Objective: fixed_anchor or variable_prefix for DFlash drafts, dspark for DSpark drafts. Default: "
            "the first that suits the draft.",
            "choices": list(OBJECTIVES),
        },
    )
    num_anchors: int = field(default=512, metadata={"help": "Blocks trained at once, at most, in each row."})
    loss_decay_gamma: float | None = field(
        default=None,
        metadata={"help": "Decay of the loss over a block's slots, in slots. Default: by block size; 0: no decay."},
    )
    prefix_weight_base: float = field(
        default=0.9, metadata={"help": "variable_prefix: a prefix one token longer is this much as likely."}
    )
    ce_loss_alpha: float = field(default=0.1, metadata={"help": "dspark: weight of the cross entropy."})
    l1_loss_alpha: float = field(
        default=0.9, metadata={"help": "dspark: weight of the distance to the target's distribution."}
    )
    confidence_head_alpha: float = field(
        default=1.0,
        metadata={"help": "dspark: weight of the confidence's cross entropy; 0 leaves the head alone and frozen."},
    )
    confidence_head_stop_gradient: bool = field(
        default=False, metadata={"help": "dspark: let the confidence term train the confidence head alone."}
    )
    expert_bias_step: float = field(
        default=1e-3, metadata={"help": "dspark: step of the router bias that balances the experts' load; 0: off."}
    )
    loss_chunk_size: int | None = field(
        default=None,
        metadata={
            "help": "Supervised slots whose logits are in memory at the same time. Default: by vocabulary and device, "
            "64 MB of logits on a CPU, 256 MB on a GPU, 64 slots at least."
        },
    )
    muon: bool = field(
        default=True,
        metadata={
            "help": "Train the draft's weight matrices with Muon, at the same learning rate, where `optim` is AdamW; "
            "an adapter, FSDP and DeepSpeed go without."
        },
    )
    cache_features: bool = field(
        default=False,
        metadata={
            "help": "Keep the target's states of every row on disk during the run, so that only the first epoch runs "
            "the target. A token takes its features' width (layers read times hidden size) in the target's dtype."
        },
    )
    eval_decode_prompts: int = field(
        default=16,
        metadata={
            "help": "Held-out prompts that evaluation decodes for real; 0 for the loss alone, all that FSDP "
            "and ZeRO-3 can do."
        },
    )
    eval_max_new_tokens: int = field(default=64, metadata={"help": "Longest answer of such a decode."})
    license: str | None = field(
        default=None,
        metadata={"help": "Licence of the draft, for its card, as the Hub names it, e.g. apache-2.0; or other."},
    )
    license_name: str | None = field(default=None, metadata={"help": "What a licence of your own (other) is called."})
    license_link: str | None = field(
        default=None, metadata={"help": "Where it can be read: a URL, or LICENSE for a file in the repository."}
    )
    datasets: list[str] | None = field(
        default=None,
        metadata={"help": "Hub ids of the datasets that the training data come from, for the card."},
    )

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up steps; below 1, a share of all steps."})
    weight_decay: float = field(default=0.0, metadata={"help": "Weight decay."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay false: row ids and loss masks are columns that no forward names."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type is not None and self.loss_type not in OBJECTIVES:
            raise ValueError(f"`loss_type` is {self.loss_type!r}; choose one of {', '.join(OBJECTIVES)}.")
        for name in ("num_anchors", "prefix_weight_base"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be positive.")
        if self.loss_chunk_size is not None and self.loss_chunk_size < 1:
            raise ValueError(
                f"`loss_chunk_size` is {self.loss_chunk_size}: it must be at least 1; leave it out for the default."
            )
        not_negative = ["eval_decode_prompts", "eval_max_new_tokens", "loss_decay_gamma", "expert_bias_step"]
        not_negative += ["ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha"]
        for name in not_negative:
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be finite and not negative.")
        if given := [name for name, off in NOT_TAKEN.items() if getattr(self, name) != off]:
            raise ValueError(
                f"`{'`, `'.join(given)}`: not for drafts, which get no token ids and no labels, but embedded blocks. "
                "Leave it out."
            )
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be false: anchors are drawn by the column `row_id`.")
        check_license(self.license, self.license_name, self.license_link)
        check_datasets(self.datasets or [])
        if local := [name for name in self.datasets or [] if os.path.exists(name)]:
            raise ValueError(
                f"`datasets` has {local[0]!r}, which is a path here: name Hub datasets only, they are for the card."
            )
        if self.hub_token is not None:
            raise ValueError(
                "`hub_token` is not taken, it would end up in files and logs: log in with `hf auth login`, or set the "
                "environment variable HF_TOKEN."
            )
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

    def unused_settings(self, loss_type: str) -> list[str]:
        """Settings that were changed and that this objective does not read."""
        default = {field.name: field.default for field in fields(self)}
        others = {name for names in OBJECTIVES.values() for name in names} - set(OBJECTIVES[loss_type])
        return sorted(name for name in others if getattr(self, name) != default[name])
