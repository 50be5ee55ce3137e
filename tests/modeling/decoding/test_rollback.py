"""Taking rejected tokens back where the cache's layers cannot be cropped, on tiny real hybrids of transformers."""

import pytest
import torch
from any_targets import CASES, HYBRIDS, LLAMA, STARTING_ANEW, Case, build
from decoding_models import (
    build_draft,
    build_dspark_draft,
    build_target,
    left_padded,
    partly_right_draft,
    prompts,
    reveal,
)
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer, QuantizedLayer

from blockdraft.modeling.decoding import rollback
from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.decoding_state import MOST_RERUN
from blockdraft.modeling.decoding.rollback import Rollback
from blockdraft.modeling.target.target_features import capture_features

NEW = 18
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
DETAILS = {"return_dict_in_generate": True}
LAYERS = {"target_layer_ids": [0, 2]}


def holds(cache) -> int:
    """How many tokens a cache holds; `None` where no layer of it knows."""
    try:
        return cache.get_seq_length()
    except ValueError:
        return None


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max() < 1e-4 * b.abs().max()


@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_and_logits_equal_those_of_generate(name):
    """Rounds that reject from nothing to everything, a prompt shorter than a convolution. The logits are what sampling
    draws from."""
    target = build(HYBRIDS[name])
    settings = GREEDY | DETAILS | {"output_logits": True}
    for length in (9, 2):
        input_ids = prompts(1)[0][:, :length]
        expected = target.generate(input_ids, **settings)
        answer = expected.sequences
        if length == 9:
            drafts = [partly_right_draft(target, answer, **LAYERS)]
        else:
            dspark = build_dspark_draft(target, **LAYERS)
            drafts = [build_draft(target, **LAYERS), reveal(dspark, target, answer, fault_every=4)]
        for draft in drafts:
            output = target.generate(input_ids, custom_generate=block_decode, draft=draft, **settings)
            assert torch.equal(output.sequences, answer)
            assert_close(torch.cat(output.logits), torch.cat(expected.logits))
            assert sum(output.accepted_lengths) == NEW - 1
            assert holds(output.cache) in (None, answer.shape[1] - 1)
    assert max(output.verified_lengths) > max(output.accepted_lengths) == 4


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "nemotron_h", "zamba2"])
@torch.no_grad()
def test_what_sampling_draws_from_is_what_one_forward_gives(name):
    """The target's logits at every token of a sampled answer, after any number of rejections; also those of targets
    whose steps of one token compute something else (a step in which nothing is drafted is one of these)."""
    case = HYBRIDS[name]
    target = build(Case(case.model_type, case.settings | {"time_step_min": 1e-3}))
    input_ids = prompts(1)[0]
    torch.manual_seed(0)
    settings = {"do_sample": True, "temperature": 1.5, "max_new_tokens": NEW, "output_logits": True}
    draft = build_dspark_draft(target, initializer_range=0.2, **LAYERS)
    output = block_decode(target, input_ids, draft=draft, **settings, **DETAILS)
    assert NEW - 1 > len(output.accepted_lengths) and len(set(output.accepted_lengths)) > 1
    logits = target(output.sequences).logits[0, input_ids.shape[1] - 1 : -1]
    several = NEW - (output.verified_lengths[-1] == 1)
    assert_close(torch.cat(output.logits)[:several], logits[:several])


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
@torch.no_grad()
def test_draft_gets_each_accepted_tokens_features_once(name):
    target, input_ids = build(HYBRIDS[name]), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    draft = partly_right_draft(target, expected, **LAYERS)
    block_decode(target, input_ids, draft=draft, **GREEDY)
    context = torch.cat(draft.context, dim=1)
    with capture_features(target, LAYERS["target_layer_ids"]) as capture:
        target(expected)
        assert_close(context, capture.features()[:, : context.shape[1]])


def test_a_batch_is_decoded_row_by_row():
    target, rows = build(HYBRIDS["qwen3_5"]), prompts(2)
    alone = [target.generate(row, **GREEDY)[0, row.shape[1] :] for row in rows]
    output = target.generate(
        **left_padded(rows), custom_generate=block_decode, draft=build_draft(target, **LAYERS), **GREEDY, **DETAILS
    )
    assert torch.equal(output.sequences[:, -NEW:], torch.stack(alone))


def test_angles_that_change_with_the_length():
    """Accepted tokens are run again by the angles that each had."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    settings = HYBRIDS["qwen3_next"].settings | {"rope_parameters": rope, "max_position_embeddings": 20}
    target, input_ids = build(Case("qwen3_next", settings)), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    for fault_every in (3, 4, 5, 7):
        draft = partly_right_draft(target, expected, fault_every=fault_every, **LAYERS)
        assert torch.equal(block_decode(target, input_ids, draft=draft, **GREEDY), expected)


def lengths_of_forwards(target, input_ids, draft, **settings) -> tuple[list[int], object]:
    lengths = []
    hook = target.get_input_embeddings().register_forward_hook(lambda _, args, out: lengths.append(args[0].shape[1]))
    output = block_decode(target, input_ids, draft=draft, **GREEDY, **settings)
    hook.remove()
    return lengths, output


def test_what_a_round_runs():
    """One forward a round, in front of whose block lie the tokens that the cache gave up; more than a few of them take
    a forward of their own."""
    target, input_ids = build(HYBRIDS["qwen3_next"]), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    # Its own embedding of a block is no forward of the target's.
    draft = partly_right_draft(target, expected, **LAYERS)
    draft.embed_block = lambda block, embed_tokens: torch.zeros(*block.shape, draft.config.hidden_size)
    lengths, output = lengths_of_forwards(target, input_ids, draft, **DETAILS)
    prompt, *checks = lengths[:3]
    assert (prompt, checks) == (input_ids.shape[1], [2, 2])
    lacking, expected_lengths = 0, []
    for accepted, verified in zip(output.accepted_lengths, output.verified_lengths, strict=True):
        if lacking > MOST_RERUN:
            expected_lengths.append(lacking)
            lacking = 0
        expected_lengths.append(lacking + verified)
        lacking = 0 if accepted == verified else lacking + accepted
    assert lengths[3:] == expected_lengths + [lacking] * (lacking > 0)
    assert len(lengths) - 3 < 1.6 * len(output.accepted_lengths)


@pytest.mark.parametrize("name", ["k3", "gemma3", "v41", "lfm2"])
def test_nothing_is_copied_where_crop_works(name, monkeypatch):
    monkeypatch.setattr(rollback, "contents", None)
    target, input_ids = build(CASES["lfm2"]) if name == "lfm2" else build_target(name), prompts(1)[0]
    settings = GREEDY | {"max_new_tokens": 12}
    expected = target.generate(input_ids, **settings)
    draft = reveal(build_dspark_draft(target, **LAYERS), target, expected)
    assert torch.equal(block_decode(target, input_ids, draft=draft, **settings), expected)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (Case("llama", LLAMA), {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}),
        (CASES["mistral"], {"cache_implementation": "static"}),
        (HYBRIDS["falcon_h1"], {"cache_implementation": "static"}),
        (HYBRIDS["qwen3_next"], {"cache_implementation": "static"}),
    ],
)
def test_other_caches_that_cannot_be_cropped(case, settings):
    """A window of fixed size past its end, keys and values in FP8, states beside a fixed cache."""
    target, input_ids = build(case), prompts(1)[0]
    settings = GREEDY | settings | {"disable_compile": True}
    expected = target.generate(input_ids, **settings)
    draft = partly_right_draft(target, expected, **LAYERS)
    assert torch.equal(block_decode(target, input_ids, draft=draft, **settings), expected)


# ---- what cannot be right -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STARTING_ANEW)
def test_a_target_that_starts_anew_is_refused_by_name(name):
    """This fails where a version of transformers hands the state to the scan: then these targets can be decoded."""
    target, input_ids = build(STARTING_ANEW[name]), prompts(1)[0]
    with pytest.raises(ValueError, match=r"layers \['LinearAttention.*'\] .* start anew .* without a draft"):
        block_decode(target, input_ids, draft=build_draft(target, **LAYERS), **GREEDY)
    # One or two new tokens have no round that verifies several.
    expected = target.generate(input_ids, do_sample=False, max_new_tokens=2)
    assert torch.equal(
        block_decode(target, input_ids, draft=build_draft(target, **LAYERS), do_sample=False, max_new_tokens=2),
        expected,
    )


def test_a_state_outside_of_the_cache_is_refused_by_name():
    target = build(CASES["recurrent_gemma"])
    with pytest.raises(ValueError, match=r"layers \['LinearAttentionLayer'\] .* neither `crop` nor a copy"):
        block_decode(target, prompts(1)[0], draft=build_draft(target, **LAYERS), **GREEDY)


def test_a_cache_that_rounds_by_the_forward_is_refused_by_name():
    class Rounding(QuantizedLayer):
        _quantize = _dequantize = staticmethod(lambda tensor, *args: tensor)

    cache = DynamicCache()
    cache.layers = [Rounding()]
    with pytest.raises(ValueError, match=r"layers \['Rounding'\]"):
        Rollback(cache)


def test_layers_are_what_they_were():
    """Convolution and recurrent states, written to in place, of a layer beside one that is cropped."""
    linear, window = LinearAttentionLayer(), DynamicSlidingWindowLayer(sliding_window=4)
    cache = DynamicCache()
    cache.layers = [linear, window]
    cache.activate_past_recording()

    def run(n: int) -> None:
        linear.update_conv_state(torch.randn(1, 3, n), conv_kernel_size=4)
        linear.update_recurrent_state(torch.randn(1, 2, 2))
        window.update(torch.randn(1, 1, n, 2), torch.randn(1, 1, n, 2))

    run(2)  # fewer than the convolution sees
    taken = Rollback(cache)
    assert taken.copies and linear.conv_states[0].shape[-1] == 4 and not linear.record_past and window.record_past
    before = [linear.conv_states[0].clone(), linear.recurrent_states[0].clone(), window.keys.clone()]
    for n in (1, 5):
        taken.save()
        run(n)
        taken.undo(n)
        after = [linear.conv_states[0], linear.recurrent_states[0], window.keys]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    taken.save()
    run(3)
    taken.keep()
    assert window.get_seq_length() == 5 and not torch.equal(linear.recurrent_states[0], before[1])
