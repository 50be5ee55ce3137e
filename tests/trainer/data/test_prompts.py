"""Prompts to decode, as serving sends them."""

import pytest
from cases import case_path, case_rows
from chat_rows import chat, write
from real_templates import real_tokenizer

from blockdraft.trainer.data.prompts import read_prompts
from blockdraft.trainer.data.regenerate import RegenerateReport, _pending
from blockdraft.trainer.data.rendering import served_prompt
from blockdraft.trainer.data.rows import open_rows, prompt_messages


def test_a_prompt_needs_no_answer():
    """It is what the answer that a conversation ends with follows, or will follow."""
    tokenizer = real_tokenizer("qwen3")
    prompts, report = read_prompts(case_path("prompts_only"), tokenizer, 8, 4096)
    assert [tokenizer.decode(prompt) for prompt in prompts] == [
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert str(report) == "2 prompts of 2 rows"


def test_of_turns_the_first_is_asked_and_the_others_are_counted():
    tokenizer = real_tokenizer("qwen3")
    [prompt], report = read_prompts(case_path("turns"), tokenizer, 8, 4096)
    river = {"messages": [{"role": "user", "content": "Name a river."}]}
    assert prompt == served_prompt(river, tokenizer)[0]
    assert report.later_turns == 1 and str(report).endswith("; 1 later `turns` left out")
    for turns in ([], "hello", [3], {"a": 1}):
        with pytest.raises(ValueError, match="turns: expected a non-empty list of texts"):
            prompt_messages({"turns": turns})


def test_prompts_are_spread_over_all_rows(tmp_path, chat_tokenizer):
    paths = [write(tmp_path / f"{i}.jsonl", [chat(f"{i} {row}", "x") for row in range(5)]) for i in range(2)]
    every, report = read_prompts(paths, chat_tokenizer, 10, 4096)
    assert len(every) == report.rows == 10
    assert read_prompts(paths, chat_tokenizer, 4, 4096)[0] == [every[i] for i in (0, 2, 5, 7)]
    assert all(isinstance(token, int) for token in every[0])


def test_what_cannot_be_decoded_is_counted_or_named(tmp_path, chat_tokenizer):
    rows = [{"prompt": "hello"}, {"prompt": ""}, {"prompt": "hello " * 90}, {"prompt_ids": [5], "completion_ids": [6]}]
    path = write(tmp_path / "a.jsonl", rows)
    path.write_text(path.read_text() + "\n")
    prompts, report = read_prompts(path, chat_tokenizer, 9, 60)
    assert prompts == [chat_tokenizer("hello")["input_ids"], [5]]
    assert str(report) == "2 prompts of 5 rows; 1 left out as longer than max_length; 2 left out as empty"
    with pytest.raises(ValueError, match="there is no prompt: 0 prompts of 1 rows; 1 left out as empty"):
        read_prompts(write(tmp_path / "b.jsonl", [{"prompt": ""}]), chat_tokenizer, 9, 60)
    with pytest.raises(ValueError, match=r"c\.jsonl: row 1: prompt: expected a non-empty list"):
        read_prompts(write(tmp_path / "c.jsonl", [chat("x"), {"text": "x"}]), chat_tokenizer, 9, 60)


def test_regenerate_asks_what_evaluation_decodes(tmp_path):
    """The same ids for every kind of row, with a row's own settings; and it keeps what they come from."""
    tokenizer = real_tokenizer("qwen3")
    names = ("content_parts", "prompts_only", "reasoning", "row_template_kwargs", "tool_arguments_as_string", "turns")
    rows = [row | {"id": i} for i, row in enumerate(row for name in names for row in case_rows(name))]
    rows.append({"id": 99, "prompt": "hello"})
    path = write(tmp_path / "a.jsonl", rows)
    report = RegenerateReport()
    asked = list(_pending(open_rows(path), tokenizer, {}, set(), None, report))
    assert [prompt.ids for prompt in asked] == read_prompts(path, tokenizer, 99, 4096)[0]
    assert report.later_turns == 1
    for prompt in asked:
        again = {key: value for key, value in prompt.fields.items()}
        assert served_prompt(again, tokenizer) == (prompt.ids, prompt.fields)
    kept = {key for prompt in asked for key in prompt.fields}
    assert kept == {"messages", "tools", "chat_template_kwargs", "prompt"}
