"""Configuration of the DeepSeek V4.1 text model, and of the layers that its DSpark draft shares with it."""

import math

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .validation import is_natural, is_positive_int, require

CONFIG_SCHEMA_VERSION = 1

# The one cache layer type: what a layer keeps follows from its place in the compression schedule.
# transformers finds a cache layer by this name, and its DeepSeek V4 has a "compressed_sparse_attention".
DEEPSEEK_V41_ATTENTION = "deepseek_v41_attention"

YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
# How released files store quantised weights: decoded on load, so no quantizer has to run.
QUANTIZATION = "quantization_config"


@strict
class DeepseekV41BaseConfig(PreTrainedConfig):
    r"""
    What a DeepSeek V4.1 decoder layer and a DSpark stage have in common: window attention with a query low rank and a
    grouped output projection, mixture of experts, hyper-connections. The defaults are the released model's.

    Args:
        qk_rope_head_dim (`int`):
            Last channels of every head that are rotated; even.
        q_lora_rank, o_lora_rank (`int`):
            Width of the compressed query, and of the compressed output of each of `o_groups` groups of heads.
        sliding_window (`int`):
            Keys that a query sees at most, its own included.
        n_routed_experts, num_experts_per_tok, n_shared_experts (`int`):
            Experts of a layer, of a token, and always on (1).
        swiglu_limit (`float`):
            Bound of the experts' gate (above) and linear half (both ways); 0 for none.
        hc_mult (`int`), hc_sinkhorn_iters (`int`), hc_eps (`float`):
            Residual streams, and the iterations and epsilon that make their mixing matrix doubly stochastic.

    Raises:
        ValueError: if a setting is outside of what the architecture defines; the message names it.
    """

    keys_to_ignore_at_inference = ["cache"]
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

    schema_version: int = CONFIG_SCHEMA_VERSION
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
        """Raises a `ValueError` that names the first setting outside of what the architecture defines."""
        for name in self.positive_ints:
            value = getattr(self, name)
            require(is_positive_int(value), name, value, "it must be a positive integer")
        for name in self.positive_numbers:
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, name, value, "it must be finite and positive")
        for name, value in self.fixed.items():
            require(getattr(self, name) == value, name, getattr(self, name), f"V4.1 is defined for {value!r} only")
        require(self.swiglu_limit >= 0, "swiglu_limit", self.swiglu_limit, "it must not be negative (0: no bound)")
        dropout = self.attention_dropout
        require(0 <= dropout < 1, "attention_dropout", dropout, "it must lie in [0, 1)")
        groups, heads = self.o_groups, self.num_attention_heads
        require(heads % groups == 0, "o_groups", groups, f"it must divide num_attention_heads ({heads})")
        require(
            self.num_experts_per_tok <= self.n_routed_experts,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            f"it cannot exceed n_routed_experts ({self.n_routed_experts})",
        )
        rope = self.qk_rope_head_dim
        require(
            is_positive_int(rope) and rope % 2 == 0 and rope <= self.head_dim,
            "qk_rope_head_dim",
            rope,
            f"it must be positive, even and at most head_dim ({self.head_dim})",
        )


@strict
class DeepseekV41TextConfig(DeepseekV41BaseConfig):
    r"""
    Text model of DeepSeek V4.1: CSA2 attention (a window plus compressed keys chosen by an indexer), Engram n-gram
    memory, single-pass hyper-connections, mixture of experts. The defaults are the released model's.

    Args:
        compress_ratios (`list[int]`):
            Tokens of a compressed key in every layer (0: window only), the draft's stages behind the model's layers.
        kv_source_layer_ids, index_source_layer_ids (`list[int]`):
            Layers that compress keys anew (Full), and those that choose among them anew (Full and Reindex). The other
            layers with a ratio reuse both.
        index_n_heads, index_head_dim, index_topk (`int`):
            Shape of the indexer and how many compressed keys it chooses for a query.
        candidate_source_layer_id (`int`), candidate_topk_blocks (`int`), candidate_block_size (`int`):
            The Full layer that narrows the choice of later layers to its best blocks of keys; -1 for none.
        compress_rope_theta (`float`), rope_scaling (`dict`, *optional*):
            Rotary base and YaRN settings of layers with a ratio; `{}` for no scaling.
        engram_layer_ids, engram_num_embeddings (`list[int]`):
            Layers with an n-gram memory and its rows; `[]` for none. `engram_max_ngram_size`, `engram_vocab_size`,
            `engram_n_heads`, `engram_head_dim`, `engram_pad_token_id`, `engram_compressed_vocab_size` shape it.
        num_nextn_predict_layers (`int`), `dspark_*`:
            Stages and shape of the DSpark draft that belongs to the model; see [`DeepseekV41DSparkConfig`].

    Raises:
        ValueError: if a setting is outside of what the architecture defines; the message names it.
    """

    model_type = "deepseek_v41_text"
    positive_ints = (*DeepseekV41BaseConfig.positive_ints, "index_n_heads", "index_head_dim", "index_topk")
    positive_numbers = (*DeepseekV41BaseConfig.positive_numbers, "compress_rope_theta")

    compress_ratios: list[int] | None = None
    kv_source_layer_ids: list[int] | None = None
    index_source_layer_ids: list[int] | None = None
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    compress_rope_theta: float | int = 1.6e5
    rope_scaling: dict | None = None

    engram_layer_ids: list[int] | None = None
    engram_num_embeddings: list[int] | None = None
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092

    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: list[int] | None = None
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3

    def __post_init__(self, **kwargs):
        kwargs.pop("layer_types", None)  # derived
        kwargs.pop(QUANTIZATION, None)
        released = {
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
            "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "rope_scaling": dict(YARN),
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384006168, 384016682] if self.engram_layer_ids is None else [],
            "dspark_target_layer_ids": [37, 38, 39],
        }
        for name, value in released.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__(**kwargs)
        self.check()

    @property
    def layer_types(self) -> list[str]:
        """What a `DynamicCache` builds its cache layers from."""
        return [DEEPSEEK_V41_ATTENTION] * self.num_hidden_layers

    @property
    def engram_layers(self) -> list[int]:
        """Layers with an Engram that the model is deep enough to have."""
        return [layer for layer in self.engram_layer_ids if layer < self.num_hidden_layers]

    def is_full(self, layer_idx: int) -> bool:
        """Whether a layer compresses keys of its own."""
        return layer_idx in self.kv_source_layer_ids

    def is_index_source(self, layer_idx: int) -> bool:
        """Whether a layer chooses its compressed keys itself."""
        return layer_idx in self.index_source_layer_ids

    def validate_layer_type(self):
        """`layer_types` is derived and holds a type of our own: the list in transformers does not apply."""

    def check(self) -> None:
        super().check()
        require(
            self.qk_rope_head_dim <= self.index_head_dim,
            "qk_rope_head_dim",
            self.qk_rope_head_dim,
            f"it must be at most index_head_dim ({self.index_head_dim})",
        )
        for name in ("num_nextn_predict_layers", "dspark_block_size"):
            value = getattr(self, name)
            require(is_natural(value), name, value, "it must be a non-negative integer")
        self._check_schedule()
        self._check_candidates()
        self._check_rope()
        self._check_engram()

    def _check_schedule(self) -> None:
        ratios, depth = self.compress_ratios, self.num_hidden_layers
        require(
            len(ratios) >= depth and all(map(is_natural, ratios)),
            "compress_ratios",
            ratios,
            f"it needs a non-negative integer for each of the {depth} layers (and for the draft's stages behind)",
        )
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            ids = getattr(self, name)
            increasing = all(a < b for a, b in zip(ids, ids[1:], strict=False))
            require(
                all(map(is_natural, ids)) and increasing and all(i < len(ratios) for i in ids),
                name,
                ids,
                f"layers must be strictly increasing and below len(compress_ratios) = {len(ratios)}",
            )
        sources, index_sources = self.kv_source_layer_ids, self.index_source_layer_ids
        require(
            set(sources) <= set(index_sources),
            "kv_source_layer_ids",
            sources,
            f"each must be in index_source_layer_ids ({index_sources}) too",
        )
        current = None  # ratio of the nearest layer below that compresses keys
        for layer, ratio in enumerate(ratios[:depth]):
            if ratio == 0:
                for name in ("kv_source_layer_ids", "index_source_layer_ids"):
                    ids = getattr(self, name)
                    require(layer not in ids, name, ids, f"layer {layer} has the ratio 0, it sees its window only")
            elif layer in sources:
                current = ratio
            else:
                require(
                    ratio == current,
                    "compress_ratios",
                    ratios,
                    f"layer {layer} has the ratio {ratio}, but the keys it reads were compressed with {current}",
                )

    def _check_candidates(self) -> None:
        source = self.candidate_source_layer_id
        require(
            is_natural(source) or source == -1, "candidate_source_layer_id", source, "it must be a layer or -1 (off)"
        )
        if source >= 0:
            require(
                source in self.kv_source_layer_ids,
                "candidate_source_layer_id",
                source,
                f"it must be one of kv_source_layer_ids ({self.kv_source_layer_ids})",
            )
            for name in ("candidate_block_size", "candidate_topk_blocks"):
                value = getattr(self, name)
                require(is_positive_int(value), name, value, "it must be a positive integer")
            for layer in (i for i in self.index_source_layer_ids if i > source):
                keys_from = max(i for i in self.kv_source_layer_ids if i <= layer)
                require(
                    keys_from in (layer, source),
                    "candidate_source_layer_id",
                    source,
                    f"layer {layer} chooses among the keys of layer {keys_from}, of which it makes no candidates",
                )

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        kind, length = scaling.get("rope_type", "yarn"), scaling.get("original_max_position_embeddings", 0)
        require(
            not scaling or (kind == "yarn" and length >= 0 and ("factor" in scaling or not length)),
            "rope_scaling",
            scaling,
            "it must be {} or of the `rope_type` yarn, with `factor` and `original_max_position_embeddings`",
        )

    def _check_engram(self) -> None:
        layers, rows = self.engram_layer_ids, self.engram_num_embeddings
        require(
            len(rows) == len(layers) and all(map(is_positive_int, rows)),
            "engram_num_embeddings",
            rows,
            f"it needs a positive integer for each of engram_layer_ids ({layers})",
        )
        if not layers:
            return
        for name in ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size"):
            value = getattr(self, name)
            require(is_positive_int(value), name, value, "it must be a positive integer")
        size, pad = self.engram_max_ngram_size, self.engram_pad_token_id
        require(is_natural(size) and size >= 2, "engram_max_ngram_size", size, "an n-gram has two tokens at least")
        require(
            is_natural(pad) and pad < self.vocab_size,
            "engram_pad_token_id",
            pad,
            f"it must lie inside the vocabulary, 0..{self.vocab_size - 1}",
        )


@strict
class DeepseekV41Config(PreTrainedConfig):
    r"""
    Configuration of a released DeepSeek V4.1 checkpoint, which is multimodal. Only its text side is built here:
    `text_config` becomes a [`DeepseekV41TextConfig`], the vision side is kept as it was read.
    """

    model_type = "deepseek_v41"
    sub_configs_defaults = {"text_config": DeepseekV41TextConfig}

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | None = None
    image_token_id: int = 129264

    def __post_init__(self, **kwargs):
        if isinstance(self.text_config, dict):
            nested = dict(self.text_config)
            model_type = nested.pop("model_type", DeepseekV41TextConfig.model_type)
            if model_type != DeepseekV41TextConfig.model_type:
                raise ValueError(
                    f"`text_config.model_type` is {model_type!r}; a deepseek_v41 checkpoint nests "
                    f"{DeepseekV41TextConfig.model_type!r}."
                )
            self.text_config = DeepseekV41TextConfig(**nested)
        kwargs.pop(QUANTIZATION, None)
        super().__post_init__(**kwargs)
        if self.text_config.dtype is None:
            self.text_config.dtype = self.dtype
