import warnings

import pytest
import torch
from decoding_models import build_draft, build_target
from tokenizers import normalizers

from blockdraft.modeling.target.pairing import check_pair
from blockdraft.modeling.target.target_identity import target_record


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
