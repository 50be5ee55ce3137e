"""Configuration of the DSpark draft with DeepSeek V4.1 stages, and its builders."""

import math

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_deepseek_v41 import DeepseekV41BaseConfig, DeepseekV41TextConfig
from .configuration_draft import (
    ANCHOR_FIRST,
    ATTENTION_INPUT_MEAN,
    LAYER_OUTPUT,
    DraftConfig,
    default_target_layer_ids,
)
from .target_settings import target_settings
from .validation import require

# The cache layer type of a stage: the keys of the context window.
DSPARK_CONTEXT = "dspark_context"
CONFIDENCE_INPUTS = ("post_norm", "pre_norm")


@strict
class DeepseekV41DSparkConfig(DraftConfig, DeepseekV41BaseConfig):
    r"""
    A [`DraftConfig`] whose backbone is a few of DeepSeek V4.1's window-only layers (stages): every field of
    [`DeepseekV41BaseConfig`], of which `hidden_size` is the target's. `num_hidden_layers`, `n_routed_experts` and
    `num_experts_per_tok` are the draft's own; `block_size` counts drafted tokens, since the anchor's slot drafts too.

    Args:
        markov_rank (`int`, *optional*):
            Rank of the Markov head, which biases a slot's logits by the token before it; `None` for neither it nor a
            confidence head.
        confidence_head (`bool`, *optional*):
            Whether there is a head that says how likely a slot's token is to be accepted. Default: with a Markov head.
        confidence_input (`str`):
            What it reads: `"post_norm"`, the draft's last hidden state, or `"pre_norm"`, the state before the final
            norm, which the released drafter and the serving engines feed it.
        confidence_temperatures (`list[float]`, *optional*):
            A positive number for each slot that its confidence logit is divided by, as calibration fits them.
    """

    model_type = "deepseek_v41_dspark"
    family_slot_layout = ANCHOR_FIRST
    family_capture_points = (ATTENTION_INPUT_MEAN, LAYER_OUTPUT)
    fixed_in_training = (
        *DraftConfig.fixed_in_training,
        "markov_rank",
        "confidence_head",
        "confidence_input",
        "n_routed_experts",
    )
    engine_view = {
        "dspark_block_size": "block_size",
        "dspark_noise_token_id": "mask_token_id",
        "dspark_target_layer_ids": "target_layer_ids",
        "dspark_markov_rank": "markov_rank",
        "dspark_n_routed_experts": "n_routed_experts",
        "dspark_num_experts_per_tok": "num_experts_per_tok",
        "num_nextn_predict_layers": "num_hidden_layers",
    }

    num_hidden_layers: int = 3
    n_routed_experts: int = 128
    num_experts_per_tok: int = 3
    sliding_window: int = 128
    capture_point: str = ATTENTION_INPUT_MEAN
    markov_rank: int | None = 256
    confidence_head: bool | None = None
    confidence_input: str = "post_norm"
    confidence_temperatures: list[float | int] | None = None

    def __post_init__(self, **kwargs):
        kwargs.pop("layer_types", None)  # derived
        super().__post_init__(**kwargs)
        if self.confidence_head is None:
            self.confidence_head = self.markov_rank is not None
        self.check()

    @property
    def layer_types(self) -> list[str]:
        """What a `DFlashCache` builds its cache layers from."""
        return [DSPARK_CONTEXT] * self.num_hidden_layers

    def validate_layer_type(self):
        """`layer_types` is derived and holds a type of our own: the list in transformers does not apply."""

    def check(self) -> None:
        super().check()
        rank, temperatures = self.markov_rank, self.confidence_temperatures
        require(rank is None or rank > 0, "markov_rank", rank, "it must be positive, or null for no Markov head")
        require(
            rank is not None or not self.confidence_head,
            "confidence_head",
            True,
            "it reads the Markov head's embedding, and `markov_rank` is null",
        )
        require(
            self.confidence_input in CONFIDENCE_INPUTS,
            "confidence_input",
            self.confidence_input,
            f"it must be one of {CONFIDENCE_INPUTS}",
        )
        require(not self.is_causal, "is_causal", True, "the slots of a DSpark block see each other in both directions")
        require(
            temperatures is None
            or (len(temperatures) == self.block_size and all(math.isfinite(t) and t > 0 for t in temperatures)),
            "confidence_temperatures",
            temperatures,
            f"it needs a positive number for each of the {self.block_size} slots",
        )

    @classmethod
    def from_target_config(
        cls,
        target_config: PreTrainedConfig,
        mask_token_id: int | None = None,
        num_draft_layers: int | None = None,
        block_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        **overrides,
    ) -> "DeepseekV41DSparkConfig":
        """
        A draft for any causal language model.

        For a DeepSeek V4.1 target every setting that is not given is what its own `dspark_*` settings say. For another
        one: 3 stages that draft 5 tokens, the features of [`default_target_layer_ids`], the target's hidden size H,
        vocabulary, special tokens, number of heads and scaling of embeddings and logits (see [`target_settings`]);
        heads of 32 channels for every 256 of H, at least 32 and at most 512, of which half, at most 64, are rotated; a
        query rank of H/4; up to 8 groups of heads whose outputs are compressed to 1.6 H in all; 8 experts of width
        H/2, 2 for a token, and the shared one; a Markov rank of H/4, at most 256; a window of 128.

        Args:
            target_config: the target's configuration; a multimodal one is read through `get_text_config()`.
            mask_token_id: see [`DraftConfig`]; needed unless the target is a V4.1.
            num_draft_layers: stages.
            block_size: tokens drafted at once.
            target_layer_ids: layers to read features from.
            overrides: any field of the configuration.

        Raises:
            ValueError: if a setting is missing or cannot be; the message names it.
        """
        text_config = target_config.get_text_config(decoder=True)
        given = {
            "mask_token_id": mask_token_id,
            "num_hidden_layers": num_draft_layers,
            "block_size": block_size,
            "target_layer_ids": target_layer_ids,
        }
        given = {name: value for name, value in given.items() if value is not None} | overrides
        if isinstance(text_config, DeepseekV41TextConfig):
            return cls(**(_settings_of_v41_target(text_config) | given))
        stages, inherited = given.get("num_hidden_layers", 3), target_settings(target_config)
        defaults = inherited | _stage_shape(inherited) | {"num_hidden_layers": stages, "block_size": 5}
        if "target_layer_ids" not in given:
            depth, capture_point = inherited["num_target_layers"], inherited["capture_point"]
            defaults["target_layer_ids"] = default_target_layer_ids(depth, stages, capture_point)
        return cls(**(defaults | given))


def build_deepseek_v41_dspark_draft_config(
    target_config: DeepseekV41TextConfig,
    num_draft_layers: int | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    markov_rank: int | None = None,
    target_layer_ids: list[int] | None = None,
    attention_backend: str = "sdpa",
    **overrides,
) -> DeepseekV41DSparkConfig:
    """
    The draft that a DeepSeek V4.1 target's configuration describes. What is given of its shape has to agree with the
    target, which engines read it from.

    Args:
        target_config: configuration of a V4.1 target (a multimodal one is read through its text side).
        num_draft_layers, block_size, mask_token_id, markov_rank, target_layer_ids: default to, and must equal, the
            target's `num_nextn_predict_layers`, `dspark_block_size`, `dspark_noise_token_id`, `dspark_markov_rank` and
            `dspark_target_layer_ids`.
        attention_backend: `"eager"` or `"sdpa"`.
        overrides: fields that no target states: `confidence_head`, `confidence_input`, ...

    Raises:
        ValueError: if `target_config` is not a V4.1 configuration, describes no draft, or disagrees.
    """
    target_config = target_config.get_text_config()
    if not isinstance(target_config, DeepseekV41TextConfig):
        raise ValueError(
            f"`target_config` has the model type {target_config.model_type!r}, not a DeepSeek V4.1's. "
            "`DeepseekV41DSparkConfig.from_target_config` builds a draft for any other target."
        )
    depth, stages = target_config.num_hidden_layers, target_config.num_nextn_predict_layers
    require(stages > 0, "num_nextn_predict_layers", stages, "the target describes no draft")
    ratios = target_config.compress_ratios
    require(
        len(ratios) >= depth + stages and not any(ratios[depth : depth + stages]),
        "compress_ratios",
        ratios,
        f"behind the target's {depth} layers it needs an entry of 0 for each of the draft's {stages} stages",
    )
    given = {
        "num_nextn_predict_layers": num_draft_layers,
        "dspark_block_size": block_size,
        "dspark_noise_token_id": mask_token_id,
        "dspark_markov_rank": markov_rank,
        "dspark_target_layer_ids": target_layer_ids,
    }
    for name, value in given.items():
        expected = getattr(target_config, name)
        require(
            value is None or value == expected,
            DeepseekV41DSparkConfig.engine_view[name],
            value,
            f"the target's `{name}` is {expected}. `DeepseekV41DSparkConfig.from_target_config` builds other drafts",
        )
    settings = _settings_of_v41_target(target_config) | {
        "architectures": ["DeepseekV41DSparkModel"],
        "attn_implementation": attention_backend,
    }
    return DeepseekV41DSparkConfig(**(settings | overrides))


def _settings_of_v41_target(target_config: DeepseekV41TextConfig) -> dict:
    shared = {name: getattr(target_config, name) for name in DeepseekV41BaseConfig.__dataclass_fields__}
    for name in PreTrainedConfig.__dataclass_fields__:
        shared.pop(name, None)
    view = {ours: getattr(target_config, name) for name, ours in DeepseekV41DSparkConfig.engine_view.items()}
    return (
        shared
        | view
        | {
            "num_target_layers": target_config.num_hidden_layers,
            "capture_point": ATTENTION_INPUT_MEAN,
        }
    )


def _stage_shape(inherited: dict) -> dict:
    """A stage for a target that is no V4.1, in proportion to its hidden size; see [`target_settings`]."""
    hidden_size, heads = inherited["hidden_size"], inherited["num_attention_heads"]
    head_dim = 32 * min(16, max(1, hidden_size // 256))
    groups = math.gcd(heads, 8)
    return {
        "head_dim": head_dim,
        "qk_rope_head_dim": min(64, head_dim // 2),
        "q_lora_rank": max(8, hidden_size // 4),
        "o_groups": groups,
        "o_lora_rank": max(8, 8 * hidden_size // (5 * groups)),
        "moe_intermediate_size": max(8, hidden_size // 2),
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "markov_rank": min(256, max(8, hidden_size // 4)),
        "rms_norm_eps": 1e-6,
    }
