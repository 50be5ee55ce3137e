import json
import threading

import pytest
import torch
from decoding_models import LLAMA_LIKE, TARGETS, build_target, prompts
from deepseek_v41_dspark_models import our_name
from goldens import GOLDENS
from torch import nn
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM
from blockdraft.modeling.target.target_features import capture_features, decoder_layers


def hooks(target) -> int:
    return sum(len(module._forward_hooks) for module in target.modules())


def pre_hooks(target) -> int:
    return sum(len(module._forward_pre_hooks) for module in target.modules())


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("layer_ids", [[1, 3], [4, 0, 4]])
@torch.no_grad()
def test_features_are_the_layers_outputs(name, layer_ids):
    target, input_ids = build_target(name), prompts(1)[0]
    hidden_states = target(input_ids, output_hidden_states=True).hidden_states
    expected = torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1)
    with capture_features(target, layer_ids) as capture:
        target(input_ids)
        assert torch.equal(capture.features(), expected)


@torch.no_grad()
def test_last_layer_is_captured_before_the_final_norm():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    with capture_features(target, [5]) as capture:
        logits = capture.run(input_ids).logits
        torch.testing.assert_close(target.lm_head(target.model.norm(capture.features())), logits)


@pytest.mark.parametrize("name", TARGETS)
@torch.no_grad()
def test_stopped_forward_gives_the_same_features_and_leaves_no_trace(name):
    target, input_ids = build_target(name), prompts(1)[0]
    target(input_ids, output_hidden_states=True)  # transformers installs hooks of its own here
    before, logits = hooks(target), target(input_ids).logits
    with capture_features(target, [3, 1]) as capture:
        capture.run(input_ids)
        expected = capture.features()
    late = []
    handle = decoder_layers(target)[4].register_forward_hook(lambda *_: late.append(1))
    with capture_features(target, [3, 1], stop_after_last=True) as capture:
        assert capture.run(input_ids=input_ids, use_cache=False) is None
        assert torch.equal(capture.features(), expected)
    assert not late
    handle.remove()
    assert hooks(target) == before
    assert torch.equal(target(input_ids).logits, logits)


def golden_v41(case) -> DeepseekV41ForCausalLM:
    """The reference's target: all kinds of layers, Engram in layers 1 and 4, features of 4, 5 and 6."""
    config = DeepseekV41TextConfig(**case.meta["config"])
    config._experts_implementation = "eager"
    target = DeepseekV41ForCausalLM(config).eval()
    target.load_state_dict({our_name(name): tensor for name, tensor in case.group("param").items()})
    tokens = json.loads((GOLDENS / "v41_target_engram.token_map.json").read_text(encoding="utf-8"))["token_map"]
    target.model.engram_hash.set_token_map(torch.tensor(tokens))
    return target


@torch.no_grad()
def test_mean_of_the_streams_is_the_references(golden):
    case = golden("v41_target_engram")
    target = golden_v41(case)
    inputs = {"input_ids": case["in.input_ids"], "attention_mask": case["in.attention_mask"], "use_cache": False}
    expected, before = case["out.dspark_target_hidden_states"], pre_hooks(target)
    for stop in (False, True):
        with capture_features(target, [4, 5, 6], "attention_input_mean", stop_after_last=stop) as capture:
            assert (capture.run(**inputs) is None) == stop
            assert (capture.features() - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert pre_hooks(target) == before


@torch.no_grad()
def test_mean_of_the_streams_ends_the_forward_before_the_layers_attention():
    target, late = build_target("v41"), []
    decoder_layers(target)[3].attn.register_forward_hook(lambda *_: late.append(1))
    with capture_features(target, [1, 3], "attention_input_mean", stop_after_last=True) as capture:
        capture.run(prompts(1)[0], use_cache=False)
        assert capture.features().shape == (1, 9, 64) and not late


def test_hooks_go_when_the_body_raises():
    target = build_target("qwen3")
    with pytest.raises(KeyError), capture_features(target, [1]):
        raise KeyError
    assert hooks(target) == 0


@torch.no_grad()
def test_only_the_own_threads_forwards_are_seen():
    target, (mine, other) = build_target("qwen3"), prompts(2)
    with capture_features(target, [1], stop_after_last=True) as capture:
        capture.run(mine)
        thread = threading.Thread(target=target, args=(other,))
        thread.start()
        thread.join()
        assert capture.features().shape[1] == mine.shape[1]


@torch.no_grad()
def test_each_forward_is_read_once():
    target = build_target("qwen3")
    with capture_features(target, [1]) as capture:
        target(prompts(1)[0])
        capture.features()
        with pytest.raises(RuntimeError, match="has not run"):
            capture.features()


@torch.no_grad()
def test_a_forward_that_ends_early_gives_none():
    target, input_ids = build_target("qwen3"), prompts(1)[0]

    def fail(*_):
        raise KeyError

    with capture_features(target, [1, 3]) as capture:
        handle = decoder_layers(target)[2].register_forward_hook(fail)
        with pytest.raises(KeyError):
            target(input_ids)
        handle.remove()
        with pytest.raises(RuntimeError, match="ended early"):
            capture.features()
        target(input_ids)
        assert capture.features().shape == (1, 9, 64)


@torch.no_grad()
def test_features_of_code_compiled_before_the_hooks():
    target, input_ids = Qwen3ForCausalLM(Qwen3Config(**(LLAMA_LIKE | {"num_hidden_layers": 1}))).eval(), prompts(1)[0]
    with capture_features(target, [0]) as capture:
        target(input_ids)
        expected = capture.features()
    graphs = []
    target.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    target(input_ids)
    assert graphs
    for _ in range(2):
        with capture_features(target, [0]) as capture:
            target(input_ids)
            assert torch.equal(capture.features(), expected)
    compiled = len(graphs)
    target(input_ids)
    assert len(graphs) == compiled  # the compiled code is there again


@torch.no_grad()
def test_features_are_held_once():
    """No tensor beside the one that is handed out, into which every layer's states are written."""
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    with capture_features(target, [1, 3, 5]) as capture:
        target(input_ids)
        held = [value for value in vars(capture).values() if isinstance(value, torch.Tensor)]
        features = capture.features()
        assert len(held) == 1 and held[0] is features
        target(prompts(2)[1])
        assert capture.features().shape == (1, 10, 96) and features.shape == (1, 9, 96)


def test_decoder_of_a_multimodal_model_is_not_its_vision_tower():
    text = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=8, patch_size=4
    )
    target = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))
    assert decoder_layers(target) is target.model.language_model.layers


def test_impossible_captures_are_refused():
    target = build_target("qwen3")
    with pytest.raises(ValueError, match="target_layer_ids.*0..5"), capture_features(target, [1, 6]):
        pass
    with pytest.raises(ValueError, match="target_layer_ids"), capture_features(target, []):
        pass
    with pytest.raises(ValueError, match="capture_point"), capture_features(target, [1], "final_norm"):
        pass
    with pytest.raises(ValueError, match="`capture_point`.*Qwen3"):
        capture_features(target, [1], "attention_input_mean").__enter__()
    with pytest.raises(ValueError, match="`capture_point`.*DeepseekV41"):
        capture_features(build_target("v41"), [1]).__enter__()
    target.model.layers = nn.Sequential(*target.model.layers)
    with pytest.raises(ValueError, match="num_hidden_layers"):
        decoder_layers(target)
