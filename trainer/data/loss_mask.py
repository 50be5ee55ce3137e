"""A chat row's token ids and its loss mask: which tokens the target itself would have produced."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from .rendering import (
    THINKING_TAGS,
    apply_template,
    check_answer,
    id_list,
    render,
    rendered_ids,
    special_ids,
    stop_tokens,
    template_settings,
    text_ids,
    thoughts_and_answer,
)
from .rows import row_messages

Span = tuple[int, int]  # the first, and one past the last


class RewrittenTurns(ValueError):
    """The template renders the earlier turns of a conversation differently from when they were answered."""


class EncodedRow(NamedTuple):
    """Token ids, loss mask (0 or 1 for each), whether the last supervised turn lacks its stop token, and for each
    supervised turn how many of the ids are the prompt that serving sends for it."""

    input_ids: list[int]
    loss_mask: list[int]
    is_open: bool
    prompts: list[int]


def encode_turns(
    row: dict, tokenizer: PreTrainedTokenizerBase, assistant_turns: str = "all", **options
) -> list[EncodedRow]:
    """The rows that a conversation gives, by [`encode_row`]: one, or one for each supervised turn if
    `assistant_turns="all"` and the template rewrites earlier turns (drops their thoughts): each turn is then learned
    as it was answered."""
    try:
        return [encode_row(row, tokenizer, assistant_turns, **options)]
    except RewrittenTurns:
        messages, given = row_messages(row)
        turns = _learned(messages, given)
        if assistant_turns == "last" or turns == [len(messages) - 1]:
            raise
    shared = {key: row[key] for key in ("tools", "chat_template_kwargs") if key in row}
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    ends = [{"finish_reason": row.get("finish_reason")} if turn == last else {} for turn in turns]
    return [
        encode_row({"messages": messages[: turn + 1]} | shared | end, tokenizer, "last", **options)
        for turn, end in zip(turns, ends, strict=True)
    ]


def _learned(messages: list[dict], given: int) -> list[int]:
    """Which messages are answers to learn: none of the first `given`, nor those of weight 0."""
    return [
        i
        for i, message in enumerate(messages)
        if i >= given and message["role"] == "assistant" and message.get("weight", 1)
    ]


def encode_row(
    row: dict,
    tokenizer: PreTrainedTokenizerBase,
    assistant_turns: str = "all",
    stop_token_ids: Sequence[int] | None = None,
    template_kwargs: dict | None = None,
    train_on_thinking: bool = True,
    thinking_tags: Sequence[str] | None = None,
) -> EncodedRow:
    """One chat row as token ids with a loss mask.

    The ids begin with those that serving sends. The mask covers each supervised assistant turn from there to its first
    stop token included, and nothing that the template writes after it: what the template adds turn by turn. An empty
    thinking block at the start of a turn is written by the template, too: it is not supervised.

    Args:
        row: see [`blockdraft.trainer.data.rows`].
        assistant_turns: `"all"`, or `"last"`: up to the last assistant turn, and only that one supervised.
        stop_token_ids: the tokens that end a turn; those of tokenizer and template if not given, see
            [`~blockdraft.trainer.data.rendering.stop_tokens`].
        template_kwargs: passed to the chat template, e.g. `{"enable_thinking": False}`: the same as at serving. A
            row's own `chat_template_kwargs` go before them.
        train_on_thinking: whether the thinking block that starts a turn is supervised; if not, it is only read.
        thinking_tags: what opens and what closes that block; those of known models if not given.

    Raises:
        RewrittenTurns: a `ValueError`, if the template rewrites earlier turns, so that no one mask fits.
        ValueError: naming the field, if the row is malformed, if the template leaves out what it says, or if the
            answer does not start like the template's generation prompt.
    """
    stop = set(stop_tokens(tokenizer) if stop_token_ids is None else stop_token_ids)
    cut = row.get("finish_reason") == "length"  # then the target produced no stop token
    tags = THINKING_TAGS if thinking_tags is None else (tuple(thinking_tags),)
    if "completion_ids" in row:
        prompt, completion = id_list(row, "prompt_ids", tokenizer), id_list(row, "completion_ids", tokenizer)
        ids, span = prompt + completion, (len(prompt), len(prompt) + len(completion))
        (first, end), closed = _close(ids, span, stop)
        if not train_on_thinking:
            first = _after_thoughts(ids, (first, end), tokenizer, tags)
        return _encoded(ids, [(first, end)], [len(prompt)], not (closed or cut))
    if "messages" not in row and isinstance(row.get("prompt"), str):
        ids, span = _encode_text(row, tokenizer, stop, cut)
        return _encoded(ids, [span], [span[0]], False)

    messages, given = row_messages(row)
    kwargs = template_settings(row, tokenizer, template_kwargs)
    turns = _learned(messages, given)
    if not turns:
        return _encoded(rendered_ids(tokenizer, render(tokenizer, messages, **kwargs)[0]), [], [], False)
    cut = cut and not any(message["role"] == "assistant" for message in messages[turns[-1] + 1 :])
    if assistant_turns == "last":
        turns = turns[-1:]
        messages = messages[: turns[0] + 1]
    text, taken = render(tokenizer, messages, **kwargs)
    spans = [_turn_span(text, tokenizer, taken, turn, kwargs) for turn in turns]
    for turn, (begin, end) in zip(turns, spans, strict=True):
        check_answer(text[begin:end], messages[turn], turn)
    if cut:
        spans[-1] = _cut_answer(text, spans[-1], messages[turns[-1]])
        text = text[: spans[-1][1]]

    ids, spans = _encode_spans(text, spans, tokenizer)
    prompts, supervised, closed = [first for first, _ in spans], [], True
    for turn, span in zip(turns, spans, strict=True):
        # The template may leave a turn's end to the next role's token, which the target then produces.
        span, closed = _close(ids, span, set() if cut and turn == turns[-1] else stop)
        first, end = span
        after = _after_thoughts(ids, span, tokenizer, tags, only_empty=train_on_thinking)
        if not train_on_thinking:
            _check_unlearned(tokenizer.decode(ids[after:end]), messages[turn], turn)
        supervised.append((after, end))
    return _encoded(ids, supervised, prompts, not (closed or cut))


def _encoded(ids: list[int], supervised: list[Span], prompts: list[int], is_open: bool) -> EncodedRow:
    mask = [0] * len(ids)
    for first, end in supervised:
        mask[first:end] = [1] * (end - first)
    return EncodedRow(ids, mask, is_open, prompts)


def _encode_text(row: dict, tokenizer: PreTrainedTokenizerBase, stop: set[int], cut: bool) -> tuple[list[int], Span]:
    if not isinstance(row.get("completion"), str):
        raise ValueError("completion: expected text, like the prompt")
    prompt = text_ids(tokenizer, row["prompt"])
    ids = prompt + rendered_ids(tokenizer, row["completion"])
    span, closed = _close(ids, (len(prompt), len(ids)), stop)
    if not (closed or cut or tokenizer.eos_token_id is None):
        ids, span = [*ids, tokenizer.eos_token_id], (len(prompt), len(ids) + 1)
    return ids[: span[1]], span


def _turn_span(text: str, tokenizer, messages: list[dict], turn: int, kwargs: dict) -> Span:
    """The characters of `text`, the whole conversation, that an assistant's turn adds to its generation prompt."""
    prompt = apply_template(tokenizer, messages[:turn], add_generation_prompt=True, **kwargs)
    through = text
    if turn + 1 < len(messages):
        through = apply_template(tokenizer, messages[: turn + 1], **kwargs)
        if not text.startswith(through) or not through.startswith(prompt):
            raise RewrittenTurns(
                f"messages[{turn}]: the chat template rewrites earlier turns (what it renders up to here is not how "
                "the whole conversation starts), so the loss mask is unknown; use assistant_turns='last' or one row a "
                "turn, pass the template_kwargs used at serving, or train on the output of `blockdraft regenerate`"
            )
    if not through.startswith(prompt):
        raise RewrittenTurns(
            f"messages[{turn}]: the chat template does not render this answer, and the turns before it, as its "
            "generation prompt starts it, so the loss mask is unknown; pass the template_kwargs used at serving, "
            "keep the answer's thoughts (`reasoning_content`), or train on the output of `blockdraft regenerate`"
        )
    return len(prompt), len(through)


def _cut_answer(text: str, span: Span, message: dict) -> Span:
    """The span without what the template writes after an answer that was cut short."""
    begin, end = span
    thoughts, answer = thoughts_and_answer(message)
    last = answer.strip() or thoughts.strip()
    found = -1 if message.get("tool_calls") else text.rfind(last, begin, end)
    return (begin, end) if found < 0 else (begin, found + len(last))


def _encode_spans(text: str, spans: list[Span], tokenizer) -> tuple[list[int], list[Span]]:
    """Token ids of the text, and its spans of characters as spans of tokens, each of which follows exactly the ids of
    the text before it, which are those that serving sends."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        starts = [start for start, _ in offsets]
        edges = [(bisect_left(starts, begin), bisect_left(starts, end)) for begin, end in spans]
        special = special_ids(tokenizer)
        for (first, _), (begin, _) in zip(edges, spans, strict=True):
            # Text is split at special tokens first: it is enough to encode what follows the last of them.
            apart = next((i + 1 for i in range(first - 1, -1, -1) if ids[i] in special), 0)
            since = offsets[apart - 1][1] if apart else 0
            if ids[apart:first] != rendered_ids(tokenizer, text[since:begin]) and (
                ids[:first] != rendered_ids(tokenizer, text[:begin])
            ):
                break
        else:
            return ids, edges
    # No offsets, or tokens across an edge: piece by piece, as in generation, where a prompt is encoded by itself.
    ids, edges = [], []
    for begin, end in spans:
        prompt = rendered_ids(tokenizer, text[:begin])
        if prompt[: len(ids)] != ids:
            raise RewrittenTurns(
                "messages: an earlier answer has other token ids as a part of the next prompt than by itself; use "
                "assistant_turns='last' or one row a turn"
            )
        ids = prompt + rendered_ids(tokenizer, text[begin:end])
        edges.append((len(prompt), len(ids)))
    return ids + rendered_ids(tokenizer, text[spans[-1][1] :]), edges


def _close(ids: list[int], span: Span, stop: set[int]) -> tuple[Span, bool]:
    """The span up to its first stop token, which may stand right behind it, and whether there is one."""
    first, end = span
    for i in range(first, min(end + 1, len(ids))):
        if ids[i] in stop:
            return (first, i + 1), True
    return span, False


def supervised_runs(mask: list[int]) -> list[tuple[int, int]]:
    """First and one past the last token of each supervised run."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _after_thoughts(ids: list[int], span: Span, tokenizer, tags: Sequence[Sequence[str]], only_empty=False) -> int:
    """Where the answer starts in a span: after the thinking block that starts it, or that its prompt has opened; if
    `only_empty`, only after an empty one. White space after the block goes too; an open block is the whole span."""
    first, end = span
    run, prompt = tokenizer.decode(ids[first:end]), tokenizer.decode(ids[max(0, first - 16) : first])
    for opening, closing in tags:
        if not (run.lstrip().startswith(opening) or prompt.rstrip().endswith(opening)):
            continue
        thoughts, closed, _ = run.partition(closing)
        if only_empty and (not closed or thoughts.replace(opening, "", 1).strip()):
            continue
        if not closed:
            return end
        sizes = range(1, end - first + 1)
        last = first + 1 + bisect_left(sizes, True, key=lambda n: closing in tokenizer.decode(ids[first : first + n]))
        while last < end and not tokenizer.decode(ids[last]).strip():
            last += 1
        return _after_thoughts(ids, (last, end), tokenizer, tags, only_empty)
    return first


def _check_unlearned(text: str, message: dict, turn: int) -> None:
    """Raises a `ValueError` if a turn's thoughts are in its supervised text, unless its answer repeats them."""
    thoughts, answer = (part.strip() for part in thoughts_and_answer(message))
    if thoughts and thoughts in text and thoughts not in answer:
        raise ValueError(
            f"messages[{turn}]: train_on_thinking=False, but the answer, as it is rendered, starts with no block that "
            "is known to hold its thoughts: give thinking_tags, what opens and what closes it, or give the thoughts "
            "as `reasoning_content`"
        )
