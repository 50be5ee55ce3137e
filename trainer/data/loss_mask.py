"""A chat row's token ids and its loss mask: which tokens the target itself would have produced."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import jinja2
from transformers import PreTrainedTokenizerBase

from .rows import row_messages, row_tools

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
THINKING_TAGS = ("<think>", "</think>")


class RewrittenTurns(ValueError):
    """The template renders the earlier turns of a conversation differently from when they were answered."""


class EncodedRow(NamedTuple):
    """Token ids, loss mask (0 or 1 for each), and whether the last supervised turn lacks its stop token."""

    input_ids: list[int]
    loss_mask: list[int]
    is_open: bool


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **kwargs):
    """`tokenizer.apply_chat_template`, with a template's refusal turned into a `ValueError`."""
    try:
        return tokenizer.apply_chat_template(messages, **kwargs)
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"messages: the chat template refuses them: {error}") from error


def encode_turns(
    row: dict, tokenizer: PreTrainedTokenizerBase, assistant_turns: str = "all", **options
) -> list[EncodedRow]:
    """The rows that a conversation gives, by [`encode_row`]: one, or one for each supervised turn if
    `assistant_turns="all"` and the template rewrites earlier turns (drops their thoughts): each turn is then learned
    as it was answered."""
    try:
        return [encode_row(row, tokenizer, assistant_turns, **options)]
    except RewrittenTurns:
        if assistant_turns == "last":
            raise
    messages, given = row_messages(row)
    turns = [i for i in range(given, len(messages)) if messages[i]["role"] == "assistant"]
    shared = {key: row[key] for key in ("tools",) if key in row}
    ends = [{"finish_reason": row.get("finish_reason")} if turn == turns[-1] else {} for turn in turns]
    return [
        encode_row({"messages": messages[: turn + 1]} | shared | end, tokenizer, "last", **options)
        for turn, end in zip(turns, ends, strict=True)
    ]


def encode_row(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    assistant_turns: str = "all",
    stop_token_ids: Sequence[int] | None = None,
    template_kwargs: dict | None = None,
    train_on_thinking: bool = True,
    thinking_tags: Sequence[str] = THINKING_TAGS,
) -> EncodedRow:
    """One chat row as token ids with a loss mask.

    The mask covers each supervised assistant turn from the first token after the generation prompt to the stop token
    included, and nothing that the template writes after it. It comes from the template's `{% generation %}` tags, if
    there are any and the tokenizer knows character offsets, else from what the template adds turn by turn. An empty
    thinking block at the start of a turn is written by the template: it is not supervised.

    Args:
        row: see [`blockdraft.trainer.data.rows`].
        assistant_turns: `"all"`, or `"last"`: up to the last assistant turn, and only that one supervised.
        stop_token_ids: the tokens that end a turn; the tokenizer's `eos_token_id` if not given.
        template_kwargs: passed to the chat template, e.g. `{"enable_thinking": False}`: the same as at serving.
        train_on_thinking: whether the thinking block that starts a turn is supervised; if not, it is only read.
        thinking_tags: what opens and what closes that block.

    Raises:
        RewrittenTurns: a `ValueError`, if the template rewrites earlier turns, so that no one mask fits.
        ValueError: naming the field, if the row is malformed, if the answer does not start like the template's
            generation prompt, or if an assistant turn has no supervised token.
    """
    stop = set(stop_token_ids or [tokenizer.eos_token_id])
    cut = row.get("finish_reason") == "length"  # then the target produced no stop token
    if "completion_ids" in row:
        prompt, completion = _id_list(row, "prompt_ids", tokenizer), _id_list(row, "completion_ids", tokenizer)
        is_open = bool(completion) and completion[-1] not in stop and not cut
        ids, mask = prompt + completion, [0] * len(prompt) + [1] * len(completion)
        if not train_on_thinking:
            mask = _without_thinking(ids, mask, tokenizer, thinking_tags, only_empty=False)
        return EncodedRow(ids, mask, is_open)
    if "messages" not in row and isinstance(row.get("prompt"), str):
        prompt, completion = _encode_text(row, tokenizer, cut)
        return EncodedRow(prompt + completion, [0] * len(prompt) + [1] * len(completion), False)

    messages, given = row_messages(row)
    kwargs = {"tools": row_tools(row), **(template_kwargs or {})}
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    supervised = [i for i in turns if i >= given]
    if not supervised:
        ids = apply_template(tokenizer, messages, return_dict=True, **kwargs)["input_ids"]
        return EncodedRow(ids, [0] * len(ids), False)
    if assistant_turns == "last":
        supervised = supervised[-1:]
        messages = messages[: supervised[0] + 1]

    text = apply_template(tokenizer, messages, tokenize=False, **kwargs)
    template = tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs["tools"])
    tagged = tokenizer.is_fast and bool(GENERATION_TAG.search(template))
    spans = [_turn_span(text, tokenizer, messages, turn, kwargs, tagged) for turn in supervised]
    if tagged:
        encoded = apply_template(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True, **kwargs)
        ids, offsets = encoded["input_ids"], encoded.encodings[0].offsets
        inside = _mask_of(spans, [start for start, _ in offsets])
        mask = [int(tag and within) for tag, within in zip(encoded["assistant_masks"], inside, strict=True)]
    else:
        ids, mask = _mask_spans(text, spans, tokenizer)
    if not any(mask):
        raise ValueError(
            "messages: the loss mask is all zero although there is an assistant turn; "
            "check the chat template's {% generation %} tags"
        )
    mask, is_open = _close_turns(ids, mask, stop, cut, tokenizer)
    mask = _without_thinking(ids, mask, tokenizer, thinking_tags, only_empty=train_on_thinking)
    return EncodedRow(ids, mask, is_open)


def _encode_text(row: dict, tokenizer: PreTrainedTokenizerBase, cut: bool) -> tuple[list[int], list[int]]:
    if not isinstance(row.get("completion"), str):
        raise ValueError("completion: expected text, like the prompt")
    prompt = tokenizer(row["prompt"])["input_ids"]
    completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    if not cut and tokenizer.eos_token_id is not None and completion[-1:] != [tokenizer.eos_token_id]:
        completion.append(tokenizer.eos_token_id)
    return prompt, completion


def _id_list(row: dict, name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids, size = row.get(name), len(tokenizer)
    if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < size for i in ids):
        raise ValueError(f"{name}: expected token ids below {size}, the tokenizer's length")
    return ids


def _turn_span(text: str, tokenizer, messages: list[dict], turn: int, kwargs: dict, tagged: bool) -> tuple[int, int]:
    """The characters of `text`, the whole conversation, that an assistant's turn adds to its generation prompt. A
    `tagged` template marks where the answer starts and needs no generation prompt."""
    prompt = apply_template(tokenizer, messages[:turn], tokenize=False, add_generation_prompt=True, **kwargs)
    through = text
    if turn + 1 < len(messages):
        through = apply_template(tokenizer, messages[: turn + 1], tokenize=False, **kwargs)
    if not text.startswith(through) or (turn + 1 < len(messages) and not tagged and not through.startswith(prompt)):
        raise RewrittenTurns(
            f"messages[{turn}]: the chat template rewrites earlier turns (what it renders up to here is not how the "
            "whole conversation starts), so the loss mask is unknown; use assistant_turns='last' or one row a "
            "turn, pass the template_kwargs used at serving, or train on the output of `blockdraft regenerate`"
        )
    if through.startswith(prompt):
        return len(prompt), len(through)
    before = apply_template(tokenizer, messages[:turn], tokenize=False, **kwargs)
    if tagged and through.startswith(before):
        return len(before), len(through)
    raise RewrittenTurns(
        f"messages[{turn}]: the chat template does not render this answer, and the turns before it, as its "
        "generation prompt starts it, so the loss mask is unknown; pass the template_kwargs used at serving, "
        "keep the answer's thoughts (`reasoning_content`), or train on the output of `blockdraft regenerate`"
    )


def _mask_of(spans: list[tuple[int, int]], starts: list[int]) -> list[int]:
    """1 for each token that starts within one of the spans of characters."""
    mask = [0] * len(starts)
    for begin, end in spans:
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        mask[first:last] = [1] * (last - first)
    return mask


def _mask_spans(text: str, spans: list[tuple[int, int]], tokenizer) -> tuple[list[int], list[int]]:
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], _mask_of(spans, [start for start, _ in encoded["offset_mapping"]])
    # No offsets: encode piece by piece. In generation, too, a prompt is encoded apart from its answer.
    ids, mask, done = [], [], 0
    for begin, end in [*spans, (len(text), len(text))]:
        for piece, supervised in ((text[done:begin], 0), (text[begin:end], 1)):
            piece_ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
            ids += piece_ids
            mask += [supervised] * len(piece_ids)
        done = end
    return ids, mask


def _close_turns(ids, mask, stop: set[int], cut: bool, tokenizer) -> tuple[list[int], bool]:
    """Ends each supervised run with its stop token: adds it if the run ends before it, and removes the white space
    that templates write after it. Returns the mask, and whether the last run lacks a stop token."""
    mask = list(mask)
    for _, end in supervised_runs(mask):
        last = end - 1  # the run's last token that is not white space
        while last > 0 and mask[last - 1] and ids[last] not in stop and not tokenizer.decode(ids[last]).strip():
            last -= 1
        closed = ids[last] in stop
        if closed:
            mask[last + 1 : end] = [0] * (end - last - 1)
        elif end < len(ids) and ids[end] in stop:
            last, closed = end, True
            mask[last] = 1
    if cut and closed:
        mask[last] = 0
    return mask, not (closed or cut)


def supervised_runs(mask: list[int]) -> list[tuple[int, int]]:
    """First and one past the last token of each supervised run."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _without_thinking(ids: list[int], mask: list[int], tokenizer, tags: Sequence[str], only_empty: bool) -> list[int]:
    """The mask without the thinking block that starts a run, or that its prompt has opened; if `only_empty`, only
    without empty blocks. White space after the block goes too; a block that is not closed is the whole run."""
    opening, closing = tags
    mask = list(mask)
    for begin, end in supervised_runs(mask):
        run = tokenizer.decode(ids[begin:end])
        prompt = tokenizer.decode(ids[max(0, begin - 16) : begin])
        if not (run.lstrip().startswith(opening) or prompt.rstrip().endswith(opening)):
            continue
        thoughts, closed, _ = run.partition(closing)
        if only_empty and (not closed or thoughts.replace(opening, "", 1).strip()):
            continue
        last = end
        if closed:
            sizes = range(1, end - begin + 1)
            last = (
                begin + 1 + bisect_left(sizes, True, key=lambda n: closing in tokenizer.decode(ids[begin : begin + n]))
            )
            while last < end and not tokenizer.decode(ids[last]).strip():
                last += 1
        mask[begin:last] = [0] * (last - begin)
    return mask
