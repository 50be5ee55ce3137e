"""Loss masks over what the target would have produced."""

import json

import pytest
from chat_templates import CHATML, THINKING
from transformers import PreTrainedTokenizer

from blockdraft.trainer.data.loss_mask import RewrittenTurns, encode_row, encode_turns

TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "answer"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "it is fine 🙂"},
    {"role": "user", "content": "and today?"},
    {"role": "assistant", "content": " fine\n"},
    {"role": "user", "content": "thanks"},
]
ANSWERS = ["it is fine 🙂<|im_end|>", " fine\n<|im_end|>"]


class CharTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python without offsets, like those that wrap tiktoken: one token a character."""

    vocab_size = 300
    added = "<|im_end|>", "<|im_start|>"

    def get_vocab(self):
        return {chr(i): i for i in range(300)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


@pytest.fixture
def char_tokenizer():
    tokenizer = CharTokenizer(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = CHATML
    return tokenizer


def supervised(tokenizer, ids, mask):
    """The supervised runs, decoded."""
    runs, previous = [], 0
    for token, m in zip(ids, mask, strict=True):
        if m and not previous:
            runs.append([])
        if m:
            runs[-1].append(token)
        previous = m
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        TAGGED,
        TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
        TAGGED.replace(
            "<|im_end|>{% endgeneration %}{% else %}", "<|im_end|>{{ '\\n' }}{% endgeneration %}{% else %}"
        ),
    ],
    ids=["prefixes", "tags", "stop token after the tags", "new line inside the tags"],
)
def test_all_assistant_turns_with_their_stop_token(chat_tokenizer, template):
    chat_tokenizer.chat_template = template
    ids, mask, is_open, _ = encode_row({"messages": MESSAGES}, chat_tokenizer)
    rendered = chat_tokenizer.apply_chat_template(MESSAGES, return_dict=True)["input_ids"]
    assert ids == rendered and not is_open
    assert supervised(chat_tokenizer, ids, mask) == ANSWERS
    assert [ids[i] for i in range(len(ids)) if mask[i] and not (mask + [0])[i + 1]] == [
        chat_tokenizer.eos_token_id
    ] * 2


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_last_turn_only(chat_tokenizer, template):
    chat_tokenizer.chat_template = template
    ids, mask, *_ = encode_row({"messages": MESSAGES}, chat_tokenizer, assistant_turns="last")
    assert supervised(chat_tokenizer, ids, mask) == ANSWERS[1:]
    assert ids == chat_tokenizer.apply_chat_template(MESSAGES[:5], return_dict=True)["input_ids"]


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_turns_of_a_prompt_are_not_supervised(chat_tokenizer, template):
    chat_tokenizer.chat_template = template
    row = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    ids, mask, *_ = encode_row(row, chat_tokenizer)
    assert supervised(chat_tokenizer, ids, mask) == ANSWERS[1:]


def test_tokenizer_without_offsets(char_tokenizer):
    messages = [{**m, "content": m["content"].replace("🙂", ":)")} for m in MESSAGES]
    for template in (CHATML, TAGGED):
        char_tokenizer.chat_template = template
        ids, mask, is_open, _ = encode_row({"messages": messages}, char_tokenizer)
        assert not char_tokenizer.is_fast and not is_open
        assert ids == char_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert supervised(char_tokenizer, ids, mask) == ["it is fine :)<|im_end|>", " fine\n<|im_end|>"]


THOUGHTS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "<think>hm</think>hi"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "<think>so</think>\n\nfine"},
]
REWRITING = {
    "prefixes": THINKING,
    # Tags say what the answer is, not whether the target gave it in this form.
    "tags": TAGGED.replace(
        "{% generation %}{{ m['content'] }}",
        "{% generation %}{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}",
    ),
}


@pytest.mark.parametrize("template", REWRITING)
def test_template_that_rewrites_earlier_turns(chat_tokenizer, template):
    chat_tokenizer.chat_template = REWRITING[template]
    with pytest.raises(
        RewrittenTurns, match=r"messages\[1\]: the chat template rewrites earlier turns.*assistant_turns='last'"
    ):
        encode_row({"messages": THOUGHTS}, chat_tokenizer)
    [(ids, mask, *_)] = encode_turns({"messages": THOUGHTS}, chat_tokenizer, "last")
    assert supervised(chat_tokenizer, ids, mask) == ["<think>so</think>\n\nfine<|im_end|>"]
    assert "hm" not in chat_tokenizer.decode(ids)
    # All turns: each as it was answered, with what came before as it is rendered then.
    rows = encode_turns({"messages": THOUGHTS, "finish_reason": "length"}, chat_tokenizer)
    assert [supervised(chat_tokenizer, ids, mask) for ids, mask, *_ in rows] == [
        ["<think>hm</think>hi<|im_end|>"],
        ["<think>so</think>\n\nfine"],
    ]
    assert rows[1].input_ids == ids[: len(rows[1].input_ids)] and rows[1].loss_mask[-1]  # nothing after what was cut
    [row] = encode_turns({"prompt": THOUGHTS[:3], "completion": THOUGHTS[3:]}, chat_tokenizer)
    assert row.input_ids == ids and row.loss_mask == mask
    assert len(encode_turns({"messages": MESSAGES}, chat_tokenizer)) == 1  # nothing to rewrite


def test_thoughts_are_learned_or_only_read(chat_tokenizer):
    row = {"messages": THOUGHTS}
    expected = {
        True: ["<think>hm</think>hi<|im_end|>", "<think>so</think>\n\nfine<|im_end|>"],
        False: ["hi<|im_end|>", "fine<|im_end|>"],
    }
    for train_on_thinking, answers in expected.items():
        for template in (CHATML, TAGGED):
            chat_tokenizer.chat_template = template
            ids, mask, *_ = encode_row(row, chat_tokenizer, train_on_thinking=train_on_thinking)
            assert supervised(chat_tokenizer, ids, mask) == answers
            assert "<think>so</think>" in chat_tokenizer.decode(ids)
    tags = ["[THINK]", "[/THINK]"]
    messages = [THOUGHTS[0], {"role": "assistant", "content": "[THINK]hm[/THINK]hi</think>"}]
    ids, mask, *_ = encode_row({"messages": messages}, chat_tokenizer, train_on_thinking=False, thinking_tags=tags)
    assert supervised(chat_tokenizer, ids, mask) == ["hi</think><|im_end|>"]


def test_thoughts_of_their_own_field_are_in_the_mask(chat_tokenizer):
    """A template that opens the block in its generation prompt, as thinking-only models do."""
    chat_tokenizer.chat_template = CHATML.replace(
        "m['content'] +",
        "('<think>\\n' + m['reasoning_content'] + '</think>' if m['reasoning_content'] else '') + m['content'] +",
    ).replace("assistant\\n'", "assistant\\n<think>\\n'")
    messages = [THOUGHTS[0], {"role": "assistant", "content": "hi", "reasoning_content": "hm", "tool_calls": None}]
    for train_on_thinking, answer in ((True, "hm</think>hi<|im_end|>"), (False, "hi<|im_end|>")):
        ids, mask, *_ = encode_row({"messages": messages}, chat_tokenizer, train_on_thinking=train_on_thinking)
        assert supervised(chat_tokenizer, ids, mask) == [answer]
    with pytest.raises(
        ValueError, match=r"messages\[1\]: the chat template does not render this answer.*reasoning_content"
    ):
        encode_row({"messages": [THOUGHTS[0], {"role": "assistant", "content": "hi"}]}, chat_tokenizer)


def test_recorded_thoughts(chat_tokenizer):
    def encode(prompt, completion, **options):
        ids = [chat_tokenizer(text)["input_ids"] for text in (prompt, completion)]
        ids, mask, *_ = encode_row({"prompt_ids": ids[0], "completion_ids": ids[1]}, chat_tokenizer, **options)
        return supervised(chat_tokenizer, ids, mask)

    # The target wrote the empty block itself.
    assert encode("hello", "<think>\n</think>hi") == ["<think>\n</think>hi"]
    assert encode("hello", "<think>\n</think>hi", train_on_thinking=False) == ["hi"]
    assert encode("hello<think>\n", "so</think>\nhi", train_on_thinking=False) == ["hi"]
    assert encode("hello", "<think>so, it", train_on_thinking=False) == []  # cut while thinking
    assert encode("hello", "a <think> tag", train_on_thinking=False) == ["a <think> tag"]


@pytest.mark.parametrize("train_on_thinking", [True, False])
@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_empty_thinking_block_is_not_supervised(chat_tokenizer, template, train_on_thinking):
    """Scaffolding that a template writes into answers without thoughts."""
    chat_tokenizer.chat_template = template.replace(
        "m['content'] +", "('<think>\\n\\n</think>\\n\\n' if m['role'] == 'assistant' else '') + m['content'] +"
    ).replace("{% generation %}", "{% generation %}<think>\n\n</think>\n\n")
    ids, mask, *_ = encode_row({"messages": MESSAGES}, chat_tokenizer, train_on_thinking=train_on_thinking)
    assert "<think>\n\n</think>" in chat_tokenizer.decode(ids)
    assert supervised(chat_tokenizer, ids, mask) == ANSWERS


def test_tagged_scaffolding_of_the_generation_prompt_is_not_supervised(chat_tokenizer):
    scaffold = "{% generation %}(think of it)"
    chat_tokenizer.chat_template = TAGGED.replace("{% generation %}", scaffold).replace(
        "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n(think of it)' }}"
    )
    ids, mask, *_ = encode_row({"messages": MESSAGES}, chat_tokenizer)
    assert chat_tokenizer.decode(ids).count("(think of it)") == 2
    assert supervised(chat_tokenizer, ids, mask) == ANSWERS


def test_scaffolding_of_the_generation_prompt_is_not_supervised(chat_tokenizer):
    chat_tokenizer.chat_template = CHATML.replace(
        "m['role'] + '\\n' +", "m['role'] + '\\n' + ('<think></think>' if m['role'] == 'assistant' and mute else '') +"
    ).replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n' + ('<think></think>' if mute else '')")
    for mute in (True, False):
        row = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
        ids, mask, *_ = encode_row(row, chat_tokenizer, template_kwargs={"mute": mute})
        assert supervised(chat_tokenizer, ids, mask) == ["hi<|im_end|>"]
        assert ("<think>" in chat_tokenizer.decode(ids)) == mute


def test_what_is_learned_begins_where_the_prompt_ends_wherever_tags_are(chat_tokenizer):
    chat_tokenizer.chat_template = "{% generation %}{% endgeneration %}" + CHATML
    ids, mask, *_ = encode_row({"messages": MESSAGES}, chat_tokenizer)
    assert supervised(chat_tokenizer, ids, mask) == ANSWERS


def test_turn_without_stop_token_is_told(chat_tokenizer):
    chat_tokenizer.chat_template = CHATML.replace("<|im_end|>", "")
    ids, mask, is_open, _ = encode_row({"messages": MESSAGES[:3]}, chat_tokenizer)
    assert is_open and supervised(chat_tokenizer, ids, mask) == ["it is fine 🙂\n"]
    # The template knows what ends a turn even where the tokenizer does not, unless another token is given.
    chat_tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|endoftext|>")
    ids, mask, is_open, _ = encode_row({"messages": MESSAGES[:3]}, chat_tokenizer)
    assert not is_open and supervised(chat_tokenizer, ids, mask) == ["it is fine 🙂<|endoftext|>"]
    stop = [chat_tokenizer.eos_token_id]
    assert encode_row({"messages": MESSAGES[:3]}, chat_tokenizer, stop_token_ids=stop).is_open


def test_answer_cut_by_length_has_no_stop_token(chat_tokenizer):
    ids, mask, is_open, _ = encode_row({"messages": MESSAGES[:3], "finish_reason": "length"}, chat_tokenizer)
    assert not is_open and supervised(chat_tokenizer, ids, mask) == ["it is fine 🙂"]


def test_plain_text(chat_tokenizer):
    row = {"prompt": "the user asks", "completion": " what"}
    ids, mask, *_ = encode_row(row, chat_tokenizer)
    assert chat_tokenizer.decode(ids) == "the user asks what<|im_end|>"
    assert supervised(chat_tokenizer, ids, mask) == [" what<|im_end|>"]
    ids, mask, *_ = encode_row({**row, "finish_reason": "length"}, chat_tokenizer)
    assert supervised(chat_tokenizer, ids, mask) == [" what"]
    with pytest.raises(ValueError, match="completion: expected text"):
        encode_row({"prompt": "x"}, chat_tokenizer)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "here"}}}
TOOL_TURNS = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "fine"},
    {"role": "assistant", "content": "it is fine"},
]
CALLED = '{"name": "weather", "arguments": {"city": "here"}}'
WITH_TOOLS = {
    name: "{% for tool in tools or [] %}{{ '<|im_start|>tools\\n' + tool | tojson + '<|im_end|>\\n' }}{% endfor %}"
    + template.replace(
        "m['content']", "(m['tool_calls'][0]['function'] | tojson if m['tool_calls'] else m['content'])"
    )
    for name, template in {"prefixes": CHATML, "tags": TAGGED}.items()
}


@pytest.mark.parametrize("written", [[TOOL], json.dumps([TOOL])], ids=["list", "JSON string"])
@pytest.mark.parametrize("template", WITH_TOOLS)
def test_tools_are_read_and_calls_are_learned(chat_tokenizer, template, written):
    """The tools' schemas stand in front of the row as at serving; what the target said, its calls too, is supervised,
    tools' results are not."""
    chat_tokenizer.chat_template = WITH_TOOLS[template]
    ids, mask, is_open, _ = encode_row({"messages": TOOL_TURNS, "tools": written}, chat_tokenizer)
    rendered = chat_tokenizer.apply_chat_template(TOOL_TURNS, tools=[TOOL], return_dict=True)["input_ids"]
    assert ids == rendered and not is_open
    assert chat_tokenizer.decode(ids).startswith(f"<|im_start|>tools\n{json.dumps(TOOL)}<|im_end|>\n<|im_start|>user")
    assert supervised(chat_tokenizer, ids, mask) == [f"{CALLED}<|im_end|>", "it is fine<|im_end|>"]


def test_tools_choose_their_template_and_stay_with_rows_of_one_turn(chat_tokenizer):
    """A tokenizer may have a template of its own for tools; each row of a split conversation has them."""
    chat_tokenizer.chat_template = {"default": CHATML, "tool_use": WITH_TOOLS["prefixes"]}
    row = {"messages": [TOOL_TURNS[0], TOOL_TURNS[3]], "tools": [TOOL]}
    assert "tools" in chat_tokenizer.decode(encode_row(row, chat_tokenizer).input_ids)
    assert "tools" not in chat_tokenizer.decode(encode_row(row | {"tools": []}, chat_tokenizer).input_ids)
    chat_tokenizer.chat_template = WITH_TOOLS["prefixes"].split("{% for m")[0] + THINKING
    turns = encode_turns({"messages": THOUGHTS, "tools": [TOOL]}, chat_tokenizer)
    assert len(turns) == 2
    assert all(chat_tokenizer.decode(turn.input_ids).startswith("<|im_start|>tools\n") for turn in turns)


def test_recorded_token_ids_are_taken_as_they_are(chat_tokenizer):
    row = {"messages": MESSAGES, "prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "finish_reason": "length"}
    assert encode_row(row, chat_tokenizer) == ([5, 6, 7, 8, 9], [0, 0, 1, 1, 1], False, [2])
    assert encode_row({**row, "finish_reason": "stop"}, chat_tokenizer)[2]
    for bad in ([7, len(chat_tokenizer)], [-1], "789", None):
        with pytest.raises(ValueError, match="prompt_ids: expected token ids below"):
            encode_row({**row, "prompt_ids": bad}, chat_tokenizer)


def test_what_a_template_refuses_is_told(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('No user query found in messages.') }}"
    with pytest.raises(ValueError, match="messages: the chat template refuses them: No user query found"):
        encode_row({"messages": MESSAGES}, chat_tokenizer)
    chat_tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(ValueError, match="messages: the chat template refuses them: division by zero"):
        encode_row({"messages": MESSAGES}, chat_tokenizer)
