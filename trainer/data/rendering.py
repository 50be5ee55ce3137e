"""What a chat template makes of messages: the text and the ids that serving sends, and where answers stop."""

import html
import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import takewhile

from transformers import GenerationConfig, PreTrainedTokenizerBase

from .rows import prompt_messages, row_template_kwargs, row_tools

# An answer's thoughts have a field of their own under one of these names; templates read one or two of them.
REASONING = ("reasoning_content", "reasoning", "thinking")
# Of messages, what we read, and what says which result belongs to which call.
MESSAGE_FIELDS = {"role", "content", "weight", "tool_calls", "tool_call_id", "name", "id", *REASONING}
# What opens and what closes the thoughts in an answer's text.
THINKING_TAGS = (
    ("<think>", "</think>"),  # Qwen3, GLM, Kimi K2, DeepSeek
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("to=self<|message|>", "<|eom|>"),  # Muse Glimmer
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("[THINK]", "[/THINK]"),  # Magistral
)
PRINTED_PARTS = re.compile(r"""["']type["']: ?["']text["']""")


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **kwargs) -> str:
    """The text that the tokenizer's chat template makes of messages. Whatever a template raises, it raises on purpose
    or for want of what it expects: a `ValueError` here."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    except Exception as error:
        raise ValueError(f"messages: the chat template refuses them: {error}") from error


def template_settings(row: dict, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None) -> dict:
    """What the template gets beside a row's messages: its tools, and `template_kwargs` under the row's own
    `chat_template_kwargs`."""
    own = row_template_kwargs(row)
    call = inspect.signature(tokenizer.apply_chat_template).parameters if own else {}
    if taken := sorted(own.keys() & call.keys()):
        raise ValueError(f"chat_template_kwargs: {', '.join(taken)}: not for the template, but for who calls it")
    return {"tools": row_tools(row), **(template_kwargs or {}), **own}


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **kwargs) -> tuple[str, list[dict]]:
    """The text of messages that were made plain, and the messages as this template takes them: content as text or as
    parts, arguments of calls as objects or as JSON, thoughts under all their names.

    Raises:
        ValueError: if the template takes them in no form, or leaves out something that was said. Thoughts of earlier
            turns may be left out, as in serving.
    """
    errors, tried = [], []
    for form in (_with_objects, _with_parts, _with_json):
        taken = [form(message, i) for i, message in enumerate(messages)]
        if taken in tried:
            continue
        tried.append(taken)
        try:
            text = apply_template(tokenizer, taken, **kwargs)
            check_said(text, messages)
        except ValueError as error:
            errors.append(error)
            continue
        if form is not _with_parts or len(PRINTED_PARTS.findall(text)) <= len(PRINTED_PARTS.findall(str(messages))):
            return text, taken
    raise errors[0]


def _with_objects(message: dict, index: int) -> dict:
    return _calls(_for_template(message), index, _parse_arguments)


def _with_parts(message: dict, index: int) -> dict:
    message = _with_objects(message, index)
    return message | {"content": [{"type": "text", "text": message.get("content", "")}]}


def _with_json(message: dict, index: int) -> dict:
    """For templates that join calls' arguments as text to others."""
    return _calls({"content": ""} | _for_template(message), index, _write_arguments)


def _for_template(message: dict) -> dict:
    """A message without what is not for the template, and with its thoughts under all names."""
    message = {key: value for key, value in message.items() if key != "weight"}
    thoughts = reasoning(message)
    return dict.fromkeys(REASONING, thoughts) | message if thoughts else message


def _calls(message: dict, index: int, change: Callable[[object, str], object]) -> dict:
    """A message whose tool calls have other arguments; they stand in `function`, or in the call itself."""
    if "tool_calls" not in message:
        return message
    where, calls = f"messages[{index}].tool_calls", message["tool_calls"]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where}: expected a list of calls")
    changed = []
    for number, call in enumerate(calls):
        function = call["function"] if isinstance(call.get("function"), dict) else call
        if "arguments" in function:
            function = function | {"arguments": change(function["arguments"], f"{where}[{number}].arguments")}
        changed.append(call | {"function": function} if "function" in call else function)
    return message | {"tool_calls": changed}


def _parse_arguments(arguments: object, where: str) -> dict:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(arguments, dict | None):
        raise ValueError(f"{where}: expected an object, or its JSON, not {arguments!r}")
    return arguments or {}


def _write_arguments(arguments: object, where: str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def check_said(text: str, messages: list[dict]) -> None:
    """Raises a `ValueError` naming the first thing that was said and is not in the rendered text; thoughts aside."""
    for index, message in enumerate(messages):
        for name, said in said_in(message):
            if not _is_in(said, text):
                raise ValueError(
                    f"messages[{index}].{name}: the chat template drops it ({said.strip()[:40]!r} of "
                    f"{message['role']!r} is not in what it renders), and so would serving: leave it out of the row, "
                    "or put it where the template reads it"
                )


def check_answer(text: str, message: dict, index: int) -> None:
    """[`check_said`] for the rendered text of one answer that is learned, its thoughts included."""
    thoughts, _ = thoughts_and_answer(message)
    if not _is_in(thoughts, text):
        raise ValueError(
            f"messages[{index}]: the chat template drops the answer's thoughts: leave them out of the row "
            f"({', '.join(REASONING)}, or the block in its content), pass the template_kwargs used at serving, or "
            "train on the output of `blockdraft regenerate`"
        )
    for name, said in said_in(message):
        if not _is_in(said, text):
            raise ValueError(f"messages[{index}].{name}: the chat template does not render it within its turn")


def said_in(message: dict) -> Iterator[tuple[str, str]]:
    """Names of fields and the texts in them: content without thoughts, and of tool calls names, keys and texts."""
    yield "content", thoughts_and_answer(message)[1]
    for call in message.get("tool_calls", []):
        function = call["function"] if isinstance(call.get("function"), dict) else call
        yield "tool_calls", str(function.get("name", ""))
        for text in _texts(_parse_arguments(function.get("arguments", {}), "tool_calls")):
            yield "tool_calls", text


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _is_in(said: str, text: str) -> bool:
    """Whether a text was rendered: as it is, trimmed, or escaped for where it stands."""
    said = said.strip()
    return said in text or any(
        escaped in text
        for escaped in (
            json.dumps(said, ensure_ascii=False)[1:-1],
            json.dumps(said)[1:-1],
            repr(said)[1:-1],
            repr(said + '"')[1:-2],
            html.escape(said, quote=False),
            html.escape(said),
        )
    )


def reasoning(message: dict) -> str:
    """The thoughts that a message has in a field of their own."""
    return next((message[name] for name in REASONING if isinstance(message.get(name), str)), "")


def thoughts_and_answer(message: dict) -> tuple[str, str]:
    """An answer's thoughts, from their field or the block that its content starts with, and its content without."""
    content = message.get("content", "")
    if message["role"] == "assistant":
        for opening, closing in THINKING_TAGS:
            thoughts, closed, answer = content.partition(closing)
            if closed and (thoughts.lstrip().startswith(opening) or opening not in content):
                return thoughts.replace(opening, "", 1), answer
    return reasoning(message), content


def fields_without_effect(row: dict, template: str | None) -> list[str]:
    """Names of what a readable row holds and neither we nor its chat template, given as text, ever read: fields, of
    the row and of its messages, tools, and settings for a template that does not mention them."""
    unused = row.keys() - {"id", "finish_reason"}
    if "completion_ids" in row:  # `blockdraft regenerate` keeps beside them what they come from
        kept = {"messages", "prompt", "completion", "tools", "chat_template_kwargs"}
        return sorted(unused - kept - {"prompt_ids", "completion_ids"})
    if "messages" not in row and isinstance(row["prompt"], str):
        return sorted(unused - {"prompt", "completion"})
    read = ("messages",) if "messages" in row else ("prompt", "completion")
    unused -= {*read, "tools", "chat_template_kwargs"}
    if template is not None:
        of_messages = {name for field in read for message in row[field] for name in message} - MESSAGE_FIELDS
        unused |= {f"messages[].{name}" for name in of_messages if name not in template}
        unused |= {f"chat_template_kwargs.{name}" for name in row_template_kwargs(row) if name not in template}
        unused |= {"tools"} if row_tools(row) and "tools" not in template else set()
    return sorted(unused)


# ---- what serving sends ---------------------------------------------------------------------------------------------


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt in plain text: with the special tokens that start a text, once, though a prompt that was
    rendered has them already."""
    whole, plain = tokenizer(text)["input_ids"], tokenizer(text, add_special_tokens=False)["input_ids"]
    added = whole[: len(whole) - len(plain)]
    return plain if added and whole[len(added) :] == plain and plain[: len(added)] == added else whole


def rendered_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of what a chat template has rendered, which has its special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special tokens, at which text is split before anything else is encoded."""
    return _special_ids(tokenizer, len(tokenizer))


@lru_cache(maxsize=1)  # some tokenizers have thousands, which takes longer to read than a row to encode
def _special_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)


def id_list(row: dict, name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A row's field of token ids; raises a `ValueError` naming it if they are not the tokenizer's."""
    ids, size = row.get(name), len(tokenizer)
    if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < size for i in ids):
        raise ValueError(f"{name}: expected token ids below {size}, the tokenizer's length")
    return ids


def served_prompt(
    row: dict, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict | None = None
) -> tuple[list[int], dict]:
    """The ids that serving sends for a row's last answer, given or not (of `turns`, for the first), and the row's
    fields that they come from. Raises a `ValueError` if there is no such prompt."""
    if "messages" not in row and isinstance(row.get("prompt"), str):
        return text_ids(tokenizer, row["prompt"]), {"prompt": row["prompt"]}
    if "prompt_ids" in row and not row.keys() & {"messages", "prompt", "turns"}:
        return id_list(row, "prompt_ids", tokenizer), {}
    messages = prompt_messages(row)
    kwargs = template_settings(row, tokenizer, template_kwargs)
    text, _ = render(tokenizer, messages, add_generation_prompt=True, **kwargs)
    fields = {"messages": messages, "tools": kwargs["tools"], "chat_template_kwargs": row_template_kwargs(row)}
    return rendered_ids(tokenizer, text), {name: value for name, value in fields.items() if value}


# ---- where answers stop ---------------------------------------------------------------------------------------------


def stop_tokens(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> list[int]:
    """The tokens that end an answer: the target's, by its generation config, the tokenizer's, and the one that the
    chat template writes at the end of a turn."""
    stops = generation_config.eos_token_id if generation_config else None
    stops = stops if isinstance(stops, list) else [stops]
    found = dict.fromkeys([*stops, tokenizer.eos_token_id, _template_stop(tokenizer)])
    return [token for token in found if token is not None]


def _template_stop(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The last special token of a turn, which a conversation that ends there and one that goes on have in common."""
    answer, turns = "xyz", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "xyz"}]
    try:
        tails = [render(tokenizer, messages)[0].rpartition(answer)[2] for messages in (turns, [*turns, turns[0]])]
    except ValueError:
        return None
    pairs = zip(*(rendered_ids(tokenizer, tail) for tail in tails), strict=False)
    common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    special = special_ids(tokenizer)
    return next((token for token in reversed(common) if token in special), None)
