"""`blockdraft train`: what is saved, resumed, refused and left alone."""

import json

import pytest
import yaml
from cli_runs import SHAPES, TINY_TRAINING

from blockdraft.modeling.decoding import rollback
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3Model
from blockdraft.trainer.cli.arguments import DataArguments
from blockdraft.trainer.cli.main import main
from blockdraft.trainer.data.rendering import THINKING_TAGS


def test_train_saves_a_draft_that_loads_and_is_described(draft_dir):
    names = {path.name for path in draft_dir.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "checkpoint-1", "checkpoint-2", "tokenizer.json"} <= names
    config = json.loads((draft_dir / "config.json").read_text())
    assert (config["block_size"], config["num_hidden_layers"], config["target_layer_ids"]) == (4, 1, [1, 3])
    assert config["training"]["global_step"] == 2 and config["training"]["answers"] == "those of the data"
    assert config["training"]["max_length"] == 4096 and (draft_dir / "training_args.json").is_file()
    assert "| held-out prompts |" in (draft_dir / "README.md").read_text()
    assert {"metrics.json", "acceptance.png"} <= names


def test_a_finished_draft_is_left_as_it_is(draft_type, own_run, target_dir, data_file, capsys):
    """Calibrated and measured after its training, its card edited by hand."""
    config_file, draft_dir = own_run
    pair, data = [str(target_dir), str(draft_dir)], ["--data", str(data_file), "--max_new_tokens", "12"]
    if draft_type == "dspark":
        assert main(["calibrate", *pair, *data, "--rounds", "8"]) == 0
    assert main(["evaluate", *pair, *data, "--num_prompts", "1", "--card", "chats"]) == 0
    with open(draft_dir / "README.md", "a") as card:
        card.write("\nMine.\n")
    before = {path.name: path.read_bytes() for path in draft_dir.iterdir() if path.is_file()}
    for more in ([], ["--eval_decode_prompts", "0"]):
        assert main(["train", str(config_file), *more]) == 0
        assert f"{draft_dir} is finished and is left as it is" in capsys.readouterr().out
        assert {path.name: path.read_bytes() for path in draft_dir.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
def test_a_run_that_ended_in_its_last_evaluation_is_finished_by_the_next(config_file, tmp_path, monkeypatch, capsys):
    """Also where the directory holds an earlier draft of as many steps."""
    command = ["train", str(config_file), "--output_dir", str(tmp_path)]

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    weights = set()
    for more in (["--learning_rate", "0.1"], ["--learning_rate", "0.2", "--overwrite_output_dir"]):
        with monkeypatch.context() as patch:
            patch.setattr("blockdraft.trainer.draft_trainer.DraftTrainer.decode", interrupt)
            assert main([*command, *more]) == 130
        capsys.readouterr()
        saved = {"config.json", "model.safetensors", "README.md", "tokenizer.json"}
        assert saved <= {path.name for path in tmp_path.iterdir()}
        assert main([*command, *more[:2]]) == 0
        assert f"{tmp_path / 'checkpoint-2'} has all of the 2 steps." in capsys.readouterr().out
        weights.add((tmp_path / "model.safetensors").read_bytes())
        assert (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes() in weights
    assert len(weights) == 2


@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
def test_what_ends_the_last_evaluation_leaves_the_draft(config_file, tmp_path, monkeypatch):
    command = ["train", str(config_file), "--output_dir", str(tmp_path)]

    def fail(*args, **kwargs):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("blockdraft.trainer.draft_trainer.DraftTrainer.decode", fail)
        with pytest.raises(MemoryError, match=r"no memory[\s\S]*saved in [\s\S]*`--eval_decode_prompts 0`"):
            main(command)
    weights = (tmp_path / "model.safetensors").read_bytes()
    assert main([*command, "--eval_decode_prompts", "0"]) == 0
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert "held-out prompts |" not in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
def test_what_cannot_be_decoded_is_told_before_the_first_step(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rollback, "stuck_layers", lambda cache: cache.layers)
    monkeypatch.setattr(rollback, "cannot_be_copied", lambda layer: True)
    command = ["train", str(config_file), "--output_dir", str(tmp_path)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "neither `crop` nor a copy" in error and "`--eval_decode_prompts 0` trains without it" in error
    assert not list(tmp_path.iterdir())
    assert main([*command, "--eval_decode_prompts", "0"]) == 0


def test_the_same_command_resumes(own_run, capsys):
    config_file, draft_dir = own_run
    figures = ("report.json", "report.md", "round_time.png", "metrics.json", "acceptance.png")
    assert all((draft_dir / name).is_file() for name in figures)
    assert main(["train", str(config_file), "--max_steps", "3", "--eval_decode_prompts", "0"]) == 0
    assert f"Resuming from {draft_dir / 'checkpoint-2'}, 1 of 3 steps to go." in capsys.readouterr().out
    assert (draft_dir / "checkpoint-3").is_dir()
    assert not any((draft_dir / name).exists() for name in figures)  # they were those of step 2


def test_another_draft_is_not_put_into_a_run(own_run, capsys):
    config_file, draft_dir = own_run
    assert main(["train", str(config_file), "--block_size", "5"]) == 2
    assert "`block_size` is 5, but" in capsys.readouterr().err
    other = draft_dir.parent / "other"
    again = ["train", str(config_file), "--output_dir", str(other), "--eval_decode_prompts", "0", "--max_steps", "1"]
    assert main([*again, "--save_strategy", "no"]) == 0
    assert main([*again, "--save_strategy", "no", "--max_steps", "2"]) == 2
    assert "holds a model and no checkpoint" in capsys.readouterr().err
    assert main([*again, "--block_size", "5", "--overwrite_output_dir"]) == 0
    assert json.loads((other / "config.json").read_text())["block_size"] == 5


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--learning_rate", "0.5"], "`learning_rate` was 0.0006, now 0.5"),
        (["--seed", "1"], "`seed` was 42, now 1"),
        (["--max_length", "26"], "`max_length` was 4096, now 26"),
        (["--eval_fraction", "0.5"], "rows to train on are others (6 then, 4 now)"),
        (["--max_steps", "1"], "it has taken 2 steps, and this one ends after 1"),
    ],
)
@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
def test_another_run_is_not_taken_for_finished(own_run, capsys, changed, named):
    config_file, draft_dir = own_run
    before = {path.name: path.read_bytes() for path in draft_dir.iterdir() if path.is_file()}
    for state in ("finished", "interrupted"):
        assert main(["train", str(config_file), *changed]) == 2, state
        error = capsys.readouterr().err
        assert "holds another run: " in error and named in error, state
        assert {path.name: path.read_bytes() for path in draft_dir.iterdir() if path.is_file()} == before
        (draft_dir / "trainer_state.json").unlink(missing_ok=True)  # what ends a run
        before.pop("trainer_state.json", None)


def test_a_question_of_scripts_is_no_setting(config_file, capsys):
    assert main(["train", str(config_file), "--do_eval"]) == 2
    assert "set `eval_strategy`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "rank", "head"),
    [({}, 8, True), ({"confidence_head_alpha": 0}, 8, False), ({"markov_rank": 0}, None, False)],
)
@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
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


@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
def test_a_streamed_mixed_and_packed_run_is_resumed(draft_type, target_dir, data_file, tmp_path, capsys):
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
@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
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


def test_an_adapter_is_trained_and_evaluated(draft_dir, target_dir, data_file, tmp_path, capsys):
    output_dir = tmp_path / "adapter"
    settings = TINY_TRAINING | {"target": target_dir, "train_data": data_file, "eval_fraction": 0.25}
    settings |= {"draft": draft_dir, "output_dir": output_dir, "lora_r": 2, "use_dora": True}
    command = ["train", *(f"--{name}={value}" for name, value in settings.items())]
    assert main(command) == 0
    assert main(command) == 0
    assert "is finished and is left as it is" in capsys.readouterr().out
    config = json.loads((output_dir / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (2, 2, True)
    assert config["base_model_name_or_path"] == str(draft_dir)
    assert not {"config.json", "model.safetensors", "tokenizer.json"} & {file.name for file in output_dir.iterdir()}
    evaluation = ["evaluate", str(target_dir), str(output_dir), "--data", str(data_file), "--num_prompts", "1"]
    assert main([*evaluation, "--max_new_tokens", "4"]) == 0
    assert main([*command, "--lora_r=3"]) == 2
    assert "`r` is 3" in capsys.readouterr().err


def test_the_thinking_tags_of_the_help_are_among_the_default():
    assert f"as {' '.join(THINKING_TAGS[0])})" in DataArguments.__dataclass_fields__["thinking_tags"].metadata["help"]


@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
def test_a_fault_in_training_shows_where_it_is(config_file, tmp_path, monkeypatch):
    """A `ValueError` of a library at work is no wrong input."""

    def broken(*args, **kwargs):
        raise ValueError("this is a fault")

    monkeypatch.setattr(KimiK3ForCausalLM, "forward", broken)
    monkeypatch.setattr(KimiK3Model, "forward", broken)
    with pytest.raises(ValueError, match="this is a fault"):
        main(["train", str(config_file), "--output_dir", str(tmp_path)])
