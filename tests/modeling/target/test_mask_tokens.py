import pytest
from word_tokenizers import word_tokenizer

from blockdraft.modeling.target.mask_tokens import propose_mask_token_ids


def test_mask_token_proposals_best_first():
    words = ["<unk>", "<s>", "</s>", "hello", "<|reserved_2|>", "<|reserved_1|>", "<mask>", "world"]
    special = {"bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    loaded = word_tokenizer(words, extra_special_tokens=["<|reserved_2|>", "<|reserved_1|>"], **special)
    assert propose_mask_token_ids(loaded, vocab_size=10) == [6, 4, 5, 8, 9]
    # Tokens beyond the embedding do not count; nor do special tokens in use.
    assert propose_mask_token_ids(loaded, vocab_size=5) == [4]


def test_no_mask_token_to_propose():
    with pytest.raises(ValueError, match="no mask, reserved or unused token"):
        propose_mask_token_ids(word_tokenizer(["<unk>", "<s>", "a"], bos_token="<s>"), vocab_size=3)


def test_bytes_that_no_text_contains_are_free(chat_tokenizer):
    """The byte-level vocabulary has no other free token; its letters `À`, `ÿ` stand for bytes, not for text."""
    names = chat_tokenizer.convert_ids_to_tokens(propose_mask_token_ids(chat_tokenizer, len(chat_tokenizer)))
    assert names == [chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))]
    assert not set("Àÿ¿ any text 😀") & {chat_tokenizer.decode([chat_tokenizer.convert_tokens_to_ids("À")])}
    with pytest.raises(ValueError, match="no mask, reserved or unused token"):
        propose_mask_token_ids(word_tokenizer(["<unk>", "À", "ÿ"]), vocab_size=3)  # letters


def test_the_data_decide_where_nothing_is_free():
    words = ["<unk>", "<s>", "<|im_start|>", "<file>", "a", "b", "c", "d"]
    loaded = word_tokenizer(words, bos_token="<s>", extra_special_tokens=["<|im_start|>", "<file>"])
    loaded.chat_template = "{{ '<|im_start|>' }}"
    rows = [{"input_ids": [1, 4, 6]}, {"input_ids": [4]}]
    assert propose_mask_token_ids(loaded, 8, rows) == [3, 7, 5]
    with pytest.raises(ValueError, match="data as `rows`"):
        propose_mask_token_ids(loaded, 8)
    with pytest.raises(ValueError, match="that your data do not contain"):
        propose_mask_token_ids(loaded, 8, [{"input_ids": [3, 4, 5, 6, 7]}])
