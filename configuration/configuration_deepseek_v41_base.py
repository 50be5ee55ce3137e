"""Configuration of the layers that the DeepSeek V4.1 text model and its DSpark draft share."""

from huggingface_hub.dataclasses import strict

from .validation import CheckedConfig, is_positive_int


@strict
class DeepseekV41BaseConfig(CheckedConfig):
    r"""What a layer of the DeepSeek V4.1 text model and a stage of its DSpark draft have in common: window attention
    with one key for all heads, compressed queries (MLA of DeepSeek-V2, arXiv 2405.04434, section 2.1) and an output
    projection by groups of heads; a mixture of experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2);
    hyper-connections (arXiv 2512.24880). The defaults are the released model's.

    Args:
        qk_rope_head_dim (`int`): Last channels of every head that are rotated; even.
        q_lora_rank, o_lora_rank (`int`): Width of the compressed query, and of the compressed output of each of
            `o_groups` groups of heads.
        sliding_window (`int`): Keys that a query sees at most, its own included.
        n_routed_experts, num_experts_per_tok, n_shared_experts (`int`): Experts of a layer, of a token, and always on
            (1).
        swiglu_limit (`float`): Bound of the experts' gate (above) and linear half (both ways); 0 for none.
        hc_mult (`int`), hc_sinkhorn_iters (`int`), hc_eps (`float`): Residual streams, and the iterations and epsilon
            that make their mixing matrix doubly stochastic.

    Raises:
        ValueError: if a setting is outside of what the architecture defines; the message names it.
    """

    attribute_map = {"num_local_experts": "n_routed_experts"}
    positive_ints = (
        "vocab_size",
        "hidden_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "o_groups",
        "n_routed_experts",
        "num_experts_per_tok",
        "sliding_window",
        "hc_mult",
        "hc_sinkhorn_iters",
        "max_position_embeddings",
    )
    positive_numbers = ("rms_norm_eps", "hc_eps", "rope_theta", "routed_scaling_factor")
    fixed = {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
    }

    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    sliding_window: int = 128
    rope_theta: float | int = 1e4
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-20
    initializer_range: float = 0.02
    attention_dropout: float | int = 0.0
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    use_cache: bool = True

    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 1.5
    swiglu_limit: float | int = 10.0

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    pad_token_id: int | None = 2
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1

    def check(self) -> None:
        super().check()
        for name, value in self.fixed.items():
            self.require(name, getattr(self, name) == value, f"V4.1 is defined for {value!r} only")
        self.require("swiglu_limit", self.swiglu_limit >= 0, "it must not be negative (0: no bound)")
        dropout = self.attention_dropout
        self.require("attention_dropout", 0 <= dropout < 1, "it must lie in [0, 1)")
        groups, heads = self.o_groups, self.num_attention_heads
        self.require("o_groups", heads % groups == 0, f"it must divide num_attention_heads ({heads})")
        reason = f"it cannot exceed n_routed_experts ({self.n_routed_experts})"
        self.require("num_experts_per_tok", self.num_experts_per_tok <= self.n_routed_experts, reason)
        rope, width = self.qk_rope_head_dim, self.head_dim
        is_valid = is_positive_int(rope) and rope % 2 == 0 and rope <= width
        self.require("qk_rope_head_dim", is_valid, f"it must be positive, even and at most head_dim ({width})")
