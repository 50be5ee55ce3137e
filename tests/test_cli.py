"""The `blockdraft` command on a tiny random Kimi K3: settings, training, resuming, evaluation, errors."""

import json
from pathlib import Path

import pytest
import yaml
from decoding_models import tiny_k3
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.modeling_kimi_k3 import KimiK3ForCausalLM
from blockdraft.trainer.cli import COMMANDS, main
from blockdraft.trainer.cli_arguments import SettingsParser, TargetArguments
from blockdraft.trainer.training_args import DraftTrainingArguments
from conftest import CHATML

TINY_TRAINING = {
    "num_draft_layers": 1,
    "block_size": 4,
    "target_layer_ids": [1, 3],
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "num_anchors": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_decode_prompts": 1,
    "eval_max_new_tokens": 4,
    "use_cpu": True,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory, chatml_backend) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(chatml_backend), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    settings = tiny_k3().config.to_dict() | {"vocab_size": len(tokenizer) + 2, "eos_token_id": tokenizer.eos_token_id}
    model = KimiK3ForCausalLM(KimiK3TextConfig(**settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    words = "hello there what is the weather like today it is fine".split()
    rows = [
        {
            "id": i,
            "messages": [
                {"role": "user", "content": " ".join(words[: 2 + i % 4])},
                {"role": "assistant", "content": " ".join(words[i % 3 :])},
            ],
        }
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, target_dir, data_file) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = TINY_TRAINING | {
        "target": str(target_dir),
        "train_data": str(data_file),
        "eval_fraction": 0.25,
        "output_dir": str(folder / "draft"),
    }
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def draft_dir(config_file) -> Path:
    assert main(["train", str(config_file)]) == 0
    return config_file.parent / "draft"


def parse(*argv):
    return SettingsParser([TargetArguments, DraftTrainingArguments], ["target"]).parse(argv)


def test_command_line_wins_over_yaml(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("target: a\nlearning_rate: 1e-3\nnum_anchors: 7\ntrust_remote_code: true\nuse_cpu: true\n")
    target, args = parse(str(path), "--num_anchors", "9")
    assert (target.target, target.trust_remote_code) == ("a", True)
    assert (args.learning_rate, args.num_anchors) == (1e-3, 9)
    target, args = parse(str(path), "b", "--trust-remote-code", "false")
    assert (target.target, target.trust_remote_code, args.num_anchors) == ("b", False, 7)


def test_every_command_has_help(capsys):
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit) as done:
            main([name, "--help"])
        assert done.value.code == 0
        out = capsys.readouterr().out
        assert all(f"--{name}" in out for name in ("target", *command.positionals))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "'trian' is not a command; choose one of train, regenerate, evaluate, generate"),
        (["train", "{tmp}/no.yaml"], "cannot read {tmp}/no.yaml: No such file or directory"),
        (["train", "{yaml}"], "`learning_rat` in {yaml} is not a setting; the nearest one is `learning_rate`."),
        (["train", "--targt", "x"], "--targt is not a setting; the nearest one is `target`."),
        (["train", "--target", "x"], "the following arguments are required: --train_data/--train-data"),
        (
            ["train", "--target", "x", "--train_data", "y", "--num_anchors", "0"],
            "`num_anchors` is 0: it must be positive.",
        ),
        (["generate", "{tmp}/t", "d", "hi"], "`target`: there is no directory {tmp}/t"),
        (["train", "--target", "{target}", "--train_data", "{tmp}/no.jsonl"], "data: there is no file {tmp}/no.jsonl"),
        (
            ["train", "--target", "t", "--train_data", "y", "--draft", "d", "--block_size", "4"],
            "leave out block_size.",
        ),
        (["evaluate", "t", "d", "--data", "x", "--template_kwargs", "{{"], "`template_kwargs` is not valid JSON"),
    ],
)
def test_wrong_input_is_one_line(argv, message, tmp_path, target_dir, capsys):
    path = tmp_path / "train.yaml"
    path.write_text("target: x\nlearning_rat: 1\n")
    places = {"tmp": tmp_path, "yaml": path, "target": target_dir}
    assert main([text.format(**places) for text in argv]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ") and message.format(**places) in last


def test_train_saves_a_draft_that_loads_and_is_described(draft_dir):
    names = {path.name for path in draft_dir.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "checkpoint-1", "checkpoint-2", "tokenizer.json"} <= names
    config = json.loads((draft_dir / "config.json").read_text())
    assert (config["block_size"], config["num_hidden_layers"], config["target_layer_ids"]) == (4, 1, [1, 3])
    assert config["training"]["global_step"] == 2
    assert "held-out prompts" in (draft_dir / "README.md").read_text()


def test_the_same_command_goes_on(draft_dir, config_file, capsys):
    before = (draft_dir / "model.safetensors").read_bytes()
    assert main(["train", str(config_file)]) == 0
    assert f"{draft_dir / 'checkpoint-2'} has all of 2 steps." in capsys.readouterr().out
    assert (draft_dir / "model.safetensors").read_bytes() == before

    assert main(["train", str(config_file), "--max_steps", "3"]) == 0
    assert f"Going on from {draft_dir / 'checkpoint-2'}, 1 of 3 steps to go." in capsys.readouterr().out
    assert (draft_dir / "checkpoint-3").is_dir()


def test_another_draft_is_not_put_into_a_run(draft_dir, config_file, capsys):
    assert main(["train", str(config_file), "--block_size", "5"]) == 2
    assert "`block_size` is 5, but" in capsys.readouterr().err
    other = draft_dir.parent / "other"
    again = ["train", str(config_file), "--output_dir", str(other), "--eval_decode_prompts", "0", "--max_steps", "1"]
    assert main([*again, "--save_strategy", "no"]) == 0
    assert main([*again, "--save_strategy", "no"]) == 2
    assert "holds a model and no checkpoint" in capsys.readouterr().err
    assert main([*again, "--block_size", "5", "--overwrite_output_dir"]) == 0
    assert json.loads((other / "config.json").read_text())["block_size"] == 5


def test_evaluate_and_generate(draft_dir, target_dir, data_file, tmp_path, capsys):
    pair = [str(target_dir), str(draft_dir)]
    output = tmp_path / "figures.json"
    options = ["--data", str(data_file), "--num_prompts", "2", "--max_new_tokens", "4", "--output", str(output)]
    assert main(["evaluate", *pair, *options]) == 0
    assert "| tau (tokens a round)" in capsys.readouterr().out
    figures = json.loads(output.read_text())
    assert figures["equal_to_greedy"] is True and len(figures["answers"]) == 2

    assert main(["generate", *pair, "hello there", "--max_new_tokens", "6"]) == 0
    assert "tokens/s]" in capsys.readouterr().out


def test_regenerate_writes_rows_to_train_on(target_dir, data_file, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    command = ["regenerate", str(target_dir), str(data_file), str(output), "--max_new_tokens", "4"]
    assert main(command) == 0
    assert "8 answers written" in capsys.readouterr().out
    assert main(command) == 0
    assert "0 answers written" in capsys.readouterr().out
    assert len(output.read_text().splitlines()) == 8
