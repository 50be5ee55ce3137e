"""Each part of transformers that decoding relies on: as it is now, and the error where a version changes it."""

import pytest
import torch
import transformers
from any_targets import build_multimodal
from decoding_models import build_target, prompts
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from blockdraft.modeling.decoding import transformers_internals as internals
from blockdraft.modeling.kimi_k3.kimi_delta_attention import KimiDeltaAttentionCacheLayer


def changed(part: str):
    """Expects the error that names the installed version and the part, and what to install."""
    version = transformers.__version__
    return pytest.raises(RuntimeError, match=rf"transformers {version} changed .*{part}.* tested with 5\.24\. Install")


def test_the_tested_version_is_the_installed_one():
    assert transformers.__version__.startswith(f"{internals.TESTED_VERSION}.")


class Seen(BaseStreamer):
    """A streamer, and a loop that looks at what `generate` calls it with."""

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs):
        self.config, self.inputs = generation_config, inputs
        self.kept, self.others = (internals.find_kept_arguments(m) for m in (model, build_target("gpt2")))
        return input_ids

    def put(self, value):
        pass

    def end(self):
        pass


def seen_by_a_loop(target, **inputs) -> Seen:
    loop = Seen()
    target.generate(**inputs, max_new_tokens=2, custom_generate=lambda *args, **kwargs: loop(*args, **kwargs))
    return loop


def test_prepare_special_tokens(monkeypatch):
    own = GenerationConfig(max_new_tokens=2)
    loop = seen_by_a_loop(build_target("qwen3"), input_ids=prompts(1)[0])
    assert internals.is_prepared(loop.config)
    assert not internals.is_prepared(own) and not internals.is_prepared(None)
    monkeypatch.setattr(GenerationMixin, "_prepare_special_tokens", lambda self, config: None)
    with changed("GenerationMixin._prepare_special_tokens"):
        internals.is_prepared(own)
    monkeypatch.delattr(GenerationMixin, "_prepare_special_tokens")
    with changed("GenerationMixin._prepare_special_tokens"):
        internals.is_prepared(own)


def test_generate_keeps_arguments_to_itself(monkeypatch):
    """Which its frame has, of the call of that model."""
    target, streamer = build_target("qwen3"), Seen()
    loop = seen_by_a_loop(target, input_ids=prompts(1)[0], streamer=streamer, synced_gpus=False)
    assert loop.kept == {"streamer": streamer, "assistant_model": None, "synced_gpus": False}
    assert not loop.kept.keys() & loop.inputs.keys()
    assert loop.others == internals.find_kept_arguments(target) == {}
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, streamer=None, assistant_model=None: None)
    with changed("GenerationMixin.generate"):
        internals.find_kept_arguments(target)


def test_get_generation_mode(monkeypatch):
    values = {mode.value for mode in GenerationMode}
    assert values == {"greedy_search", "sample", *internals.OTHER_MODES}
    assert internals.other_mode(GenerationConfig()) is None
    assert internals.other_mode(GenerationConfig(do_sample=True)) is None
    assert internals.other_mode(GenerationConfig(num_beams=2)) == ("beam_search", "`num_beams`")
    monkeypatch.delitem(internals.OTHER_MODES, "beam_search")
    with changed("GenerationConfig.get_generation_mode"):
        internals.other_mode(GenerationConfig(num_beams=2))


def test_settings_of_generation_config():
    defaults = GenerationConfig._get_default_generation_params()
    assert internals.ASSISTED_SETTINGS.items() <= defaults.items()
    assert internals.settings_without_effect(GenerationConfig(**internals.ASSISTED_SETTINGS)) == ([], [])
    config = GenerationConfig(num_assistant_tokens=3, output_attentions=True)
    assert internals.settings_without_effect(config) == (["output_attentions"], ["num_assistant_tokens"])
    del config.prefill_chunk_size
    with changed("the settings of GenerationConfig"):
        internals.settings_without_effect(config)


def test_encoded_kinds_are_the_encoders_outputs():
    target, image = build_multimodal("gemma3"), torch.randn(1, 3, 8, 8)
    input_ids = torch.tensor([[3, *[target.config.image_token_id] * 4, 7, 8]])
    types = (input_ids == target.config.image_token_id).long()
    loop = seen_by_a_loop(target, input_ids=input_ids, token_type_ids=types, pixel_values=image)
    assert internals.encoded_kinds(loop.inputs) == ["images"]
    assert internals.encoded_kinds(seen_by_a_loop(target, input_ids=input_ids[:, 5:]).inputs) == []


def test_processors_of_transformers_take_any_prefix():
    class Own(RepetitionPenaltyLogitsProcessor):
        pass

    assert LogitsProcessor.__module__ == "transformers.generation.logits_process"
    general = [RepetitionPenaltyLogitsProcessor(1.2), MinLengthLogitsProcessor(3, 1)]
    assert internals.take_any_prefix(LogitsProcessorList(general))
    for particular in (PrefixConstrainedLogitsProcessor(lambda *_: [1], 1), Own(1.2)):
        assert not internals.take_any_prefix(LogitsProcessorList([*general, particular]))


def test_prepare_inputs_for_generation(monkeypatch):
    assert not internals.prepares_inputs_itself(build_target("qwen3"))
    assert internals.prepares_inputs_itself(build_multimodal("gemma3"))
    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", lambda self, input_ids, **kwargs: {})
    with changed("GenerationMixin.prepare_inputs_for_generation"):
        internals.prepares_inputs_itself(build_target("qwen3"))


def test_update_model_kwargs_for_generation(monkeypatch):
    target, types = build_target("gpt2"), torch.tensor([[3, 3, 5]])
    output = target(prompts(1)[0][:, :3], use_cache=True)
    inputs = {"token_type_ids": types, "cache": output.cache, "attention_mask": torch.ones(1, 3)}
    extended = internals.inputs_after(target, output, inputs)
    assert extended["token_type_ids"].tolist() == [[3, 3, 5, 5]] and extended["attention_mask"].shape == (1, 4)
    monkeypatch.delattr(GenerationMixin, "_update_model_kwargs_for_generation")
    with changed("GenerationMixin._update_model_kwargs_for_generation"):
        internals.inputs_after(target, output, inputs)


def test_rope_parameters():
    config = LlamaConfig(max_position_embeddings=6)
    assert internals.rotary_steps(config, 9) == [9]
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert internals.rotary_steps(config, 9) == [6, 7, 8, 9]
    config.rope_parameters = {"local": {"rope_type": "longrope", "original_max_position_embeddings": 4}}
    assert internals.rotary_steps(config, 9) == [4, 9]
    del config.rope_parameters["local"]["original_max_position_embeddings"]
    with changed("rope_parameters"):
        internals.rotary_steps(config, 9)


def filled(*layers) -> DynamicCache:
    """A cache of such layers that has seen three tokens."""
    cache = DynamicCache()
    cache.layers = list(layers)
    for layer in layers:
        layer.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))
    return cache


def test_has_previous_state(monkeypatch):
    assert not internals.holds_tokens(DynamicCache(config=build_target("qwen3").config))
    assert internals.holds_tokens(filled(DynamicLayer()))
    target = build_target("k3")
    cache = DynamicCache(config=target.config)
    cache.layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    assert not internals.holds_tokens(cache)
    cache.layers[0].has_previous_state[0] = True
    assert internals.holds_tokens(cache)
    del cache.layers[0].has_previous_state
    with changed("LinearAttentionCacheLayerMixin.has_previous_state"):
        internals.holds_tokens(cache)


def test_is_croppable(monkeypatch):
    class Own(DynamicLayer):
        """Keeps something beside keys and values, and says nothing of it."""

    class OwnWithCrop(Own):
        def crop(self, tokens_to_remove):
            pass

    assert internals.stuck_layers(filled(DynamicLayer(), OwnWithCrop())) == []
    own = [Own(), Own()]
    assert internals.stuck_layers(filled(DynamicLayer(), *own)) == own
    cache = DynamicCache(config=build_target("k3").config)
    kda = [layer for layer in cache.layers if type(layer) is KimiDeltaAttentionCacheLayer]
    assert internals.stuck_layers(cache) == kda != []
    cache.activate_past_recording()
    assert internals.stuck_layers(cache) == []
    monkeypatch.delattr(DynamicLayer, "is_croppable")
    monkeypatch.delattr(DynamicLayer.__mro__[1], "is_croppable")
    with changed("CacheLayerMixin.is_croppable"):
        internals.stuck_layers(filled(DynamicLayer()))


def linear_layer() -> LinearAttentionLayer:
    """That has seen two tokens while it recorded."""
    layer = LinearAttentionLayer()
    layer.activate_past_recording()
    layer.update_conv_state(torch.ones(1, 3, 2), conv_kernel_size=4)
    layer.update_recurrent_state(torch.ones(1, 2, 2))
    return layer


def test_conv_states():
    layer = linear_layer()
    internals.stop_recording(layer)
    assert layer.conv_states[0][0, 0].tolist() == [0, 0, 1, 1] and not layer.record_past
    layer.update_conv_state(torch.ones(1, 3, 1))  # in place, at its width
    assert layer.conv_states[0][0, 0].tolist() == [0, 1, 1, 1]
    del layer.conv_states
    with changed("LinearAttentionCacheLayerMixin.conv_states"):
        internals.stop_recording(layer)


def test_recurrent_states():
    layer = linear_layer()
    held = internals.contents(layer)
    internals.clear_state(layer)
    assert not layer.recurrent_states[0].any() and held["recurrent_states"][0].all()
    assert not internals.cannot_be_copied(layer) and internals.cannot_be_copied(LinearAttentionLayer())
    del layer.recurrent_states
    with changed("LinearAttentionCacheLayerMixin.recurrent_states"):
        internals.clear_state(layer)


def test_contents_of_a_layer():
    """Whatever it keeps them in; keys and values that are replaced, and never written to, are not copied."""

    class Own(DynamicLayer):
        pass

    layer, own = DynamicLayer(), Own()
    filled(layer, own)
    assert internals.contents(layer)["keys"] is layer.keys
    own.nested = {"a": [torch.zeros(2)], "b": (torch.zeros(2), 3)}
    held = internals.contents(own)
    for tensor in (own.keys, own.nested["a"][0], own.nested["b"][0]):
        tensor.fill_(7)
    assert held["keys"].eq(1).all() and held["nested"]["b"][1] == 3
    assert not held["nested"]["a"][0].any() and not held["nested"]["b"][0].any()


def test_is_initialized():
    long = DynamicLayer()
    cache = filled(long, DynamicLayer())
    long.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4))
    assert internals.held_lengths(cache) == [3, 5]
    static = StaticCache(config=build_target("qwen3").config, max_cache_len=8)
    assert internals.held_lengths(static) == []
    del static.layers[0].is_initialized
    with changed("CacheLayerMixin.is_initialized"):
        internals.held_lengths(static)
