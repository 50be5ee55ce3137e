"""Reading and checking chat rows."""

import json

import datasets
import huggingface_hub
import pytest
from datasets import Dataset

from blockdraft.trainer.data.rows import (
    HUB_NAME,
    check_messages,
    hub_datasets,
    iter_rows,
    open_rows,
    row_id,
    row_messages,
    row_tools,
)

ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "hello\u2028there"}, {"role": "assistant", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "x", "name": "Bo"}], "tools": [{"name": "f", "parameters": {"n": 1}}]},
    {"prompt": "once", "completion": "upon"},
]
NUMBERED = [("a", ROWS[0]), (1, ROWS[1]), (2, ROWS[2])]


def read(source):
    return [(row_id, row) for _, row_id, row in iter_rows(open_rows(source))]


def test_json_lines_are_read_row_by_row_whatever_their_fields(tmp_path):
    path = tmp_path / "rows [1].jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path.write_text("\n".join(lines[:2]) + "\n\n" + lines[2], encoding="utf-8")
    assert read(path) == [("a", ROWS[0]), (1, ROWS[1]), (3, ROWS[2])]  # the blank line counts as row 2
    assert [where for where, _, _ in iter_rows(open_rows(path))] == [f"{path}: row {i}" for i in (0, 1, 3)]


def test_json_list_parquet_and_datasets_give_the_same_rows(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert read(tmp_path / "rows.json") == NUMBERED
    dataset = Dataset.from_list([{"prompt": "once", "completion": "upon"}, {"prompt": "twice", "completion": None}])
    dataset.to_parquet(tmp_path / "rows.parquet")
    expected = [(0, {"prompt": "once", "completion": "upon"}), (1, {"prompt": "twice"})]
    assert read(tmp_path / "rows.parquet") == read(dataset) == expected
    both = read([tmp_path / "rows.json", tmp_path / "rows.parquet"])
    assert [row_id for row_id, _ in both] == ["a", 1, 2, 3, 4]


def test_hub_datasets_and_folders(tmp_path, monkeypatch):
    """A folder of the Hub's layout is opened by the same call as a repository."""
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"prompt": "of", "completion": split}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    here = [f"{path}{split}" for path in ("owner/name", "./owner/name", folder) for split in ("", ":test")]
    assert hub_datasets([*here, "owner/name/default:test", "owner/other:test"]) == ["owner/other"]
    for name in here:
        split = "test" if name.endswith(":test") else "train"
        assert read(name) == [(0, {"prompt": "of", "completion": split})]
        [(_, stream)] = open_rows(name, streaming=True)
        assert list(stream) == [{"prompt": "of", "completion": split}]
    assert HUB_NAME.fullmatch("a/b@main/en:train[:5%]").groupdict() == {
        "path": "a/b",
        "revision": "main",
        "name": "en",
        "split": "train[:5%]",
    }
    with pytest.raises(ValueError, match=r"no file owner/name:dev, and no dataset .*Unknown split"):
        open_rows("owner/name:dev")
    with pytest.raises(ValueError, match=r"no file owner/other, and no dataset of that name could be opened"):
        open_rows("owner/other")


def test_nulls_of_a_table_are_no_fields(tmp_path):
    """Parquet gives every message and every tool all fields of all others."""
    rows = [
        {
            "messages": [
                turn("user"),
                turn("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}]),
            ]
        },
        {
            "messages": [
                turn("user"),
                turn("assistant", None, tool_calls=[{"function": {"name": "g", "arguments": {"b": "x"}}}]),
            ]
        },
        {"messages": [turn("user", name="Bo"), turn("assistant")]},
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    expected = [[{k: v for k, v in message.items() if v is not None} for message in row["messages"]] for row in rows]
    assert [row["messages"] for _, row in read(tmp_path / "rows.parquet")] == expected
    assert row_messages(rows[0])[0] == expected[0]  # in JSON, at messages alone: a null argument may be meant


def test_changed_file_is_read_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "one"}\n')
    assert read(path) == [(0, {"prompt": "one"})]
    path.write_text('{"prompt": "two"}\n')
    assert read(path) == [(0, {"prompt": "two"})]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("rows.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"rows\.jsonl: row 1: not valid JSON"),
        ("rows.jsonl", "[1]\n", r"rows\.jsonl: row 0: expected an object"),
        ("rows.jsonl", '{"id": [1]}\n', r"rows\.jsonl: row 0: id: expected an int or a string"),
        ("rows.jsonl", "", "is empty"),
        ("rows.json", '{"prompt": 1}', "list of rows"),
        ("rows.json", '{"a": 1}\n{"a": 1}', r"name JSON lines \.jsonl"),
        ("rows.txt", "x", r"must end in \.jsonl, \.json or \.parquet"),
    ],
)
def test_unreadable_files_name_the_place(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_wrong_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no file"):
        open_rows(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="one split of a DatasetDict"):
        open_rows({"train": Dataset.from_list([{"prompt": "x"}])})


def turn(role, content="x", **more):
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ([turn("user"), "hello"], r"messages\[1\]: expected a message"),
        ([turn("user"), turn("ipython")], r"messages\[1\]\.role: 'ipython' is not one of"),
        ([{"content": "x"}], r"messages\[0\]\.role: None"),
        (
            [turn("user"), turn("assistant"), turn("assistant")],
            r"messages\[2\]\.role: an assistant turn follows assistant",
        ),
        ([turn("assistant")], "an assistant turn follows nothing"),
        ([turn("user"), turn("tool")], "a tool result follows user"),
        ([turn("user", None)], r"messages\[0\]\.content: expected text, not None"),
        ([turn("user"), turn("assistant", None)], r"messages\[1\]\.content"),
    ],
)
def test_bad_messages_name_the_field(messages, message):
    with pytest.raises(ValueError, match=message):
        check_messages(messages)


def test_tool_calls_need_no_content():
    messages = [turn("user"), turn("assistant", None, tool_calls=[{"name": "f"}]), turn("tool"), turn("assistant")]
    assert check_messages(messages) is messages


def test_prompt_and_completion_become_messages():
    row = {"prompt": [turn("user"), turn("assistant"), turn("user")], "completion": [turn("assistant", "y")]}
    assert row_messages(row) == (row["prompt"] + row["completion"], 3)
    with pytest.raises(ValueError, match="completion: expected a list"):
        row_messages({**row, "completion": "y"})
    with pytest.raises(ValueError, match=r"messages: missing.*\['text'\]"):
        row_messages({"text": "x"})


def test_ids_and_tools():
    assert row_id({"id": "a"}, 3) == "a" and row_id({}, 3) == 3
    assert row_tools({"tools": '[{"name": "f"}]'}) == [{"name": "f"}]
    assert row_tools({"tools": "[]"}) is None and row_tools({}) is None
    for tools in ("[", "{}", ["f"]):
        with pytest.raises(ValueError, match="tools: "):
            row_tools({"tools": tools})
