"""From chat rows to rows of token ids, for training sets and streams alike."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .loss_mask import EncodedRow, encode_turns
from .rendering import fields_without_effect, stop_tokens
from .rows import errors_of, read_row, row_id, row_tools

logger = logging.get_logger(__name__)

# The columns of a training row, and what is noted about the chat row it comes from.
ROW = Features(
    {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("int8")),
        "row_id": Value("int64"),
        "prompt_length": Value("int32"),  # how many of the ids serving sends for the last supervised turn
        "conversation_id": Value("int64"),  # of all rows that the chat row gives, see `hold_out`
    }
)
OUTCOME = Features(
    {
        "part": Value("int32"),  # number of the row, where a conversation gives one row a turn
        "supervised": Value("int32"),
        "truncated": Value("bool"),
        "open": Value("bool"),
        "dropped": Value("string"),
        "problem": Value("string"),
        "unused": List(Value("string")),  # fields of the chat row without effect
    }
)
ENCODED = Features({**ROW, **OUTCOME})
# Rows encoded by another version of these files are not taken from the cache.
SOURCES = ("encoder.py", "loss_mask.py", "rendering.py", "rows.py")


def stable_row_id(row_id: int | str) -> int:
    """An int64 that names the row in every process and run: an int, or the first 63 bits of a string's SHA-256."""
    if isinstance(row_id, str):
        return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8]) >> 1
    return int(row_id)


@dataclass
class RowEncoder:
    """Encodes chat rows, with the settings of [`~blockdraft.trainer.data.loss_mask.encode_row`]. Rows longer than
    `max_length` tokens lose their end; `id_prefix` keeps the row ids of sets apart that are joined or interleaved.
    Raises a `ValueError` for an impossible setting."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    assistant_turns: str = "all"
    stop_token_ids: Sequence[int] | None = None
    template_kwargs: dict | None = None
    train_on_thinking: bool = True
    thinking_tags: Sequence[str] | None = None
    id_prefix: str = ""

    def __post_init__(self):
        if self.assistant_turns not in ("all", "last"):
            raise ValueError(f"assistant_turns must be 'all' or 'last', not {self.assistant_turns!r}")
        if self.max_length < 1:
            raise ValueError(f"max_length must be positive, not {self.max_length}")
        if self.thinking_tags is not None and (len(self.thinking_tags) != 2 or not all(self.thinking_tags)):
            raise ValueError(f"thinking_tags are what opens and what closes a block, not {list(self.thinking_tags)}")
        if self.stop_token_ids is None:
            self.stop_token_ids = stop_tokens(self.tokenizer)
        if template := self._template(None):
            unread = [name for name in self.template_kwargs or {} if name not in template and name != "chat_template"]
            if unread:
                logger.warning(f"template_kwargs: the chat template does not read {', '.join(unread)}: no effect")

    def fingerprint(self, *more) -> str:
        """A hash of everything that the encoded rows depend on, the same in every process; `more` is hashed too."""
        settings = {name: value for name, value in vars(self).items() if name != "tokenizer"}
        code = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in SOURCES]
        parts = [_tokenizer_key(self.tokenizer), settings, code, version("transformers"), more]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def __call__(self, example: dict, where: str, default_id: int | str) -> list[dict]:
        """One example of an opened dataset as rows of `ENCODED`; what is wrong with it is in `dropped`, or in
        `problem`, which begins with `where` it is. `default_id` is its id if it has none of its own."""
        encoded, dropped, problem, unused, key = [EncodedRow([], [], False, [])], "", "", [], default_id
        try:
            with errors_of(where):
                row = read_row(example)
                if row is None:
                    dropped = "blank line"
                else:
                    key = row_id(row, default_id)
                    encoded = encode_turns(
                        row,
                        self.tokenizer,
                        self.assistant_turns,
                        stop_token_ids=self.stop_token_ids,
                        template_kwargs=self.template_kwargs,
                        train_on_thinking=self.train_on_thinking,
                        thinking_tags=self.thinking_tags,
                    )
                    unused = fields_without_effect(row, self._template(row_tools(row)))
                if self.id_prefix:
                    key = f"{self.id_prefix}/{key}"
                names = [key] if len(encoded) == 1 else [f"{key}/turn {part}" for part in range(len(encoded))]
                names, conversation = [stable_row_id(name) for name in names], stable_row_id(key)
        except ValueError as error:
            encoded, names, conversation, problem = [EncodedRow([], [], False, [])], [0], 0, str(error)
        rows = zip(encoded, names, strict=True)
        return [
            self._row(turn, part, dropped, problem, [] if part else unused)
            | {"row_id": name, "conversation_id": conversation}
            for part, (turn, name) in enumerate(rows)
        ]

    def _template(self, tools: list[dict] | None) -> str | None:
        """The text of the chat template for rows with such tools; `None` if there is none."""
        given = (self.template_kwargs or {}).get("chat_template")
        if given is None and self.tokenizer.chat_template is None:
            return None
        return self.tokenizer.get_chat_template(given, tools)

    def _row(self, turn: EncodedRow, part: int, dropped: str, problem: str, unused: list[str]) -> dict:
        """What a turn alone gives of a row of `ENCODED`."""
        size = self.max_length
        supervised = sum(turn.loss_mask[:size])
        if not (problem or dropped or supervised):
            cut_away = any(turn.loss_mask)
            dropped = f"no supervised token within max_length={size}" if cut_away else "no answer to learn from"
        return {
            "input_ids": turn.input_ids[:size],
            "loss_mask": turn.loss_mask[:size],
            "prompt_length": max((prompt for prompt in turn.prompts if any(turn.loss_mask[prompt:size])), default=0),
            "part": part,
            "supervised": supervised,
            "truncated": len(turn.input_ids) > size,
            "open": turn.is_open and len(turn.input_ids) <= size,
            "dropped": dropped,
            "problem": problem,
            "unused": unused,
        }


def columns(rows: list[dict], features: Features) -> dict[str, list]:
    """Rows as a batch of `Dataset.map`."""
    return {name: [row[name] for row in rows] for name in features}


def examples(batch: dict[str, list]) -> list[dict]:
    """A batch of `Dataset.map` as rows."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> list:
    """What a tokenizer does to text: vocabulary, rules, template and special tokens, without the state of padding and
    truncation that its last call left behind."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    else:
        rules = [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())]
    probe = tokenizer("A probe,  of spaces\nand special tokens")["input_ids"]
    return [rules, probe, tokenizer.chat_template, tokenizer.special_tokens_map]
