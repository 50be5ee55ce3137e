"""The `blockdraft` command: its table of commands, help, version, and what it makes of errors."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import blockdraft
from blockdraft.trainer.cli.main import COMMANDS, is_wrong_input, main
from blockdraft.trainer.cli.parser import SettingsParser
from blockdraft.trainer.data.provenance import read_settings
from blockdraft.trainer.training_settings import TrainingSettings

ROOT = Path(__file__).parents[3]
LIGHT = """
import sys
from blockdraft.trainer.cli.main import COMMANDS, main

HEAVY = ("torch", "transformers", "datasets", "matplotlib")

def imported(*argv):
    assert main(list(argv)) == 0
    return [name for name in HEAVY if name in sys.modules]

print(imported("--help"), imported("--version"), "huggingface_hub" in sys.modules, file=sys.stderr)
for name in COMMANDS:
    assert not imported(name, "--help"), imported(name, "--help")
assert not imported("train", "--help_all")
"""


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"]])
def test_a_reader_that_stops_early_is_no_error(monkeypatch, capsys, argv):
    unread, output = os.pipe()
    os.close(unread)
    with os.fdopen(output, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(argv) == 141
    assert capsys.readouterr().err == ""


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == main(["-h"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().out == out[: len(out) // 2]


def test_every_command_has_a_module_and_help(capsys):
    modules = {path.stem.replace("_", "-") for path in Path(main.__code__.co_filename).parent.glob("*.py")}
    assert modules - COMMANDS.keys() == {"--init--", "main", "arguments", "help", "launch", "opening", "parser"}
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: blockdraft {name} [CONFIG.yaml] ")
        assert all(
            f"--{setting} " in out
            for setting in import_module(f"blockdraft.trainer.cli.{name.replace('-', '_')}").POSITIONALS
        )


def test_help_and_version_import_nothing_that_takes_time():
    """What they cost in CPU-seconds, `benchmarks/startup.py` measures."""
    result = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == "[] [] False"
    assert f"blockdraft {blockdraft.__version__}" in result.stdout.splitlines()


def test_the_package_and_its_module_are_the_command():
    for module in ("blockdraft", "blockdraft.trainer.cli.main"):
        result = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (0, f"blockdraft {blockdraft.__version__}\n")
        assert subprocess.run([sys.executable, "-m", module, "trian"], capture_output=True).returncode == 2
    result = subprocess.run([sys.executable, "-m", "blockdraft.trainer.cli"], capture_output=True)
    assert result.returncode == 1  # a package that cannot be run says so


@pytest.mark.parametrize("draft_type", ["dflash"], scope="session", indirect=True)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["trian"],
            "'trian' is not a command; choose one of train, regenerate, cache-features, calibrate,",
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
        (["evaluate", "t", "d", "--data", "x", "--template_kwargs", "{{"], "--template-kwargs: not valid JSON"),
        (["generate", "t", "d", "hi", "--template_kwargs", "[1]"], "must be a JSON object, not a list."),
        (
            ["generate", "t", "d", "hi", "--target_dtype", "half"],
            "--target-dtype: invalid choice: 'half' (choose from ",
        ),
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
            ["train", "--target", "t", "--train_data", "y", "--draft_type", "dspark"]
            + ["--num_full_attention_layers", "1"],
            "`num_full_attention_layers` belongs to `draft_type` dflash; this draft is a dspark.",
        ),
        (
            ["train", "--target", "{target}", "--train_data", "{data}", "--draft_type", "dspark"]
            + ["--is_causal", "true", "--use_cpu"],
            "`is_causal` is True: the slots of a DSpark block see each other in both directions",
        ),
        (["generate", "t", "d", "hi", "--confidence_threshold", "2"], "`confidence_threshold` is 2.0: it must lie"),
        (
            ["evaluate", "t", "d", "--data", "x", "--confidence_threshold", "0.5", "--confidence_cost_table", "true"],
            "exclude each other: give one.",
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
        (["generate", "t", "d", "hi", "--temperature", "-1"], "`temperature` is -1.0: it must not be negative."),
        (["calibrate", "t", "d", "--data", "x", "--top_p", "0"], "`top_p` is 0.0: it must lie above 0"),
        (["generate", "{tmp}", "d", "hi"], "tokenizer"),  # none in there: refused by transformers
        (["export", "d"], "Give the folder to write, `output`, or the target's, `into`."),
        (["export", "d", "o", "--format", "gguf"], "--format: invalid choice: 'gguf' (choose from "),
        (["export", "d", "o", "--for", "gguf"], "--for: invalid choice: 'gguf' (choose from "),
    ],
)
def test_wrong_input_is_one_line(argv, message, tmp_path, target_dir, data_file, capsys):
    path = tmp_path / "train.yaml"
    path.write_text("target: x\nlearning_rat: 1\n")
    places = {"tmp": tmp_path, "yaml": path, "target": target_dir, "data": data_file}
    assert main([text.format(**places) for text in argv]) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ") and message.format(**places) in last


class Refuses(torch.nn.Module):
    def forward(self):
        raise ValueError("refused")


class RefusesByOurs(torch.nn.Module):
    def forward(self):
        TrainingSettings(num_anchors=0).check_settings()


@pytest.mark.parametrize(
    ("cause", "wrong"),
    [
        (lambda: TrainingSettings(num_anchors=0).check_settings(), True),
        (lambda: RefusesByOurs()(), True),  # of ours, wherever
        (lambda: SettingsParser([TrainingSettings]).parse(["no.yaml"]), True),
        (lambda: read_settings(Path("no/file.json")), True),  # raised in the standard library, called by ours
        (lambda: import_module("transformers").AutoConfig.for_model("kimi_k4"), True),
        (lambda: import_module("huggingface_hub").hf_hub_download("owner/none", "x", local_files_only=True), True),
        (lambda: blockdraft.KimiK3TextConfig(hidden_size="wide"), True),
        (lambda: Refuses()(), False),
        (lambda: torch.zeros(2).reshape(3), False),
        (lambda: {}["missing"], False),
        (lambda: int("three"), False),  # neither ours nor a library's that opens what it is given
    ],
)
def test_wrong_input_is_told_from_faults(cause, wrong):
    with pytest.raises(Exception) as caught:
        cause()
    assert is_wrong_input(caught.value) is wrong


def test_a_switch_shows_the_traceback_of_wrong_input(monkeypatch, capsys):
    monkeypatch.setenv("BLOCKDRAFT_DEBUG", "1")
    with pytest.raises(ValueError, match="'trian' is not a command"):
        main(["trian"])
    monkeypatch.delenv("BLOCKDRAFT_DEBUG")
    assert main(["trian"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_commands_in_readme_and_docs_are_ones_that_there_are():
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    lines = [line for text in texts for line in text.splitlines() if re.match(r"(\.venv/bin/)?blockdraft ", line)]
    assert len(lines) > 15
    for line in lines:
        _, name, *argv = shlex.split(line.replace("examples/", f"{ROOT}/examples/"), comments=True)
        # bf16 is refused without a GPU or this.
        extra = ["--use_cpu", "true"] if name in ("train", "cache-features") else []
        command = import_module(f"blockdraft.trainer.cli.{name.replace('-', '_')}")
        assert SettingsParser(command.SETTINGS.values(), command.POSITIONALS).parse([*argv, *extra])
