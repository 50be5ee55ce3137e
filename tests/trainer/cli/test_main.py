"""The `blockdraft` command on tiny random targets of both families: settings, runs, resuming, errors."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from chat_templates import CHATML
from decoding_models import tiny_k3
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.deepseek_v41.engram import compressed_token_map
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
from blockdraft.trainer.cli.arguments import SettingsParser, TargetArguments
from blockdraft.trainer.cli.main import COMMANDS, main
from blockdraft.trainer.training_args import DraftTrainingArguments

README = Path(__file__).parents[3] / "README.md"
TINY_V41 = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.3,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 2, 1, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "candidate_source_layer_id": -1,
    "rope_scaling": {},
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [1000],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 64,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 4,
    "dspark_target_layer_ids": [1, 3],
    "dspark_markov_rank": 8,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
SHAPES = {
    "dflash": {"num_draft_layers": 1, "block_size": 4, "target_layer_ids": [1, 3]},
    "dspark": {"draft_type": "dspark"},  # the rest is what the target says
}
TINY_TRAINING = {
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


@pytest.fixture(scope="module", params=SHAPES)
def draft_type(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def target_dir(draft_type, tmp_path_factory, chatml_backend) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(chatml_backend), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    special |= {"vocab_size": len(tokenizer) + 2}
    if draft_type == "dflash":
        model = KimiK3ForCausalLM(KimiK3TextConfig(**(tiny_k3().config.to_dict() | special)))
    else:
        special |= {
            "engram_pad_token_id": tokenizer.pad_token_id,
            "engram_compressed_vocab_size": int(compressed_token_map(tokenizer).max()) + 1,
            "dspark_noise_token_id": len(tokenizer),
        }
        model = DeepseekV41ForCausalLM(DeepseekV41TextConfig(**(TINY_V41 | special)))
        model.set_tokenizer(tokenizer)
    model.save_pretrained(folder)
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
def config_file(draft_type, tmp_path_factory, target_dir, data_file) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = (
        TINY_TRAINING
        | SHAPES[draft_type]
        | {
            "target": str(target_dir),
            "train_data": str(data_file),
            "eval_fraction": 0.25,
            "output_dir": str(folder / "draft"),
        }
    )
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
        assert all(f"--{name}" in out for name in command.positionals)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["trian"],
            "'trian' is not a command; choose one of train, regenerate, calibrate, evaluate,",
        ),
        (["train", "{tmp}/no.yaml"], "cannot read {tmp}/no.yaml: No such file or directory"),
        (["train", "{yaml}"], "`learning_rat` in {yaml} is not a setting; the nearest one is `learning_rate`."),
        (["train", "--targt", "x"], "--targt is not a setting; the nearest one is `target`."),
        (["train", "--target", "x"], "the following arguments are required: --train_data/--train-data"),
        (
            ["train", "--target", "x", "--train_data", "y", "--num_anchors", "0"],
            "`num_anchors` is 0: it must be positive.",
        ),
        (["train", "--target", "x", "--train_data", "y", "--license", "other"], "`license_name` is missing"),
        (["train", "--target", "x", "--train_data", "y", "--datasets", "a.jsonl"], "`datasets` has 'a.jsonl'"),
        (["generate", "{tmp}/t", "d", "hi"], "`target`: there is no directory {tmp}/t"),
        (["train", "--target", "{target}", "--train_data", "{tmp}/no.jsonl"], "data: there is no file {tmp}/no.jsonl"),
        (
            ["train", "--target", "t", "--train_data", "y", "--draft", "d", "--block_size", "4"],
            "leave out block_size.",
        ),
        (["evaluate", "t", "d", "--data", "x", "--template_kwargs", "{{"], "`template_kwargs` is not valid JSON"),
        (["train", "--target", "t", "--train_data", "y", "--lora_r", "4"], "name it as `draft`."),
        (["train", "--target", "t", "--train_data", "y", "--use_dora"], "`use_dora` belongs to an adapter"),
        (
            ["train", "--target", "t", "--train_data", "y", "--draft_type", "dspork"],
            "`draft_type` is 'dspork'; choose one of dflash, dspark.",
        ),
        (
            ["train", "--target", "t", "--train_data", "y", "--markov_rank", "8"],
            "`markov_rank` belongs to `draft_type` dspark; this draft is a dflash.",
        ),
        (
            ["train", "--target", "t", "--train_data", "y", "--draft_type", "dspark", "--is_causal", "true"],
            "`is_causal` belongs to `draft_type` dflash",
        ),
        (["generate", "t", "d", "hi", "--confidence_threshold", "2"], "`confidence_threshold` is 2.0: it must lie"),
        (
            ["evaluate", "t", "d", "--data", "x", "--confidence_threshold", "0.5", "--confidence_cost_table", "true"],
            "are two ways to cut: give one.",
        ),
        (["evaluate", "t", "no/draft", "--data", "x", "--card", "c"], "`draft` is 'no/draft', give its directory."),
        (["evaluate", "t", "d", "--data", "x", "--card", "c", "--benchmark_task", "tau"], "and `card` is 'c'"),
        (["calibrate", "t", "no/draft", "--data", "x"], "`draft` is 'no/draft': give a directory"),
        (
            ["train", "--target", "t", "--train_data", "y", "--data_mix", "0.5", "0.5"],
            "`data_mix` has 2 shares for 1 sources in `train_data`.",
        ),
        (["train", "--target", "t", "--train_data", "y", "--streaming"], "`streaming` holds no rows out: give `eval"),
        (
            ["train", "--target", "{target}", "--train_data", "y", "--streaming", "--eval_data", "y"],
            "`streaming` data has no length: set `max_steps`.",
        ),
        (["export", "d"], "Give the folder to write, `output`, or the target's, `into`."),
        (["export", "d", "o", "--format", "gguf"], "`format` is 'gguf'; the one there is is deepseek."),
        (["export", "d", "o", "--for", "llama.cpp"], "`for` is 'llama.cpp'; choose vllm or sglang."),
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
    assert config["training"]["global_step"] == 2 and config["training"]["answers"] == "those of the data"
    assert "| held-out prompts |" in (draft_dir / "README.md").read_text()
    assert {"metrics.json", "acceptance.png"} <= names


def test_a_finished_draft_stays_as_it_is(draft_type, draft_dir, config_file, target_dir, data_file, capsys):
    """Calibrated and measured after its training, its card edited by hand."""
    pair, data = [str(target_dir), str(draft_dir)], ["--data", str(data_file), "--max_new_tokens", "12"]
    if draft_type == "dspark":
        assert main(["calibrate", *pair, *data, "--rounds", "8"]) == 0
    assert main(["evaluate", *pair, *data, "--num_prompts", "1", "--card", "chats"]) == 0
    with open(draft_dir / "README.md", "a") as card:
        card.write("\nMine.\n")
    before = {path.name: path.read_bytes() for path in draft_dir.iterdir() if path.is_file()}
    for more in ([], ["--eval_decode_prompts", "0"]):
        assert main(["train", str(config_file), *more]) == 0
        assert f"{draft_dir} is finished and stays as it is" in capsys.readouterr().out
        assert {path.name: path.read_bytes() for path in draft_dir.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("draft_type", ["dflash"], scope="module", indirect=True)
def test_a_run_that_ended_in_its_last_evaluation_is_finished_by_the_next(config_file, tmp_path, monkeypatch, capsys):
    """Also where the directory holds an earlier draft of as many steps."""
    command = ["train", str(config_file), "--output_dir", str(tmp_path)]

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    weights = set()
    for more in (["--learning_rate", "0.1"], ["--learning_rate", "0.2", "--overwrite_output_dir"]):
        with monkeypatch.context() as patch:
            patch.setattr("blockdraft.trainer.cli.main.evaluate_decoding", interrupt)
            assert main([*command, *more]) == 130
        capsys.readouterr()
        assert main([*command, *more[:2]]) == 0
        assert f"{tmp_path / 'checkpoint-2'} has all of 2 steps." in capsys.readouterr().out
        weights.add((tmp_path / "model.safetensors").read_bytes())
        assert (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes() in weights
    assert len(weights) == 2


def test_the_same_command_goes_on(draft_dir, config_file, capsys):
    figures = ("report.json", "report.md", "round_time.png", "metrics.json", "acceptance.png")
    assert all((draft_dir / name).is_file() for name in figures)
    assert main(["train", str(config_file), "--max_steps", "3", "--eval_decode_prompts", "0"]) == 0
    assert f"Going on from {draft_dir / 'checkpoint-2'}, 1 of 3 steps to go." in capsys.readouterr().out
    assert (draft_dir / "checkpoint-3").is_dir()
    assert not any((draft_dir / name).exists() for name in figures)  # they were those of step 2


def test_another_draft_is_not_put_into_a_run(draft_dir, config_file, capsys):
    assert main(["train", str(config_file), "--block_size", "5"]) == 2
    assert "`block_size` is 5, but" in capsys.readouterr().err
    other = draft_dir.parent / "other"
    again = ["train", str(config_file), "--output_dir", str(other), "--eval_decode_prompts", "0", "--max_steps", "1"]
    assert main([*again, "--save_strategy", "no"]) == 0
    assert main([*again, "--save_strategy", "no", "--max_steps", "2"]) == 2
    assert "holds a model and no checkpoint" in capsys.readouterr().err
    assert main([*again, "--block_size", "5", "--overwrite_output_dir"]) == 0
    assert json.loads((other / "config.json").read_text())["block_size"] == 5


@pytest.mark.parametrize("draft_type", ["dspark"], scope="module", indirect=True)
def test_calibrate_writes_temperatures_and_schedules_cut(draft_dir, target_dir, data_file, tmp_path, capsys):
    pair = [str(target_dir), str(draft_dir)]
    options = ["--data", str(data_file), "--max_new_tokens", "12", "--rounds", "8", "--output", str(tmp_path)]
    assert main(["calibrate", *pair, *options]) == 0
    assert "| ECE before" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"calibration.md", "calibration.json", "reliability.png"}
    temperatures = json.loads((draft_dir / "config.json").read_text())["confidence_temperatures"]
    assert len(temperatures) == 4 and all(temperature > 0 for temperature in temperatures)

    generate = ["generate", *pair, "hello there", "--max_new_tokens", "6"]
    assert main(generate) == 0
    uncut, _ = capsys.readouterr().out.rsplit("\n[", 1)
    for schedule in (["--confidence_threshold", "0.9"], ["--confidence_cost_table", "true"]):
        assert main([*generate, *schedule]) == 0
        assert capsys.readouterr().out.rsplit("\n[", 1)[0] == uncut
    options = ["--data", str(data_file), "--num_prompts", "1", "--max_new_tokens", "4"]
    assert main(["evaluate", *pair, *options, "--confidence_threshold", "1"]) == 0
    assert "threshold" in capsys.readouterr().out


@pytest.mark.parametrize("draft_type", ["dspark"], scope="module", indirect=True)
def test_export_writes_released_names(draft_dir, target_dir, tmp_path, capsys):
    assert main(["export", str(draft_dir), str(tmp_path / "own"), "--quantize", "true", "--for", "sglang"]) == 0
    done = capsys.readouterr()
    assert "warning: " in done.err and f"Written into {tmp_path / 'own'}." in done.out
    with safe_open(tmp_path / "own" / "mtp.safetensors", framework="pt") as file:
        assert all(name.startswith("mtp.0.") for name in file.keys())
        assert "mtp.0.ffn.experts.3.w1.scale" in file.keys()
    before = {path.name for path in target_dir.iterdir()}
    assert main(["export", str(draft_dir), "--into", str(target_dir)]) == 0
    added = {path.name for path in target_dir.iterdir()} - before
    assert added == {"mtp.safetensors", "model.safetensors.index.json"}
    for name in added:
        (target_dir / name).unlink()


@pytest.mark.parametrize(
    ("options", "rank", "head"),
    [({}, 8, True), ({"confidence_head_alpha": 0}, 8, False), ({"markov_rank": 0}, None, False)],
)
@pytest.mark.parametrize("draft_type", ["dflash"], scope="module", indirect=True)
def test_a_dspark_draft_for_a_target_of_another_family(options, rank, head, target_dir, data_file, tmp_path):
    settings = TINY_TRAINING | {"target": str(target_dir), "train_data": str(data_file), "max_steps": 1} | options
    settings |= {"draft_type": "dspark", "target_layer_ids": [1, 3], "num_draft_layers": 1, "eval_fraction": 0.25}
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(settings | {"output_dir": str(tmp_path / "draft")}))
    assert main(["train", str(path)]) == 0
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (config["model_type"], config["capture_point"]) == ("deepseek_v41_dspark", "layer_output")
    assert (config["markov_rank"], config["confidence_head"]) == (rank, head)
    assert main(["generate", str(target_dir), str(tmp_path / "draft"), "hello", "--max_new_tokens", "4"]) == 0


@pytest.mark.parametrize("draft_type", ["dflash"], scope="module", indirect=True)
def test_a_streamed_mixed_and_packed_run_goes_on(draft_type, target_dir, data_file, tmp_path, capsys):
    more = tmp_path / "more.jsonl"
    more.write_text(data_file.read_text().replace("hello", "there"))
    settings = TINY_TRAINING | {"target": str(target_dir), "train_data": [str(data_file), str(more)], "max_length": 64}
    settings |= {"data_mix": [1, 3], "packing": True, "output_dir": str(tmp_path / "draft")}
    settings |= {"target_layer_ids": [1, 3], "num_draft_layers": 1, "block_size": 4, "eval_decode_prompts": 0}
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(settings | {"streaming": True, "eval_data": str(data_file), "max_steps": 2}))
    assert main(["train", str(path)]) == 0
    assert "eval_data: 8 of 8 rows kept" in capsys.readouterr().out
    assert main(["train", str(path), "--max_steps", "3"]) == 0
    assert "1 of 3 steps to go." in capsys.readouterr().out
    path.write_text(yaml.safe_dump(settings | {"eval_fraction": 0.25, "max_steps": 1}))
    assert main(["train", str(path), "--output_dir", str(tmp_path / "set")]) == 0
    out = capsys.readouterr().out
    assert "train_data 1: 8 of 8 rows kept" in out and "4 rows of train_data are held out" in out


UNUSED_BUFFER = "`shuffle_buffer` is not used: without `streaming`"
UNUSED_FRACTION = "`eval_fraction` is not used: `eval_data`"
FOREIGN = ".jsonl are those of org/other: `blockdraft regenerate` wrote them with org/other, the target is "


@pytest.mark.parametrize(
    ("writer", "settings", "told"),
    [
        ("own", {"eval_fraction": 0.25}, []),
        ("own", {"eval_fraction": 0.25, "shuffle_buffer": 7}, [UNUSED_BUFFER]),
        ("own", {"streaming": True, "eval_data": "{data}", "shuffle_buffer": 7}, []),
        ("other", {"eval_fraction": 0.25, "eval_data": "{data}"}, [FOREIGN, UNUSED_FRACTION]),
        ("other", {"streaming": True, "eval_data": "{data}"}, [FOREIGN]),
    ],
)
@pytest.mark.parametrize("draft_type", ["dflash"], scope="module", indirect=True)
def test_what_is_unused_or_doubtful_in_the_data_is_told(
    writer, settings, told, target_dir, data_file, tmp_path, caplog
):
    """Settings that another one overrules; answers that another model wrote, on the card too."""
    answers, path = tmp_path / "answers.jsonl", tmp_path / "train.yaml"
    assert main(["regenerate", str(target_dir), str(data_file), str(answers), "--max_new_tokens", "4"]) == 0
    if writer == "other":
        provenance = tmp_path / "answers.jsonl.provenance.json"
        record = json.loads(provenance.read_text())
        record["settings"] |= {"target": "org/other", "weights_sha256": "0"}
        provenance.write_text(json.dumps(record))
    settings = {name: str(data_file) if value == "{data}" else value for name, value in settings.items()}
    settings |= TINY_TRAINING | SHAPES["dflash"] | {"max_steps": 1, "save_strategy": "no", "eval_decode_prompts": 0}
    settings |= {"target": str(target_dir), "train_data": str(answers), "output_dir": str(tmp_path / "draft")}
    path.write_text(yaml.safe_dump(settings))
    with caplog.at_level("WARNING", logger="blockdraft"):
        assert main(["train", str(path)]) == 0
    assert [message for message in (FOREIGN, UNUSED_BUFFER, UNUSED_FRACTION) if message in caplog.text] == told
    training = json.loads((tmp_path / "draft" / "config.json").read_text())["training"]
    assert training["answers"] == ("the target's own" if writer == "own" else "those of org/other")


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


def test_commands_of_the_readme_are_ones_that_there_are():
    lines = [line for line in README.read_text().splitlines() if re.match(r"(\.venv/bin/)?blockdraft ", line)]
    assert len(lines) > 6
    for line in lines:
        _, name, *argv = shlex.split(line.replace("examples/", f"{README.parent}/examples/"), comments=True)
        extra = ["--use_cpu", "true"] if name == "train" else []  # bf16 is refused without a GPU or this
        assert SettingsParser(COMMANDS[name].settings, COMMANDS[name].positionals).parse([*argv, *extra])


def test_an_adapter_is_trained_and_evaluated(draft_dir, target_dir, data_file, tmp_path, capsys):
    output_dir = tmp_path / "adapter"
    settings = TINY_TRAINING | {"target": target_dir, "train_data": data_file, "eval_fraction": 0.25}
    settings |= {"draft": draft_dir, "output_dir": output_dir, "lora_r": 2, "use_dora": True}
    command = ["train", *(f"--{name}={value}" for name, value in settings.items())]
    assert main(command) == 0
    assert main(command) == 0
    assert "is finished and stays as it is" in capsys.readouterr().out
    config = json.loads((output_dir / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (2, 2, True)
    assert config["base_model_name_or_path"] == str(draft_dir)
    assert not {"config.json", "model.safetensors", "tokenizer.json"} & {file.name for file in output_dir.iterdir()}
    evaluation = ["evaluate", str(target_dir), str(output_dir), "--data", str(data_file), "--num_prompts", "1"]
    assert main([*evaluation, "--max_new_tokens", "4"]) == 0
    assert main([*command, "--lora_r=3"]) == 2
    assert "`r` is 3" in capsys.readouterr().err
