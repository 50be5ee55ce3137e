import json
import warnings
from functools import partial

import pytest
import torch
from decoding_models import build_draft, build_target
from tokenizers import normalizers

from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.target.pairing import check_is_draft, check_pair
from blockdraft.modeling.target.target_identity import target_record
from blockdraft.trainer.loading import load_draft


@pytest.fixture
def pair():
    target = build_target("qwen3")
    return target, build_draft(target, target=target_record(target, None, revision="abc"))


def test_the_recorded_target_is_accepted_in_silence(pair):
    target, draft = pair
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_pair(target, draft)
        check_pair(target, draft, revision="abc")
        check_pair(target.to(torch.bfloat16), draft)
        check_pair(target, build_draft(target))


# What `config.json` holds of things that are given as a draft and are none, and what the message says of them.
NO_DRAFTS = {
    "target": ({}, "model of the type 'qwen3' .Qwen3ForCausalLM.. If it is the target, pass it as `target`"),
    "z-lab": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}, "block_size": 16},
        "z-lab's layout .DFlashDraftModel.",
    ),
    "speculators": (
        {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "model_type": None},
        "speculators' layout .DFlashSpeculator.",
    ),
}


@pytest.mark.parametrize("kind", NO_DRAFTS)
def test_what_is_no_draft_is_told_what_it_is(pair, kind, tmp_path):
    """Given as a directory, on the command line or not, and as a model in memory."""
    settings, says = NO_DRAFTS[kind]
    target, _ = pair
    target.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    for load in (check_is_draft, load_draft):
        with pytest.raises(ValueError, match=f"`draft`: {tmp_path} is no draft of this library, but .*{says}"):
            load(str(tmp_path))
    for use in (check_pair, partial(block_decode, input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)):
        with pytest.raises(ValueError, match="is no draft of this library, but a model of the type 'qwen3'"):
            use(target, draft=target)


def test_a_saved_draft_is_one(pair, tmp_path):
    _, draft = pair
    draft.save_pretrained(tmp_path)
    check_is_draft(str(tmp_path))
    assert type(load_draft(str(tmp_path))) is type(draft)


def test_another_shape_is_an_error(pair):
    target, draft = pair
    target.resize_token_embeddings(72)
    with pytest.raises(ValueError, match="`vocab_size`=64.*72"):
        check_pair(target, draft)


def test_other_weights_and_revisions_are_a_warning(pair):
    target, draft = pair
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_pair(target, draft, revision="def")  # of the same weights
    with torch.no_grad():
        target.get_input_embeddings().weight[0] += 1e-3
    with pytest.warns(UserWarning, match="embedding_sha256"):
        check_pair(target, draft)
    target.to(torch.bfloat16)  # the weights cannot be compared
    with pytest.warns(UserWarning, match="revision"):
        check_pair(target, draft, revision="def")
    commit = "0123456789abcdef0123456789abcdef01234567"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_pair(target, draft, revision=commit)  # "abc" may be a branch that is there
    draft.config.target["revision"] = commit[::-1]
    with pytest.warns(UserWarning, match="revision"):
        check_pair(target, draft, revision=commit)


def test_a_tokenizer_that_splits_otherwise_is_a_warning(pair, chat_tokenizer):
    target, _ = pair
    record = target_record(target, chat_tokenizer)
    chat_tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.warns(UserWarning, match="splits text otherwise.*tokenizer that comes with the draft"):
        check_pair(target, build_draft(target, target=record), chat_tokenizer)
    del record["tokenization_sha256"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_pair(target, build_draft(target, target=record), chat_tokenizer)


def test_another_tokenizer_is_an_error(pair, chat_tokenizer):
    target, _ = pair
    draft = build_draft(target, target=target_record(target, chat_tokenizer))
    check_pair(target, draft, chat_tokenizer)
    chat_tokenizer.add_tokens(["<|new|>"])
    with pytest.raises(ValueError, match="`tokenizer` has another vocabulary"):
        check_pair(target, draft, chat_tokenizer)
