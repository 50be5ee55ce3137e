"""The loop without a draft, and what block decoding shares with it: processors, the cached target."""

import pytest
import torch
from any_targets import LLAMA, VISION, Case, build, multimodal
from decoding_models import TARGETS, build_draft, build_dspark_draft, build_target, partly_right_draft, prompts
from transformers import StaticCache

from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.plain_decoding import plain_decode

GREEDY = {"do_sample": False, "max_new_tokens": 12}
DETAILS = {"return_dict_in_generate": True}


@pytest.mark.parametrize("name", TARGETS)
def test_plain_decoding_equals_generate(name):
    target, input_ids = build_target(name), prompts(1)[0]
    settings = {"do_sample": False, "max_new_tokens": 24}
    expected = target.generate(input_ids, **settings)
    assert torch.equal(plain_decode(target, input_ids, **settings), expected)
    settings["eos_token_id"] = expected[0, -10].item()
    expected = target.generate(input_ids, **settings)
    output = target.generate(input_ids, custom_generate=plain_decode, return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, expected)
    assert output.accepted_lengths == [] and output.seconds["draft"] == 0 < output.seconds["prefill"]


def test_sampled_tokens_pass_the_processors():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    greedy = plain_decode(target, input_ids, do_sample=False, max_new_tokens=16)
    assert torch.equal(plain_decode(target, input_ids, do_sample=True, top_k=1, max_new_tokens=16), greedy)
    hot = plain_decode(target, input_ids, do_sample=True, temperature=5.0, top_k=0, max_new_tokens=16)
    assert not torch.equal(hot, greedy)


def loops(draft) -> list[dict]:
    """Settings of `generate` for both loops."""
    return [{"custom_generate": plain_decode}, {"custom_generate": block_decode, "draft": draft}]


def test_what_the_loops_return_can_be_used_again():
    """The loops run in inference mode, whose tensors nobody else could change in place: sequence, static cache."""
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    for loop in loops(build_draft(target)):
        cache = StaticCache(config=target.config, max_cache_len=64)
        for _ in range(2):
            output = target.generate(input_ids, cache=cache, **loop, **GREEDY)
            assert torch.equal(output, expected)
            output += 1
            cache.reset()
        assert torch.equal(target.generate(input_ids, cache=cache, **GREEDY), expected)


# Processors

TRIE = {(): [5, 7], (5,): [9, 40], (5, 9): [62], (5, 40): [11], (5, 40, 11): [62], (7,): [62]}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("build_one", [build_draft, build_dspark_draft])
def test_a_constraint_is_not_asked_behind_a_stop(build_one, do_sample):
    """Of which it knows nothing: here it raises `KeyError`."""
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    start, asked = input_ids.shape[1], []

    def allowed(_, prefix):
        asked.append(tuple(prefix[start:].tolist()))
        return TRIE[asked[-1]]

    settings = {"max_new_tokens": 24, "eos_token_id": 62, "prefix_allowed_tokens_fn": allowed}
    expected = target.generate(input_ids, do_sample=False, **settings)
    asked.clear()
    output = target.generate(
        input_ids, custom_generate=block_decode, draft=build_one(target), do_sample=do_sample, **settings
    )
    *entity, stop = output[0, start:].tolist()
    assert stop == 62 and TRIE[tuple(entity)] == [62]
    assert do_sample or torch.equal(output, expected)
    assert len(asked) > len(entity) + 1  # the draft was asked too


# Targets that prepare inputs in a way of their own

SWITCH = 14
LAYERS = {"target_layer_ids": [0, 2]}


def rotary(kind: str) -> dict:
    if kind == "dynamic":
        return {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "short_mscale": 1.0, "long_mscale": 1.4}
    return {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": SWITCH} | factors


ROTARY = {
    "phi3": LLAMA | {"rope_parameters": rotary("longrope"), "original_max_position_embeddings": SWITCH},
    "phimoe": LLAMA | {"rope_parameters": rotary("longrope"), "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": LLAMA | {"rope_parameters": rotary("longrope")},
    "olmo": LLAMA | {"rope_parameters": rotary("dynamic"), "max_position_embeddings": SWITCH},
}


# A model with dynamic NTK forgets the angles of a longer text only in one shorter than the switch.
ROTARY_CASES = [(name, length) for name in ROTARY for length in (9, SWITCH, 20) if name != "olmo" or length < SWITCH]


@pytest.mark.parametrize("model_type, length", ROTARY_CASES)
def test_rotary_angles_that_change_with_the_length(model_type, length):
    """At one length (LongRoPE, where Phi computes its cache anew) or from there on with each token (dynamic NTK)."""
    target, input_ids = build(Case(model_type, ROTARY[model_type])), prompts(1, length)[0]
    expected = target.generate(input_ids, **GREEDY)
    for loop in loops(build_draft(target, **LAYERS)):
        assert torch.equal(target.generate(input_ids, **loop, **GREEDY), expected)
    draft = partly_right_draft(target, expected, fault_every=100, **LAYERS)
    output = block_decode(target, input_ids, draft=draft, **GREEDY, **DETAILS)
    assert torch.equal(output.sequences, expected)
    assert output.cache.get_seq_length() == expected.shape[1] - 1
    # No round reaches over the switch; right candidates before it are taken in one.
    before, after = ([5], [6]) if length < SWITCH else ([], [8, 3])
    assert output.accepted_lengths == before + ([1] * sum(after) if model_type == "olmo" else after)


@pytest.mark.parametrize("static", [False, True])
def test_positions_that_start_at_one(static):
    """PaliGemma's, with an image, whose tokens and the prompt's see one another and not the answer's."""
    target = multimodal(
        "paligemma",
        text_config=LLAMA,
        vision_config=VISION | {"image_size": 8, "patch_size": 4, "vision_use_head": False},
        projection_dim=32,
        image_token_index=60,
    )
    input_ids = torch.tensor([[60] * 4 + [5, 17, 40, 3, 22]])
    inputs = {"input_ids": input_ids, "pixel_values": torch.randn(1, 3, 8, 8)}
    inputs["token_type_ids"] = torch.zeros_like(input_ids)
    settings = GREEDY | ({"cache_implementation": "static"} if static else {})
    expected = target.generate(**inputs, **settings)
    for draft in (build_draft(target, **LAYERS), partly_right_draft(target, expected, **LAYERS)):
        for loop in loops(draft):
            assert torch.equal(target.generate(**inputs, **loop, **settings), expected)


def test_an_image_that_cross_attention_reads():
    """Llama 3.2's: the mask of its tiles goes on with the answer. Its rows in the cache cannot be taken back."""
    target = multimodal(
        "mllama",
        text_config=LLAMA | {"cross_attention_layers": [1, 3], "bos_token_id": 1},
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "intermediate_size": 16,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 32,
            "image_size": 8,
            "patch_size": 4,
        },
        image_token_index=60,
    )
    for layer in target.model.language_model.layers:
        for name, weight in layer.named_parameters():
            if name.startswith("cross_attn") and name.endswith("gate"):
                torch.nn.init.ones_(weight)  # 0 as it is made: the image without effect
    input_ids, draft = torch.tensor([[60, 5, 17, 40, 3, 22]]), build_draft(target, **LAYERS)
    for loop in loops(draft):  # text alone leaves the layers of cross-attention out
        assert torch.equal(
            target.generate(input_ids[:, 1:], **loop, **GREEDY), target.generate(input_ids[:, 1:], **GREEDY)
        )
    mask = torch.zeros(1, 6, 1, 4, dtype=torch.long)
    mask[..., 0] = 1
    inputs = {
        "input_ids": input_ids,
        "pixel_values": torch.randn(1, 1, 4, 3, 8, 8),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1, 0, 0]]]),
    }
    expected = target.generate(**inputs, cross_attention_mask=mask, **GREEDY)
    assert not torch.equal(expected, target.generate(**inputs, cross_attention_mask=torch.ones_like(mask), **GREEDY))
    inputs["cross_attention_mask"] = mask
    assert torch.equal(plain_decode(target, **inputs, **GREEDY), expected)
    with pytest.raises(ValueError, match="without a draft, or without its images"):
        block_decode(target, draft=draft, **inputs, **GREEDY)
