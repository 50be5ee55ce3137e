"""Batches: each row gives what its prompt alone gives, whatever the target keeps in its cache."""

import pytest
import torch
from any_targets import build_multimodal
from decoding_models import PAD, build_draft, build_dspark_draft, build_target, left_padded, prompts
from torch.nn.functional import pad
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.generate_call import split_rows
from blockdraft.modeling.decoding.plain_decoding import plain_decode

GREEDY = {"do_sample": False, "max_new_tokens": 8}
DETAILS = {"return_dict_in_generate": True}


@pytest.mark.parametrize(
    "name, build",
    [
        ("qwen3", build_draft),
        ("k3", build_dspark_draft),
        ("gemma3", build_dspark_draft),
        ("gpt2", build_draft),
        ("v41", build_draft),
    ],
)
def test_rows_equal_their_prompts_alone(name, build):
    """Prompts of other lengths, one of a single token; an answer that stops early is filled up with the pad token."""
    target, (first, _, third) = build_target(name), prompts(3)
    rows = [first[:, :1], third, first]
    stop = target.generate(third, **GREEDY)[0, third.shape[1] + 4].item()
    settings = GREEDY | {"eos_token_id": [stop, 62]}
    alone = [target.generate(row, **settings)[0, row.shape[1] :] for row in rows]
    longest = max(map(len, alone))
    assert len(alone[1]) < longest
    inputs = left_padded(rows, content=7)  # whatever stands there
    expected = torch.stack([pad(answer, (0, longest - len(answer)), value=PAD) for answer in alone])
    assert torch.equal(plain_decode(target, **inputs, **settings)[:, third.shape[1] :], expected)

    output = target.generate(**inputs, custom_generate=block_decode, draft=build(target), **settings, **DETAILS)
    assert torch.equal(output.sequences[:, : third.shape[1]], inputs["input_ids"])
    assert torch.equal(output.sequences[:, third.shape[1] :], expected)
    for row, answer, prompt in zip(output.rows, alone, rows, strict=True):
        assert torch.equal(row.sequences[0, third.shape[1] :], answer)
        assert sum(row.accepted_lengths) == len(answer) - 1
        assert len(row.verified_lengths) == len(row.accepted_lengths)
        assert row.cache.get_seq_length() == prompt.shape[1] + len(answer) - 1
        assert row.seconds["total"] > row.seconds["target"] + row.seconds["prefill"] > 0


def test_a_cache_given_for_a_batch_stays_empty():
    target, inputs = build_target("qwen3"), left_padded(prompts(2))
    cache = DynamicCache(config=target.config)
    settings = GREEDY | {"draft": build_draft(target)}
    assert torch.equal(
        block_decode(target, **inputs, cache=cache, **settings), block_decode(target, **inputs, **settings)
    )
    assert cache.get_seq_length() == 0


def test_processors_know_their_row():
    """Padding that a penalty has to skip, and tokens allowed in one row only."""
    target, inputs = build_target("qwen3"), left_padded(prompts(3))
    settings = GREEDY | {
        "repetition_penalty": 1.8,
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(20 * row, 20 * row + 20)),
    }
    expected = target.generate(**inputs, **settings)
    assert torch.equal(plain_decode(target, **inputs, **settings), expected)
    assert torch.equal(block_decode(target, **inputs, draft=build_dspark_draft(target), **settings), expected)


def test_several_samples_of_a_prompt():
    target, input_ids = build_target("k3"), prompts(1)[0]
    settings = {"draft": build_dspark_draft(target), "do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3}
    hot = target.generate(input_ids, custom_generate=block_decode, top_k=0, temperature=3.0, **settings)
    assert hot.shape == (3, input_ids.shape[1] + 8) and len(hot.unique(dim=0)) == 3
    cold = target.generate(input_ids, custom_generate=block_decode, top_k=1, **settings)
    assert torch.equal(cold, target.generate(input_ids, do_sample=False, max_new_tokens=8).expand(3, -1))


def test_hidden_tokens_inside_a_prompt():
    """Not padding: `generate` hides pad tokens wherever they are, if nobody gives a mask."""
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    input_ids[:, [0, 4]] = PAD
    expected = target.generate(input_ids, **GREEDY)
    for build in (build_draft, build_dspark_draft):
        assert torch.equal(block_decode(target, input_ids, draft=build(target), **GREEDY), expected)


def test_batches_that_cannot_work_are_refused():
    target, inputs = build_target("qwen3"), left_padded(prompts(2))
    settings = GREEDY | {"draft": build_draft(target)}
    with pytest.raises(ValueError, match="`streamer`.*single prompt"):
        block_decode(target, **inputs, streamer=Discard(), **settings)
    with pytest.raises(ValueError, match="Row 1 of `attention_mask` is all 0"):
        mask = inputs["attention_mask"] * torch.tensor([[1], [0]])
        block_decode(target, inputs["input_ids"], attention_mask=mask, **settings)
    target.generation_config.pad_token_id = None
    block_decode(target, **inputs, **settings)  # all answers are equally long
    with pytest.raises(ValueError, match="set `pad_token_id`"):
        block_decode(target, **inputs, max_time=60.0, **settings)


def test_a_static_cache_keeps_its_mask():
    """FlashAttention finds the end of the tokens in it by a mask, of ones as well."""
    input_ids = prompts(1)[0]
    mask, config = torch.ones_like(input_ids), build_target("qwen3").config
    for cache, kept in ((StaticCache(config=config, max_cache_len=32), True), (DynamicCache(config=config), False)):
        (row,) = split_rows(input_ids, {"cache": cache, "attention_mask": mask})
        assert (row.inputs["attention_mask"] is not None) == kept


def test_text_for_a_multimodal_target():
    """Kinds of tokens have a column for each token, padding included."""
    target, inputs = build_multimodal("qwen2_5_vl"), left_padded(prompts(2))
    inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    expected = target.generate(**inputs, **GREEDY)
    assert torch.equal(plain_decode(target, **inputs, **GREEDY), expected)
    assert torch.equal(
        block_decode(target, draft=build_draft(target, target_layer_ids=[0, 2]), **inputs, **GREEDY), expected
    )


def test_images_of_several_prompts_are_refused():
    """Which `generate` has encoded by then, all together."""
    target = build_multimodal("gemma3")
    image = target.config.image_token_id
    input_ids = torch.tensor([[3, *[image] * 4, 7, 8], [5, *[image] * 4, 9, 11]])
    inputs = {
        "input_ids": input_ids,
        "token_type_ids": (input_ids == image).long(),
        "pixel_values": torch.randn(2, 3, 8, 8),
    }
    settings = GREEDY | {"draft": build_draft(target, target_layer_ids=[0, 2])}
    with pytest.raises(ValueError, match=r"\['images'\].*one prompt at a time"):
        block_decode(target, **inputs, **settings)
    one = {name: value[:1] for name, value in inputs.items()}
    assert torch.equal(block_decode(target, **one, **settings), target.generate(**one, **GREEDY))
    with pytest.raises(ValueError, match=r"\['images'\].*one prompt at a time"):
        block_decode(target, num_return_sequences=2, **one, **(settings | {"do_sample": True}))


class Discard(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass
