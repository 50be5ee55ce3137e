"""DeepSeek V4.1 text model: CSA2 attention, Engram, single-pass hyper-connections, mixture of experts."""

import warnings

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from ...configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from ..ops.fp32 import Fp32Linear
from ..ops.shapes import check_shape
from ..target.causal_lm import CausalLMForward
from ..target.decoded_weights import load_decoded, with_text_config
from .compressed_attention import CompressedState, DeepseekV41Attention, DeepseekV41CacheLayer
from .conversion_deepseek_v41 import register_deepseek_v41_conversion
from .deepseek_v41_layers import (
    DeepseekV41HyperConnection,
    DeepseekV41ModelMixin,
    DeepseekV41MoE,
    DeepseekV41RMSNorm,
    DeepseekV41Router,
)
from .engram import EngramHash, EngramLayer, compressed_token_map
from .hyper_connections import collapse_streams, expand_streams
from .token_plan import TokenPlan

# Arguments of `from_pretrained` that say where a repository's files are; the tokenizer lies beside the weights.
LOCATION = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class DeepseekV41DecoderLayer(GradientCheckpointingLayer):
    """Engram where there is one, attention, experts. A sublayer reads the streams as the one before it says."""

    def __init__(self, config: DeepseekV41TextConfig, layer_idx: int):
        super().__init__()
        self.engram = None
        if layer_idx in config.engram_layer_ids:
            self.engram_index = config.engram_layer_ids.index(layer_idx)
            self.engram = EngramLayer(config, self.engram_index)
        self.attn = DeepseekV41Attention(config, layer_idx)
        self.attn_norm = DeepseekV41RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_hc = DeepseekV41HyperConnection(config)
        self.ffn = DeepseekV41MoE(config)
        self.ffn_norm = DeepseekV41RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_hc = DeepseekV41HyperConnection(config)

    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        plan: TokenPlan,
        state: CompressedState | None = None,
        engram_rows: Tensor | None = None,
        cache_layer: DeepseekV41CacheLayer | None = None,
    ) -> tuple[Tensor, Tensor, CompressedState | None]:
        """Streams `[B, S, s, H]`, the weights `[B, S, s]` fp32 with which the attention reads them, the state of the
        layers below and `[B, S, engram layers, tables]` rows -> streams, weights for the next sublayer, state."""
        valid = plan.new_valid
        if self.engram is not None:
            streams = self.engram(streams, engram_rows[:, :, self.engram_index], valid)
        mix = self.attn_hc(streams)
        output, state = self.attn(self.attn_norm(collapse_streams(streams, pre)), plan, state, cache_layer)
        streams, pre = expand_streams(output, streams, mix.post, mix.comb), mix.pre
        mix = self.ffn_hc(streams)
        output = self.ffn(self.ffn_norm(collapse_streams(streams, pre)), None if valid is None else ~valid)
        return expand_streams(output, streams, mix.post, mix.comb), mix.pre, state


class DeepseekV41PreTrainedModel(DeepseekV41ModelMixin, PreTrainedModel):
    config_class = DeepseekV41TextConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeepseekV41DecoderLayer"]
    _skip_keys_device_placement = ["cache", "cache_layer"]
    _supports_sdpa = True
    _can_compile_fullgraph = False
    _is_stateful = False  # its cache layer rolls back, see DeepseekV41CacheLayer
    _can_record_outputs = {
        "router_logits": OutputRecorder(DeepseekV41Router, index=0),
        "hidden_states": DeepseekV41DecoderLayer,  # the streams, `[B, S, s, H]`
    }
    _keep_in_fp32_modules_strict = DeepseekV41ModelMixin._keep_in_fp32_modules_strict + [
        "compressor.wkv",
        "compressor.wgate",
        "lm_head",
    ]
    _keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"^vision\.", r"^aligner\.", r"^image_(start|end|newline)"]

    def __init__(self, config: DeepseekV41TextConfig):
        super().__init__(config)
        if beyond := [str(layer) for layer in range(config.num_hidden_layers, len(config.compress_ratios))]:
            # A model that was made shorter than its checkpoint leaves the other layers there.
            names = rf"layers\.({'|'.join(beyond)})\."
            self._keys_to_ignore_on_load_unexpected = [*self._keys_to_ignore_on_load_unexpected, names]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, EngramHash):
            module.init_buffers()
        elif isinstance(module, EngramLayer):
            init.ones_(module.q_weight)
            init.ones_(module.k_weight)
        else:
            super()._init_weights(module)

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """
        Tells Engram what the tokens say. `from_pretrained` does it with the tokenizer beside the weights.

        Raises:
            ValueError: if it is not the tokenizer that the model was made for.
        """
        if self.base_model.engram_hash is not None:
            self.base_model.engram_hash.set_token_map(compressed_token_map(tokenizer))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """As in transformers; a model with Engram reads the tokenizer that lies beside its weights as well. `config`
        may be that of the multimodal checkpoint. Raises a `ValueError` for quantised weights that are not decoded."""
        arguments = (pretrained_model_name_or_path, *model_args)
        loaded = load_decoded(super().from_pretrained, *arguments, **with_text_config(kwargs))
        model = loaded[0] if kwargs.get("output_loading_info") else loaded
        if model.base_model.engram_hash is not None:
            location = {name: kwargs[name] for name in LOCATION if name in kwargs}
            try:
                tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **location)
            except (OSError, ValueError) as error:
                warnings.warn(
                    f"No tokenizer could be read from {pretrained_model_name_or_path} ({error}); Engram needs it: "
                    "call `model.set_tokenizer(tokenizer)` before the first forward.",
                    stacklevel=2,
                )
            else:
                model.set_tokenizer(tokenizer)
        return loaded


class DeepseekV41Model(DeepseekV41PreTrainedModel):
    """
    The DeepSeek V4.1 text backbone: layers of CSA2 attention and experts on several residual streams (single-pass
    hyper-connections, arXiv 2512.24880), some with an n-gram memory (Engram, arXiv 2601.07372), between an embedding
    and a final norm.
    """

    def __init__(self, config: DeepseekV41TextConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.engram_hash = EngramHash(config) if config.engram_layers else None
        self.layers = nn.ModuleList(DeepseekV41DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = DeepseekV41RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """
        Args:
            input_ids: `[B, S]` int64, or in their place inputs_embeds `[B, S, H]`, beside which Engram needs them too.
            attention_mask: `[B, past + S]`, 1 = token, 0 = padding: on the left, or on the right without a cache.
            position_ids: accepted and unused: a token's position is its number in the row, padding not counted.
            cache, use_cache: a `DynamicCache(config=config)`, and whether to make one where none is given.

        Returns:
            [`~transformers.modeling_outputs.MoeModelOutputWithPast`]: `last_hidden_state` `[B, S, H]` after the final
            norm, and `cache`.

        Raises:
            ValueError: if inputs contradict each other, their shapes do not fit, or the mask cannot be followed.
        """
        if input_ids is None and inputs_embeds is None:
            raise ValueError("Pass `input_ids` or `inputs_embeds`.")
        if inputs_embeds is None:
            check_shape("input_ids", input_ids, "B", "S")
            inputs_embeds = self.embed_tokens(input_ids)
        batch, length, _ = check_shape("inputs_embeds", inputs_embeds, "B", "S", self.config.hidden_size)
        if input_ids is not None:
            check_shape("input_ids", input_ids, batch, length, reason="the tokens of `inputs_embeds`")
        past = 0 if cache is None else cache.get_seq_length()
        if attention_mask is not None:
            check_shape("attention_mask", attention_mask, batch, past + length, reason="cached tokens are in it, too")
        plan = TokenPlan(self.config, length, past, attention_mask, inputs_embeds.device, cache is not None)
        if use_cache and cache is None and not plan.is_padded_right:
            cache = DynamicCache(config=self.config)
        engram_rows = None if self.engram_hash is None else self._engram_rows(input_ids, plan, cache)

        streams = inputs_embeds.unsqueeze(-2).repeat(1, 1, self.config.hc_mult, 1)
        pre = torch.zeros(streams.shape[:-1], dtype=torch.float32, device=streams.device)
        pre[..., 0] = 1.0
        state = None
        for i, layer in enumerate(self.layers):
            cache_layer = None if cache is None else cache.layers[i]
            streams, pre, state = layer(streams, pre, plan, state, engram_rows, cache_layer)
            if cache_layer is not None:
                cache_layer.advance(length)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(collapse_streams(streams, pre)), cache=cache)

    def _engram_rows(self, input_ids: Tensor | None, plan: TokenPlan, cache: Cache | None) -> Tensor:
        """`[B, S, engram layers, tables]`; the first Engram layer's cache remembers the last tokens."""
        if input_ids is None:
            raise ValueError("`input_ids` are needed beside `inputs_embeds`: Engram looks n-grams of tokens up.")
        ids = self.engram_hash.compress(input_ids, plan.new_valid)
        if cache is not None:
            cache_layer = cache.layers[self.config.engram_layers[0]]
            ids = cache_layer.append("token ids", ids, self.config.engram_max_ngram_size - 1)
        return self.engram_hash(ids, input_ids.shape[1])


class DeepseekV41ForCausalLM(CausalLMForward, DeepseekV41PreTrainedModel, GenerationMixin):
    """
    The DeepSeek V4.1 text model with its language modeling head, which is fp32 whatever the model's dtype. Released
    checkpoints load as they are, FP8 and FP4 decoded; vision side and draft are left out. See [`CausalLMForward`] and
    [`DeepseekV41Model`] for the arguments of the forward.
    """

    _tied_weights_keys = {}

    def __init__(self, config: DeepseekV41TextConfig):
        super().__init__(config)
        self.model = DeepseekV41Model(config)
        self.lm_head = Fp32Linear(config.hidden_size, config.vocab_size)
        self.post_init()


register_deepseek_v41_conversion()
