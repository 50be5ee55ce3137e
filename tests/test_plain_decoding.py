import pytest
import torch
from decoding_models import TARGETS, build_draft, build_target, prompts

from blockdraft.modeling.block_decoding import block_decode
from blockdraft.modeling.plain_decoding import plain_decode, sample


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


def test_sample_draws_in_proportion_and_nothing_of_weight_zero():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    drawn = sample(weights.expand(100, 200, 6))
    counts = torch.bincount(drawn.flatten(), minlength=6)
    assert drawn.shape == (100, 200) and counts[[0, 2, 5]].sum() == 0
    assert (counts / 20_000 - weights / 8).abs().sum() / 2 < 0.02


def test_sample_stays_below_the_total_at_the_largest_random_number(monkeypatch):
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 1 - 2**-24))
    probs = torch.cat([torch.rand(500, 64), torch.zeros(500, 3)], dim=-1)
    assert (sample(probs) < 64).all()


def test_sequences_are_ordinary_tensors():
    """The loops run in inference mode, whose tensors could not be changed in place by the caller."""
    target = build_target("k3")
    prompt = prompts(1)[0]
    plain = target.generate(prompt, custom_generate=plain_decode, max_new_tokens=3, do_sample=False)
    block = target.generate(
        prompt, custom_generate=block_decode, draft=build_draft(target), max_new_tokens=3, do_sample=False
    )
    assert not plain.is_inference() and not block.is_inference()
    plain += 1
