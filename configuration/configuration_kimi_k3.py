"""Configuration of the Kimi K3 text model, and of the released multimodal checkpoint around it."""

from huggingface_hub.dataclasses import strict

from .configuration_kimi_k3_base import KimiK3BaseConfig
from .multimodal import QUANTIZATION, MultimodalConfig, text_side
from .validation import require

KIMI_DELTA_ATTENTION = "kimi_delta_attention"
FULL_ATTENTION = "full_attention"
# How released files store routed experts (the name is that of the compressed-tensors format).
MXFP4_FORMAT = "mxfp4-pack-quantized"


@strict
class KimiK3TextConfig(KimiK3BaseConfig):
    r"""
    Text backbone of Kimi K3: Kimi Delta Attention (KDA, from Kimi Linear, arXiv 2510.26692) and gated MLA layers, a
    latent mixture of experts (routed as in DeepSeek-V3, arXiv 2412.19437, section 2.1.2), attention residuals. The
    defaults are the released model's shape. Beside the fields of [`KimiK3BaseConfig`]:

    Args:
        num_experts (`int`, *optional*): Routed experts of a sparse layer; `None` makes every layer dense.
        routed_expert_hidden_size (`int`, *optional*): Width of the latent space in which the routed experts work.
        attn_res_block_size (`int`, *optional*): Layers between two snapshots of the residual stream that learned
            mixers read; `None` for plain residuals.
        linear_attn_config (`dict`, *optional*): KDA shape (`head_dim`, `num_heads`, `short_conv_kernel_size`,
            `use_full_rank_gate`, `gate_lower_bound`) and the **1-based** lists `kda_layers` and `full_attn_layers`,
            which are disjoint and cover all layers.

    Raises:
        ValueError: if a setting is outside of what the architecture defines; the message names it.
    """

    model_type = "kimi_k3_text"
    attribute_map = {
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
    }
    positive_ints = (*KimiK3BaseConfig.positive_ints, "moe_layer_freq")

    num_experts: int | None = 896
    num_experts_per_token: int | None = 16
    num_shared_experts: int | None = 2
    moe_intermediate_size: int | None = 3072
    routed_expert_hidden_size: int | None = 3584
    latent_moe_use_norm: bool = True
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float | int = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0

    attn_res_block_size: int | None = 12
    linear_attn_config: dict | None = None

    def __post_init__(self, **kwargs):
        if (quantization := self.for_quantizer(kwargs.pop(QUANTIZATION, None))) is not None:
            kwargs[QUANTIZATION] = quantization
        if self.linear_attn_config is None:
            layers = range(1, self.num_hidden_layers + 1)
            full = [layer for layer in layers if layer % 4 == 0 or layer == self.num_hidden_layers]
            self.linear_attn_config = {
                "head_dim": 128,
                "num_heads": 96,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
                "full_attn_layers": full,
                "kda_layers": [layer for layer in layers if layer not in full],
            }
        super().__post_init__(**kwargs)

    @staticmethod
    def for_quantizer(quantization: dict | None) -> dict | None:
        """What a quantizer of transformers is told, of a file's `quantization_config`: nothing of MXFP4, which is
        decoded on load. FP8 is decoded, too: its modules compute other experts than these."""
        quantization = quantization or {}
        formats = [group.get("format") for group in quantization.get("config_groups", {}).values()]
        if not quantization or MXFP4_FORMAT in (quantization.get("format"), *formats):
            return None
        return quantization | {"dequantize": True} if quantization.get("quant_method") == "fp8" else quantization

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict, dict]:
        """As in transformers; of a multimodal checkpoint, its text side."""
        settings, kwargs = super().get_config_dict(*args, **kwargs)
        return text_side(KimiK3Config, settings), kwargs

    # The KDA shape. A checkpoint that leaves a field out means the value given here.
    @property
    def linear_head_dim(self) -> int:
        return self.linear_attn_config.get("head_dim", 128)

    @property
    def linear_num_heads(self) -> int:
        return self.linear_attn_config.get("num_heads", 96)

    @property
    def linear_conv_kernel_size(self) -> int:
        return self.linear_attn_config.get("short_conv_kernel_size", 4)

    @property
    def linear_use_full_rank_gate(self) -> bool:
        return self.linear_attn_config.get("use_full_rank_gate", False)

    @property
    def linear_gate_lower_bound(self) -> float | None:
        return self.linear_attn_config.get("gate_lower_bound")

    @property
    def layer_types(self) -> list[str]:
        """Attention type of every layer; also what a `DynamicCache` builds its cache layers from."""
        kda = set(self.linear_attn_config["kda_layers"])
        return [KIMI_DELTA_ATTENTION if i + 1 in kda else FULL_ATTENTION for i in range(self.num_hidden_layers)]

    @property
    def mlp_layer_types(self) -> list[str]:
        """`"sparse"` or `"dense"` for every layer."""
        first = self.num_hidden_layers if self.num_experts is None else self.first_k_dense_replace
        return [
            "sparse" if layer >= first and layer % self.moe_layer_freq == 0 else "dense"
            for layer in range(self.num_hidden_layers)
        ]

    def check(self) -> None:
        super().check()
        size = self.attn_res_block_size
        self.require("attn_res_block_size", size is None or size > 0, "null or positive")
        lists = [self.linear_attn_config.get(name) for name in ("kda_layers", "full_attn_layers")]
        self.require(
            "linear_attn_config",
            None not in lists and sorted(lists[0] + lists[1]) == list(range(1, self.num_hidden_layers + 1)),
            f"kda_layers and full_attn_layers (1-based) must be disjoint and cover 1..{self.num_hidden_layers}",
        )
        name = "linear_attn_config.full_attn_layers"
        require(len(lists[1]) > 0, name, lists[1], "at least one layer must be full attention")
        bound = self.linear_gate_lower_bound
        require(bound is None or bound < 0, "linear_attn_config.gate_lower_bound", bound, "null or negative")
        if self.num_experts is not None:
            self._check_experts()

    def _check_experts(self):
        for name in ("num_experts", "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size"):
            value = getattr(self, name)
            self.require(name, value is not None and value > 0, "a model with experts needs it positive")
        reason = f"it cannot exceed num_experts ({self.num_experts})"
        self.require("num_experts_per_token", self.num_experts_per_token <= self.num_experts, reason)
        is_known = self.moe_router_activation_func in ("sigmoid", "softmax")
        self.require("moe_router_activation_func", is_known, 'it must be "sigmoid" or "softmax"')
        groups = self.num_expert_group
        self.require("num_expert_group", groups > 0 and self.num_experts % groups == 0, "it must divide num_experts")
        self.require("topk_group", 0 < self.topk_group <= groups, f"it must lie in 1..{groups}")


@strict
class KimiK3Config(MultimodalConfig):
    r"""
    Configuration of a released Kimi K3 checkpoint, which is multimodal: a [`MultimodalConfig`] around a
    [`KimiK3TextConfig`], for which the nested type `kimi_linear` of released files is accepted.
    """

    model_type = "kimi_k3"
    sub_configs_defaults = {"text_config": KimiK3TextConfig}
    nested_types = ("kimi_linear",)
