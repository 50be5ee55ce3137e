"""Real chat from the `chitchat-dataset` package (MIT; Myers, Etchart and Fulda, 2020), cleaned, split by conversation.

Run `python -m examples.chitchat.corpus` to see how many conversations are kept, and why others are dropped.
"""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import resources

from transformers import PreTrainedTokenizerBase

# Conversations that use one of these words are dropped: a demo model should not learn them.
ABUSIVE = re.compile(
    r"\b(fuck\w*|shit\w*|bitch\w*|cunt|dick|whore|slut|horny|porn\w*|rape[ds]?|cum|nude|sexy|retard\w*|fag\w*|nigg\w*"
    r"|hitler|nazis?)\b",
    re.IGNORECASE,
)
# "soooooo" -> "sooo", "hahahahaha" -> "hahaha": endless runs teach a small model to loop. Numbers stay.
LONG_RUN = re.compile(r"([^\d\n]{1,4}?)\1{3,}")
MAX_TURN_CHARS = 1500
MIN_MEAN_CHARS = 8

SPLITS = {"train": 80, "draft": 15, "heldout": 5}  # percent of the conversations


@dataclass(frozen=True)
class Conversation:
    """One conversation of two people: `turns` alternate between them, the first speaker first."""

    id: str
    turns: tuple[str, ...]


def clean_text(text: str) -> str:
    """Strips every line, drops empty ones, joins runs of blanks and shortens endless repetitions to three."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    return LONG_RUN.sub(lambda run: run.group(1) * 3, "\n".join(line for line in lines if line))


def merge_turns(messages: list[list[dict]]) -> tuple[str, ...]:
    """Consecutive messages of one sender become one turn, a line a message; turns without text vanish."""
    turns: list[tuple[str, str]] = []
    for message in (message for group in messages for message in group):
        text = clean_text(message["text"])
        if not text:
            continue
        if turns and turns[-1][0] == message["sender"]:
            turns[-1] = (message["sender"], f"{turns[-1][1]}\n{text}")
        else:
            turns.append((message["sender"], text))
    return tuple(text for _, text in turns)


def drop_reason(turns: tuple[str, ...]) -> str | None:
    """Why a conversation is left out of the corpus, or `None` when it is kept."""
    if len(turns) < 2:
        return "nobody answered"
    if any(len(turn) > MAX_TURN_CHARS for turn in turns):
        return f"a turn of more than {MAX_TURN_CHARS} characters"
    if sum(map(len, turns)) < MIN_MEAN_CHARS * len(turns):
        return f"turns of less than {MIN_MEAN_CHARS} characters on average"
    if any(ABUSIVE.search(turn) for turn in turns):
        return "abusive or explicit words"
    return None


@cache
def _read() -> tuple[tuple[Conversation, ...], dict[str, int]]:
    try:
        data = resources.files("chitchat_dataset").joinpath("dataset.json").read_text(encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ValueError("The corpus needs the `chitchat-dataset` package: pip install chitchat-dataset") from error
    kept, dropped = [], Counter()
    for conversation_id, record in json.loads(data).items():
        turns = merge_turns(record["messages"])
        if reason := drop_reason(turns):
            dropped[reason] += 1
        else:
            kept.append(Conversation(conversation_id, turns))
    return tuple(kept), dict(dropped)


def conversations() -> tuple[Conversation, ...]:
    """All kept conversations, in the order of the data set.

    Raises:
        ValueError: When the `chitchat-dataset` package is not installed.
    """
    return _read()[0]


def dropped() -> dict[str, int]:
    """How many conversations were left out, by reason."""
    return _read()[1]


def split_of(conversation_id: str) -> str:
    """The split of a conversation, from a hash of its id alone: it never moves when the cleaning changes."""
    percent = int.from_bytes(hashlib.sha256(conversation_id.encode()).digest()[:8]) % 100
    for name, share in SPLITS.items():
        if percent < share:
            return name
        percent -= share
    raise AssertionError("the shares add up to 100")


def split() -> dict[str, list[Conversation]]:
    """Conversations by use, without overlap.

    Returns:
        `"train"` for the target model, `"draft"` for prompts to train drafts on, `"heldout"` for evaluation only.
    """
    parts: dict[str, list[Conversation]] = {name: [] for name in SPLITS}
    for conversation in conversations():
        parts[split_of(conversation.id)].append(conversation)
    return parts


def as_messages(turns: tuple[str, ...] | list[str]) -> list[dict[str, str]]:
    """Turns as chat messages, the first one the user's. Drop the first turn to hear the other speaker as assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def prompts(part: list[Conversation], max_turns: int = 5) -> list[dict]:
    """One prompt for every turn that was answered, so that both speakers take the assistant's part.

    Args:
        part: Conversations, e.g. `split()["heldout"]`.
        max_turns: The most turns a prompt keeps, odd, so that it starts and ends with the user.

    Returns:
        Rows `{"id": "<conversation>:<turn>", "messages": [...]}`, the last message the user's.
    """
    rows = []
    for conversation in part:
        for end in range(1, len(conversation.turns)):
            start = max(end - max_turns, (end - 1) % 2)
            rows.append({"id": f"{conversation.id}:{end}", "messages": as_messages(conversation.turns[start:end])})
    return rows


def chat_rows(part: list[Conversation], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[dict]:
    """Cuts conversations at turns into chats of at most `max_length` tokens, each heard from both speakers' side.

    Args:
        part: Conversations, e.g. `split()["train"]`.
        tokenizer: A tokenizer with the chat template of `train_tokenizer`.
        max_length: Tokens in a row; a single longer turn is cut off.

    Returns:
        Rows `{"input_ids": [...], "assistant_masks": [...]}`, every row a chat that starts with the user.
    """
    overhead = len(tokenizer.apply_chat_template(as_messages([""]), return_dict=True)["input_ids"])
    chats = []
    for conversation in part:
        lengths = [len(ids) + overhead for ids in tokenizer(list(conversation.turns))["input_ids"]]
        for start in (0, 1):  # without its first turn the other speaker becomes the assistant
            room = 0
            for turn, length in zip(conversation.turns[start:], lengths[start:], strict=True):
                if length > room:
                    chats.append([])
                    room = max_length
                chats[-1].append(turn)
                room -= length
    encoded = tokenizer.apply_chat_template(
        [as_messages(chat) for chat in chats if len(chat) > 1],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return [
        {"input_ids": ids[:max_length], "assistant_masks": mask[:max_length]}
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if any(mask[:max_length])
    ]


if __name__ == "__main__":
    for name, part in split().items():
        print(f"{name}: {len(part)} conversations, {sum(len(conversation.turns) for conversation in part)} turns")
    print("dropped:", dropped())
