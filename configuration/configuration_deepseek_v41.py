"""Configuration of the DeepSeek V4.1 text model, and of the released multimodal checkpoint around it."""

from itertools import pairwise

from huggingface_hub.dataclasses import strict

from .configuration_deepseek_v41_base import DeepseekV41BaseConfig
from .multimodal import QUANTIZATION, MultimodalConfig, text_side
from .validation import is_natural, is_positive_int

# The one cache layer type: what a layer keeps follows from its place in the compression schedule.
# transformers finds a cache layer by this name, and its DeepSeek V4 has a "compressed_sparse_attention".
DEEPSEEK_V41_ATTENTION = "deepseek_v41_attention"

YARN = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}


@strict
class DeepseekV41TextConfig(DeepseekV41BaseConfig):
    r"""
    Text model of DeepSeek V4.1: CSA2 attention (a window plus compressed keys chosen by an indexer), Engram n-gram
    memory, single-pass hyper-connections, mixture of experts. The defaults are the released model's. Beside the fields
    of [`DeepseekV41BaseConfig`]:

    Args:
        compress_ratios (`list[int]`): Tokens of a compressed key in every layer (0: window only), the draft's stages
            behind the model's layers.
        kv_source_layer_ids, index_source_layer_ids (`list[int]`): Layers that compress keys anew (Full), and those
            that choose among them anew (Full and Reindex). The other layers with a ratio reuse both.
        index_n_heads, index_head_dim, index_topk (`int`): Shape of the indexer and how many compressed keys it chooses
            for a query.
        candidate_source_layer_id (`int`), candidate_topk_blocks (`int`), candidate_block_size (`int`): The Full layer
            that narrows the choice of later layers to its best blocks of keys; -1 for none.
        compress_rope_theta (`float`), rope_scaling (`dict`, *optional*): Rotary base and YaRN settings of layers with
            a ratio; `{}` for no scaling.
        engram_layer_ids, engram_num_embeddings (`list[int]`): Layers with an n-gram memory and its rows; `[]` for
            none. `engram_max_ngram_size`, `engram_vocab_size`, `engram_n_heads`, `engram_head_dim`,
            `engram_pad_token_id`, `engram_compressed_vocab_size` shape it.
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
        if (quantization := self.for_quantizer(kwargs.pop(QUANTIZATION, None))) is not None:
            kwargs[QUANTIZATION] = quantization
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

    @staticmethod
    def for_quantizer(quantization: dict | None) -> dict | None:
        """What a quantizer of transformers is told, of a file's `quantization_config`: nothing of the FP8 and FP4 of
        released files, which are decoded on load."""
        return None if (quantization or {}).get("quant_method", "fp8") == "fp8" else quantization

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict, dict]:
        """As in transformers; of a multimodal checkpoint, its text side."""
        settings, kwargs = super().get_config_dict(*args, **kwargs)
        return text_side(DeepseekV41Config, settings), kwargs

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

    def check(self) -> None:
        super().check()
        rope, width = self.qk_rope_head_dim, self.index_head_dim
        self.require("qk_rope_head_dim", rope <= width, f"it must be at most index_head_dim ({width})")
        for name in ("num_nextn_predict_layers", "dspark_block_size"):
            self.require(name, is_natural(getattr(self, name)), "it must be a non-negative integer")
        self._check_schedule()
        self._check_candidates()
        self._check_rope()
        self._check_engram()

    def _check_schedule(self) -> None:
        ratios, depth = self.compress_ratios, self.num_hidden_layers
        self.require(
            "compress_ratios",
            len(ratios) >= depth and all(map(is_natural, ratios)),
            f"it needs a non-negative integer for each of the {depth} layers (and for the draft's stages behind)",
        )
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            ids = getattr(self, name)
            increasing = all(a < b for a, b in pairwise([*ids, len(ratios)]))
            reason = f"layers must be strictly increasing and below len(compress_ratios) = {len(ratios)}"
            self.require(name, all(map(is_natural, ids)) and increasing, reason)
        sources, index_sources = self.kv_source_layer_ids, self.index_source_layer_ids
        reason = f"each must be in index_source_layer_ids ({index_sources}) too"
        self.require("kv_source_layer_ids", set(sources) <= set(index_sources), reason)
        current = None  # ratio of the nearest layer below that compresses keys
        for layer, ratio in enumerate(ratios[:depth]):
            if ratio == 0:
                for name in ("kv_source_layer_ids", "index_source_layer_ids"):
                    ids = getattr(self, name)
                    self.require(name, layer not in ids, f"layer {layer} has the ratio 0, it sees its window only")
            elif layer in sources:
                current = ratio
            else:
                self.require(
                    "compress_ratios",
                    ratio == current,
                    f"layer {layer} has the ratio {ratio}, but the keys it reads were compressed with {current}",
                )

    def _check_candidates(self) -> None:
        source = self.candidate_source_layer_id
        self.require("candidate_source_layer_id", is_natural(source) or source == -1, "it must be a layer or -1 (off)")
        if source >= 0:
            key_sources = self.kv_source_layer_ids
            reason = f"it must be one of kv_source_layer_ids ({key_sources})"
            self.require("candidate_source_layer_id", source in key_sources, reason)
            self.require_positive_ints("candidate_block_size", "candidate_topk_blocks")
            for layer in (i for i in self.index_source_layer_ids if i > source):
                keys_from = max(i for i in key_sources if i <= layer)
                self.require(
                    "candidate_source_layer_id",
                    keys_from in (layer, source),
                    f"layer {layer} chooses among the keys of layer {keys_from}, of which it makes no candidates",
                )

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        kind, length = scaling.get("rope_type", "yarn"), scaling.get("original_max_position_embeddings", 0)
        self.require(
            "rope_scaling",
            not scaling or (kind == "yarn" and length >= 0 and ("factor" in scaling or not length)),
            "it must be {} or of the `rope_type` yarn, with `factor` and `original_max_position_embeddings`",
        )

    def _check_engram(self) -> None:
        layers, rows = self.engram_layer_ids, self.engram_num_embeddings
        self.require(
            "engram_num_embeddings",
            len(rows) == len(layers) and all(map(is_positive_int, rows)),
            f"it needs a positive integer for each of engram_layer_ids ({layers})",
        )
        if not layers:
            return
        sizes = ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size")
        self.require_positive_ints(*sizes)
        size, pad = self.engram_max_ngram_size, self.engram_pad_token_id
        self.require("engram_max_ngram_size", is_natural(size) and size >= 2, "an n-gram has two tokens at least")
        is_inside = is_natural(pad) and pad < self.vocab_size
        self.require("engram_pad_token_id", is_inside, f"it must lie inside the vocabulary, 0..{self.vocab_size - 1}")


@strict
class DeepseekV41Config(MultimodalConfig):
    r"""
    Configuration of a released DeepSeek V4.1 checkpoint, which is multimodal: a [`MultimodalConfig`] around a
    [`DeepseekV41TextConfig`].
    """

    model_type = "deepseek_v41"
    sub_configs_defaults = {"text_config": DeepseekV41TextConfig}

    image_token_id: int = 129264
