"""From chat rows to a training set and its batches."""

import json
import os
import subprocess
import sys

import datasets
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from chat_rows import chat, write
from chat_templates import CHATML, THINKING
from datasets import Dataset, IterableDataset, concatenate_datasets
from draft_trainers import make_rows, make_trainer, weights
from torch.utils.data import DataLoader

from blockdraft.trainer.data.dataset import (
    DraftCollator,
    hold_out,
    mix,
    prepare_dataset,
    prepare_stream,
    stable_row_id,
)
from blockdraft.trainer.data.packing import pack_rows


def test_rows_become_ids_masks_and_row_ids(tmp_path, chat_tokenizer):
    path = write(tmp_path / "a.jsonl", [chat("fine"), chat("it is", "so", id="x"), chat("well", id=7)])
    more = write(tmp_path / "b.jsonl", [{"prompt_ids": [4, 5], "completion_ids": [6, 2]}])
    dataset, report = prepare_dataset([path, more], chat_tokenizer, max_length=64)
    assert dataset.column_names == ["input_ids", "loss_mask", "row_id", "prompt_length", "conversation_id"]
    assert dataset["row_id"][:] == dataset["conversation_id"][:] == [0, stable_row_id("x"), 7, 3]
    expected = chat_tokenizer.apply_chat_template(chat("fine")["messages"], return_dict=True)["input_ids"]
    assert dataset[0]["input_ids"] == expected
    kept = [i for i, m in zip(dataset[0]["input_ids"], dataset[0]["loss_mask"], strict=True) if m]
    assert chat_tokenizer.decode(kept) == "fine<|im_end|>"
    row = {"input_ids": [4, 5, 6, 2], "loss_mask": [0, 0, 1, 1], "prompt_length": 2}
    assert dataset[3] == row | {"row_id": 3, "conversation_id": 3}
    assert (report.rows, report.kept, report.truncated, report.dropped, report.bad) == (4, 4, 0, {}, 0)
    assert report.supervised_tokens == sum(sum(mask) for mask in dataset["loss_mask"])
    assert report.open_turns == 0 and report.provenance == {}


@pytest.mark.parametrize("kind", ["turns that the template rewrites", "rows of one id"])
def test_a_conversation_is_trained_on_or_held_out_as_a_whole(kind, tmp_path, chat_tokenizer):
    if kind == "rows of one id":
        rows = [chat("a", *"bc"[:turn], id=f"x{i}") for i in range(20) for turn in range(3)]
    else:
        chat_tokenizer.chat_template = THINKING
        rows = [chat(*["<think>hm</think>a"] * 3, id=f"x{i}") for i in range(20)]
    dataset, report = prepare_dataset(write(tmp_path / "a.jsonl", rows), chat_tokenizer, max_length=128)
    parts = hold_out(dataset, 0.25, seed=0)
    train, test = (set(parts[name]["conversation_id"]) for name in ("train", "test"))
    assert len(dataset) == 60 and len(test) == 5 and not train & test
    assert train | test == {stable_row_id(f"x{i}") for i in range(20)}
    assert len(parts["test"]) == 15 and len(parts["train"]) == 45


def test_rows_that_are_conversations_of_their_own_are_split_as_datasets_does(tmp_path, chat_tokenizer):
    dataset, _ = prepare_dataset(write(tmp_path / "a.jsonl", [chat("a")] * 20), chat_tokenizer, max_length=64)
    expected = dataset.train_test_split(test_size=5, seed=3)
    for name, rows in hold_out(dataset, 0.25, seed=3).items():
        assert rows.to_list() == expected[name].to_list()
    with pytest.raises(ValueError, match="1 conversations .* none is left to train on"):
        hold_out(dataset.select([0]), 0.25, seed=0)


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
    assert len(dataset) == report.kept == 1 and report.bad == 3
    with pytest.raises(ValueError, match="no row is left to train on"):
        prepare_dataset(write(tmp_path / "b.jsonl", rows[1:]), chat_tokenizer, max_length=64, max_bad_fraction=1.0)


def test_answers_without_a_stop_token_are_counted(chat_tokenizer):
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("<|im_end|>", "X")
    rows = Dataset.from_list([chat("fine"), chat("so")])
    assert prepare_dataset(rows, chat_tokenizer, max_length=64)[1].open_turns == 2
    stop = chat_tokenizer("X")["input_ids"]
    assert prepare_dataset(rows, chat_tokenizer, max_length=64, stop_token_ids=stop)[1].open_turns == 0


def test_settings_are_checked(chat_tokenizer):
    rows = Dataset.from_list([chat("fine")])
    with pytest.raises(ValueError, match="assistant_turns must be 'all' or 'last', not 'first'"):
        prepare_dataset(rows, chat_tokenizer, max_length=64, assistant_turns="first")
    with pytest.raises(ValueError, match="max_length must be positive"):
        prepare_dataset(rows, chat_tokenizer, max_length=0)


def test_templates_that_rewrite_turns_give_one_row_a_turn(tmp_path, chat_tokenizer, caplog):
    chat_tokenizer.chat_template = THINKING
    path = write(tmp_path / "a.jsonl", [chat("<think>a</think>so"), chat("<think>a</think>so", "fine", id="x")])
    with caplog.at_level("WARNING", logger="blockdraft"):
        dataset, report = prepare_dataset(path, chat_tokenizer, max_length=64)
    assert dataset["row_id"][:] == [0, stable_row_id("x/turn 0"), stable_row_id("x/turn 1")]
    assert (report.rows, report.kept, report.split, report.bad) == (2, 3, 1, 0)
    assert "3 rows kept of 2" in caplog.text and "1 split into one row a turn, as the chat template" in caplog.text
    last, report = prepare_dataset(path, chat_tokenizer, max_length=64, assistant_turns="last")
    assert (len(last), report.split) == (2, 0) and last[1]["input_ids"] == dataset[2]["input_ids"]
    read_only, _ = prepare_dataset(path, chat_tokenizer, max_length=64, train_on_thinking=False)
    kept = [i for i, m in zip(read_only[1]["input_ids"], read_only[1]["loss_mask"], strict=True) if m]
    assert chat_tokenizer.decode(kept) == "so<|im_end|>"


def test_tools_of_rows_reach_the_template(tmp_path, chat_tokenizer):
    """Each row's own, from JSON lines and from Arrow, where all tools of a column share their fields."""
    chat_tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
    tools = [{"name": "a", "strict": True}], [{"name": "b"}, {"name": "c"}]
    rows = [chat("fine", tools=tools[0]), chat("so", tools=tools[1]), chat("well")]
    for source in (write(tmp_path / "a.jsonl", rows), Dataset.from_list(rows)):
        dataset, _ = prepare_dataset(source, chat_tokenizer, max_length=128)
        for row, given in zip(dataset, [*tools, []], strict=True):
            text = chat_tokenizer.decode(row["input_ids"])
            assert text.startswith("".join(map(json.dumps, given)) + "<|im_start|>user"), text


def test_repeated_ids_are_told(tmp_path, chat_tokenizer, caplog):
    path = write(tmp_path / "a.jsonl", [chat("fine", id=1), chat("so", id=1), chat("so")])
    with caplog.at_level("WARNING", logger="blockdraft"):
        prepare_dataset(path, chat_tokenizer, max_length=64)
    assert "1 rows have an `id` that another row has too" in caplog.text


def test_encoding_is_cached_until_a_setting_changes(tmp_path, chat_tokenizer):
    """A hit also after the tokenizer was used otherwise, and with the counts of the first time."""
    path = write(tmp_path / "a.jsonl", [chat("fine"), chat("so"), {"prompt": [], "completion": []}])

    def prepare(**settings):
        settings = {"max_length": 64, "max_bad_fraction": 0.5} | settings
        dataset, report = prepare_dataset(path, chat_tokenizer, **settings)
        return dataset.cache_files, report

    first, report = prepare()
    chat_tokenizer(["one", "another one"], padding=True, truncation=True, max_length=3)
    assert prepare() == (first, report) and report.bad == 1 and len(report.problems) == 1
    changes = {
        "max_length": 32,
        "assistant_turns": "last",
        "stop_token_ids": [5],
        "template_kwargs": {"a": 1},
        "train_on_thinking": False,
        "thinking_tags": ["[", "]"],
        "id_prefix": "x",
    }
    files = [first] + [prepare(**{name: value})[0] for name, value in changes.items()]
    chat_tokenizer.chat_template += "{{ '' }}"
    files.append(prepare()[0])
    chat_tokenizer.add_tokens(["<new>"])
    files.append(prepare()[0])
    assert len({encoded["filename"] for encoded, *_ in files}) == len(changes) + 3


SECOND_PROCESS = """
import sys, datasets
from transformers import AutoTokenizer
from blockdraft.trainer.data.dataset import prepare_dataset
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
dataset, report = prepare_dataset(folder + "/a.jsonl", tokenizer, max_length=64, num_proc=int(sys.argv[2]))
print(dataset.cache_files[0]["filename"], report.rows, report.truncated, dataset["row_id"][:])
"""


def test_another_process_takes_rows_from_the_cache(tmp_path, chat_tokenizer):
    """Rows encoded there by two processes are those that are found here."""
    write(tmp_path / "a.jsonl", [chat("fine"), chat("so " * 40), chat("it is")])
    chat_tokenizer.save_pretrained(tmp_path / "tokenizer")
    environment = os.environ | {"HF_DATASETS_CACHE": str(datasets.config.HF_DATASETS_CACHE)}
    command = [sys.executable, "-c", SECOND_PROCESS, str(tmp_path), "1"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    written = {path: path.stat().st_mtime_ns for path in datasets.config.HF_DATASETS_CACHE.rglob("cache-*.arrow")}
    tokenizer = type(chat_tokenizer).from_pretrained(tmp_path / "tokenizer")
    dataset, report = prepare_dataset(tmp_path / "a.jsonl", tokenizer, max_length=64)
    found = f"{dataset.cache_files[0]['filename']} {report.rows} {report.truncated} {dataset['row_id'][:]}"
    assert result.stdout.strip() == found and report.truncated == 1
    cached = datasets.config.HF_DATASETS_CACHE.rglob("cache-*.arrow")
    assert {path: path.stat().st_mtime_ns for path in cached} == written


def test_several_processes_encode_alike(tmp_path, chat_tokenizer):
    rows = [chat(f"fine {i}") for i in range(5)]
    alone, report = prepare_dataset(write(tmp_path / "a.jsonl", rows), chat_tokenizer, max_length=64)
    shared, report_of_two = prepare_dataset(
        write(tmp_path / "b.jsonl", rows), chat_tokenizer, max_length=64, num_proc=2
    )
    assert alone[:] == shared[:] and report == report_of_two


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


# ---- streams ------------------------------------------------------------------------------------------------------


def shards(tmp_path, count=3, rows=5):
    return [
        write(tmp_path / f"shard{i}.jsonl", [chat(f"answer {i} {row}") for row in range(rows)]) for i in range(count)
    ]


def test_streams_give_the_rows_of_sets(tmp_path, chat_tokenizer):
    paths = shards(tmp_path)
    (tmp_path / "list.json").write_text(json.dumps([chat("of a list", id="x")]))
    paths.append(tmp_path / "list.json")
    stream = prepare_stream(paths, chat_tokenizer, max_length=64)
    assert isinstance(stream, IterableDataset)
    rows, (dataset, _) = list(stream), prepare_dataset(paths, chat_tokenizer, max_length=64)
    assert list(rows[0]) == dataset.column_names
    for name in ("input_ids", "loss_mask"):
        assert [row[name] for row in rows] == dataset[name][:]
    ids = [row["row_id"] for row in rows]
    assert len(set(ids)) == 16 and ids[-1] == stable_row_id("x")
    # Named by their content: in any order, in any file, and apart from those of another source.
    renamed = write(tmp_path / "all.jsonl", [chat(f"answer {i} {row}") for i in (2, 0, 1) for row in range(5)])
    again = [row["row_id"] for row in prepare_stream(renamed, chat_tokenizer, max_length=64)]
    assert set(again) == set(ids[:-1]) and again != ids[:-1]
    other = [row["row_id"] for row in prepare_stream(paths, chat_tokenizer, max_length=64, id_prefix="1")]
    assert not set(other) & set(ids)


@pytest.mark.parametrize("count", [1, 4])
def test_ranks_and_workers_share_a_stream_out(tmp_path, chat_tokenizer, count):
    """As a trainer's accelerator prepares it: by files where there are enough, else batch by batch."""
    stream = prepare_stream(shards(tmp_path, count, rows=4), chat_tokenizer, max_length=64)
    expected, seen = sorted(row["row_id"] for row in stream), []
    for rank in range(2):
        loader = DataLoader(stream, batch_size=2, num_workers=count // 2, collate_fn=DraftCollator(0))
        loader = prepare_data_loader(loader, num_processes=2, process_index=rank, dispatch_batches=False)
        seen.append([row_id for batch in loader for row_id in batch["row_id"].tolist()])
    assert sorted(seen[0] + seen[1]) == expected and len(seen[0]) == len(seen[1])


def test_bad_rows_of_a_stream_are_left_out_up_to_a_limit(tmp_path, chat_tokenizer, caplog):
    rows = [chat("fine")] * 1090 + [{"messages": []}] * 9 + [{"messages": chat("x")["messages"][:1]}]
    path = write(tmp_path / "a.jsonl", rows)
    with caplog.at_level("WARNING", logger="blockdraft"):
        assert len(list(prepare_stream(path, chat_tokenizer, max_length=64, max_bad_fraction=0.01))) == 1090
    assert "a.jsonl, read by this process: 1024 of 1024 rows kept" in caplog.text
    with pytest.raises(
        ValueError, match=r"9 of 1100 rows are bad.*\n.*a\.jsonl: row 1090 of this process: messages: "
    ):
        list(prepare_stream(path, chat_tokenizer, max_length=64))
    with pytest.raises(ValueError, match="no row is left to train on"):
        prepare_stream(write(tmp_path / "b.jsonl", rows[-1:]), chat_tokenizer, max_length=64)
    with pytest.raises(ValueError, match="use `prepare_stream`"):
        prepare_dataset(prepare_stream(path, chat_tokenizer, max_length=64, max_bad_fraction=0.1), chat_tokenizer, 64)


@pytest.mark.parametrize("count", [5, 64, 70, 1100])
def test_a_stream_tells_what_became_of_its_rows_at_its_end(tmp_path, chat_tokenizer, caplog, count):
    """Also one of few rows, once however often it is read. Where batches come out even, the next pass tells."""
    rows = [chat("fine " * 80)] + [chat("so")] * (count - 3)
    rows += [{"messages": []}, {"prompt_ids": [3], "completion_ids": []}]
    stream = prepare_stream(write(tmp_path / "a.jsonl", rows), chat_tokenizer, max_length=64, max_bad_fraction=0.01)
    assert "read by this process" not in caplog.text
    with caplog.at_level("WARNING", logger="blockdraft"):
        for _ in range(3):
            assert len(list(stream)) == count - 2
    lines = [record.message for record in caplog.records if f" of {count} rows kept" in record.message]
    assert len(lines) == 1
    assert f"a.jsonl, read by this process{'' if count == 64 else ' to its end'}: {count - 2} of" in lines[0]
    assert "; 1 truncated; 1 dropped: no answer to learn from; 1 bad, the first: " in lines[0]
    assert f"a.jsonl: row {count - 2} of this process: " in lines[0]
    assert sum("read by this process" in record.message for record in caplog.records) == (2 if count > 1000 else 1)


@pytest.mark.parametrize("prepare", ["dataset", "stream"])
def test_sources_are_mixed_by_their_shares(tmp_path, chat_tokenizer, prepare):
    paths = [write(tmp_path / f"{i}.jsonl", [chat(f"{i} {row}") for row in range(n)]) for i, n in enumerate((5, 60))]

    def parts():
        if prepare == "stream":
            return [prepare_stream(path, chat_tokenizer, 64, id_prefix=str(i)) for i, path in enumerate(paths)]
        return [prepare_dataset(path, chat_tokenizer, 64, id_prefix=str(i))[0] for i, path in enumerate(paths)]

    first, second = ({row["row_id"] for row in part} for part in parts())
    assert len(first | second) == 65
    mixed = [row["row_id"] for row in mix(parts(), [1, 3], seed=0)]
    assert set(mixed) == first | second  # every row is there, those of the short part several times
    assert 0.15 < sum(row in first for row in mixed) / len(mixed) < 0.35
    assert mixed == [row["row_id"] for row in mix(parts(), [0.25, 0.75], seed=0)]
    assert mixed != [row["row_id"] for row in mix(parts(), [1, 3], seed=1)]
    for wrong in ([1], [1, 0], [1, -1, 2]):
        with pytest.raises(ValueError, match="must have one positive share for each of the 2 sources"):
            mix(parts(), wrong, seed=0)


def test_a_trainer_takes_and_resumes_a_stream(tmp_path, chat_tokenizer):
    """Two passes over a shuffled, packed stream, cut in the middle: the weights of an uninterrupted run."""
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"

    def trainer(name, **arguments):
        paths = shards(tmp_path, count=2, rows=6)
        stream = prepare_stream(paths, chat_tokenizer, max_length=64).shuffle(seed=1, buffer_size=4)
        stream = pack_rows(stream, 64).map(lambda row: {"input_ids": [token % 60 for token in row["input_ids"]]})
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3} | arguments
        return make_trainer(tmp_path / name, stream, **settings)

    whole = trainer("whole")
    whole.train()
    assert whole.state.epoch == 1 and whole.state.global_step == 6
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(whole)[name]), name
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        trainer("endless", max_steps=-1)


def test_rows_without_ids_are_named_by_their_content(tmp_path, caplog):
    """The same draft whatever the order they come in and the place they have; the user is told."""
    rows, known = make_rows(), []
    bare = rows.remove_columns("row_id")
    collate = DraftCollator(0)
    ids = [collate([row])["row_id"].item() for row in bare]
    assert len({*ids}) == 8 and collate(list(bare))["row_id"].tolist() == ids
    for given in (bare, list(bare), bare.to_iterable_dataset()):
        with caplog.at_level("WARNING", logger="blockdraft"):
            trainer = make_trainer(tmp_path, given, max_steps=1, train_sampling_strategy="sequential")
        trainer.train()
        known.append(weights(trainer))
        assert caplog.text.count("has no column `row_id`") == 2  # to train and to evaluate on
        caplog.clear()
    for name, tensor in known[0].items():
        assert torch.equal(tensor, known[1][name]) and torch.equal(tensor, known[2][name])


@pytest.mark.parametrize("kind", [Dataset.from_list, list, lambda rows: {"chat": Dataset.from_list(rows)}])
def test_rows_that_cannot_be_trained_on_are_refused_at_once(tmp_path, kind):
    rows = [{"text": "hello", "input_ids": [1, 2]}]
    with pytest.raises(ValueError, match=r"no `loss_mask` among their columns \(input_ids, text\): `prepare_dataset`"):
        make_trainer(tmp_path, kind(rows))
    with pytest.raises(ValueError, match="no `loss_mask`"):
        DraftCollator(0)(rows)
    with pytest.raises(ValueError, match="no `loss_mask`, no `row_id`: pack what `prepare_dataset` makes"):
        pack_rows(Dataset.from_list(rows), 8)
