"""Several processes for a command: what accelerate's launcher is told, and the configurations that ship."""

import os
from pathlib import Path
from unittest import mock

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from draft_trainers import arguments
from torch.distributed.elastic.multiprocessing.api import SignalException

from blockdraft.trainer.cli.launch import ProcessArguments, launch, only_first_prints
from blockdraft.trainer.cli.main import main
from blockdraft.trainer.sharding import check_fsdp

CONFIGS = Path(__file__).parents[3] / "accelerate_configs"
NAMES = {"one_gpu", "many_gpus", "fsdp2", "zero2", "zero3", "many_nodes", "two_cpu_processes"}
TRAIN = ["train", "--target", "t", "--train_data", "rows.jsonl", "--output_dir", "run"]


@pytest.fixture
def started(monkeypatch) -> list:
    """What accelerate's launcher is called with, its defaults filled in."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    calls = []
    monkeypatch.setattr(
        "accelerate.commands.launch.launch_command", lambda args: calls.append(_validate_launch_command(args)[0])
    )
    return calls


def test_num_processes_starts_the_same_command_in_each(started):
    argv = [*TRAIN, "--num_processes", "2", "--bf16", "true"]
    assert main(argv) == 0
    [args] = started
    assert args.module and (args.training_script, args.training_script_args) == ("blockdraft", argv)
    assert args.multi_gpu and args.num_processes == 2 and prepare_multi_gpu_env(args)


def test_settings_come_from_a_file_too(started, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"target: t\ntrain_data: [rows.jsonl]\noutput_dir: run\naccelerate_config: {CONFIGS / 'fsdp2.yaml'}\n"
    )
    assert main(["train", str(tmp_path / "run.yaml"), "--num-processes", "4"]) == 0
    assert started[0].use_fsdp and started[0].num_processes == 4


def test_a_file_of_several_cpu_processes_starts_several(started, tmp_path):
    """accelerate starts one, in silence."""
    config = yaml.safe_load((CONFIGS / "two_cpu_processes.yaml").read_text()) | {"distributed_type": "MULTI_CPU"}
    (tmp_path / "cpus.yaml").write_text(yaml.dump(config))
    assert main([*TRAIN, "--accelerate_config", str(tmp_path / "cpus.yaml")]) == 0
    assert started[0].multi_gpu and started[0].num_processes == 2 and os.environ["ACCELERATE_USE_CPU"] == "true"


def test_one_process_of_several_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for name in ("ACCELERATE_DYNAMO_BACKEND", "MASTER_PORT"):
        arguments(tmp_path)
        monkeypatch.setenv(name, "29500")
    with pytest.raises(ValueError, match="has started one.*MULTI_CPU.*`blockdraft train --accelerate_config`"):
        arguments(tmp_path)


def test_wrong_input_is_told_once_and_before_anything_starts(started, tmp_path, capsys):
    (tmp_path / "no.yaml").write_text("target: t\n")
    for more, told in (
        (["--num_processes", "0"], "`num_processes` is 0"),
        (["--num_processes", "2", "--learning_rat", "1"], "the nearest one is `learning_rate`"),
        (["--num_processes", "2", "--max_steps", "many"], "max_steps"),
        (["--accelerate_config", str(tmp_path / "missing.yaml")], "`accelerate_config`"),
        (["--accelerate_config", str(tmp_path / "no.yaml")], "`accelerate_config`"),
    ):
        assert main([*TRAIN, *more]) == 2
        assert told in capsys.readouterr().err
    assert not started


def test_one_process_of_several_prints(monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with only_first_prints():
            print(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"


def test_a_signal_is_an_exit_code(monkeypatch):
    monkeypatch.setattr("accelerate.commands.launch.launch_command", mock.Mock(side_effect=SignalException("", 15)))
    assert launch(ProcessArguments(num_processes=2), TRAIN) == 143


@pytest.mark.parametrize("name", sorted(NAMES))
def test_configurations_are_what_they_say(name, monkeypatch):
    assert {path.stem for path in CONFIGS.iterdir()} == NAMES
    file = CONFIGS / f"{name}.yaml"
    assert load_config_from_file(str(file))
    argv = ["--config_file", str(file), "--module", "blockdraft", "train"]
    args = _validate_launch_command(launch_command_parser().parse_args(argv))[0]
    if name == "fsdp2":
        with mock.patch.dict(os.environ, prepare_multi_gpu_env(args)):
            plugin = FullyShardedDataParallelPlugin()
        check_fsdp(plugin)
        assert plugin.auto_wrap_policy is not None and not plugin.cpu_ram_efficient_loading
    elif name.startswith("zero"):
        assert args.use_deepspeed and args.zero_stage == int(name[-1])
    else:
        assert args.multi_gpu == (name != "one_gpu")
        assert (args.num_processes, args.num_machines) == {
            "one_gpu": (1, 1),
            "many_gpus": (8, 1),
            "many_nodes": (16, 2),
            "two_cpu_processes": (2, 1),
        }[name]
