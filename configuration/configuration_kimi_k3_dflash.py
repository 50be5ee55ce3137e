"""Configuration of the DFlash draft with a dense Kimi K3 MLA backbone, and its builders."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_draft import (
    ATTENTION_INPUT_MEAN,
    LAYER_OUTPUT,
    DraftConfig,
    build_target_layer_ids,
    default_target_layer_ids,
)
from .configuration_kimi_k3 import FULL_ATTENTION, KimiK3Config, KimiK3TextConfig
from .target_settings import mlp_width, target_settings

SLIDING_ATTENTION = "sliding_attention"
# What a draft does not build is switched off, so that its configuration describes the draft and not the target.
DENSE_DRAFT = {
    "num_experts": None,
    "num_shared_experts": 0,
    "num_nextn_predict_layers": 0,
    "attn_res_block_size": None,
    "tie_word_embeddings": False,
}


@strict
class KimiK3DFlashConfig(DraftConfig, KimiK3TextConfig):
    r"""
    A [`DraftConfig`] whose backbone is a dense stack of Kimi K3's MLA layers: every field of [`KimiK3TextConfig`], of
    which `hidden_size` is the target's, since the draft reads the target's embeddings and features and feeds its head.

    Args:
        num_full_attention_layers (`int`):
            With a `sliding_window`: the last layers, so many of them, see the whole context all the same.
    """

    model_type = "kimi_k3_dflash"
    family_capture_points = (LAYER_OUTPUT, ATTENTION_INPUT_MEAN)
    fixed_in_training = (*DraftConfig.fixed_in_training, "num_full_attention_layers", "is_causal")
    engine_view_key = "dflash_config"
    engine_view = {
        "block_size": "block_size",
        "mask_token_id": "mask_token_id",
        "target_layer_ids": "target_layer_ids",
        "output_multiplier": "output_multiplier",
        "final_logit_softcapping": "final_logit_softcapping",
        "input_embedding_scale": "input_embedding_scale",
        "causal": "is_causal",
    }

    num_experts: int | None = None
    num_shared_experts: int | None = 0
    attn_res_block_size: int | None = None
    num_full_attention_layers: int = 0

    def __post_init__(self, **kwargs):
        if self.linear_attn_config is None:
            self.linear_attn_config = _all_full_attention(self.num_hidden_layers)
        super().__post_init__(**kwargs)

    @property
    def context_windows(self) -> list[int | None]:
        """Of every layer, the `sliding_window` on its context."""
        windowed = self.num_hidden_layers - self.num_full_attention_layers
        return [self.sliding_window] * windowed + [None] * self.num_full_attention_layers

    def to_dict(self) -> dict:
        """With `layer_types`, in which engines look for the layers that have a window."""
        kinds = [FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in self.context_windows]
        return super().to_dict() | {"layer_types": kinds}

    def check_draft(self) -> None:
        super().check_draft()
        if not 0 <= self.num_full_attention_layers < self.num_hidden_layers:
            raise ValueError(
                f"`num_full_attention_layers` is {self.num_full_attention_layers}: of {self.num_hidden_layers} layers "
                "at least one keeps the window (for none, set `sliding_window` to null)."
            )
        if self.num_full_attention_layers and self.sliding_window is None:
            raise ValueError(
                f"`num_full_attention_layers` is {self.num_full_attention_layers}, but without a `sliding_window` "
                "every layer sees the whole context: leave it out, or set a window."
            )

    def check(self) -> None:
        super().check()
        if (
            self.num_experts is not None
            or self.linear_attn_config["kda_layers"]
            or self.attn_res_block_size is not None
        ):
            raise ValueError(
                "A DFlash draft is dense: `num_experts` and `attn_res_block_size` must be null and "
                "`linear_attn_config.kda_layers` empty. `build_kimi_k3_dflash_draft_config` derives such a one."
            )

    @classmethod
    def from_target_config(
        cls,
        target_config: PreTrainedConfig,
        mask_token_id: int,
        num_draft_layers: int = 5,
        block_size: int = 16,
        target_layer_ids: list[int] | None = None,
        **overrides,
    ) -> "KimiK3DFlashConfig":
        """
        A draft for any causal language model: the target's hidden size, vocabulary, special tokens, scaling of
        embeddings and logits (see [`target_settings`]), and K3's MLA in proportion to its hidden size H where the
        target is not a K3 (heads = the target's, per-head widths of K3's 128/64/128 capped by H / heads, K3's ranks of
        1536 for queries and 512 for the latent capped by H/2, an MLP of the target's width, gated, SiTU as in K3).

        Args:
            target_config: the target's configuration; a multimodal one is read through `get_text_config()`.
            mask_token_id: see [`DraftConfig`]; `propose_mask_token_ids` lists candidates.
            target_layer_ids: defaults to [`default_target_layer_ids`].
            overrides: any field of the configuration. Two defaults are not the reference's, a bidirectional block that
                sees the whole context. Without positions, its masked slots hold the same token and see the same keys,
                so that all of them predict the same distribution, and which context row is the newest has to be found
                by content. Here `is_causal` is true, since a slot can count the masks before it, and `sliding_window`
                is the block size, which says what is near; `None` is the whole context. With a window, the last of
                several layers sees the whole context (`num_full_attention_layers`): it can copy from there.

        Raises:
            ValueError: if a setting cannot be.
        """
        text_config = target_config.get_text_config(decoder=True)
        depth, inherited = text_config.num_hidden_layers, target_settings(target_config)
        overrides = {"is_causal": True, "sliding_window": block_size} | overrides
        if overrides["sliding_window"] is not None:
            overrides = {"num_full_attention_layers": int(num_draft_layers > 1)} | overrides
        dflash_config = {
            "mask_token_id": mask_token_id,
            "target_layer_ids": target_layer_ids
            or default_target_layer_ids(depth, num_draft_layers, inherited["capture_point"]),
        }
        if isinstance(text_config, KimiK3TextConfig):
            config = build_kimi_k3_dflash_draft_config(
                text_config, num_draft_layers, depth, block_size, dflash_config, "sdpa"
            )
            settings = config.to_dict()
            del settings["dflash_config"]  # a view of what may be overridden
            return cls.from_dict(settings | overrides)
        hidden_size, heads = inherited["hidden_size"], inherited["num_attention_heads"]
        head_dim = max(8, hidden_size // heads)
        settings = inherited | {
            "intermediate_size": mlp_width(text_config),
            "rms_norm_eps": 1e-5,
            "q_lora_rank": min(1536, hidden_size // 2),
            "kv_lora_rank": min(512, hidden_size // 2),
            "qk_nope_head_dim": min(128, head_dim),
            "qk_rope_head_dim": min(64, max(4, head_dim // 2)),
            "v_head_dim": min(128, head_dim),
            "initializer_range": 0.02,
            "num_hidden_layers": num_draft_layers,
            "block_size": block_size,
        }
        return cls(**(DENSE_DRAFT | settings | overrides), dflash_config=dflash_config)


def build_kimi_k3_dflash_draft_config(
    target_config: KimiK3TextConfig,
    num_draft_layers: int,
    num_target_layers: int,
    block_size: int,
    dflash_config: dict,
    attention_backend: str,
) -> KimiK3DFlashConfig:
    """
    A draft configuration from a Kimi K3 target's: the target's MLA shape, hidden size, MLP and vocabulary; depth,
    block and features of the draft; what the draft does not build switched off.

    Args:
        target_config: configuration of a K3 target (a `kimi_k3` one is read through its text side).
        num_draft_layers: decoder layers of the draft.
        num_target_layers: depth of the target.
        block_size: tokens of a block, anchor included.
        dflash_config: holds `mask_token_id` and `target_layer_ids`; ids default to [`build_target_layer_ids`].
        attention_backend: `"eager"`, `"sdpa"` or `"flex_attention"`.

    Raises:
        ValueError: if `target_config` is not a Kimi K3 configuration, or a setting cannot be.
    """
    target_config = target_config.get_text_config()
    if not isinstance(target_config, KimiK3TextConfig):
        raise ValueError(
            f"`target_config` has the model type {target_config.model_type!r}, not a Kimi K3's. "
            "`KimiK3DFlashConfig.from_target_config` builds a draft for any other target."
        )
    settings = target_config.to_dict()
    for name in ("model_type", "dtype", "transformers_version", "quantization_config", "auto_map", "_name_or_path"):
        settings.pop(name, None)
    draft = {
        "architectures": ["KimiK3DFlashDraftModel"],
        "num_hidden_layers": num_draft_layers,
        "linear_attn_config": _all_full_attention(num_draft_layers),
        "num_target_layers": num_target_layers,
        "block_size": block_size,
        "dflash_config": {"target_layer_ids": build_target_layer_ids(num_target_layers, num_draft_layers)}
        | dflash_config,
        "attn_implementation": attention_backend,
    }
    return KimiK3DFlashConfig(**(settings | DENSE_DRAFT | draft))


def build_kimi_k3_dflash_target_kwargs(config: PreTrainedConfig) -> dict:
    """
    Keyword arguments that load the text-only `KimiK3ForCausalLM` out of a (multimodal) K3 checkpoint:

    ```python
    kwargs = build_kimi_k3_dflash_target_kwargs(AutoConfig.from_pretrained(name))
    target = KimiK3ForCausalLM.from_pretrained(name, **kwargs)
    ```

    Raises:
        ValueError: if `config` is not a Kimi K3 configuration.
    """
    if not isinstance(config, (KimiK3Config, KimiK3TextConfig)):
        raise ValueError(f"`config` has the model type {config.model_type!r}, not a Kimi K3's.")
    return {"config": config.get_text_config(), "dtype": "auto"}


def _all_full_attention(num_layers: int) -> dict:
    return {"kda_layers": [], "full_attn_layers": list(range(1, num_layers + 1))}
