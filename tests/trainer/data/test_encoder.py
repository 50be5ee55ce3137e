"""What goes wrong with a row stays with it: counted, its file, place and field named."""

import json

import pytest
from cases import case_path, case_rows
from chat_rows import chat
from datasets import Dataset
from real_templates import real_tokenizer

from blockdraft.trainer.data.dataset import prepare_dataset, prepare_stream
from blockdraft.trainer.data.encoder import ENCODED, RowEncoder
from blockdraft.trainer.data.regenerate import RegenerateReport, _pending
from blockdraft.trainer.data.rows import JSON_LINE, open_rows

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}


def calling(calls, **fields):
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}], **fields}


WRONG = {
    "id of more than 64 bits": case_rows("large_id")[0],
    "id with half a surrogate pair": {"id": "\ud800", "messages": [USER, ANSWER]},
    "text with half a surrogate pair": {"messages": [USER, {"role": "assistant", "content": "hi \udc00"}]},
    "role with half a surrogate pair": {"messages": [{"role": "\ud800", "content": "x"}]},
    "messages as an object": {"messages": {"role": "user"}},
    "content as a number": {"messages": [USER, {"role": "assistant", "content": 3}]},
    "part without text": {"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]},
    "part as a number": {"messages": [{"role": "user", "content": [3]}, ANSWER]},
    "weight of a half": {"messages": [USER, {**ANSWER, "weight": 0.5}]},
    "calls as a number": calling(3),
    "calls as texts": calling(["weather"]),
    "function as text": calling([{"function": "weather"}]),
    "arguments as a list": calling([{"function": {"name": "f", "arguments": ["a"]}}]),
    "arguments as a list in JSON": calling([{"function": {"name": "f", "arguments": "[1]"}}]),
    "arguments as a number": calling([{"function": {"name": "f", "arguments": 3}}]),
    "tools as a number": {"messages": [USER, ANSWER], "tools": 3},
    "settings as a list": {"messages": [USER, ANSWER], "chat_template_kwargs": [1]},
    "ids as text": {"prompt_ids": [1], "completion_ids": ["a"]},
    "ids too large": {"prompt_ids": [1], "completion_ids": [2**70]},
    "completion as a number": {"prompt": "a", "completion": 3},
    "turns without answers": case_rows("turns")[0],
    "no field that is known": {"text": "hello"},
    "deep nesting": {JSON_LINE: '{"messages": ' + "[" * 100_000},
    "a number of 5000 digits": {JSON_LINE: '{"id": ' + "1" * 5000 + "}"},
    "a list": {JSON_LINE: "[1]"},
    "no JSON": {JSON_LINE: '{"messages": '},
    "a byte that is not UTF-8": {JSON_LINE: '{"prompt": "\\xc8"}'},
}


@pytest.mark.parametrize("what", WRONG)
def test_nothing_escapes_a_row(what):
    """Whatever is raised, of any type; what is said of it can be written to a table."""
    for name in ("qwen2_5", "gptoss"):
        [row] = RowEncoder(real_tokenizer(name), 64, id_prefix="0")(WRONG[what], "rows.jsonl: row 3", 3)
        assert row["problem"].startswith("rows.jsonl: row 3: ") and not row["dropped"]
        assert Dataset.from_list([row], features=ENCODED)[0]["problem"] == row["problem"]


def test_templates_may_raise_what_they_like(chat_tokenizer):
    for expression in (
        "1 / 0",
        "messages[0].content.x.y",
        "messages + 1",
        "{}.pop()",
        "raise_exception('no')",
    ):
        chat_tokenizer.chat_template = "{{ " + expression + " }}"
        [row] = RowEncoder(chat_tokenizer, 64)(chat("hi"), "rows.jsonl: row 0", 0)
        assert row["problem"].startswith("rows.jsonl: row 0: messages: the chat template "), expression


@pytest.mark.parametrize("name", ["large_id", "latin1"])
@pytest.mark.parametrize("read", ["dataset", "stream", "regenerate"])
def test_a_bad_row_names_its_file_however_it_is_read(name, read, chat_tokenizer, tmp_path):
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(case_path(name).read_bytes() + (json.dumps(chat("well", id=9)) + "\n").encode())
    message = (
        rf"{name}\.jsonl: row 0( of this process)?: (id: 1180591620717411303424 does not fit|not valid JSON.*UTF-8)"
    )
    if read == "regenerate":
        with pytest.raises(ValueError, match=message):
            list(_pending(open_rows(path), chat_tokenizer, {}, set(), None, RegenerateReport()))
        return
    prepare = prepare_dataset if read == "dataset" else prepare_stream
    with pytest.raises(ValueError, match=f"1 of {2 if name == 'latin1' else 3} rows are bad"):
        prepare(path, chat_tokenizer, 64)[0] if read == "dataset" else list(prepare(path, chat_tokenizer, 64, 0.009))
    if read == "dataset":
        rows, report = prepare(path, chat_tokenizer, 64, max_bad_fraction=0.5)
        assert report.bad == 1 and rows["row_id"][-1] == 9
        with pytest.raises(ValueError, match=message):
            prepare(path, chat_tokenizer, 64)


@pytest.mark.parametrize("name", ["a.json", "a.parquet"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(case_path("latin1").read_bytes())
    with pytest.raises(ValueError, match=rf"data: .*{name} (is not UTF-8|cannot be read): "):
        open_rows(path)


def test_fields_without_effect_are_counted_and_named(chat_tokenizer, caplog):
    [kwargs] = case_rows("row_template_kwargs")
    rows = [
        chat("hi", source="web", id=1),
        chat("hi", source="web", reasoning_effort="high", tools=[{"name": "f"}]),
        kwargs,
        {"prompt": "hello", "completion": "hi", "messages_of": 3},
        {"messages": [{**USER, "time": 3}, {**ANSWER, "train": False, "name": "Bo", "weight": 1}]},
        {"prompt": [USER], "completion": [{**ANSWER, "train": False}]},
        {"prompt_ids": [5], "completion_ids": [6, 2], "messages": [USER], "finish_reason": "stop", "model": "x"},
    ]
    lines = Dataset.from_list([{JSON_LINE: json.dumps(row)} for row in rows])
    with caplog.at_level("WARNING", logger="blockdraft"):
        _, report = prepare_dataset(lines, chat_tokenizer, max_length=64, template_kwargs={"enable_thinking": False})
    assert report.kept == 7 and report.unused == {
        "source": 2,
        "reasoning_effort": 1,
        "tools": 1,
        "chat_template_kwargs.reasoning_effort": 1,
        "messages_of": 1,
        "messages[].time": 1,
        "messages[].train": 2,
        "model": 1,
    }
    assert "fields without effect: source (2 rows), reasoning_effort (1 rows), tools (1 rows)" in caplog.text
    assert "template_kwargs: the chat template does not read enable_thinking: no effect" in caplog.text
    chat_tokenizer.chat_template += "{% if tools and reasoning_effort and time and train %}{% endif %}"
    _, report = prepare_dataset(lines, chat_tokenizer, max_length=64)
    assert report.unused == {"source": 2, "reasoning_effort": 1, "messages_of": 1, "model": 1}


def test_the_length_of_the_served_prompt_is_that_of_the_last_answer_within_the_row(chat_tokenizer):
    row = chat("fine", "so")
    [whole] = RowEncoder(chat_tokenizer, 200)(row, "", 0)
    first = whole["loss_mask"].index(1)
    second = (
        len(whole["loss_mask"]) - whole["loss_mask"][::-1].index(1) - len(chat_tokenizer("so<|im_end|>")["input_ids"])
    )
    assert whole["prompt_length"] == second > first
    [cut] = RowEncoder(chat_tokenizer, second)(row, "", 0)
    assert cut["prompt_length"] == first and cut["truncated"]
