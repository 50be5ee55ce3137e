import pytest
import torch
from decoding_models import LAYER_IDS, TARGETS, build_draft, build_target, partly_right_draft, prompts
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    Qwen3Config,
    Qwen3ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from blockdraft.modeling.block_decoding import block_decode, match, verify
from blockdraft.modeling.kimi_delta_attention import KimiDeltaAttentionCache
from blockdraft.modeling.target_features import capture_features

GREEDY = {"do_sample": False, "max_new_tokens": 32}
DETAILS = {"return_dict_in_generate": True}


def total_variation(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probs)) / len(tokens)
    return (counts - probs).abs().sum().item() / 2


# Verification


def test_match_keeps_the_leading_agreement():
    target_tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    candidates = torch.tensor([[1, 2, 3], [1, 7, 3], [7, 2, 3]])
    accepted, next_token = match(candidates, target_tokens)
    assert accepted.tolist() == [3, 1, 0] and next_token.tolist() == [4, 2, 1]


@pytest.mark.parametrize("closeness", [0.0, 0.7, 1.0])
def test_verified_tokens_have_the_targets_distribution(closeness):
    """Four tokens of a Markov chain over 8 tokens, drafted with another chain: marginals stay exact."""
    draws, vocab, n = 20_000, 8, 3
    p = torch.randn(vocab, vocab).mul(1.5).softmax(-1)
    q = closeness * p + (1 - closeness) * torch.randn(vocab, vocab).mul(1.5).softmax(-1)

    def sample(probs):
        return torch.multinomial(probs, 1).squeeze(1)

    tokens = torch.zeros(draws, 1, dtype=torch.long)  # every chain starts in token 0
    for _ in range(n):
        tokens = torch.cat([tokens, sample(q[tokens[:, -1]])[:, None]], dim=1)
    accepted, next_token = verify(tokens[:, 1:], q[tokens[:, :-1]], p[tokens])
    if closeness == 1:
        assert (accepted == n).float().mean() > 0.99
    marginal = p[0]
    for position in range(1, n + 2):
        # What a round leaves open, later rounds draw from p.
        if position <= n:
            drawn = torch.where(accepted >= position, tokens[:, position], sample(p[tokens[:, position - 1]]))
            tokens[:, position] = torch.where(accepted == position - 1, next_token, drawn)
        else:
            drawn = sample(p[tokens[:, position - 1]])
            tokens = torch.cat([tokens, torch.where(accepted == n, next_token, drawn)[:, None]], dim=1)
        assert total_variation(tokens[:, position], marginal) < 0.02
        marginal = marginal @ p


def test_verify_never_takes_what_the_target_excludes():
    p = torch.tensor([0.0, 0.5, 0.5]).expand(2000, 2, 3)
    q = torch.tensor([0.8, 0.1, 0.1]).expand(2000, 1, 3)
    candidates = torch.multinomial(q[:, 0], 1)
    accepted, next_token = verify(candidates, q, p)
    assert not (accepted[candidates[:, 0] == 0]).any() and not (next_token == 0).any()


# Greedy decoding equals generate()


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_equals_generate(name):
    target = build_target(name)
    for input_ids in prompts(3):
        expected = target.generate(input_ids, **GREEDY)
        for draft in (build_draft(target), partly_right_draft(target, expected)):
            output = target.generate(input_ids, custom_generate=block_decode, draft=draft, **GREEDY, **DETAILS)
            assert torch.equal(output.sequences, expected)
            assert sum(output.accepted_lengths) == 31  # the prefill's token is not a round's
            assert output.cache.get_seq_length() == expected.shape[1] - 1
        # A fault at every fifth position ends a round there: four right tokens and the target's correction.
        assert output.accepted_lengths[1:-1] == [5] * len(output.accepted_lengths[1:-1])
        # A round that has room for one token drafts nothing.
        assert draft.rounds == len(output.accepted_lengths) - (output.accepted_lengths[-1] == 1)
        seconds = output.seconds
        assert min(seconds.values()) > 0 and seconds["total"] > seconds["target"] + seconds["draft"]


@pytest.mark.parametrize("name", ["qwen3", "k3"])
def test_native_path_gives_the_same_tokens(name):
    target = build_target(name)
    for input_ids in prompts(2):
        expected = target.generate(input_ids, **GREEDY)
        for draft in (build_draft(target), partly_right_draft(target, expected)):
            native = target.generate(input_ids, assistant_model=draft, speculation_type="dflash", **GREEDY)
            assert torch.equal(native, expected)
            assert torch.equal(block_decode(target, input_ids, draft=draft, **GREEDY), expected)


@pytest.mark.parametrize("name", ["qwen3", "k3", "gemma3"])
@torch.no_grad()
def test_draft_gets_each_accepted_tokens_features_once(name):
    target, input_ids = build_target(name), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    draft = partly_right_draft(target, expected)
    block_decode(target, input_ids, draft=draft, **GREEDY)
    context = torch.cat(draft.context, dim=1)
    with capture_features(target, LAYER_IDS) as capture:
        target(expected)
        torch.testing.assert_close(context, capture.features()[:, : context.shape[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"sliding_window": 4}, {"block_size": 2}, {"block_size": 16}])
def test_greedy_with_other_drafts(settings):
    target, input_ids = build_target("k3"), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    for draft in (build_draft(target, **settings), partly_right_draft(target, expected, **settings)):
        assert torch.equal(block_decode(target, input_ids, draft=draft, **GREEDY), expected)


def test_variable_prefix_draft_sees_two_known_tokens():
    target, input_ids = build_target("k3"), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    draft = partly_right_draft(target, expected, fault_every=100, objective={"loss_type": "variable_prefix"})
    output = block_decode(target, input_ids, draft=draft, **GREEDY, **DETAILS)
    assert torch.equal(output.sequences, expected)
    assert output.accepted_lengths == [7, 7, 7, 7, 3]  # 6 proposals of a block of 8, and the bonus
    # The token before the anchor is a block token: its feature comes one round later.
    assert draft.context[0].shape[1] == input_ids.shape[1] - 1
    block = build_draft(target, objective={"loss_type": "variable_prefix"})
    assert torch.equal(block_decode(target, input_ids, draft=block, **GREEDY), expected)
    assert torch.equal(
        block_decode(target, input_ids[:, :1], draft=block, **GREEDY), target.generate(input_ids[:, :1], **GREEDY)
    )


@pytest.mark.parametrize("name", ["qwen3", "k3"])
def test_left_padded_prompt(name):
    target, input_ids = build_target(name), prompts(1)[0]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), input_ids], dim=1)
    inputs = {"input_ids": padded, "attention_mask": (torch.arange(padded.shape[1]) >= 3).long()[None]}
    expected = target.generate(**inputs, **GREEDY)
    assert torch.equal(expected[:, 3:], target.generate(input_ids, **GREEDY))
    output = target.generate(**inputs, custom_generate=block_decode, draft=build_draft(target), **GREEDY)
    assert torch.equal(output, expected)


def test_draft_in_another_dtype():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    draft = build_draft(target).to(torch.bfloat16)
    assert torch.equal(block_decode(target, input_ids, draft=draft, **GREEDY), target.generate(input_ids, **GREEDY))


# Stops, limits, processors, streaming


@pytest.mark.parametrize("position", [2, 5, 6, 7, 11])
def test_stop_token_inside_a_block(position):
    target, input_ids = build_target("k3"), prompts(1)[0]
    answer = target.generate(input_ids, **GREEDY)
    stop = {"eos_token_id": [answer[0, input_ids.shape[1] + position].item(), 62]}
    expected = target.generate(input_ids, **GREEDY, **stop)
    output = block_decode(target, input_ids, draft=partly_right_draft(target, answer), **GREEDY, **stop, **DETAILS)
    assert torch.equal(output.sequences, expected)
    assert sum(output.accepted_lengths) == expected.shape[1] - input_ids.shape[1] - 1
    assert output.cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 8, 9])
def test_length_limit_inside_a_block(max_new_tokens):
    target, input_ids = build_target("k3"), prompts(1)[0]
    answer = target.generate(input_ids, **GREEDY)
    draft = partly_right_draft(target, answer, fault_every=100)
    output = block_decode(target, input_ids, draft=draft, do_sample=False, max_new_tokens=max_new_tokens)
    assert torch.equal(output, answer[:, : input_ids.shape[1] + max_new_tokens])


class SumStops(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -2:].sum(-1) % 9 == 0


def test_other_criteria_stop_at_the_token_where_plain_decoding_stops():
    target = build_target("k3")
    lengths = set()
    for input_ids in prompts(4):
        answer = target.generate(input_ids, **GREEDY)
        expected = target.generate(input_ids, stopping_criteria=StoppingCriteriaList([SumStops()]), **GREEDY)
        output = target.generate(
            input_ids,
            stopping_criteria=StoppingCriteriaList([SumStops()]),
            custom_generate=block_decode,
            draft=partly_right_draft(target, answer),
            **GREEDY,
        )
        assert torch.equal(output, expected)
        lengths.add(expected.shape[1] - input_ids.shape[1])
    assert min(lengths) < 32


def test_processors_see_the_prefix_of_each_slot():
    target = build_target("qwen3")
    settings = GREEDY | {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
    for input_ids in prompts(3):
        expected = target.generate(input_ids, **settings)
        draft = partly_right_draft(target, expected)
        output = block_decode(target, input_ids, draft=draft, **settings, **DETAILS)
        assert torch.equal(output.sequences, expected)
        assert max(output.accepted_lengths) == 5


class Recorder(BaseStreamer):
    def __init__(self):
        self.chunks, self.ended = [], False

    def put(self, value):
        self.chunks.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_streamer_gets_the_tokens_of_each_round():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    streamer = Recorder()
    draft = partly_right_draft(target, target.generate(input_ids, **GREEDY))
    output = block_decode(target, input_ids, draft=draft, streamer=streamer, **GREEDY, **DETAILS)
    prompt, first, *rounds = streamer.chunks
    assert prompt == input_ids[0].tolist() and len(first) == 1
    assert [len(chunk) for chunk in rounds] == output.accepted_lengths
    assert sum(streamer.chunks, []) == output.sequences[0].tolist() and streamer.ended


# Sampling


@torch.no_grad()
def test_sampled_decoding_has_the_targets_distribution():
    """Three tokens of a real target under a warper and a prefix-dependent processor, against enumeration."""
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )
    target = Qwen3ForCausalLM(config).eval()
    draft = build_draft(target, mask_token_id=7, num_draft_layers=1, target_layer_ids=[0], block_size=3)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0), TemperatureLogitsWarper(0.7)])
    input_ids = torch.tensor([[1, 2, 3]])
    answers = torch.cartesian_prod(*[torch.arange(8)] * 3)
    sequences = torch.cat([input_ids.expand(len(answers), 3), answers], dim=1)
    logits = target(sequences).logits
    rows = [processors(sequences[:, : 3 + i], logits[:, 2 + i]).softmax(-1) for i in range(3)]
    joint = torch.stack([row.gather(1, answers[:, i : i + 1]) for i, row in enumerate(rows)]).prod(0).squeeze(1)
    marginals = [torch.zeros(8).index_add(0, answers[:, i], joint) for i in range(3)]

    settings = GenerationConfig(do_sample=True, max_length=6, return_dict_in_generate=True)
    outputs = [
        block_decode(
            target, input_ids, processors, StoppingCriteriaList(), settings, draft, cache=DynamicCache(config=config)
        )
        for _ in range(300)
    ]
    samples = torch.cat([output.sequences for output in outputs])[:, 3:]
    assert {tuple(output.accepted_lengths) for output in outputs} == {(2,), (1, 1)}
    for i in range(3):
        assert total_variation(samples[:, i], marginals[i]) < 0.1


# What is refused


def test_calls_that_cannot_work_are_refused(monkeypatch):
    target, input_ids = build_target("k3"), prompts(1)[0]
    draft = build_draft(target)
    with pytest.raises(ValueError, match="batch of 2"):
        block_decode(target, input_ids.repeat(2, 1), draft=draft, **GREEDY)
    with pytest.raises(ValueError, match="`draft`"):
        target.generate(input_ids, custom_generate=block_decode, **GREEDY)
    embeds = target.get_input_embeddings()(input_ids)
    with pytest.raises(ValueError, match="inputs_embeds"):
        target.generate(inputs_embeds=embeds, custom_generate=block_decode, draft=draft, **GREEDY)
    with pytest.raises(ValueError, match="use_cache"):
        block_decode(target, input_ids, draft=draft, use_cache=False, **GREEDY)
    cache = block_decode(target, input_ids, draft=draft, **GREEDY, **DETAILS).cache
    with pytest.raises(ValueError, match="empty `cache`"):
        block_decode(target, input_ids, draft=draft, cache=cache, **GREEDY)
    with pytest.raises(ValueError, match="num_target_layers|hidden_size"):
        block_decode(target, input_ids, draft=build_draft(target, num_target_layers=9), **GREEDY)
    with pytest.warns(UserWarning, match="output_scores"):
        block_decode(target, input_ids, draft=draft, output_scores=True, **GREEDY, **DETAILS)
    monkeypatch.setattr(KimiDeltaAttentionCache, "is_croppable", False)
    with pytest.raises(ValueError, match="KimiDeltaAttentionCache.*crop"):
        block_decode(target, input_ids, draft=draft, **GREEDY)
