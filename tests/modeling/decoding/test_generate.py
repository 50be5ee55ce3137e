"""`generate` with our loops: what it keeps to itself, its settings, the form that a draft's repository ships."""

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from decoding_models import LLAMA_LIKE, build_draft, build_dspark_draft, build_target, left_padded, prompts
from hub_server import LFS_SUFFIXES, Commit, File, Repo, hub_server
from safetensors.torch import save_file
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.generate import generate
from blockdraft.modeling.decoding.generate_call import ASSISTED_SETTINGS
from blockdraft.modeling.decoding.plain_decoding import plain_decode
from blockdraft.modeling.saving.remote_code import GENERATE_REQUIREMENTS

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

    for outer, call in ((build_target("gpt2"), loop), (target, whole_call)):
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
    defaults = GenerationConfig._get_default_generation_params()
    assert ASSISTED_SETTINGS.items() <= defaults.items()
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


# The repository form

# Isolated mode and an empty code cache; the package is blocked even where it is installed.
FRESH_PROCESS = """
import sys
sys.modules["blockdraft"] = None
target_directory, inputs, commit, *drafts = sys.argv[1:]

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(target_directory)
batch = load_file(inputs)
expected = batch.pop("expected")
settings = {"do_sample": False, "max_new_tokens": 12, "trust_remote_code": True}
for directory in drafts:
    by_name = target.generate(**batch, custom_generate=directory, draft=directory, **settings)
    assert torch.equal(by_name, expected), directory
    draft = AutoModel.from_pretrained(directory, trust_remote_code=True)
    assert type(draft).__module__.startswith("transformers_modules.")
    assert not draft.can_generate() and not hasattr(draft, "generate")
    draft.save_pretrained(directory + "_again")
    details = {"return_dict_in_generate": True, "repetition_penalty": 1.0}
    output = target.generate(**batch, custom_generate=directory + "_again", draft=draft, **details, **settings)
    assert torch.equal(output.sequences, expected) and len(output.rows) == len(expected)
    assert all(row.accepted_lengths for row in output.rows)

class Recorder(BaseStreamer):
    tokens, ended = [], False
    def put(self, value):
        self.tokens += value.flatten().tolist()
    def end(self):
        self.ended = True

class Stop(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= batch["input_ids"].shape[1] + 3)

one = {name: tensor[-1:] for name, tensor in batch.items()}
streamer = Recorder()
own = {"streamer": streamer, "stopping_criteria": StoppingCriteriaList([Stop()]), "draft": drafts[0]}
answer = target.generate(**one, custom_generate=drafts[1], **own, **settings)
assert torch.equal(answer, expected[-1:, : batch["input_ids"].shape[1] + 3])
assert streamer.tokens == answer[0].tolist() and streamer.ended

# From a Hub, at a commit: what was uploaded later does not run, of code and draft, unless it is asked for
hub = {"custom_generate": "user/draft", "revision": commit, "draft": "user/draft"}
assert torch.equal(target.generate(**batch, **hub, **settings), expected)
try:
    target.generate(**batch, **hub, draft_revision="main", **settings)
except RuntimeError as error:
    assert str(error) == "uploaded later"
else:
    raise AssertionError("the draft of the commit was loaded")

# transformers' own path, for the DFlash draft
settings.pop("trust_remote_code")
dflash = AutoModel.from_pretrained(drafts[0], trust_remote_code=True)
native = target.generate(**one, assistant_model=dflash, speculation_type="dflash", **settings)
assert torch.equal(native, expected[-1:])
print("all equal")
"""


def test_repository_form_without_the_package(tmp_path, pair):
    target, dspark = pair
    target.save_pretrained(tmp_path / "target")
    build_draft(target).save_pretrained(tmp_path / "dflash")
    dspark.save_pretrained(tmp_path / "dspark")
    rows = prompts(2)
    batch = left_padded(rows)
    expected = torch.cat([target.generate(row, **GREEDY)[:, row.shape[1] :] for row in rows])
    batch["expected"] = torch.cat([batch["input_ids"], expected], dim=1)
    save_file(batch, tmp_path / "batch.safetensors")

    published = [path for path in (tmp_path / "dspark").rglob("*") if path.is_file()]
    tree = {
        path.relative_to(tmp_path / "dspark").as_posix(): File(path.read_bytes(), path.suffix in LFS_SUFFIXES)
        for path in published
    }
    with hub_server() as hub:
        hub.objects = {file.oid: file.content for file in tree.values() if file.lfs}
        repo = hub.repos["user/draft"] = Repo(private=False)
        commit = repo.add("main", Commit(None, "a draft", tree))
        later = File(b'raise RuntimeError("uploaded later")', False)
        repo.add("main", Commit(commit, "Later", tree | {"modeling_deepseek_v41_dspark.py": later}))
        files = [str(tmp_path / name) for name in ("target", "batch.safetensors", "dflash", "dspark")]
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf_home"),
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-I", "-c", FRESH_PROCESS, *files[:2], commit, *files[2:]]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.split("\n")[-2] == "all equal", result.stderr


def test_a_draft_by_name_is_read_once_for_each_save(tmp_path, pair, monkeypatch):
    target, draft = pair
    input_ids, loads = prompts(1)[0], []
    draft.save_pretrained(tmp_path)

    def load(name, **settings):
        loads.append((name, settings))
        return build_draft(target)

    monkeypatch.setattr("blockdraft.modeling.decoding.generate.AutoModel.from_pretrained", load)
    settings = GREEDY | {"draft": str(tmp_path), "draft_revision": "v1", "revision": "v2", "local_files_only": True}
    expected = target.generate(input_ids, **GREEDY)
    for _ in range(2):
        assert torch.equal(generate(target, input_ids, **settings), expected)
    known = {"revision": "v1", "trust_remote_code": True, "local_files_only": True}
    assert loads == [(str(tmp_path), known)]
    draft.save_pretrained(tmp_path)
    generate(target, input_ids, **settings)
    assert len(loads) == 2
    del settings["draft_revision"]
    generate(target, input_ids, **settings)
    assert loads[2:] == [(str(tmp_path), known | {"revision": "v2"})]
    with pytest.raises(ValueError, match="`draft_revision` is for a `draft` given by name"):
        generate(target, input_ids, draft=draft, draft_revision="v1")
    with pytest.raises(ValueError, match="needs `draft`"):
        generate(target, input_ids)


def test_requirements_are_those_of_the_package():
    with open(Path(__file__).parents[3] / "pyproject.toml", encoding="utf-8") as file:
        project = file.read()
    for requirement in GENERATE_REQUIREMENTS.split():
        assert f'"{requirement}' in project
