"""Builds the configuration of a DFlash draft with Kimi K3 layers from its target's."""

from transformers import PreTrainedConfig

from .configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from .configuration_kimi_k3_dflash import KimiK3DFlashConfig, all_full_attention
from .target_settings import build_target_layer_ids, default_target_layer_ids, mlp_width, target_settings

# What a draft does not build is switched off, so that its configuration describes the draft and not the target.
DENSE_DRAFT = {
    "num_experts": None,
    "num_shared_experts": 0,
    "num_nextn_predict_layers": 0,
    "attn_res_block_size": None,
    "tie_word_embeddings": False,
}


def from_target_config(
    cls: type[KimiK3DFlashConfig],
    target_config: PreTrainedConfig,
    mask_token_id: int | None,
    num_draft_layers: int | None,
    block_size: int | None,
    target_layer_ids: list[int] | None,
    **overrides,
) -> KimiK3DFlashConfig:
    """
    A draft for any causal language model: 5 layers, blocks of 16 slots, the target's hidden size H, vocabulary,
    special tokens, scaling of embeddings and logits (see [`target_settings`]), the layers of
    [`default_target_layer_ids`], and K3's MLA. A K3 target gives its shape; for any other it is in proportion to H:
    the target's number of heads, widths for each head of K3's 128/64/128 capped by H / heads, ranks of K3's 1536 for
    queries and 512 for the latent capped by H / 2, an MLP of the target's width, gated, with SiTU as in K3.

    Two defaults are not the reference's, which are a bidirectional block and the whole context. Without positions, its
    masked slots hold the same token and see the same keys, so that all of them predict the same distribution, and
    which context row is the newest has to be found by content. Here `is_causal` is true, since a slot can count the
    masks before it, and `sliding_window` is the block size, which says what is near; `None` is the whole context. With
    a window, the last of several layers sees the whole context (`num_full_attention_layers`): it can copy from there.

    Arguments and errors are those of [`DraftConfig.from_target_config`].
    """
    text_config = target_config.get_text_config(decoder=True)
    depth, inherited = text_config.num_hidden_layers, target_settings(target_config)
    num_draft_layers = 5 if num_draft_layers is None else num_draft_layers
    block_size = 16 if block_size is None else block_size
    overrides = {"is_causal": True, "sliding_window": block_size} | overrides
    if overrides["sliding_window"] is not None:
        overrides = {"num_full_attention_layers": int(num_draft_layers > 1)} | overrides
    layers = target_layer_ids or default_target_layer_ids(depth, num_draft_layers, inherited["capture_point"])
    draft = {"mask_token_id": mask_token_id, "target_layer_ids": layers}
    if isinstance(text_config, KimiK3TextConfig):
        config = build_kimi_k3_dflash_draft_config(text_config, num_draft_layers, depth, block_size, draft, "sdpa")
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
    return cls(**(DENSE_DRAFT | settings | draft | overrides))


def build_kimi_k3_dflash_draft_config(
    target_config: KimiK3TextConfig,
    num_draft_layers: int,
    num_target_layers: int,
    block_size: int,
    dflash_config: dict,
    attention_backend: str,
) -> KimiK3DFlashConfig:
    """
    A draft configuration from a Kimi K3 target's, as the reference (NeMo AutoModel) builds it: the target's MLA shape,
    hidden size, MLP and vocabulary; depth, block and features of the draft; what the draft does not build switched
    off.

    Args:
        target_config: configuration of a K3 target (a `kimi_k3` one is read through its text side).
        num_draft_layers: decoder layers of the draft.
        num_target_layers: depth of the target.
        block_size: slots of a block, the anchor's included.
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
        "linear_attn_config": all_full_attention(num_draft_layers),
        "num_target_layers": num_target_layers,
        "block_size": block_size,
        "dflash_config": {"target_layer_ids": build_target_layer_ids(num_target_layers, num_draft_layers)}
        | dflash_config,
        "attention_backend": attention_backend,
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
