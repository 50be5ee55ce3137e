import warnings

import pytest
import torch
from decoding_models import (
    ALL_TARGETS,
    LAYER_IDS,
    build_draft,
    build_dspark_draft,
    build_target,
    partly_right_draft,
    prompts,
    reveal,
    tiny_v41,
)
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

from blockdraft.modeling.decoding import block_decoding, decoding_state
from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.confidence_schedule import ConfidenceThreshold
from blockdraft.modeling.target import pairing
from blockdraft.modeling.target.target_features import capture_features
from blockdraft.modeling.target.target_identity import target_record

GREEDY = {"do_sample": False, "max_new_tokens": 32}
DETAILS = {"return_dict_in_generate": True}


def total_variation(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probs)) / len(tokens)
    return (counts - probs).abs().sum().item() / 2


# Greedy decoding equals generate()


@pytest.mark.parametrize("name", ALL_TARGETS)
def test_greedy_equals_generate(name):
    target = build_target(name)
    for input_ids in prompts(3):
        expected = target.generate(input_ids, **GREEDY)
        # A draft that is nearly always wrong has a round for each token: half of them show what all would.
        for draft, tokens in ((build_draft(target), 16), (partly_right_draft(target, expected), 32)):
            settings = GREEDY | DETAILS | {"max_new_tokens": tokens}
            output = target.generate(input_ids, custom_generate=block_decode, draft=draft, **settings)
            assert torch.equal(output.sequences, expected[:, : input_ids.shape[1] + tokens])
            assert sum(output.accepted_lengths) == tokens - 1  # the prefill's token is not a round's
            assert output.cache.get_seq_length() == output.sequences.shape[1] - 1
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
        for draft, tokens in ((build_draft(target), 16), (partly_right_draft(target, expected), 32)):
            settings = GREEDY | {"max_new_tokens": tokens}
            native = target.generate(input_ids, assistant_model=draft, speculation_type="dflash", **settings)
            assert torch.equal(native, expected[:, : input_ids.shape[1] + tokens])
            assert torch.equal(block_decode(target, input_ids, draft=draft, **settings), native)


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


@pytest.mark.parametrize("name", ALL_TARGETS)
def test_greedy_equals_generate_with_anchor_first_blocks(name):
    target, input_ids = build_target(name), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    draft = build_dspark_draft(target)
    output = target.generate(input_ids, custom_generate=block_decode, draft=draft, **GREEDY, **DETAILS)
    assert torch.equal(output.sequences, expected)
    assert sum(output.accepted_lengths) == 31
    assert output.verified_lengths[:-8] == [9] * (len(output.verified_lengths) - 8)
    assert output.cache.get_seq_length() == expected.shape[1] - 1
    # Every slot drafts, the anchor's too: 8 proposals of a block of 8.
    draft = reveal(draft, target, expected, fault_every=100)
    output = block_decode(target, input_ids, draft=draft, **GREEDY, **DETAILS)
    assert torch.equal(output.sequences, expected)
    assert output.accepted_lengths == output.verified_lengths == [9, 9, 9, 4]


@pytest.mark.parametrize("seed, length", [(0, 1), (1, 6)])
def test_v41_target_takes_back_what_it_rejects(seed, length):
    """All kinds of layers, prompts from one token on, rounds that reject from nothing to everything."""
    target, input_ids = tiny_v41(seed), prompts(1)[0][:, :length]
    expected = target.generate(input_ids, **GREEDY)
    draft = reveal(build_dspark_draft(target), target, expected, fault_every=4)
    for schedule in (None, lambda confidences: len(confidences) // 2):
        settings = {"draft": draft, "confidence_schedule": schedule}
        output = block_decode(target, input_ids, **settings, **GREEDY, **DETAILS)
        assert torch.equal(output.sequences, expected)
        assert max(output.verified_lengths) > max(output.accepted_lengths) == 4
        assert output.cache.get_seq_length() == expected.shape[1] - 1


def test_number_of_candidates():
    target = build_target("qwen3")
    assert build_draft(target).config.num_drafted == 7
    assert build_draft(target, objective={"loss_type": "variable_prefix"}).config.num_drafted == 6
    assert build_dspark_draft(target).config.num_drafted == 8


# Markov head and confidence


def spy(monkeypatch, name: str, module=block_decoding) -> list[tuple]:
    """Arguments of the calls of a function that a module uses, as they were then."""
    calls, function = [], getattr(module, name)

    def recorded(*args):
        calls.append([arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args])
        return function(*args)

    monkeypatch.setattr(module, name, recorded)
    return calls


PROCESSORS = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.7)])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "processors, schedule", [(LogitsProcessorList(), None), (PROCESSORS, ConfidenceThreshold(0.2))]
)
@torch.no_grad()
def test_markov_candidates_come_from_the_processed_sum(monkeypatch, do_sample, processors, schedule):
    """Base logits plus the bias of the token before, then the processors with the slot's own prefix."""
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    draft = build_dspark_draft(target)
    calls, hidden_states = spy(monkeypatch, "verify" if do_sample else "match"), []
    draft.register_forward_hook(lambda module, args, output: hidden_states.append(output.last_hidden_state))
    settings = {"do_sample": do_sample, "max_new_tokens": 20, "top_k": None, "logits_processor": processors}
    output = block_decode(target, input_ids, draft=draft, confidence_schedule=schedule, **settings, **DETAILS)
    biased, length = 0, input_ids.shape[1] + 1
    for arguments, hidden, kept, logits in zip(
        calls, hidden_states, output.accepted_lengths, output.confidence_logits, strict=False
    ):
        candidates, prefix, embeddings = arguments[0][0], output.sequences[:, :length], []
        base = draft.compute_logits(hidden, target.get_output_embeddings())[0]
        for k, candidate in enumerate(candidates):
            bias, embedding = draft.markov_head(prefix[:, -1])
            row = processors(prefix, base[k : k + 1] + bias)[0]
            if do_sample:
                torch.testing.assert_close(arguments[1][0, k], row.softmax(-1))
            else:
                assert candidate == row.argmax()
                biased += int(candidate != processors(prefix, base[k : k + 1])[0].argmax())
            embeddings.append(embedding)
            prefix = torch.cat([prefix, candidate[None, None]], dim=1)
        if embeddings:
            states = hidden[0, : len(embeddings)]
            expected = draft.confidence_head(states, torch.cat(embeddings))
            torch.testing.assert_close(torch.tensor(logits[: len(embeddings)]), expected)
        length += kept
    assert do_sample or biased > 0


def test_schedule_cuts_blocks_and_leaves_the_text():
    target, input_ids = build_target("k3"), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    draft, seen = build_dspark_draft(target), []
    draft.config.confidence_temperatures = [0.5, 2.0] * 4

    def schedule(confidences):
        seen.append(confidences)
        return len(seen) % (len(confidences) + 1)

    settings = {"draft": draft, "confidence_schedule": schedule}
    output = target.generate(input_ids, custom_generate=block_decode, **settings, **GREEDY, **DETAILS)
    assert torch.equal(output.sequences, expected)
    assert output.cache.get_seq_length() == expected.shape[1] - 1
    assert {1, 2, 5, 9} <= set(output.verified_lengths)
    drafted = [logits for logits in output.confidence_logits if logits]
    for logits, confidences in zip(drafted, seen, strict=True):
        temperatures = torch.tensor(draft.config.confidence_temperatures[: len(logits)])
        torch.testing.assert_close(torch.tensor(confidences), (torch.tensor(logits) / temperatures).sigmoid())
    assert len(output.confidence_logits) == len(output.verified_lengths) == len(output.accepted_lengths)


def test_everything_and_nothing_can_be_verified():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    draft = build_dspark_draft(target)
    full = block_decode(target, input_ids, draft=draft, **GREEDY, **DETAILS)
    output = block_decode(
        target, input_ids, draft=draft, confidence_schedule=ConfidenceThreshold(0.0), **GREEDY, **DETAILS
    )
    assert output.verified_lengths == full.verified_lengths and output.verified_lengths[0] == 9
    output = block_decode(
        target, input_ids, draft=draft, confidence_schedule=ConfidenceThreshold(1.0), **GREEDY, **DETAILS
    )
    assert torch.equal(output.sequences, full.sequences)
    assert output.verified_lengths == output.accepted_lengths == [1] * 31


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
@torch.no_grad()
def test_left_padded_prompt(name):
    target, input_ids = build_target(name), prompts(1)[0]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), input_ids], dim=1)
    inputs = {"input_ids": padded, "attention_mask": (torch.arange(padded.shape[1]) >= 3).long()[None]}
    expected = target.generate(**inputs, **GREEDY)
    assert torch.equal(expected[:, 3:], target.generate(input_ids, **GREEDY))
    for build in (build_draft, build_dspark_draft):
        assert torch.equal(
            target.generate(**inputs, custom_generate=block_decode, draft=build(target), **GREEDY), expected
        )
    # The draft sees what it would see without padding.
    plain, padded = (partly_right_draft(target, expected[:, 3:]) for _ in range(2))
    block_decode(target, input_ids, draft=plain, **GREEDY)
    block_decode(target, draft=padded, **inputs, **GREEDY)
    torch.testing.assert_close(torch.cat(padded.context, dim=1), torch.cat(plain.context, dim=1), rtol=1e-4, atol=1e-4)


def test_a_pair_is_checked_once(monkeypatch):
    target, other, input_ids = build_target("qwen3"), build_target("qwen3"), prompts(1)[0]
    draft, calls = build_draft(target), spy(monkeypatch, "check_pair", pairing)
    for model in (target, target, other, target):
        block_decode(model, input_ids, draft=draft, do_sample=False, max_new_tokens=2)
    assert [model for model, _ in calls] == [target, other, target]


def test_another_targets_weights_are_a_warning_once():
    target, input_ids, settings = build_target("qwen3"), prompts(1)[0], {"do_sample": False, "max_new_tokens": 2}
    draft = build_draft(target, target=target_record(target, None))
    with torch.no_grad():
        target.get_input_embeddings().weight[0] += 1
    with pytest.warns(UserWarning, match="embedding_sha256"):
        block_decode(target, input_ids, draft=draft, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block_decode(target, input_ids, draft=draft, **settings)


def test_a_draft_decodes_by_its_own_method():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    for build in (build_draft, build_dspark_draft):
        output = build(target).block_decode(target, input_ids, **GREEDY, **DETAILS)
        assert torch.equal(output.sequences, target.generate(input_ids, **GREEDY)) and output.accepted_lengths
        assert torch.equal(build(target).block_decode(target, input_ids=input_ids, **GREEDY), output.sequences)


def test_rounds_are_timed_where_somebody_reads_the_times(monkeypatch):
    target, input_ids, now = build_target("qwen3"), prompts(1)[0], []
    monkeypatch.setattr(decoding_state.Stopwatch, "_now", lambda self, device: now.append(device) or 0.0)
    block_decode(target, input_ids, draft=build_dspark_draft(target), **GREEDY)
    assert not now
    block_decode(target, input_ids, draft=build_dspark_draft(target), **GREEDY, **DETAILS)
    assert now


def test_draft_in_another_dtype():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    draft = build_draft(target).to(torch.bfloat16)
    assert torch.equal(block_decode(target, input_ids, draft=draft, **GREEDY), target.generate(input_ids, **GREEDY))


# Stops, limits, processors, streaming


@pytest.fixture(scope="module")
def k3_answer():
    """A Kimi K3 target, a prompt and its greedy answer behind the prompt."""
    target, input_ids = build_target("k3"), prompts(1)[0]
    return target, input_ids, target.generate(input_ids, **GREEDY)


@pytest.mark.parametrize("position", [2, 5, 6, 7, 11])
def test_stop_token_inside_a_block(k3_answer, position):
    target, input_ids, answer = k3_answer
    stop = {"eos_token_id": [answer[0, input_ids.shape[1] + position].item(), 62]}
    expected = target.generate(input_ids, **GREEDY, **stop)
    output = block_decode(target, input_ids, draft=partly_right_draft(target, answer), **GREEDY, **stop, **DETAILS)
    assert torch.equal(output.sequences, expected)
    assert sum(output.accepted_lengths) == expected.shape[1] - input_ids.shape[1] - 1
    assert output.cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 8, 9])
def test_length_limit_inside_a_block(k3_answer, max_new_tokens):
    target, input_ids, answer = k3_answer
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


def build_mild_dspark_draft(target, **settings):
    return build_dspark_draft(target, initializer_range=0.2, **settings)


@pytest.mark.parametrize(
    "build, schedule", [(build_draft, None), (build_mild_dspark_draft, ConfidenceThreshold(0.06))]
)
@torch.no_grad()
def test_sampled_decoding_has_the_targets_distribution(build, schedule):
    """Four tokens of a real target under a warper and a prefix-dependent processor, against enumeration."""
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
    draft = build(target, mask_token_id=7, num_draft_layers=1, target_layer_ids=[0], block_size=3)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0), TemperatureLogitsWarper(2.0)])
    input_ids = torch.tensor([[1, 2, 3]])
    answers = torch.cartesian_prod(*[torch.arange(8)] * 4)
    sequences = torch.cat([input_ids.expand(len(answers), 3), answers], dim=1)
    logits = target(sequences).logits
    rows = [processors(sequences[:, : 3 + i], logits[:, 2 + i]).softmax(-1) for i in range(4)]
    joint = torch.stack([row.gather(1, answers[:, i : i + 1]) for i, row in enumerate(rows)]).prod(0).squeeze(1)
    marginals = [torch.zeros(8).index_add(0, answers[:, i], joint) for i in range(4)]

    settings = GenerationConfig(do_sample=True, max_length=7, return_dict_in_generate=True)
    inputs = (target, input_ids, processors, StoppingCriteriaList(), settings, draft, schedule)
    outputs = [block_decode(*inputs, cache=DynamicCache(config=config)) for _ in range(300)]
    samples = torch.cat([output.sequences for output in outputs])[:, 3:]
    assert {tuple(output.accepted_lengths) for output in outputs} == {(3,), (2, 1), (1, 2), (1, 1, 1)}
    assert {output.verified_lengths[0] for output in outputs} == ({3} if schedule is None else {2, 3})
    for i in range(4):
        assert total_variation(samples[:, i], marginals[i]) < 0.1


# What is refused


def test_calls_that_cannot_work_are_refused():
    target, input_ids = build_target("k3"), prompts(1)[0]
    draft = build_draft(target)
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
    with pytest.warns(UserWarning, match="output_attentions"):
        block_decode(target, input_ids, draft=draft, output_attentions=True, **GREEDY, **DETAILS)
    with pytest.raises(ValueError, match="`confidence_schedule`.*confidence head"):
        block_decode(target, input_ids, draft=draft, confidence_schedule=ConfidenceThreshold(0.5), **GREEDY)
