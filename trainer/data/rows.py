"""Reads and checks chat rows.

A row is one of
- `{"messages": [{"role", "content"}, ...]}`, optionally with `tools` and `chat_template_kwargs`,
- `{"prompt": str, "completion": str}` (plain text) or both as lists of messages,
- `{"prompt_ids": [int], "completion_ids": [int]}`, as written by `blockdraft regenerate`: taken as they are,
- `{"turns": [str, ...]}`, what a user says in turn: a prompt alone,
each optionally with `id` (an int or a string, stable across runs) and `finish_reason` ("stop" or "length"). Where a
prompt is all that is asked for, answers may be missing.

Messages are OpenAI's: content is text or a list of text parts, arguments of a tool call are an object or its JSON, and
an answer whose `weight` is 0 is not learned.
"""

import glob
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow
from datasets import Dataset, Features, IterableDataset, Value, load_dataset
from datasets.exceptions import DatasetsError

ROLES = ("system", "developer", "user", "assistant", "tool")
JSON_LINE = "json_line"  # the only column of an opened JSON file: parsed row by row, so that a bad row is one error
HUB_NAME = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/:]+))?(?:/(?P<name>[^/:]+))?(?::(?P<split>.+))?")
SUFFIXES = (".jsonl", ".json", ".parquet")
PARTS = ("text", "input_text", "output_text")  # kinds of content parts that are text
Source = Dataset | IterableDataset | str | Path | Sequence[str | Path]


def open_rows(source: Source, streaming: bool = False) -> list[tuple[str, Dataset | IterableDataset]]:
    """Opens chat rows: a dataset, paths of JSONL, JSON (a list) or parquet files, or names of Hub datasets.

    A Hub dataset is named `owner/name[@revision][/config][:split]`, the split being `train` if not given; a folder is
    opened in the same way. JSONL and parquet are read in pieces; a JSON list is parsed as a whole.

    Returns:
        `(name, dataset)` of each file or Hub dataset, with `streaming` a `datasets.IterableDataset`, which is read
        while it is iterated; error messages use the name.

    Raises:
        ValueError: if something cannot be opened.
    """
    if isinstance(source, IterableDataset) and not streaming:
        raise ValueError("data: a streamed dataset has no length and cannot be prepared whole: use `prepare_stream`")
    if isinstance(source, (Dataset, IterableDataset)):
        return [("dataset", source.to_iterable_dataset() if streaming and isinstance(source, Dataset) else source)]
    if isinstance(source, (str, Path)):
        source = [source]
    if not isinstance(source, Sequence):
        raise ValueError(
            f"data: expected paths, Hub names or a datasets.Dataset, not {type(source).__name__}; take one "
            "split of a DatasetDict"
        )
    return [(str(name), _open(str(name), streaming)) for name in source]


def hub_datasets(names: Sequence[str | Path]) -> list[str]:
    """Ids of the Hub datasets among the names of chat rows, each once."""
    named = [HUB_NAME.fullmatch(str(name)) for name in names if Path(name).suffix not in SUFFIXES]
    return sorted({hub["path"] for hub in named if hub and not Path(hub["path"]).exists()})  # else it is local


def _open(name: str, streaming: bool) -> Dataset | IterableDataset:
    path, hub = Path(name), HUB_NAME.fullmatch(name)
    folder, _, split = (name, "", "") if path.is_dir() else name.partition(":")
    is_folder = Path(folder).is_dir()
    if path.is_file() or path.suffix in SUFFIXES or not (hub or is_folder):
        return _open_file(path, streaming)
    named = {"path": folder, "split": split} if is_folder else hub.groupdict()
    try:
        return load_dataset(**named | {"split": named.get("split") or "train"}, streaming=streaming)
    except (ValueError, OSError, DatasetsError) as error:
        raise ValueError(
            f"data: there is no file {name}, and no dataset of that name could be opened on the Hub "
            f"(owner/name[@revision][/config][:split]): {error}"
        ) from error


def _json_list(path: str, size: int, changed: int) -> Iterator[dict]:
    """The rows of a JSON list; size and time of change are part of the cache's key."""
    yield from ({JSON_LINE: json.dumps(row)} for row in json.loads(Path(path).read_text(encoding="utf-8")))


def _open_file(path: Path, streaming: bool) -> Dataset | IterableDataset:
    if not path.is_file():
        raise ValueError(f"data: there is no file {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"data: {path} is empty")
    files = glob.escape(str(path.absolute()))
    load = partial(load_dataset, data_files=files, split="train", streaming=streaming)
    if path.suffix == ".jsonl":
        # A byte that is not UTF-8 becomes `\x..`, which JSON does not have: an error of its row.
        return load("text", features=Features({JSON_LINE: Value("string")}), encoding_errors="backslashreplace")
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"data: {path} is not UTF-8: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"data: {path} is not one JSON value: {error}; name JSON lines .jsonl") from error
        if not isinstance(rows, list):
            raise ValueError(f"data: {path} must hold a list of rows, not a {type(rows).__name__}")
        key = {"path": str(path.absolute()), "size": path.stat().st_size, "changed": path.stat().st_mtime_ns}
        dataset = Dataset.from_generator(_json_list, Features({JSON_LINE: Value("string")}), gen_kwargs=key)
        return dataset.to_iterable_dataset() if streaming else dataset
    if path.suffix == ".parquet":
        try:
            return load("parquet")
        except (DatasetsError, pyarrow.ArrowException) as error:
            raise ValueError(f"data: {path} cannot be read: {error.__cause__ or error}") from error
    raise ValueError(f"data: {path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


@contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Turns whatever goes wrong with a row into a `ValueError` that begins with `where` it is."""
    try:
        yield
    except Exception as error:
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        # Half of a surrogate pair may stand in JSON, but not in a file or table.
        message = f"{where}: {what}".encode(errors="backslashreplace").decode()
        raise ValueError(message) from error


def read_row(example: dict) -> dict | None:
    """The row in one example of an opened dataset, without null fields; `None` for a blank line. Raises `ValueError`
    if it is not a JSON object."""
    if example.keys() == {JSON_LINE}:
        line = example[JSON_LINE]
        if not line.strip():
            return None
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            hint = " (a byte that is not UTF-8)" if line[error.pos : error.pos + 2] == "\\x" else ""
            raise ValueError(f"not valid JSON: {error}{hint}") from error
        if not isinstance(example, dict):
            raise ValueError(f"expected an object with fields, not a {type(example).__name__}")
        return {key: value for key, value in example.items() if value is not None}
    return _without_nulls(example)


def _without_nulls(value):
    """Arrow gives all messages, tools and arguments of a column the same fields, null if a row had none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def iter_rows(opened: list[tuple[str, Dataset]]) -> Iterator[tuple[str, int | str, dict]]:
    """Yields `(where, id, row)`: the row's place for error messages, its id (else its running index), its fields."""
    first = 0
    for name, dataset in opened:
        for index, example in enumerate(dataset):
            where = f"{name}: row {index}"
            with errors_of(where):
                row = read_row(example)
                name_of_row = None if row is None else row_id(row, first + index)
            if row is not None:
                yield where, name_of_row, row
        first += len(dataset)


def row_messages(row: dict) -> tuple[list[dict], int]:
    """The row's messages, by [`plain_messages`], and how many of them are a conversational `prompt`, hence not
    supervised."""
    if "messages" in row:
        return plain_messages(row["messages"]), 0
    if "prompt" in row and "completion" in row:
        prompt = check_messages(row["prompt"], "prompt")
        if not isinstance(row["completion"], list):
            raise ValueError("completion: expected a list of messages, like the prompt")
        return plain_messages(prompt + row["completion"], "prompt + completion"), len(prompt)
    if "turns" in row:
        raise ValueError("turns: what a user says, without answers to learn; `blockdraft regenerate` writes them")
    raise ValueError(f"messages: missing, and so is a prompt with a completion; the fields are {sorted(row)}")


def prompt_messages(row: dict) -> list[dict]:
    """The messages that a row's last answer follows, or will follow if it has none yet, by [`plain_messages`]."""
    if "messages" in row:
        messages = plain_messages(row["messages"])
        return messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if "prompt" not in row and "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError("turns: expected a non-empty list of texts")
        return [{"role": "user", "content": turns[0]}]
    return plain_messages(row.get("prompt"), "prompt")


def later_turns(row: dict) -> int:
    """How many `turns` of a row [`prompt_messages`] leaves out."""
    return 0 if "messages" in row or "prompt" in row else len(row.get("turns", [None])) - 1


def plain_messages(messages: object, name: str = "messages") -> list[dict]:
    """Checked messages in one form: without null fields, which templates would render as `None`, and with text parts
    joined. Raises `ValueError` naming the field, also for parts that are not text."""
    plain = []
    for i, message in enumerate(check_messages(messages, name)):
        message = {key: value for key, value in message.items() if value is not None}
        if isinstance(content := message.get("content"), list):
            message["content"] = "".join(_part_text(part, f"{name}[{i}].content") for part in content)
        plain.append(message)
    return plain


def _part_text(part: object, where: str) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in PARTS or not isinstance(part.get("text"), str):
        raise ValueError(f"{where}: expected parts of text, not of {kind!r}")
    return part["text"]


def check_messages(messages: object, name: str = "messages") -> list[dict]:
    """Checks roles, their order, contents and weights; raises `ValueError` naming the field."""
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
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"{name}[{i}].weight: {message['weight']!r} is not 0 (not to be learned) or 1")
        previous = role
    return messages


def row_id(row: dict, default: int | str) -> int | str:
    """The row's `id`, or `default` if it has none."""
    value = row.get("id", default)
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise ValueError(f"id: expected an int or a string, not {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"id: {value} does not fit 64 bits; write it as a string")
    return value


def row_tools(row: dict) -> list[dict] | None:
    """The row's tool schemas; a JSON string, as many datasets store them, is parsed."""
    tools = _parsed(row, "tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools: expected a list of JSON schemas")
    return tools or None


def row_template_kwargs(row: dict) -> dict:
    """What the row itself sets for its chat template; a JSON string is parsed."""
    kwargs = _parsed(row, "chat_template_kwargs")
    if not isinstance(kwargs, dict | None):
        raise ValueError("chat_template_kwargs: expected an object of settings for the chat template")
    return kwargs or {}


def _parsed(row: dict, name: str):
    value = row.get(name)
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}: not valid JSON: {error}") from error
    return value
