"""The embedded chat target's corpus, tokenizer and loop detector."""

import pytest

from blockdraft.trainer.text_loops import is_looping
from examples.kimi_k3_chitchat.corpus import (
    Conversation,
    as_messages,
    chat_rows,
    clean_text,
    conversations,
    drop_reason,
    dropped,
    merge_turns,
    prompts,
    split,
)
from examples.kimi_k3_chitchat.train_tokenizer import RESERVED, train_tokenizer


@pytest.fixture(scope="module")
def parts():
    return split()


@pytest.fixture(scope="module")
def tokenizer(parts):
    return train_tokenizer(parts["train"][:150], vocab_size=600)


def test_every_conversation_is_kept_or_counted():
    assert len(conversations()) + sum(dropped().values()) == 7168


def test_splits_are_disjoint_and_complete(parts):
    ids = {name: {conversation.id for conversation in part} for name, part in parts.items()}
    assert set().union(*ids.values()) == {conversation.id for conversation in conversations()}
    assert sum(map(len, ids.values())) == len(conversations())
    assert len(ids["train"]) > len(ids["draft"]) > len(ids["heldout"]) > 100


def test_messages_of_one_sender_become_one_turn():
    messages = [[{"text": " hi ", "sender": "a"}, {"text": "  ", "sender": "b"}], [{"text": "you?", "sender": "a"}]]
    assert merge_turns(messages + [[{"text": "good", "sender": "b"}]]) == ("hi\nyou?", "good")


def test_cleaning_shortens_runs_but_not_numbers():
    assert clean_text("  sooooooo   funny hahahahaha\n\n 1000000 ") == "sooo funny hahaha\n1000000"


def test_drop_reasons():
    assert drop_reason(("hello there",)) == "nobody answered"
    assert "characters" in drop_reason(("hello there", "x" * 2000))
    assert "average" in drop_reason(("a", "b"))
    assert "explicit" in drop_reason(("what the fuck", "hello there"))
    assert drop_reason(("hello there", "hi, how are you?")) is None


def test_prompts_end_with_the_user_and_take_both_sides():
    rows = prompts([Conversation("c", tuple("abcdefgh"))], max_turns=3)
    assert ["".join(m["content"] for m in row["messages"]) for row in rows] == "a b abc bcd cde def efg".split()
    assert all(row["messages"][0]["role"] == row["messages"][-1]["role"] == "user" for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)


def test_chat_rows_start_with_the_user_and_fit(parts, tokenizer):
    rows = chat_rows(parts["heldout"][:10], tokenizer, max_length=96)
    start = tokenizer("<|bos|><|im_start|>user\n")["input_ids"]
    assert rows
    for row in rows:
        assert len(row["input_ids"]) <= 96
        assert row["input_ids"][: len(start)] == start


def test_tokenizer_round_trip(parts, tokenizer):
    assert len(tokenizer) == 600
    for text in ["I'm 24 :)\nwhat about you?", "naïve café ☕  two  blanks", *parts["heldout"][0].turns]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 3]
    assert tokenizer.convert_tokens_to_ids(RESERVED) == list(range(4, 4 + len(RESERVED)))


def test_template_masks_answers_with_their_end(tokenizer):
    messages = as_messages(["hi", "hello!", "how are you?", "fine"])
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    chosen = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(chosen) == "hello!<|im_end|>fine<|im_end|>"
    prompt = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded["input_ids"][: len(prompt)] == prompt


def test_is_looping_finds_consecutive_ngrams():
    assert is_looping([9, 1, 2, 3, 4] + [5, 6, 7, 8] * 4 + [1])
    assert not is_looping([5, 6, 7, 8] * 3 + [5, 6, 7])
    assert not is_looping([5, 6, 7, 8, 0] * 6)  # not a 4-gram running
    assert is_looping([7] * 16)
    assert not is_looping([7] * 15)
    assert is_looping([1, 2, 1, 2, 1, 2], n=2, times=3)
    assert not is_looping([])
    with pytest.raises(ValueError, match="times"):
        is_looping([1, 2], times=1)
