"""The settings of block-parallel training, with the papers' defaults. Importing them does not import torch."""

import math
import os
from dataclasses import MISSING, dataclass, field, fields

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
# Settings of TrainingArguments that a draft's training cannot follow: what switches them off, and why.
_NO_LABELS = "drafts get no token ids and no labels, but embedded blocks"
_NO_PREDICTIONS = "an evaluation sums losses and decodes, and gathers no predictions"
_AS_TRAINED = "an evaluation runs the draft in the precision of its training"
_NO_KERNELS = "Liger has no kernels for drafts"
NOT_TAKEN = {
    "include_num_input_tokens_seen": ("no", _NO_LABELS),
    "label_names": (None, _NO_LABELS),
    "label_smoothing_factor": (0.0, _NO_LABELS),
    "neftune_noise_alpha": (None, _NO_LABELS),
    "average_tokens_across_devices": (True, "a window's loss is always the mean over the slots of all ranks"),
    "batch_eval_metrics": (False, _NO_PREDICTIONS),
    "do_predict": (False, _NO_PREDICTIONS),
    "eval_accumulation_steps": (None, _NO_PREDICTIONS),
    "eval_do_concat_batches": (True, _NO_PREDICTIONS),
    "eval_use_gather_object": (False, _NO_PREDICTIONS),
    "include_for_metrics": ([], _NO_PREDICTIONS),
    "prediction_loss_only": (False, _NO_PREDICTIONS),
    "bf16_full_eval": (False, _AS_TRAINED),
    "fp16_full_eval": (False, _AS_TRAINED),
    "liger_kernel_config": (None, _NO_KERNELS),
    "use_liger_kernel": (False, _NO_KERNELS),
    "use_cache": (False, "a draft is trained on whole rows, without a cache"),
    "enable_jit_checkpoint": (False, "take the callback `SaveOnInterrupt`, whose checkpoints are whole"),
}
FEATURES_DTYPES = ("auto", "bfloat16", "float8_e4m3fn")
AFTER_LAYERS, LAYER_OUTPUT = SERVED_INDICES = ("after_layers", "layer_output")  # what an engine's id of a layer means
POSITIVE = ("num_anchors", "prefix_weight_base", "loss_chunk_size")
NOT_NEGATIVE = (
    "eval_decode_prompts",
    "eval_max_new_tokens",
    "served_wait",
    "max_skipped_share",
    "loss_decay_gamma",
    "expert_bias_step",
    "ce_loss_alpha",
    "l1_loss_alpha",
    "confidence_head_alpha",
)


def setting(help: str, default=MISSING, **argument):
    """A dataclass field with its line of help, required without a `default`, and what else the command line's argument
    has: `choices`, `aliases`."""
    return field(default=default, metadata={"help": help} | argument)


def default_loss_decay_gamma(block_size: int) -> float:
    """The decay length, in slots, that DFlash (arXiv 2602.06036) uses for a block size: 7 at 16, 5 at 10, 4 at 8."""
    return 4.0 if block_size <= 8 else 5.0 if block_size <= 10 else 7.0


@dataclass
class TrainingSettings:
    """What [`DraftTrainingArguments`] has beside the settings of transformers, and the defaults that it changes.
    Learning rate, warm-up, weight decay and clipping default to DSpark's (arXiv 2607.05147), anchors and decay to
    DFlash's (arXiv 2602.06036)."""

    loss_type: str | None = setting(
        "Objective: fixed_anchor or variable_prefix for DFlash drafts, dspark for DSpark drafts. Default: the first "
        "that suits the draft.",
        default=None,
        choices=list(OBJECTIVES),
    )
    num_anchors: int = setting("Most blocks trained at once in each row.", default=512)
    loss_decay_gamma: float | None = setting(
        "Decay of the loss over a block's slots, in slots; 0: no decay. Default: by block size.", default=None
    )
    prefix_weight_base: float = setting(
        "variable_prefix: how likely a prefix is, relative to one that is a token shorter.", default=0.9
    )
    ce_loss_alpha: float = setting("dspark: weight of the cross entropy.", default=0.1)
    l1_loss_alpha: float = setting("dspark: weight of the distance to the target's distribution.", default=0.9)
    confidence_head_alpha: float = setting(
        "dspark: weight of the confidence head's cross entropy; 0 leaves that head untrained.", default=1.0
    )
    confidence_head_stop_gradient: bool = setting(
        "dspark: the confidence loss trains the confidence head alone.", default=False
    )
    expert_bias_step: float = setting(
        "dspark: step of the router bias that balances the experts' load; 0: off.", default=1e-3
    )
    loss_chunk_size: int | None = setting(
        "Supervised slots whose logits are in memory at the same time. Default: by vocabulary and device, 64 MB of "
        "logits on a CPU, 256 MB on a GPU, at least 64 slots.",
        default=None,
    )
    muon: bool = setting(
        "Train the draft's weight matrices with Muon, at the same learning rate, where `optim` is AdamW. Not for "
        "adapters and DeepSpeed.",
        default=True,
    )
    max_skipped_share: float = setting(
        "Rows with NaN or Inf in their features or gradients are left out, named and counted; training ends with an "
        "error if they are more than this share of the rows so far, or of 1,000.",
        default=0.01,
    )
    features: str | None = setting(
        "Folder of the target's states that `blockdraft cache-features` wrote. Training reads them and does not run "
        "the target, of which it loads the embedding and the head alone.",
        default=None,
    )
    cache_features: bool = setting(
        "Write the target's states of all rows to disk before the first step, into features (default: the folder "
        "features in output_dir), and train from there. A token takes its features' width (layers read times hidden "
        "size) in features_dtype.",
        default=False,
    )
    features_dtype: str = setting(
        "Dtype of what cache_features and cache-features write: auto (the states' own), bfloat16, or float8_e4m3fn "
        "with a scale for each token.",
        default="auto",
        choices=FEATURES_DTYPES,
    )
    served_features: str | None = setting(
        "Folder of states that vLLM or speculators wrote, or writes: cache_features and cache-features take them from "
        "there, and the target does not run.",
        default=None,
    )
    served_layer_ids: list[int] | None = setting(
        "served_features: the ids that the engine was given (eagle_aux_hidden_state_layer_ids).", default=None
    )
    served_index: str = setting(
        "served_features: what such an id j means, after_layers (vLLM: the state after j layers, 0 the embedding) or "
        "layer_output (the output of the zero-based layer j).",
        default=SERVED_INDICES[0],
        choices=SERVED_INDICES,
    )
    served_final_norm: bool = setting(
        "served_features: the state after the last layer has been through the target's final norm (vLLM's has not).",
        default=False,
    )
    served_attn_res_stream: bool = setting(
        "served_features of Kimi K3: vLLM ran with VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1.", default=False
    )
    served_wait: float = setting(
        "served_features: wait for missing rows until no file has come for so many seconds.", default=0.0
    )
    eval_decode_prompts: int = setting(
        "Held-out prompts that each evaluation decodes, a rough measure (eval_tau_low, eval_tau_high); several "
        "processes share them out. 0: the loss alone.",
        default=16,
    )
    eval_max_new_tokens: int = setting("Longest answer of these prompts, in tokens.", default=64)
    license: str | None = setting(
        "Licence of the draft, for its card, as the Hub names it, e.g. apache-2.0; or other.", default=None
    )
    license_name: str | None = setting("What a licence of your own (other) is called.", default=None)
    license_link: str | None = setting(
        "Where that licence can be read: a URL, or LICENSE for a file in the repository.", default=None
    )
    datasets: list[str] | None = setting(
        "Hub ids of the datasets that the training data come from, for the card.", default=None
    )

    learning_rate: float = setting("Peak learning rate.", default=6e-4)
    lr_scheduler_type: str = setting("Learning rate schedule.", default="cosine")
    warmup_steps: float = setting("Warm-up steps; below 1, a share of all steps.", default=0.04)
    weight_decay: float = setting("Weight decay.", default=0.0)
    remove_unused_columns: bool = setting(
        "Must stay false: row ids and loss masks are columns that no forward names.", default=False
    )

    def check_settings(self) -> None:
        """Raises a `ValueError` that names the setting if one of these cannot be."""
        from ..hub_cards.rules import check_datasets, check_license  # which imports transformers

        if self.loss_type is not None and self.loss_type not in OBJECTIVES:
            raise ValueError(f"`loss_type` is {self.loss_type!r}; choose one of {', '.join(OBJECTIVES)}.")
        for name in POSITIVE:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"`{name}` is {value}: it must be positive. Leave it out for the default.")
        for name in NOT_NEGATIVE:
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be finite and not negative.")
        if self.features_dtype not in FEATURES_DTYPES:
            raise ValueError(f"`features_dtype` is {self.features_dtype!r}; choose {', '.join(FEATURES_DTYPES)}.")
        if self.served_index not in SERVED_INDICES:
            raise ValueError(f"`served_index` is {self.served_index!r}; choose {' or '.join(SERVED_INDICES)}.")
        if (self.served_features is None) != (self.served_layer_ids is None):
            raise ValueError(
                "`served_features` and `served_layer_ids` belong together: the folder, and the layers' ids that its "
                "engine was given, which no file says."
            )
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be false: anchors are drawn by the column `row_id`.")
        check_license(self.license, self.license_name, self.license_link)
        check_datasets(self.datasets or [])
        if local := [name for name in self.datasets or [] if os.path.exists(name)]:
            raise ValueError(
                f"`datasets` has {local[0]!r}, which is a path here: name Hub datasets only, they are for the card."
            )

    def gamma(self, block_size: int) -> float | None:
        """The decay length, in slots, for a block size; `None` is no decay."""
        if self.loss_decay_gamma is None:
            return default_loss_decay_gamma(block_size)
        return self.loss_decay_gamma or None

    def unused_settings(self, loss_type: str) -> list[str]:
        """Settings that were changed and that this objective does not read."""
        default = {field.name: field.default for field in fields(self)}
        others = {name for names in OBJECTIVES.values() for name in names} - set(OBJECTIVES[loss_type])
        return sorted(name for name in others if getattr(self, name) != default[name])
