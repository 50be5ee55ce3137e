"""The parts of transformers that decoding relies on though transformers does not promise to keep them.

Each has a test of its name. Where a version changed one, the error names the version and the part.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, QuantizedLayer
from transformers.utils import ModelOutput

TESTED_VERSION = "5.24"

# What `generate` does not pass on to its loop.
KEPT_ARGUMENTS = ("streamer", "assistant_model", "synced_gpus")
# Modes of `generate` other than greedy search and sampling, and the settings that ask for them.
OTHER_MODES = {
    "assisted_generation": "`prompt_lookup_num_tokens`, `use_mtp` or `assistant_early_exit`",
    "beam_search": "`num_beams`",
    "beam_sample": "`num_beams`",
    "group_beam_search": "`num_beam_groups`",
    "constrained_beam_search": "`constraints` or `force_words_ids`",
    "contrastive_search": "`penalty_alpha`",
    "dola_generation": "`dola_layers`",
}
IGNORED_SETTINGS = (
    "assistant_ensemble_weight",
    "compile_config",
    "output_attentions",
    "output_hidden_states",
    "prefill_chunk_size",
    "speculation_type",
)
# Of assisted decoding, with the defaults that `generate` fills in, whether it assists or not.
ASSISTED_SETTINGS = {
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "target_lookbehind": 10,
}


@contextmanager
def relies_on(part: str) -> Iterator[None]:
    """Raises a `RuntimeError` that names a `part` of transformers where its use fails as if it had changed."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"transformers {transformers.__version__} changed {part}; blockdraft was tested with {TESTED_VERSION}. "
            "Install that version, or a newer blockdraft; plain `generate` is not affected."
        ) from error


def is_prepared(config: GenerationConfig | None) -> bool:
    """Whether `generate` prepared this configuration for a loop, rather than that a user passed it: on its own copy
    `generate` keeps the special tokens as tensors."""
    mark = "_pad_token_tensor"
    with relies_on("GenerationMixin._prepare_special_tokens"):
        if mark not in GenerationMixin._prepare_special_tokens.__code__.co_names:
            raise AttributeError(mark)
    return config is not None and mark in vars(config)


def find_kept_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """The [`KEPT_ARGUMENTS`] of the innermost running `generate` call of `model`; none outside of one.

    This reads a stack frame, the one place that does. `generate` puts the prompt into its `streamer` but does not pass
    it on to a `custom_generate` function, whatever the signature of that function, so nothing else would ever put the
    answer there or end it. Functions of the user's may wrap the loop, so the call is looked for all the way up.
    """
    with relies_on("GenerationMixin.generate"):
        code = inspect.unwrap(GenerationMixin.generate).__code__
        if lacking := {"self", *KEPT_ARGUMENTS}.difference(code.co_varnames):
            raise KeyError(*lacking)
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals["self"] is model):
        frame = frame.f_back
    return {} if frame is None else {name: frame.f_locals[name] for name in KEPT_ARGUMENTS}


def other_mode(config: GenerationConfig) -> tuple[str, str] | None:
    """The mode that a configuration asks for, and by which settings; `None` for greedy search and sampling."""
    with relies_on("GenerationConfig.get_generation_mode"):
        mode = config.get_generation_mode().value
        return None if mode in ("greedy_search", "sample") else (mode, OTHER_MODES[mode])


def settings_without_effect(config: GenerationConfig) -> tuple[list[str], list[str]]:
    """Names of settings that a block-parallel loop ignores: of any kind, and of assisted decoding."""
    with relies_on("the settings of GenerationConfig"):
        ignored = [name for name in IGNORED_SETTINGS if getattr(config, name)]
        assisted = [name for name, value in ASSISTED_SETTINGS.items() if getattr(config, name) not in (None, value)]
    return ignored, assisted


def encoded_kinds(inputs: dict) -> list[str]:
    """What of a prompt's pictures and the like `generate` has encoded already, all rows together: `["images"]`."""
    encoded = inputs.get("mm_encoder_outputs") or {}
    return [f"{kind}s" for kind, features in encoded.items() if features is not None]


def take_any_prefix(processors: LogitsProcessorList) -> bool:
    """Whether no processor fails on a prefix that it never asked for: transformers' own do not, but for the one that
    calls a function of the user's."""
    return all(
        type(processor).__module__ == LogitsProcessor.__module__
        and not isinstance(processor, PrefixConstrainedLogitsProcessor)
        for processor in processors
    )


def prepares_inputs_itself(model: PreTrainedModel) -> bool:
    """Whether the target's class prepares the inputs of its forwards in a way of its own."""
    with relies_on("GenerationMixin.prepare_inputs_for_generation"):
        common = GenerationMixin.prepare_inputs_for_generation
        lacking = {"is_first_iteration", "next_sequence_length"} - inspect.signature(common).parameters.keys()
        if lacking:
            raise KeyError(*lacking)
    return type(model).prepare_inputs_for_generation is not common


def inputs_after(model: PreTrainedModel, output: ModelOutput, inputs: dict) -> dict:
    """A forward's `inputs`, extended by the first token after its `output`."""
    with relies_on("GenerationMixin._update_model_kwargs_for_generation"):
        return model._update_model_kwargs_for_generation(output, inputs, is_encoder_decoder=False)


def rotary_steps(config: PreTrainedConfig, max_length: int) -> list[int]:
    """Ascending lengths, `max_length` among them: a forward that ends beyond one of them turns all its positions by
    other angles than one that ends there (LongRoPE, dynamic NTK)."""
    config = config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}  # only rotary models have the field
    steps = [max_length]
    with relies_on("rope_parameters"):
        for parameters in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
            kind = parameters.get("rope_type") or "default"
            if kind == "longrope":
                steps.append(parameters["original_max_position_embeddings"])
            elif "dynamic" in kind:
                steps += range(config.max_position_embeddings, max_length)
    return sorted(steps)


def holds_tokens(cache: Cache) -> bool:
    """Whether a cache has seen tokens, also one without any attention layer, which has no length."""
    with relies_on("LinearAttentionCacheLayerMixin.has_previous_state"):
        if all(is_linear(layer) for layer in cache.layers):
            return any(any(layer.has_previous_state.values()) for layer in cache.layers)
    return cache.get_seq_length() > 0


def stuck_layers(cache: Cache) -> list[CacheLayerMixin | LinearAttentionCacheLayerMixin]:
    """The layers of a cache that cannot take tokens back, known only after the first forward: some layers learn in it
    what they hold. A layer class of a model's own that has no `crop` of its own is one of them, whatever it inherits:
    the inherited one leaves what it keeps beside keys and values."""

    def takes_back(layer) -> bool:
        return (_is_known(layer) or "crop" in vars(type(layer))) and layer.is_croppable

    with relies_on("CacheLayerMixin.is_croppable"):
        return [layer for layer in cache.layers if not takes_back(layer)]


def _is_known(layer) -> bool:
    return type(layer).__module__ == DynamicCache.__module__


def is_linear(layer) -> bool:
    """Whether a cache layer is of linear attention or a state space, alone or beside attention."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def cannot_be_copied(layer) -> bool:
    """Whether a copy of a filled cache layer does not bring back what it was: it has no state, so its module must have
    it, or it rounds tokens at moments that depend on how many come at once."""
    with relies_on("LinearAttentionCacheLayerMixin.has_previous_state"):
        is_empty = is_linear(layer) and not any(layer.has_previous_state.values())
    return is_empty or isinstance(layer, QuantizedLayer)


def stop_recording(layer) -> None:
    """Ends what `activate_past_recording` began, in a cache layer that has just been cropped: its convolution states
    have their full width again, which a recording layer gives up where a prompt is shorter."""
    if is_linear(layer):
        with relies_on("LinearAttentionCacheLayerMixin.conv_states"):
            for i, states in layer.conv_states.items():
                if states is not None:
                    missing = layer.conv_kernel_size[i] - states.shape[-1]
                    layer.conv_states[i] = nn.functional.pad(states, (missing, 0))
    if "record_past" in vars(layer):
        layer.record_past = False


def contents(layer) -> dict[str, Any]:
    """A copy of what a cache layer holds. Tensors are copied, since a forward may write into them; but not keys and
    values of transformers' growing layers, which a forward replaces."""
    replaced = ("keys", "values") if _is_known(layer) and isinstance(layer, DynamicLayer) else ()
    return {name: value if name in replaced else _copied(value) for name, value in vars(layer).items()}


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


def clear_state(layer) -> None:
    """Sets the recurrent states of a linear cache layer to zero."""
    with relies_on("LinearAttentionCacheLayerMixin.recurrent_states"):
        for states in layer.recurrent_states.values():
            if states is not None:
                states.zero_()


def held_lengths(cache: Cache) -> list[int]:
    """How many rows the attention layers of a filled cache hold: one number, unless some hold what is no text."""
    with relies_on("CacheLayerMixin.is_initialized"):
        layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin) and layer.is_initialized]
    return sorted({int(layer.get_seq_length()) for layer in layers})
