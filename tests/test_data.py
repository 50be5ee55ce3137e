"""From chat rows to a training set and its batches."""

import json

import pytest
import torch
from datasets import Dataset, concatenate_datasets

from blockdraft.trainer.data import DraftCollator, prepare_dataset, provenance_path, stable_row_id


def chat(*answers, **fields):
    turns = [({"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}) for answer in answers]
    return {"messages": [message for turn in turns for message in turn], **fields}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_become_ids_masks_and_row_ids(tmp_path, chat_tokenizer):
    path = write(tmp_path / "a.jsonl", [chat("fine"), chat("it is", "so", id="x"), chat("well", id=7)])
    more = write(tmp_path / "b.jsonl", [{"prompt_ids": [4, 5], "completion_ids": [6, 2]}])
    dataset, report = prepare_dataset([path, more], chat_tokenizer, max_length=64)
    assert dataset.column_names == ["input_ids", "loss_mask", "row_id"]
    assert dataset["row_id"][:] == [0, stable_row_id("x"), 7, 3]
    expected = chat_tokenizer.apply_chat_template(chat("fine")["messages"], return_dict=True)["input_ids"]
    assert dataset[0]["input_ids"] == expected
    kept = [i for i, m in zip(dataset[0]["input_ids"], dataset[0]["loss_mask"], strict=True) if m]
    assert chat_tokenizer.decode(kept) == "fine<|im_end|>"
    assert dataset[3] == {"input_ids": [4, 5, 6, 2], "loss_mask": [0, 0, 1, 1], "row_id": 3}
    assert (report.rows, report.kept, report.truncated, report.dropped, report.bad) == (4, 4, 0, {}, [])
    assert report.supervised_tokens == sum(sum(mask) for mask in dataset["loss_mask"])
    assert report.open_turns == 0 and report.provenance == {}


def test_truncated_and_dropped_rows_are_counted(tmp_path, chat_tokenizer):
    prompt_ids = chat_tokenizer.apply_chat_template(
        chat("x")["messages"][:1], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    rows = [
        chat("a"),  # whole: the answer, its stop token and a new line fit
        chat("it is fine it is fine it is fine it is fine"),  # cut, but two answer tokens are left
        {"prompt_ids": [3] * 40, "completion_ids": [4, 2]},  # cut before its answer
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt_ids": [3], "completion_ids": []},
        chat("b"),
    ]
    path = write(tmp_path / "a.jsonl", rows)
    path.write_text(path.read_text() + "\n")
    dataset, report = prepare_dataset(path, chat_tokenizer, max_length=len(prompt_ids) + 3)
    assert dataset["row_id"][:] == [0, 1, 5]
    assert len(dataset[1]["input_ids"]) == len(prompt_ids) + 3 and sum(dataset[1]["loss_mask"]) == 3
    assert (report.rows, report.kept, report.truncated) == (7, 3, 2)
    assert report.dropped == {
        f"no supervised token within max_length={len(prompt_ids) + 3}": 1,
        "no answer to learn from": 2,
        "blank line": 1,
    }
    assert str(report).startswith("3 of 7 rows kept; 7 supervised tokens; 2 truncated; 1 dropped: no supervised token")


def test_bad_rows_are_named_and_limited(tmp_path, chat_tokenizer):
    two = [{"role": "user", "content": "x"}, *[{"role": "assistant", "content": "y"}] * 2]
    rows = [chat("fine"), {"messages": two}, {"messages": [{"role": "ipython", "content": "x"}]}, chat("a", tools="[")]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as error:
        prepare_dataset(path, chat_tokenizer, max_length=64)
    assert "3 of 4 rows are bad, more than max_bad_fraction=0.0 allows" in str(error.value)
    for place in (
        f"{path}: row 1: messages[2].role: an assistant turn follows assistant",
        f"{path}: row 2: messages[0].role: 'ipython' is not one of",
        f"{path}: row 3: tools: not valid JSON",
    ):
        assert place in str(error.value)
    dataset, report = prepare_dataset(path, chat_tokenizer, max_length=64, max_bad_fraction=0.75)
    assert len(dataset) == report.kept == 1 and len(report.bad) == 3
    with pytest.raises(ValueError, match="no row is left to train on"):
        prepare_dataset(write(tmp_path / "b.jsonl", rows[1:]), chat_tokenizer, max_length=64, max_bad_fraction=1.0)


def test_all_zero_mask_names_the_row(tmp_path, chat_tokenizer):
    chat_tokenizer.chat_template = "{% generation %}{% endgeneration %}" + chat_tokenizer.chat_template
    with pytest.raises(ValueError, match=r"a\.jsonl: row 0: messages: the loss mask is all zero"):
        prepare_dataset(write(tmp_path / "a.jsonl", [chat("fine")]), chat_tokenizer, max_length=64)


def test_answers_without_a_stop_token_are_counted(chat_tokenizer):
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("<|im_end|>", "<|endoftext|>")
    rows = Dataset.from_list([chat("fine"), chat("so")])
    assert prepare_dataset(rows, chat_tokenizer, max_length=64)[1].open_turns == 2
    stop = [chat_tokenizer.pad_token_id]
    assert prepare_dataset(rows, chat_tokenizer, max_length=64, stop_token_ids=stop)[1].open_turns == 0


def test_settings_are_checked(chat_tokenizer):
    rows = Dataset.from_list([chat("fine")])
    with pytest.raises(ValueError, match="assistant_turns must be 'all' or 'last', not 'first'"):
        prepare_dataset(rows, chat_tokenizer, max_length=64, assistant_turns="first")
    with pytest.raises(ValueError, match="max_length must be positive"):
        prepare_dataset(rows, chat_tokenizer, max_length=0)


def test_encoding_is_cached_until_a_setting_changes(tmp_path, chat_tokenizer):
    path = write(tmp_path / "a.jsonl", [chat("fine"), chat("so")])

    def cache_file(**settings):
        return prepare_dataset(path, chat_tokenizer, **{"max_length": 64, **settings})[0].cache_files

    first = cache_file()
    assert first == cache_file() != cache_file(max_length=32)
    chat_tokenizer.chat_template += "{{ '' }}"
    assert first != cache_file()


def provenance(path, **changes):
    settings = {"target": "t", "revision": "r", "chat_template_sha256": "c", "template_kwargs": {}} | changes
    provenance_path(path).write_text(json.dumps({"settings": settings}))


def test_regenerated_sets_must_agree(tmp_path, chat_tokenizer):
    paths = [write(tmp_path / name, [chat("fine")]) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    provenance(paths[0])
    provenance(paths[1], template_kwargs={"enable_thinking": False})
    assert list(prepare_dataset([paths[0], paths[2]], chat_tokenizer, max_length=64)[1].provenance) == [str(paths[0])]
    with pytest.raises(
        ValueError, match=r"b\.jsonl was regenerated with template_kwargs=\{'enable_thinking': False\}"
    ):
        prepare_dataset(paths, chat_tokenizer, max_length=64)


def test_collator_pads_on_the_right():
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "row_id": "x", "document_ids": [1, 1, 2]},
        {"input_ids": [8], "loss_mask": [1], "row_id": 2**40, "document_ids": [1]},
    ]
    batch = DraftCollator(pad_token_id=9)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch["document_ids"].tolist() == [[1, 1, 2], [1, 0, 0]]
    assert batch["row_id"].tolist() == [stable_row_id("x"), 2**40]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    plain = DraftCollator(pad_token_id=9)([{k: v for k, v in row.items() if k != "document_ids"} for row in rows])
    assert "document_ids" not in plain


def test_row_ids_are_stable():
    assert stable_row_id("conversation-1") == 2348674417659035190
    assert stable_row_id(-3) == -3
    ids = {stable_row_id(f"row {i}") for i in range(1000)}
    assert len(ids) == 1000 and 0 <= min(ids) and max(ids) < 2**63


def test_prepared_sets_can_be_joined(chat_tokenizer):
    rows = Dataset.from_list([chat("fine"), {**chat("so"), "id": None}])
    first, _ = prepare_dataset(rows, chat_tokenizer, max_length=64)
    second, _ = prepare_dataset(rows, chat_tokenizer, max_length=64, assistant_turns="last")
    assert concatenate_datasets([first, second])["row_id"][:] == [0, 1, 0, 1]
