"""The two ways into a loop: what `generate` keeps to itself, its settings, direct calls."""

import warnings
from functools import partial

import pytest
import torch
from decoding_models import LLAMA_LIKE, build_draft, build_dspark_draft, build_target, prompts
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    Qwen3Config,
    Qwen3ForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.generate import generate
from blockdraft.modeling.decoding.plain_decoding import plain_decode

GREEDY = {"do_sample": False, "max_new_tokens": 12}
DETAILS = {"return_dict_in_generate": True}


@pytest.fixture(scope="module")
def pair():
    target = build_target("qwen3")
    return target, build_dspark_draft(target)


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


# What `generate` keeps to itself


class Wrapped:
    """A loop behind two functions of its user."""

    def __init__(self, decode, **settings):
        self.decode, self.settings = decode, settings

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)

    def run(self, *args, **kwargs):
        return self.decode(*args, **self.settings, **kwargs)


def as_loops(draft):
    """What a user may pass as `custom_generate`, whole."""
    return (
        partial(block_decode, draft=draft),
        partial(plain_decode),
        lambda model, *args, **kwargs: block_decode(model, *args, draft=draft, **kwargs),
        lambda model, *args, **kwargs: plain_decode(model, *args, **kwargs),
        Wrapped(block_decode, draft=draft),
        Wrapped(plain_decode),
    )


def test_streamer_of_generate_gets_the_answer(pair):
    target, draft = pair
    input_ids = prompts(1)[0]
    for loop in as_loops(draft):
        streamer = Recorder()
        output = target.generate(input_ids, streamer=streamer, custom_generate=loop, **GREEDY)
        assert streamer.tokens == output[0].tolist() and streamer.ended


def test_streamer_of_another_call_is_left_alone(pair):
    """A loop inside the `generate` of another model, and a whole call inside the same model's."""
    target, draft = pair
    input_ids = prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)

    def in_processor(call):
        def process(input_ids, scores):
            assert torch.equal(call(), expected)
            return scores

        return LogitsProcessorList([process])

    limit = expected.shape[1]
    prepared = (LogitsProcessorList(), StoppingCriteriaList([MaxLengthCriteria(limit)]), GenerationConfig())

    def loop():
        return block_decode(target, input_ids, *prepared, draft, cache=DynamicCache(config=target.config))

    def whole_call():
        return block_decode(target, input_ids, draft=draft, **GREEDY)

    def through_generate():
        return target.generate(input_ids, custom_generate=block_decode, draft=draft, **GREEDY)

    calls = ((build_target("gpt2"), loop), (build_target("gpt2"), through_generate), (target, whole_call))
    for outer, call in calls:
        streamer = Recorder()
        settings = {"custom_generate": plain_decode, "do_sample": False, "max_new_tokens": 2, "streamer": streamer}
        output = outer.generate(input_ids, logits_processor=in_processor(call), **settings)
        assert streamer.tokens == output[0].tolist() and streamer.ended


def test_stop_strings_end_a_direct_call(chat_tokenizer):
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(Qwen3Config(**LLAMA_LIKE | {"vocab_size": len(chat_tokenizer)})).eval()
    draft = build_draft(target, mask_token_id=len(chat_tokenizer) - 1)
    input_ids = prompts(1)[0]
    answer = target.generate(input_ids, **GREEDY)[0, input_ids.shape[1] :]
    texts = chat_tokenizer.batch_decode(answer[3:, None])
    string = next(text for text in texts if text.isascii() and text.strip())
    expected = target.generate(input_ids, stop_strings=[string], tokenizer=chat_tokenizer, **GREEDY)
    assert expected.shape[1] < input_ids.shape[1] + 12
    settings = GREEDY | {"draft": draft, "tokenizer": chat_tokenizer}
    assert torch.equal(block_decode(target, input_ids, stop_strings=string, **settings), expected)
    target.generation_config.stop_strings = [string]
    assert torch.equal(generate(target, input_ids=input_ids, **settings), expected)


def test_a_prompt_is_healed_before_a_direct_call(chat_tokenizer):
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(Qwen3Config(**LLAMA_LIKE | {"vocab_size": len(chat_tokenizer)})).eval()
    draft = build_draft(target, mask_token_id=len(chat_tokenizer) - 1)
    input_ids = chat_tokenizer("The answer is th", return_tensors="pt").input_ids
    settings = GREEDY | {"draft": draft, "tokenizer": chat_tokenizer}
    healing = {"token_healing": True}
    for asked in (healing, {"generation_config": GenerationConfig(**healing)}):
        for call in (block_decode, generate):
            with pytest.raises(ValueError, match=r"`token_healing`.*heal_tokens\(input_ids, tokenizer\)"):
                call(target, input_ids, **settings, **asked)
    target.generation_config.token_healing = True
    with pytest.raises(ValueError, match="`token_healing`"):
        block_decode(target, input_ids, **settings)
    target.generation_config.token_healing = None
    chat_tokenizer.bos_token = "<|im_start|>"  # transformers cannot heal without one
    expected = target.generate(input_ids, tokenizer=chat_tokenizer, **GREEDY, **healing)
    healed = target.heal_tokens(input_ids, chat_tokenizer)
    assert not torch.equal(healed, input_ids)
    assert torch.equal(block_decode(target, healed, **settings), expected)


def test_assistant_model_is_another_path(pair):
    target, draft = pair
    for loop in as_loops(draft):
        with pytest.raises(ValueError, match="_decode.*leave out `assistant_model`"):
            target.generate(prompts(1)[0], custom_generate=loop, assistant_model=draft, **GREEDY)
    for own in ({}, {"streamer": Recorder()}):
        with pytest.raises(ValueError, match="leave out `assistant_model`"):
            block_decode(target, prompts(1)[0], draft=draft, assistant_model=draft, **own, **GREEDY)
    with pytest.raises(ValueError, match="leave out `assistant_model`"):
        generate(target, prompts(1)[0], assistant_model=draft)


@pytest.mark.parametrize("sharing", ["set", "ZeRO-3", "FSDP"])
def test_ranks_are_not_kept_in_step(pair, sharing, monkeypatch):
    """Nor can they be: each takes as many forwards as its answer needs."""
    target, draft = pair
    input_ids, settings = prompts(1)[0], dict(GREEDY)
    expected = target.generate(input_ids, **settings)
    if sharing == "set":
        settings["synced_gpus"] = True
    elif sharing == "ZeRO-3":
        monkeypatch.setattr("blockdraft.modeling.decoding.generate_call.is_deepspeed_zero3_enabled", lambda: True)
    else:
        monkeypatch.setattr(target, "_is_fsdp_managed_module", True, raising=False)
    calls = [partial(target.generate, custom_generate=loop) for loop in as_loops(draft)]
    calls += [partial(block_decode, target, draft=draft), partial(plain_decode, target)]
    for call in calls:
        assert torch.equal(call(input_ids, **settings), expected)  # alone
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for call in calls:
        with pytest.raises(ValueError, match="_decode cannot honour `synced_gpus`"):
            call(input_ids, **settings)
        assert torch.equal(call(input_ids, **settings | {"synced_gpus": False}), expected)


# Direct calls


def test_a_direct_call_takes_what_generate_takes(pair):
    """Also all that `generate` prepares for a loop."""
    target, draft = pair
    input_ids = prompts(1)[0]
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4)])
    asked = {"logits_processor": penalty, "stopping_criteria": StoppingCriteriaList(), "use_cache": True}
    expected = target.generate(input_ids, generation_config=GenerationConfig(**GREEDY), **asked)
    assert expected.shape[1] == input_ids.shape[1] + 12
    for decode in (partial(block_decode, draft=draft), plain_decode, draft.block_decode):
        config, cache = GenerationConfig(**GREEDY), DynamicCache(config=target.config)
        output = decode(target, input_ids=input_ids, generation_config=config, cache=cache, **asked)
        assert torch.equal(output, expected) and cache.get_seq_length() == expected.shape[1] - 1


# Settings


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 10, "bad_words_ids": [[3], [5, 7]], "suppress_tokens": [9]},
        {"forced_eos_token_id": 5, "exponential_decay_length_penalty": (3, 1.5), "renormalize_logits": True},
        {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2, "sequence_bias": [[[4], 2.0]]},
    ],
)
def test_processors_of_the_settings(pair, settings):
    target, draft = pair
    input_ids = prompts(1)[0]
    settings = GREEDY | settings
    settings["eos_token_id"] = target.generate(input_ids, **GREEDY)[0, -6].item()
    assert torch.equal(
        block_decode(target, input_ids, draft=draft, **settings), target.generate(input_ids, **settings)
    )


def test_the_callers_own_limits_take_precedence(pair):
    target, draft = pair
    input_ids = prompts(1)[0]
    answer = target.generate(input_ids, **GREEDY)
    for criterion in (MaxLengthCriteria(input_ids.shape[1] + 5), EosTokenCriteria(answer[0, -4].item())):
        settings = GREEDY | {"stopping_criteria": StoppingCriteriaList([criterion]), "eos_token_id": 62}
        expected = target.generate(input_ids, **settings)
        assert expected.shape[1] < answer.shape[1]
        assert torch.equal(block_decode(target, input_ids, draft=draft, **settings), expected)
    # Time is up after the first token.
    assert block_decode(target, input_ids, draft=draft, max_time=1e-9, **GREEDY).shape[1] == input_ids.shape[1] + 1


def test_scores_and_logits_are_those_of_generate(pair):
    target, draft = pair
    input_ids = prompts(1)[0]
    settings = GREEDY | DETAILS | {"output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    expected = target.generate(input_ids, **settings)
    for decode, extra in ((block_decode, {"draft": draft}), (plain_decode, {})):
        output = target.generate(input_ids, custom_generate=decode, **extra, **settings)
        for name in ("scores", "logits"):
            assert len(output[name]) == 12
            torch.testing.assert_close(torch.cat(output[name]), torch.cat(expected[name]), rtol=1e-4, atol=1e-4)
        assert not output.scores[0].is_inference()


def test_token_types_go_on_with_the_answer():
    target, input_ids = build_target("gpt2"), prompts(1)[0]
    types = torch.full_like(input_ids, 3)
    expected = target.generate(input_ids, token_type_ids=types, **GREEDY)
    assert not torch.equal(expected, target.generate(input_ids, **GREEDY))
    output = block_decode(target, input_ids, token_type_ids=types, draft=build_draft(target), **GREEDY)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"num_beams": 2}, "`num_beams`"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "`penalty_alpha`"),
        ({"dola_layers": "low"}, "`dola_layers`"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens`"),
        ({"guidance_scale": 1.5}, "`guidance_scale`"),
    ],
)
def test_settings_of_other_modes_are_refused(pair, settings, named):
    target, draft = pair
    with pytest.raises(ValueError, match=f"block_decode.*{named}"):
        target.generate(prompts(1)[0], custom_generate=block_decode, draft=draft, **GREEDY, **settings)


def test_settings_without_effect_are_named(pair):
    target, draft = pair
    with pytest.warns(UserWarning, match=r"ignores.*\['output_hidden_states', 'speculation_type'\]"):
        settings = GREEDY | DETAILS | {"output_hidden_states": True, "speculation_type": "dflash"}
        block_decode(target, prompts(1)[0], draft=draft, **settings)


def test_settings_of_assisted_decoding_are_named_where_they_are_given(pair):
    """`generate` fills in their defaults, of which nothing is said."""
    target, draft = pair
    input_ids = prompts(1)[0]
    given = {"assistant_confidence_threshold": 0.9, "num_assistant_tokens": 3}
    config = GenerationConfig(**GREEDY, **given)
    for settings in (GREEDY | given, {"generation_config": config}):
        for loop in (partial(block_decode, draft=draft), plain_decode):
            with pytest.warns(
                UserWarning, match=r"ignores.*\['assistant_conf.*', 'num_assistant_tokens'\].*`block_size`"
            ):
                target.generate(input_ids, custom_generate=loop, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block_decode(target, input_ids, draft=draft, **GREEDY)
