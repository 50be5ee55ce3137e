"""Rows under chat templates of real models: what is learned, and what serving sends."""

import json

import pytest
from cases import case_rows
from chat_templates import CHATML
from datasets import Dataset
from real_templates import ENTRIES, generation_config, real_tokenizer
from tokenizers import processors

from blockdraft.trainer.data.dataset import prepare_dataset
from blockdraft.trainer.data.encoder import RowEncoder
from blockdraft.trainer.data.loss_mask import encode_row, encode_turns, supervised_runs
from blockdraft.trainer.data.rendering import check_said, render, served_prompt, stop_tokens, text_ids
from blockdraft.trainer.evaluation.decoding import held_out_prompts


def encoded(name, row, **options):
    return encode_turns(row, real_tokenizer(name), stop_token_ids=stops(name), **options)


def stops(name):
    return stop_tokens(real_tokenizer(name), generation_config(name))


def learned(name, row, **options):
    """The supervised text, run by run; of a row that is refused, why."""
    tokenizer = real_tokenizer(name)
    encoder = RowEncoder(tokenizer, 4096, stop_token_ids=stops(name), **options)
    rows = encoder(row, "rows.jsonl: row 0", 0)
    if problem := rows[0]["problem"]:
        assert problem.startswith("rows.jsonl: row 0: messages") and len(rows) == 1
        return problem
    return [tokenizer.decode(r["input_ids"][a:b]) for r in rows for a, b in supervised_runs(r["loss_mask"])]


# ---- templates x kinds of rows --------------------------------------------------------------------------------------

# What stands before and after an answer that is learned.
AROUND = {
    **dict.fromkeys(["qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_training", "qwen3_instruct_2507"], ("", "<|im_end|>")),
    **dict.fromkeys(["qwen3_5_think", "qwen3_8"], ("", "<|im_end|>")),
    **dict.fromkeys(["llama3", "llama3_1"], ("", "<|eot_id|>")),
    "gemma3": ("", "<end_of_turn>"),
    "gemma4_v5": ("", "<turn|>"),
    "gptoss": ("<|channel|>final<|message|>", "<|return|>"),
    "glm4moe": ("", ""),  # the next role's token stops it
    **dict.fromkeys(["idefics3", "smolvlm"], (" ", "<end_of_utterance>")),
    "llava_next": (" ", "</s>"),
    "phi3_5": ("", "<|end|>"),
    "kimi_k3": (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    ),
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"to": "Lima"}}\n</tool_call><|im_end|>'
XML = "<tool_call>\n<function=weather>\n<parameter=to>\nLima\n</parameter>\n</function>\n</tool_call><|im_end|>"
# What a call is to the templates that know calls.
CALL = {
    **dict.fromkeys(["qwen2_5", "qwen3", "qwen3_training", "qwen3_instruct_2507"], HERMES),
    **dict.fromkeys(["qwen3_5_think", "qwen3_8"], XML),
    "llama3_1": '{"name": "weather", "parameters": {"to": "Lima"}}<|eot_id|>',
    "gemma4_v5": '<|tool_call>call:weather{to:<|"|>Lima<|"|>}<tool_call|><|tool_response>',
    "gptoss": ' to=functions.weather<|channel|>commentary json<|message|>{"to": "Lima"}<|call|>',
    "glm4moe": "<tool_call>weather\n<arg_key>to</arg_key>\n<arg_value>Lima</arg_value>\n</tool_call><|observation|>",
    "kimi_k3": '<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather"<|sep|>'
    '<|open|>argument key="to"<|sep|>Lima<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    "<|close|>message<|sep|><|end_of_msg|>",
}
# What thoughts are to the templates that know thoughts.
THOUGHTS = {
    **dict.fromkeys(["qwen3", "qwen3_training"], "<think>\nEasy one.\n</think>\n\n"),
    **dict.fromkeys(["qwen3_5_think", "qwen3_8"], "Easy one.\n</think>\n\n"),
    "gemma4_v5": "<|channel>thought\nEasy one.\n<channel|>",
    "gptoss": "<|channel|>analysis<|message|>Easy one.<|end|><|start|>assistant",
    "glm4moe": "\n<think>Easy one.</think>\n",
    "kimi_k3": "Easy one.<|close|>think<|sep|>",
}
READ_BLOCKS = ("qwen3", "qwen3_training", "qwen3_5_think", "glm4moe")  # of those, in the content too
DEVELOPER = ("qwen2_5_vl", "llama3", "llama3_1", "gemma4_v5", "gptoss", "idefics3", "smolvlm", "kimi_k3")
PARTS = ("idefics3", "smolvlm", "llava_next")  # take content as parts only
# These open thoughts in the prompt and drop them from answers: only recorded ids can be learned.
NEVER = ("deepseekv3", "deepseek_r1_distill")

USER, ANSWER = {"role": "user", "content": "Capital of Chile?"}, {"role": "assistant", "content": "Santiago."}
MORE = [{"role": "user", "content": "And of Peru?"}, {"role": "assistant", "content": "Lima."}]
[WEATHER] = case_rows("tool_arguments_as_string")
REFUSED = None


def text(*parts):
    return [{"type": "text", "text": part} for part in parts]


def with_arguments(arguments, **content):
    turn = {
        "role": "assistant",
        **content,
        "tool_calls": [json.loads(json.dumps(WEATHER["messages"][1]["tool_calls"][0]))],
    }
    turn["tool_calls"][0]["function"]["arguments"] = arguments
    return {"messages": [WEATHER["messages"][0], turn, *WEATHER["messages"][2:]], "tools": WEATHER["tools"]}


def expectations(name):
    """For each kind of row: the row, and what of it is learned; `REFUSED` if nothing can be."""
    before, after = AROUND.get(name, ("", ""))

    def said(answer, end=after):
        return before + answer + end

    next_user = "<|user|>" if name == "glm4moe" else after
    chat = [USER, ANSWER]
    block = "<think>\nEasy one.\n</think>\n\nSantiago."
    in_block = THOUGHTS[name] + said("Santiago.") if name in READ_BLOCKS else said(block)
    calls = [CALL[name], said("It is mild.")] if name in CALL else REFUSED
    thoughts = [THOUGHTS[name] + said("Santiago.")] if name in THOUGHTS else REFUSED
    stripped = "\n\nSantiago." if name in ("qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507", *PARTS) else "Santiago."
    stripped = "\n\nSantiago." if name in ("gptoss", "phi3_5", "kimi_k3") else stripped
    return {
        "plain": ({"messages": chat}, [said("Santiago.")]),
        "system": ({"messages": [{"role": "system", "content": "Be brief."}, *chat]}, [said("Santiago.")]),
        "developer": (
            {"messages": [{"role": "developer", "content": "Be brief."}, *chat]},
            [said("Santiago.")] if name in DEVELOPER else REFUSED,
        ),
        "parts": (
            {
                "messages": [
                    USER | {"content": text("Capital of ", "Chile?")},
                    ANSWER | {"content": text("Santi", "ago.")},
                ]
            },
            [said("Santiago.")],
        ),
        "image": ({"messages": [USER | {"content": [{"type": "image", "image": "a.png"}]}, ANSWER]}, REFUSED),
        "turns": ({"messages": chat + MORE}, [said("Santiago.", next_user), said("Lima.")]),
        "weight 0": ({"messages": [USER, ANSWER | {"weight": 0}, *MORE]}, [said("Lima.")]),
        "cut": ({"messages": chat, "finish_reason": "length"}, [said("Santiago.", "")]),
        "white space": ({"messages": [USER, ANSWER | {"content": "\n\nSantiago."}]}, [said(stripped)]),
        "calls": (with_arguments({"to": "Lima"}), calls),
        "calls in JSON": (with_arguments('{"to": "Lima"}', content=""), calls),
        "thoughts": ({"messages": [USER, ANSWER | {"reasoning_content": "Easy one."}]}, thoughts),
        "thoughts by another name": ({"messages": [USER, ANSWER | {"thinking": "Easy one."}]}, thoughts),
        "thoughts in the content": ({"messages": [USER, ANSWER | {"content": block}]}, [in_block]),
    }


def as_served(name, row):
    """The prompts of a row's answers, with the messages that the template takes written by hand."""
    tokenizer, messages, prompts = real_tokenizer(name), [], []
    for message in row["messages"]:
        if message["role"] == "assistant":
            prompt = {"tools": row.get("tools"), "add_generation_prompt": True, "return_dict": True}
            prompts.append(tokenizer.apply_chat_template(messages, **prompt)["input_ids"])
        message = {key: value for key, value in message.items() if key != "weight"}
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        if content is not None:
            message["content"] = text(content) if name in PARTS else content
        for call in message.get("tool_calls", []):
            message["tool_calls"] = [call | {"function": {"name": "weather", "arguments": {"to": "Lima"}}}]
        messages.append(message)
    return prompts


@pytest.mark.parametrize("name", ENTRIES)
def test_every_row_is_learned_as_it_is_served_or_refused(name):
    """Real templates by kinds of rows. What is learned begins where the served prompt ends and ends with the first
    stop token; the ids before it are those that serving sends."""
    assert len(ENTRIES) >= 15 and ENTRIES.keys() == AROUND.keys() | set(NEVER)
    for kind, (row, expected) in expectations(name).items():
        found = learned(name, row)
        if expected is REFUSED or name in NEVER:
            assert isinstance(found, str) and "Error" not in found, (kind, found)
            continue
        assert found == expected, kind
        prompts = as_served(name, row)
        for turn in encoded(name, row):
            assert turn.prompts and not any(turn.loss_mask[: turn.prompts[0]]), kind
            assert all(turn.input_ids[:length] in prompts for length in turn.prompts), kind


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_are_only_read_if_asked_for(name):
    row, _ = expectations(name)["thoughts"]
    before, after = AROUND[name]
    start = "<|start|>assistant" if name == "gptoss" else ""
    assert learned(name, row, train_on_thinking=False) == [start + before + "Santiago." + after]


def test_thoughts_in_a_block_that_nobody_knows_are_not_learned_unasked():
    tokenizer = real_tokenizer("qwen2_5")
    template = tokenizer.chat_template.replace(
        "'\\n' + message.content +",
        "'\\n' + ('~' + message.thinking + '~' if message.thinking else '') + message.content +",
    )
    assert template != tokenizer.chat_template
    row = {"messages": [USER, ANSWER | {"reasoning_content": "Easy one."}]}
    options = {"train_on_thinking": False, "template_kwargs": {"chat_template": template}}
    assert "train_on_thinking=False, but" in (problem := learned("qwen2_5", row, **options))
    assert "give thinking_tags" in problem
    with pytest.raises(ValueError, match="thinking_tags are what opens and what closes a block"):
        RowEncoder(tokenizer, 64, thinking_tags=["~"])
    template = template.replace("'~' + message.thinking", "'(' + message.thinking")
    options |= {"thinking_tags": ["(", "~"], "template_kwargs": {"chat_template": template}}
    assert learned("qwen2_5", row, **options) == ["Santiago.<|im_end|>"]
    # Nothing to warn of: the answer repeats its thoughts.
    row = {"messages": [USER, ANSWER | {"content": "So: Santiago.", "thinking": "Santiago."}]}
    assert learned("qwen3", row, train_on_thinking=False) == ["So: Santiago.<|im_end|>"]


def test_what_a_template_prints_as_a_list_was_not_rendered():
    template = "{% for m in messages %}{{ m.content if m.content is not string else '' }}{% endfor %}"
    tokenizer = real_tokenizer("qwen2_5")
    with pytest.raises(ValueError, match=r"messages\[0\]\.content: the chat template drops it \('Capital of Chile"):
        render(tokenizer, [USER, ANSWER], chat_template=template)


def test_arguments_in_json_where_a_template_joins_text():
    """DeepSeek V3's way; its prompt opens thoughts, which is beside the point here."""
    tokenizer = real_tokenizer("deepseekv3")
    for arguments in ('{"to":  "Lima"}', {"to": "Lima"}):
        row = with_arguments(arguments)
        shown, _ = render(tokenizer, row["messages"], tools=row["tools"])
        assert (arguments if isinstance(arguments, str) else '{"to": "Lima"}') in shown
    for arguments in ('{"to": ', '["Lima"]', "Lima"):
        row = with_arguments(arguments, content="")
        assert r"messages[1].tool_calls[0].arguments: " in learned("qwen2_5", row)


@pytest.mark.parametrize("said", ['a "quote"\nand\\', "ä's <b> & 🙂", "  trimmed\n"])
def test_texts_are_found_as_templates_write_them(said):
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": said}}}],
    }
    for written in (said, said.strip(), json.dumps(said), json.dumps(said, ensure_ascii=False), repr(said)):
        check_said(f"f(a={written})", [message])
    with pytest.raises(ValueError, match=r"messages\[0\]\.tool_calls: the chat template drops it"):
        check_said(f"f(a={said.strip()[:-1]})", [message])


def test_what_is_said_in_a_turn_is_rendered_in_it():
    """Not only somewhere: the question happens to hold the answer's word, which the template drops."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content if m.role == 'user' }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    row = {"messages": [USER, {"role": "assistant", "content": "Chile"}]}
    found = learned("qwen2_5", row, template_kwargs={"chat_template": template})
    assert "messages[1].content: the chat template does not render it within its turn" in found


# ---- stop tokens ----------------------------------------------------------------------------------------------------


def test_stop_tokens_are_those_of_target_tokenizer_and_template():
    def found(name, config=None):
        return real_tokenizer(name).convert_ids_to_tokens(stop_tokens(real_tokenizer(name), config))

    assert found("gemma3") == ["<eos>", "<end_of_turn>"]
    assert found("phi3_5") == ["<|endoftext|>", "<|end|>"]  # which the template writes only where it ends
    assert found("kimi_k3") == ["<|end_of_msg|>"]
    assert found("glm4moe") == ["<|endoftext|>"]  # the target alone knows that `<|user|>` stops it
    assert found("glm4moe", generation_config("glm4moe")) == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    config = generation_config("qwen3")
    config.eos_token_id = real_tokenizer("qwen3").convert_tokens_to_ids("<|endoftext|>")
    assert found("qwen3", config) == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize("known_from", ["template", "generation config"])
def test_stop_only_in_generation_config(known_from):
    """Gemma 3's, whose tokenizer names another one. A cut answer has none, and nothing that a template writes."""
    tokenizer = real_tokenizer("gemma3")
    end = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    whole, cut = case_rows("stop_only_in_generation_config")
    given = None if known_from == "template" else stops("gemma3")
    assert tokenizer.eos_token == "<eos>"
    ids, mask, is_open, _ = encode_row(whole, tokenizer, stop_token_ids=given)
    assert not is_open and [i for i, m in zip(ids, mask, strict=True) if m][-1] == end
    assert learned("gemma3", whole) == ["Santiago.<end_of_turn>"]
    assert learned("gemma3", cut) == ["Lima, the city of"]


def test_nothing_after_the_first_stop_token_is_learned():
    said = "Santiago.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>"
    assert learned("qwen2_5", {"messages": [USER, {"role": "assistant", "content": said}]}) == ["Santiago.<|im_end|>"]
    tokenizer = real_tokenizer("qwen2_5")
    row = {"prompt": "Capital?", "completion": said}
    ids, mask, *_ = encode_row(row, tokenizer)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "Santiago.<|im_end|>"
    recorded = {"prompt_ids": [5, 6], "completion_ids": [7, tokenizer.eos_token_id, 8]}
    assert encode_row(recorded, tokenizer) == ([5, 6, 7, tokenizer.eos_token_id, 8], [0, 0, 1, 1, 0], False, [2])


def test_a_cut_answer_ends_where_it_was_cut():
    """Whatever its template writes after it: tags, stop tokens, new lines; in the thoughts, too."""
    row = {
        "messages": [USER, {"role": "assistant", "content": "", "reasoning_content": "Easy"}],
        "finish_reason": "length",
    }
    assert learned("kimi_k3", row) == ["Easy"]
    assert learned("kimi_k3", {**row, "finish_reason": "stop"})[0].endswith("<|end_of_msg|>")
    # Whether an answer was cut is said of the last one.
    row = {"messages": [USER, ANSWER, MORE[0], MORE[1] | {"weight": 0}], "finish_reason": "length"}
    assert learned("qwen2_5", row) == ["Santiago.<|im_end|>"]
    assert learned("qwen3", row) == ["Santiago.<|im_end|>"]


# ---- what serving sends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
def test_prompts_are_those_of_serving(name):
    """With an answer and without, in a training set's rows too: no thinking block that nobody asked for."""
    for row in (*case_rows("no_thoughts_for_a_thinking_template"), *case_rows("prompts_only")):
        tokenizer, messages = real_tokenizer(name), row["messages"]
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if name in PARTS:
            messages = [message | {"content": text(message["content"])} for message in messages]
        served = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert served_prompt(row, tokenizer)[0] == served
        if row["messages"][-1]["role"] == "assistant" and name not in NEVER:
            dataset, _ = prepare_dataset(Dataset.from_list([row]), tokenizer, max_length=4096)
            assert held_out_prompts(dataset, 1) == [served]


def test_tokens_across_the_end_of_a_prompt_are_not_learned_as_one():
    """The prompt's last new line and the answer's first ones would be two tokens in the whole text, and are three when
    served. Later prompts hold the answer otherwise: then each turn has a row."""
    tokenizer = real_tokenizer("qwen2_5")
    answer = {"role": "assistant", "content": "\n\nSantiago."}
    [turn] = encoded("qwen2_5", {"messages": [USER, answer]})
    served, _ = served_prompt({"messages": [USER]}, tokenizer)
    assert turn.input_ids[: turn.prompts[0]] == served and turn.loss_mask[turn.prompts[0]]
    whole = tokenizer.apply_chat_template([USER, answer], return_dict=True)["input_ids"]
    assert whole[: len(served)] != served and tokenizer.decode(whole) == tokenizer.decode(turn.input_ids)
    first, second = encoded("qwen2_5", {"messages": [USER, answer, *MORE]})
    assert first.input_ids[: first.prompts[0]] == served
    assert second.input_ids[: second.prompts[0]] == served_prompt({"messages": [USER, answer, MORE[0]]}, tokenizer)[0]


def test_a_rendered_prompt_has_one_bos():
    """Text is encoded with the tokens that start it, unless it has them."""
    tokenizer = real_tokenizer("llama3")
    backend = tokenizer.backend_tokenizer
    bos = tokenizer.bos_token_id
    before = backend.post_processor
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    try:
        [row] = case_rows("rendered_prompt_with_bos")
        chat = [{"role": "user", "content": "Capital of Chile?"}]
        served = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert served.count(bos) == 1 and served_prompt(row, tokenizer)[0] == served
        ids, mask, is_open, prompts = encode_row(row, tokenizer)
        assert ids[: prompts[0]] == served and ids.count(bos) == 1 and not is_open
        assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "Santiago.<|eot_id|>"
        assert text_ids(tokenizer, "Chile")[0] == bos and text_ids(tokenizer, "")[:1] == [bos]
        [turn] = encode_turns({"messages": [*chat, ANSWER]}, tokenizer)
        assert turn.input_ids.count(bos) == 1
    finally:
        backend.post_processor = before


def test_settings_of_a_row_reach_its_template():
    [row] = case_rows("row_template_kwargs")
    tokenizer = real_tokenizer("gptoss")
    for ids in (encoded("gptoss", row)[0].input_ids, served_prompt(row, tokenizer)[0]):
        assert "Reasoning: high" in tokenizer.decode(ids)
    lower = {"template_kwargs": {"reasoning_effort": "low"}}
    assert "Reasoning: high" in tokenizer.decode(encoded("gptoss", row, **lower)[0].input_ids)
    plain = {"messages": row["messages"]}
    assert "Reasoning: low" in tokenizer.decode(encoded("gptoss", plain, **lower)[0].input_ids)
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    assert (
        real_tokenizer("qwen3")
        .decode(served_prompt(plain | quiet, real_tokenizer("qwen3"))[0])
        .endswith("</think>\n\n")
    )
    # Of each row of a conversation that is split, too.
    split = encoded("gptoss", {**row, "messages": [*row["messages"], *MORE]})
    assert len(split) == 2 and all("Reasoning: high" in tokenizer.decode(turn.input_ids) for turn in split)
    for name in ("tokenize", "add_generation_prompt", "chat_template"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs: {name}: not for the template"):
            encoded("gptoss", {**plain, "chat_template_kwargs": {name: False}})


def test_a_tokenizer_without_a_template_takes_text(chat_tokenizer):
    chat_tokenizer.chat_template = None
    assert stop_tokens(chat_tokenizer) == [chat_tokenizer.eos_token_id]
    assert served_prompt({"prompt": "hello"}, chat_tokenizer) == (
        chat_tokenizer("hello")["input_ids"],
        {"prompt": "hello"},
    )
    with pytest.raises(ValueError, match="messages: the chat template refuses them"):
        served_prompt({"messages": [USER]}, chat_tokenizer)
    chat_tokenizer.chat_template = CHATML
    assert stop_tokens(chat_tokenizer) == [chat_tokenizer.eos_token_id]
