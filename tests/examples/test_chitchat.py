"""The embedded chat targets: corpus, tokenizer, shapes, cards, and the loop detector."""

from dataclasses import asdict, replace

import pytest
import torch

from blockdraft.modeling.families import FAMILIES
from blockdraft.trainer.evaluation.decoding_report import is_looping
from examples.chitchat.corpus import (
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
from examples.chitchat.demo import DEMOS, once, unseen_prompts
from examples.chitchat.target_card import write_card
from examples.chitchat.target_model import CHAT_TARGETS, load_target, new_target, save_target
from examples.chitchat.train_tokenizer import MAX_LENGTH, RESERVED, train_tokenizer


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


@pytest.mark.parametrize("name", CHAT_TARGETS)
def test_targets_are_saved_with_what_they_need(name, tokenizer, tmp_path):
    torch.manual_seed(0)
    model = new_target(name, tokenizer).eval()
    save_target(model, tokenizer, tmp_path)
    saved = load_target(tmp_path)
    assert type(saved) is type(model) and saved.config.vocab_size == len(tokenizer)
    assert saved.generation_config.do_sample is False and saved.generation_config.max_new_tokens == 128
    for name, weight in model.state_dict().items():
        kept = saved.state_dict()[name]
        assert torch.equal(kept, weight) or torch.equal(kept, weight.bfloat16().float()), name
    saved.generate(torch.tensor([tokenizer("hello")["input_ids"]]), max_new_tokens=2)


def test_v41_target_has_every_kind_of_layer(tokenizer):
    config = CHAT_TARGETS["deepseek_v41"].config(tokenizer)
    layers = range(config.num_hidden_layers)
    full = [layer for layer in layers if config.is_full(layer)]
    reindex = [layer for layer in layers if config.is_index_source(layer) and layer not in full]
    reuse = [layer for layer in layers if config.compress_ratios[layer] and layer not in full + reindex]
    assert full and reindex and reuse and config.engram_layers
    assert config.sliding_window < MAX_LENGTH and config.n_routed_experts > config.num_experts_per_tok
    assert config.dspark_noise_token_id == tokenizer.convert_tokens_to_ids(RESERVED[0])


@pytest.mark.parametrize("name", CHAT_TARGETS)
def test_card_names_the_target_and_its_commands(name, tokenizer, tmp_path):
    shares = ("loop_share", "any_loop_share", "stop_share", "distinct_share")
    scores = dict.fromkeys(("perplexity_assistant", "perplexity_all", "mean_tokens", *shares), 0.5)
    scores |= {"prompts": 4, "samples": [{"user": "hi", "assistant": "Hi!"}]}
    names = ("minutes", "steps", "epochs", "batch_size", "row_tokens", "learning_rate", "max_minutes")
    write_card(tmp_path, name, new_target(name, tokenizer), scores, dict.fromkeys(names, 2))
    card = (tmp_path / "README.md").read_text()
    for text in (CHAT_TARGETS[name].title, f"targets/{name}", f"train_target --target {name} ", "'hi' -> 'Hi!'"):
        assert text in card
    assert "{" not in card


def test_unseen_prompts_share_no_conversation(parts):
    rows = prompts(parts["heldout"])
    seen = rows[:: len(rows) // 10]
    unseen = unseen_prompts(rows, seen)
    conversation = {row["id"].split(":")[0] for row in seen}
    assert unseen and not conversation & {row["id"].split(":")[0] for row in unseen}


def test_demos_name_targets_and_draft_types_that_exist():
    for name, demo in DEMOS.items():
        assert demo.draft_type == name in FAMILIES and demo.target in CHAT_TARGETS


def test_a_demo_measures_again_what_was_measured_otherwise(tmp_path):
    """Of other weights, or with other settings, targets or prompts."""
    draft, measured = torch.nn.Linear(2, 2), []

    def measure():
        measured.append(len(measured))
        return {"text": str(len(measured))}

    path = tmp_path / "evaluated.json"
    assert [once(path, draft, [asdict(DEMOS["dflash"])], measure)["text"] for _ in range(2)] == ["1", "1"]
    changed = asdict(replace(DEMOS["dflash"], max_new_tokens=4))
    assert once(path, draft, [changed], measure)["text"] == "2" == once(path, draft, [changed], measure)["text"]
    torch.nn.init.zeros_(draft.weight)
    assert once(path, draft, [changed], measure)["text"] == "3"
    path.write_text('{"draft": "x", "text": "of an earlier version"}')
    assert once(path, draft, [changed], measure)["text"] == "4"
