"""The training scripts: short, run for real on a tiny target, go on from a checkpoint; their commands are valid."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from counting_pairs import chats, counting_target, counting_tokenizer
from transformers import AutoModel, HfArgumentParser

from blockdraft import DraftTrainingArguments

ROOT = Path(__file__).parents[2]
SCRIPTS = {"dflash": ROOT / "examples/train_dflash.py", "dspark": ROOT / "examples/train_dspark.py"}
TINY = shlex.split(
    "--num_draft_layers 1 --block_size 4 --max_length 32 --per_device_train_batch_size 2 --num_anchors 4 "
    "--save_steps 1 --eval_decode_prompts 1 --eval_max_new_tokens 4 --use_cpu --disable_tqdm true --report_to none"
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    counting_target().save_pretrained(folder / "target")
    counting_tokenizer().save_pretrained(folder / "target")
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats()[:40]))
    return ["--target", str(folder / "target"), "--data", str(data)]


@pytest.mark.parametrize("kind", SCRIPTS)
def test_script_trains_evaluates_saves_and_goes_on(kind, inputs, tmp_path, monkeypatch):
    output = tmp_path / "draft"
    first = output / "checkpoint-1" / "model.safetensors"
    written = []
    for steps in (1, 2):
        command = [str(SCRIPTS[kind]), *inputs, "--output_dir", str(output), "--max_steps", str(steps), *TINY]
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(command[0], run_name="__main__")
        written.append(first.stat().st_mtime_ns)
    assert written[0] == written[1], "the second run has to go on from the first one's checkpoint"
    metrics = json.loads((output / "eval_results.json").read_text())
    assert metrics["eval_loss"] > 0 and metrics["eval_tau"] >= 1
    draft = AutoModel.from_pretrained(output)
    assert draft.config.model_type.endswith(kind) and draft.config.training["global_step"] == 2
    assert (output / "README.md").is_file() and (output / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", SCRIPTS)
def test_commands_in_the_docstring(kind):
    """Both parse, and the tiny one names files that are in the repository."""
    text = SCRIPTS[kind].read_text()
    assert len(text.splitlines()) < 150
    script = runpy.run_path(str(SCRIPTS[kind]))
    parser = HfArgumentParser((script["ScriptArguments"], DraftTrainingArguments), allow_abbrev=False)
    commands = [" ".join(block.split("\\\n")) for block in re.findall(r"```\n(.*?)```", text.split('"""')[1], re.S)]
    assert len(commands) == 2
    for command in commands:
        name = str(SCRIPTS[kind].relative_to(ROOT))
        words = shlex.split(command)
        known, unknown = parser.parse_known_args(words[words.index(name) + 1 :])
        assert unknown == []
        assert known.output_dir.startswith("runs/")
    tiny = parser.parse_known_args(shlex.split(commands[0])[2:])[0]
    assert (ROOT / tiny.target / "config.json").is_file()
    assert [(ROOT / path).is_file() for path in tiny.data] == [True]
