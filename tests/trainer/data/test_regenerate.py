"""The target's own answers: exact tokens, resumed runs, kept settings."""

import json
import re
import socket
import subprocess
import sys

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from blockdraft.trainer.data.dataset import prepare_dataset
from blockdraft.trainer.data.provenance import provenance_path
from blockdraft.trainer.data.regenerate import regenerate

GREEDY = GenerationConfig(do_sample=False)


@pytest.fixture
def target(chat_tokenizer):
    """A random target with a peaked head, so that its answers vary, and some of them stop."""
    config = Qwen3Config(
        vocab_size=len(chat_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.lm_head.weight.data.normal_(std=1.0)
    model.generation_config.eos_token_id = STOP
    return model


STOP = list(range(2, 20))  # many stop tokens: some answers stop early, others do not


def rows(count=11):
    words = "hello there what is the weather like today it is fine".split()
    return [
        {
            "id": f"row-{i}",
            "messages": [
                {"role": "user", "content": " ".join(words[: 1 + i % 7] * (1 + i % 3))},
                {"role": "assistant", "content": "someone else's answer"},
            ],
        }
        for i in range(count)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_rows_are_what_the_target_generates_alone(tmp_path, target, chat_tokenizer):
    source = write(tmp_path / "in.jsonl", rows())
    report = regenerate(target, chat_tokenizer, source, tmp_path / "out.jsonl", 24, GREEDY, batch_size=4)
    written = read(tmp_path / "out.jsonl")
    assert list(written) != [row["id"] for row in rows()] and set(written) == {row["id"] for row in rows()}
    for row in rows():
        prompt = chat_tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        alone = target.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0].tolist()
        answer = written[row["id"]]
        assert answer["prompt_ids"] + answer["completion_ids"] == alone
        assert answer["finish_reason"] == ("stop" if alone[-1] in STOP else "length")
        assert answer["messages"][:-1] == row["messages"][:1]
        text = chat_tokenizer.decode(answer["completion_ids"], skip_special_tokens=True)
        assert answer["messages"][-1] == {"role": "assistant", "content": text}
    stopped = sum(row["finish_reason"] == "stop" for row in written.values())
    tokens = sum(len(row["completion_ids"]) for row in written.values())
    assert 0 < stopped < 11
    assert (report.written, report.stopped, report.resumed, report.too_long) == (11, stopped, 0, 0)
    assert report.completion_tokens == tokens


def test_training_rows_are_exactly_the_generated_tokens(tmp_path, target, chat_tokenizer):
    output = tmp_path / "out.jsonl"
    regenerate(target, chat_tokenizer, write(tmp_path / "in.jsonl", rows()), output, 24, GREEDY)
    dataset, report = prepare_dataset(output, chat_tokenizer, max_length=256, stop_token_ids=STOP)
    for row, trained in zip(read(output).values(), dataset, strict=True):
        assert trained["input_ids"] == row["prompt_ids"] + row["completion_ids"]
        assert trained["loss_mask"] == [0] * len(row["prompt_ids"]) + [1] * len(row["completion_ids"])
    round_trips = [
        chat_tokenizer(row["messages"][-1]["content"])["input_ids"] == row["completion_ids"]
        for row in read(output).values()
    ]
    assert not all(round_trips)  # so the text alone would have lost tokens
    assert report.open_turns == 0
    assert report.provenance[str(output)]["generation"]["max_new_tokens"] == 24


def test_interrupted_run_goes_on(tmp_path, target, chat_tokenizer):
    source = write(tmp_path / "in.jsonl", rows())
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    regenerate(target, chat_tokenizer, source, whole, 24, GREEDY, batch_size=4)
    lines = whole.read_bytes().splitlines(keepends=True)
    for cut in (b"", lines[5][:30], lines[5][:-1]):
        broken.write_bytes(b"".join(lines[:5]) + cut)
        provenance_path(broken).write_bytes(provenance_path(whole).read_bytes())
        report = regenerate(target, chat_tokenizer, source, broken, 24, GREEDY, batch_size=4)
        assert (report.resumed, report.written) == (5, 6)
        assert read(broken) == read(whole) and len(broken.read_text().splitlines()) == 11
    before = whole.read_bytes()
    assert regenerate(target, chat_tokenizer, source, whole, 24, GREEDY).written == 0
    assert whole.read_bytes() == before
    broken.write_bytes(lines[0] + b"{}\n" + lines[1])
    with pytest.raises(ValueError, match=r"broken\.jsonl: row 1 is damaged"):
        regenerate(target, chat_tokenizer, source, broken, 24, GREEDY)


def test_other_settings_do_not_mix(tmp_path, target, chat_tokenizer):
    source, output = write(tmp_path / "in.jsonl", rows(2)), tmp_path / "out.jsonl"
    regenerate(target, chat_tokenizer, source, output, 4, GREEDY)
    settings = json.loads(provenance_path(output).read_text())["settings"]
    assert settings["dtype"] == "float32" and settings["template_kwargs"] == {}
    with pytest.raises(ValueError, match="made with other settings .*generation was .*now .*choose another path"):
        regenerate(target, chat_tokenizer, source, output, 5, GREEDY)
    with pytest.raises(ValueError, match=r"template_kwargs was \{\}, now \{'enable_thinking': False\}"):
        regenerate(target, chat_tokenizer, source, output, 4, GREEDY, template_kwargs={"enable_thinking": False})
    target.lm_head.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="weights_sha256 was"):
        regenerate(target, chat_tokenizer, source, output, 4, GREEDY)
    settings.pop("weights_sha256")  # what the file does not say cannot be compared
    provenance_path(output).write_text(json.dumps({"settings": settings}))
    assert regenerate(target, chat_tokenizer, source, output, 4, GREEDY).resumed == 2
    chat_tokenizer.chat_template += " "
    with pytest.raises(ValueError, match="chat_template_sha256 was"):
        regenerate(target, chat_tokenizer, source, output, 4, GREEDY)
    provenance_path(output).unlink()
    with pytest.raises(ValueError, match=r"out\.jsonl exists, but out\.jsonl\.provenance\.json does not"):
        regenerate(target, chat_tokenizer, source, output, 4, GREEDY)


def test_answers_to_other_prompts_do_not_mix(tmp_path, target, chat_tokenizer):
    """Rows without ids are numbered: those of another file would pass for answered. Prompts may be added."""
    output = tmp_path / "out.jsonl"
    known = [{"messages": row["messages"][:1]} for row in rows(4)]

    def run(name, rows, **settings):
        return regenerate(target, chat_tokenizer, write(tmp_path / name, rows), output, 4, GREEDY, **settings)

    assert run("a.jsonl", known[:3]).written == 3
    assert (again := run("b.jsonl", known)).resumed == 3 and again.written == 1
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"from other data: its row with id 0 answers another prompt than .*c\.jsonl"):
        run("c.jsonl", known[::-1])
    with pytest.raises(
        ValueError, match="from other data: 2 of its 4 answers are to no prompt of these, such as id 2"
    ):
        run("d.jsonl", known[:2])
    with pytest.raises(ValueError, match=r"to no prompt of at most 3 tokens \(max_prompt_length\) of these"):
        run("b.jsonl", known, max_prompt_length=3)
    assert output.read_bytes() == before


HOLD = """
import sys
from blockdraft.trainer.process_lock import one_process

with one_process(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_writes_a_file(tmp_path, target, chat_tokenizer):
    """Another one is told who does; the lock of one that was killed is gone with it."""
    source, output = write(tmp_path / "in.jsonl", rows(2)), tmp_path / "out.jsonl"
    command = [sys.executable, "-c", HOLD, str(output)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        by = (
            rf"out\.jsonl is being written by process {other.pid} on {re.escape(socket.gethostname())}, since \d{{4}}-"
        )
        with pytest.raises(ValueError, match=by):
            regenerate(target, chat_tokenizer, source, output, 4, GREEDY)
        assert not output.exists()
        other.kill()
    assert regenerate(target, chat_tokenizer, source, output, 4, GREEDY).written == 2
    assert not (tmp_path / "out.jsonl.holder").exists()


def test_sampling_follows_the_seed(tmp_path, target, chat_tokenizer):
    source = write(tmp_path / "in.jsonl", rows(4))
    sampled = GenerationConfig(do_sample=True, temperature=2.0, top_k=0)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        regenerate(target, chat_tokenizer, source, tmp_path / f"{name}.jsonl", 24, sampled, seed=seed)
        torch.rand(3)
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "b.jsonl") != read(tmp_path / "c.jsonl")


def test_prompts_of_every_shape(tmp_path, target, chat_tokenizer):
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    source = write(
        tmp_path / "in.jsonl",
        [
            {"messages": [*turns, *turns, turns[0]], "tools": json.dumps(tools)},
            {"messages": turns[:1]},
            {"prompt": turns[:1], "completion": turns[1:]},
            {"prompt": "hello there", "completion": "x"},
            {"prompt": "hello " * 100},
        ],
    )
    output = tmp_path / "out.jsonl"
    report = regenerate(target, chat_tokenizer, source, output, 4, GREEDY, max_prompt_length=60)
    assert (report.written, report.too_long) == (4, 1)
    written = read(output)
    assert written[0]["messages"][:-1] == [*turns, *turns, turns[0]] and written[0]["tools"] == tools
    assert written[1]["prompt_ids"] == written[2]["prompt_ids"]
    assert written[3]["prompt"] == "hello there" and isinstance(written[3]["completion"], str)
    assert chat_tokenizer.decode(written[3]["prompt_ids"]) == "hello there"
    assert prepare_dataset(output, chat_tokenizer, max_length=64)[1].kept == 4


@pytest.mark.parametrize(
    "row, message",
    [
        ({"id": "row-0", "prompt": "x"}, r"in\.jsonl: row 1: id: 'row-0' appears twice"),
        ({"messages": [{"role": "ipython", "content": "x"}]}, r"in\.jsonl: row 1: messages\[0\]\.role: 'ipython'"),
        ({"text": "x"}, r"in\.jsonl: row 1: prompt: expected a non-empty list"),
    ],
)
def test_bad_rows_are_named(tmp_path, target, chat_tokenizer, row, message):
    source = write(tmp_path / "in.jsonl", [*rows(1), row])
    with pytest.raises(ValueError, match=message):
        regenerate(target, chat_tokenizer, source, tmp_path / "out.jsonl", 4, GREEDY)


@pytest.mark.parametrize(
    "config, message",
    [
        (GenerationConfig(num_beams=2), "num_beams=2"),
        (GenerationConfig(do_sample=True, num_return_sequences=2), "num_return_sequences=2"),
        (GenerationConfig(stop_strings=["x"]), "stop_strings"),
    ],
)
def test_one_plain_answer_a_prompt(tmp_path, target, chat_tokenizer, config, message):
    source = write(tmp_path / "in.jsonl", rows(1))
    with pytest.raises(ValueError, match=message):
        regenerate(target, chat_tokenizer, source, tmp_path / "out.jsonl", 4, config)
    assert not (tmp_path / "out.jsonl").exists() and not provenance_path(tmp_path / "out.jsonl").exists()


def test_stop_token_of_the_tokenizer_where_the_target_has_none(tmp_path, target, chat_tokenizer):
    target.generation_config.eos_token_id = None
    regenerate(target, chat_tokenizer, write(tmp_path / "in.jsonl", rows(1)), tmp_path / "out.jsonl", 4, GREEDY)
    settings = json.loads(provenance_path(tmp_path / "out.jsonl").read_text())["settings"]
    assert settings["generation"]["eos_token_id"] == [chat_tokenizer.eos_token_id]
