"""Reads and checks chat rows.

A row is one of
- `{"messages": [{"role", "content"}, ...]}`, optionally with `tools`,
- `{"prompt": str, "completion": str}` (plain text) or both as lists of messages,
- `{"prompt_ids": [int], "completion_ids": [int]}`, as written by `blockdraft regenerate`: taken as they are,
each optionally with `id` (an int or a string, stable across runs) and `finish_reason` ("stop" or "length").
"""

import glob
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from datasets import Dataset, Features, Value, load_dataset

ROLES = ("system", "developer", "user", "assistant", "tool")
JSON_LINE = "json_line"  # the one column of an opened JSON file: parsed row by row, so that one bad row is one error
Source = Dataset | str | Path | Sequence[str | Path]


def open_rows(source: Source) -> list[tuple[str, Dataset]]:
    """Opens chat rows: a `datasets.Dataset`, or paths of JSONL, JSON (a list) or parquet files.

    Returns:
        One `(name, dataset)` a file; the name stands in error messages.
    """
    if isinstance(source, Dataset):
        return [("dataset", source)]
    if isinstance(source, (str, Path)):
        source = [source]
    if not isinstance(source, Sequence):
        raise ValueError(
            f"data: expected paths or a datasets.Dataset, not {type(source).__name__}; take one split of a "
            "DatasetDict, and save a streamed dataset to a file first"
        )
    return [(str(path), _open_file(Path(path))) for path in source]


def _open_file(path: Path) -> Dataset:
    if not path.is_file():
        raise ValueError(f"data: there is no file {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"data: {path} is empty")
    load = partial(load_dataset, data_files=glob.escape(str(path.absolute())), split="train")
    if path.suffix == ".jsonl":
        return load("text", features=Features({JSON_LINE: Value("string")}))
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"data: {path} is not one JSON value: {error}; name JSON lines .jsonl") from error
        if not isinstance(rows, list):
            raise ValueError(f"data: {path} must hold a list of rows, not a {type(rows).__name__}")
        return Dataset.from_dict({JSON_LINE: [json.dumps(row) for row in rows]})
    if path.suffix == ".parquet":
        return load("parquet")
    raise ValueError(f"data: {path} must end in .jsonl, .json or .parquet")


def read_row(example: dict) -> dict | None:
    """The row held by one example of an opened dataset, without null fields; `None` for a blank line."""
    if example.keys() == {JSON_LINE}:
        if not example[JSON_LINE].strip():
            return None
        try:
            example = json.loads(example[JSON_LINE])
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error}") from error
        if not isinstance(example, dict):
            raise ValueError(f"expected an object with fields, not a {type(example).__name__}")
    return {key: value for key, value in example.items() if value is not None}


def iter_rows(opened: list[tuple[str, Dataset]]) -> Iterator[tuple[str, int | str, dict]]:
    """Yields `(where, id, row)`: the row's place for error messages, its id (else its running index), its fields."""
    first = 0
    for name, dataset in opened:
        for index, example in enumerate(dataset):
            where = f"{name}: row {index}"
            try:
                row = read_row(example)
                name_of_row = None if row is None else row_id(row, first + index)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if row is not None:
                yield where, name_of_row, row
        first += len(dataset)


def row_messages(row: dict) -> tuple[list[dict], int]:
    """The row's messages, checked, and how many of them are a conversational `prompt`, hence not supervised."""
    if "messages" in row:
        return check_messages(row["messages"]), 0
    if "prompt" in row and "completion" in row:
        prompt = check_messages(row["prompt"], "prompt")
        if not isinstance(row["completion"], list):
            raise ValueError("completion: expected a list of messages, like the prompt")
        return check_messages(prompt + row["completion"], "prompt + completion"), len(prompt)
    raise ValueError(f"messages: missing, and so is a prompt with a completion; the fields are {sorted(row)}")


def check_messages(messages: object, name: str = "messages") -> list[dict]:
    """Checks roles, their order and contents; raises `ValueError` naming the field."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name}: expected a non-empty list of messages")
    previous = None
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"{name}[{i}]: expected a message with role and content, not {message!r}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"{name}[{i}].role: {role!r} is not one of {', '.join(ROLES)}")
        if role == "assistant" and previous in (None, "assistant"):
            raise ValueError(f"{name}[{i}].role: an assistant turn follows {previous or 'nothing'}")
        if role == "tool" and previous not in ("assistant", "tool"):
            raise ValueError(f"{name}[{i}].role: a tool result follows {previous or 'nothing'}")
        if not isinstance(content, (str, list)) and not (role == "assistant" and message.get("tool_calls")):
            raise ValueError(f"{name}[{i}].content: expected text, not {content!r}")
        previous = role
    return messages


def row_id(row: dict, default: int) -> int | str:
    """The row's `id`, or `default` if it has none."""
    value = row.get("id", default)
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise ValueError(f"id: expected an int or a string, not {value!r}")
    return value


def row_tools(row: dict) -> list[dict] | None:
    """The row's tool schemas; a JSON string, as many datasets store them, is parsed."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"tools: not valid JSON: {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools: expected a list of JSON schemas")
    return tools or None
