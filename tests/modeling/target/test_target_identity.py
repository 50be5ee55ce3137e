import json

import pytest
import torch
from kimi_k3_models import tiny_config
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from word_tokenizers import word_tokenizer

from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
from blockdraft.modeling.target.target_identity import target_record, tokenization_fingerprint, tokenizer_fingerprint


def test_target_record_identifies_the_target():
    target = KimiK3ForCausalLM(tiny_config())
    loaded = word_tokenizer(["<unk>", "a", "b"])
    record = target_record(target, loaded, revision="abc")
    assert record["architecture"] == "KimiK3ForCausalLM" and record["model_type"] == "kimi_k3_text"
    assert (record["hidden_size"], record["num_hidden_layers"], record["embedding_rows"]) == (48, 5, 97)
    assert (record["tokenizer_length"], record["revision"], record["dtype"]) == (3, "abc", "float32")
    assert record == target_record(target, loaded, revision="abc")
    assert target_record(target, None)["tokenizer_sha256"] is None

    with torch.no_grad():
        target.get_input_embeddings().weight[5] += 1e-3
    assert target_record(target, loaded, "abc")["embedding_sha256"] != record["embedding_sha256"]
    assert tokenizer_fingerprint(word_tokenizer(["<unk>", "b", "a"])) != record["tokenizer_sha256"]


def lower_case(backend: dict) -> None:
    backend["normalizer"] = {"type": "Lowercase"}


def space_in_front(backend: dict) -> None:
    backend["pre_tokenizer"]["add_prefix_space"] = True


def merges_in_another_order(backend: dict) -> None:
    backend["model"]["merges"].reverse()


def bos_in_front(backend: dict) -> None:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, sequence],
        "pair": [sequence, sequence],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }


@pytest.mark.parametrize("edit", [lower_case, space_in_front, merges_in_another_order, bos_in_front])
def test_what_splits_text_is_in_the_record(edit, chat_tokenizer):
    target = KimiK3ForCausalLM(tiny_config())
    backend = json.loads(chat_tokenizer.backend_tokenizer.to_str())
    edit(backend)
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))
    record, other_record = target_record(target, chat_tokenizer), target_record(target, other)
    assert {name for name in record if record[name] != other_record[name]} == {"tokenization_sha256"}


def test_calls_and_templates_leave_the_fingerprint_as_it_is(chat_tokenizer):
    before = tokenization_fingerprint(chat_tokenizer)
    chat_tokenizer(["a", "hello there"], padding=True, truncation=True, max_length=4)
    chat_tokenizer.model_max_length, chat_tokenizer.padding_side, chat_tokenizer.chat_template = 8, "left", None
    assert tokenization_fingerprint(chat_tokenizer) == before
