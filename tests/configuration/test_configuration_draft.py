import json

import pytest
import torch
from kimi_k3_models import TINY, tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from blockdraft.configuration.configuration_draft import build_target_layer_ids, default_target_layer_ids
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
from blockdraft.modeling.target.mask_tokens import propose_mask_token_ids
from blockdraft.modeling.target.target_identity import target_record, tokenization_fingerprint, tokenizer_fingerprint

DENSE = {name: TINY[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
DRAFT = DENSE | {
    "num_hidden_layers": 2,
    "block_size": 4,
    "mask_token_id": 91,
    "target_layer_ids": [1, 3],
    "num_target_layers": 6,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}


def draft_config(**settings) -> KimiK3DFlashConfig:
    return KimiK3DFlashConfig(**(DRAFT | settings))


def tokenizer(words: list[str], **special) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)
    return loaded


def test_defaults_of_the_block_contract():
    config = draft_config()
    assert (config.slot_layout, config.capture_point, config.is_causal) == ("1+N", "layer_output", False)
    assert (config.output_multiplier, config.input_embedding_scale) == (1.0, 1.0)
    assert config.final_logit_softcapping is None and config.sliding_window is None
    assert config.draft_schema_version == 1


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 97}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"mask_token_id": 1}, "mask_token_id"),
        ({"mask_token_id": 7}, "mask_token_id"),
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [-1, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [1, 5]}, "target_layer_ids"),
        ({"slot_layout": "N"}, "slot_layout"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"capture_point": "hc_mean"}, "capture_point"),
        ({"output_multiplier": 0}, "output_multiplier"),
        ({"input_embedding_scale": -1.0}, "input_embedding_scale"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"dflash_config": {"projector_type": "mlp"}}, "dflash_config.projector_type"),
        ({"dflash_config": {"num_anchors": 4}}, "dflash_config.num_anchors"),
    ],
)
def test_impossible_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=f"`{named}`"):
        draft_config(**settings)


def test_nested_settings_are_read_and_written():
    nested = {
        "mask_token_id": 90,
        "target_layer_ids": [0, 2],
        "output_multiplier": 0.5,
        "causal": True,
        "projector_type": None,
    }
    config = KimiK3DFlashConfig(**(DRAFT | {"mask_token_id": None, "target_layer_ids": None}), dflash_config=nested)
    assert (config.mask_token_id, config.target_layer_ids, config.output_multiplier) == (90, [0, 2], 0.5)
    assert config.is_causal
    assert not hasattr(config, "dflash_config")  # one truth
    config.output_multiplier = 2.0
    written = config.to_dict()
    assert written["sample_from_anchor"] is False
    assert written["dflash_config"] == {
        "block_size": 4,
        "mask_token_id": 90,
        "target_layer_ids": [0, 2],
        "output_multiplier": 2.0,
        "final_logit_softcapping": None,
        "input_embedding_scale": 1.0,
        "causal": True,
    }


@pytest.mark.parametrize(
    "settings, nested",
    [
        ({}, {"mask_token_id": 90}),
        ({}, {"target_layer_ids": [0, 2]}),
        ({"output_multiplier": 2.0}, {"output_multiplier": 0.5}),
        ({"is_causal": True}, {"causal": False}),
    ],
)
def test_contradictions_of_the_two_views_are_named(settings, nested):
    (name,) = nested
    with pytest.raises(ValueError, match=f"`dflash_config.{name}`.*give one value"):
        draft_config(**settings, dflash_config=nested)


def test_a_stored_file_without_slot_layout_is_refused(tmp_path):
    stored = draft_config().to_dict()
    assert KimiK3DFlashConfig.from_dict(stored).to_dict() == stored
    del stored["slot_layout"]
    with pytest.raises(ValueError, match="no `slot_layout`"):
        KimiK3DFlashConfig.from_dict(stored)


def test_default_layer_ids(golden):
    for key, expected in golden("k3_dflash_draft_config").meta["build_target_layer_ids"].items():
        assert build_target_layer_ids(*map(int, key.split(","))) == expected, key


def test_default_layer_ids_differ_and_can_be_tapped_on_any_target():
    for depth in range(2, 40):
        for count in range(1, 9):
            for capture_point, last in (("layer_output", depth - 2), ("attention_input_mean", depth - 1)):
                ids = default_target_layer_ids(depth, count, capture_point)
                assert len(ids) == min(count, last + 1) and ids == sorted(set(ids))
                assert ids[0] >= 0 and ids[-1] <= last
    assert default_target_layer_ids(36, 5) == build_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    with pytest.raises(ValueError, match="deeper target"):
        default_target_layer_ids(1, 2)


def test_mask_token_proposals_best_first():
    words = ["<unk>", "<s>", "</s>", "hello", "<|reserved_2|>", "<|reserved_1|>", "<mask>", "world"]
    special = {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    loaded = tokenizer(words, extra_special_tokens=["<|reserved_2|>", "<|reserved_1|>"], **special)
    assert propose_mask_token_ids(loaded, vocab_size=10) == [6, 4, 5, 8, 9]
    # Tokens beyond the embedding do not count; nor do special tokens in use.
    assert propose_mask_token_ids(loaded, vocab_size=5) == [4]


def test_no_mask_token_to_propose():
    with pytest.raises(ValueError, match="no mask, reserved or unused token"):
        propose_mask_token_ids(tokenizer(["<unk>", "<s>", "a"], bos_token="<s>"), vocab_size=3)


def test_bytes_that_no_text_contains_are_free(chat_tokenizer):
    """The byte-level vocabulary has no other free token; its letters `À`, `ÿ` stand for bytes, not for text."""
    names = chat_tokenizer.convert_ids_to_tokens(propose_mask_token_ids(chat_tokenizer, len(chat_tokenizer)))
    assert names == [chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]
    assert not set("Àÿ¿ any text 😀") & {chat_tokenizer.decode([chat_tokenizer.convert_tokens_to_ids("À")])}
    with pytest.raises(ValueError, match="no mask, reserved or unused token"):
        propose_mask_token_ids(tokenizer(["<unk>", "À", "ÿ"]), vocab_size=3)  # letters


def test_the_data_decide_where_nothing_is_free():
    words = ["<unk>", "<s>", "<|im_start|>", "<file>", "a", "b", "c", "d"]
    loaded = tokenizer(words, bos_token="<s>", extra_special_tokens=["<|im_start|>", "<file>"])
    loaded.chat_template = "{{ '<|im_start|>' }}"
    rows = [{"input_ids": [1, 4, 6]}, {"input_ids": [4]}]
    assert propose_mask_token_ids(loaded, 8, rows) == [3, 7, 5]
    with pytest.raises(ValueError, match="data as `rows`"):
        propose_mask_token_ids(loaded, 8)
    with pytest.raises(ValueError, match="that your data do not contain"):
        propose_mask_token_ids(loaded, 8, [{"input_ids": [3, 4, 5, 6, 7]}])


def test_target_record_identifies_the_target():
    target = KimiK3ForCausalLM(tiny_config())
    loaded = tokenizer(["<unk>", "a", "b"])
    record = target_record(target, loaded, revision="abc")
    assert record["architecture"] == "KimiK3ForCausalLM" and record["model_type"] == "kimi_k3_text"
    assert (record["hidden_size"], record["num_hidden_layers"], record["embedding_rows"]) == (48, 5, 97)
    assert (record["tokenizer_length"], record["revision"], record["dtype"]) == (3, "abc", "float32")
    assert record == target_record(target, loaded, revision="abc")
    assert target_record(target, None)["tokenizer_sha256"] is None

    with torch.no_grad():
        target.get_input_embeddings().weight[5] += 1e-3
    assert target_record(target, loaded, "abc")["embedding_sha256"] != record["embedding_sha256"]
    assert tokenizer_fingerprint(tokenizer(["<unk>", "b", "a"])) != record["tokenizer_sha256"]


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


def test_target_record_fits_the_configuration_and_survives_the_file(tmp_path):
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=97, hidden_size=48, num_hidden_layers=6, num_attention_heads=4, intermediate_size=64)
    )
    config = draft_config(target=target_record(llama, None), objective={"loss_type": "fixed_anchor"}, note="kept")
    config.save_pretrained(tmp_path)
    loaded = KimiK3DFlashConfig.from_pretrained(tmp_path)
    assert loaded.target == config.target and loaded.objective == config.objective and loaded.note == "kept"
    assert loaded.to_diff_dict() == config.to_diff_dict()
