"""Configuration of the DFlash draft with a dense Kimi K3 MLA backbone."""

from huggingface_hub.dataclasses import strict

from .configuration_draft import ATTENTION_INPUT_MEAN, LAYER_OUTPUT, DraftConfig
from .configuration_kimi_k3_base import KimiK3BaseConfig

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@strict
class KimiK3DFlashConfig(DraftConfig, KimiK3BaseConfig):
    r"""
    A [`DraftConfig`] whose backbone is a dense stack of Kimi K3's MLA layers: every field of [`KimiK3BaseConfig`], of
    which `hidden_size` is the target's, since the draft reads the target's embeddings and features and feeds its head.
    The defaults that count are those of `from_target_config`, see `build_kimi_k3_dflash`.

    Args:
        num_full_attention_layers (`int`): With a `sliding_window`: how many of the last layers see the whole context
            all the same.
        num_experts, num_shared_experts, attn_res_block_size, linear_attn_config: What a K3 target has and its draft
            has not, stated for engines: no experts, no attention residuals, all layers full attention.
    """

    model_type = "kimi_k3_dflash"
    builder = "build_kimi_k3_dflash"
    family_capture_points = (LAYER_OUTPUT, ATTENTION_INPUT_MEAN)
    attention_backends = ("eager", "sdpa", "flex_attention")
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
    linear_attn_config: dict | None = None
    num_full_attention_layers: int = 0

    def derive_settings(self) -> None:
        super().derive_settings()
        if self.linear_attn_config is None:
            self.linear_attn_config = all_full_attention(self.num_hidden_layers)

    @property
    def context_windows(self) -> list[int | None]:
        """The window on the context, for each layer."""
        windowed = self.num_hidden_layers - self.num_full_attention_layers
        return [self.sliding_window] * windowed + [None] * self.num_full_attention_layers

    @property
    def layer_types(self) -> list[str]:
        """What a `DFlashCache` builds its cache layers from: all rows of the context are kept."""
        return [FULL_ATTENTION] * self.num_hidden_layers

    def to_dict(self) -> dict:
        """With `layer_types`, in which engines look for the layers that have a window."""
        kinds = [FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in self.context_windows]
        return super().to_dict() | {"layer_types": kinds}

    def check(self) -> None:
        super().check()
        count, depth = self.num_full_attention_layers, self.num_hidden_layers
        reason = f"of {depth} layers at least one keeps the window (for none, set `sliding_window` to null)"
        self.require("num_full_attention_layers", 0 <= count < depth, reason)
        reason = "without a `sliding_window` every layer sees the whole context: leave it out, or set a window"
        self.require("num_full_attention_layers", not count or self.sliding_window is not None, reason)
        kda, full = (self.linear_attn_config.get(name, []) for name in ("kda_layers", "full_attn_layers"))
        is_full = not kda and sorted(full) == list(range(1, depth + 1))
        if self.num_experts is not None or self.attn_res_block_size is not None or not is_full:
            raise ValueError(
                "A DFlash draft is dense: `num_experts` and `attn_res_block_size` must be null, and all layers (1 to "
                f"{depth}) in `linear_attn_config.full_attn_layers`. `from_target_config` derives such a one."
            )


def all_full_attention(num_layers: int) -> dict:
    """The `linear_attn_config` of layers that are all full attention."""
    return {"kda_layers": [], "full_attn_layers": list(range(1, num_layers + 1))}
