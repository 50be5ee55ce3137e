"""`blockdraft evaluate`."""

import json
import shutil

import pytest
import torch

from blockdraft.trainer.cli.arguments import SamplingArguments, TargetArguments
from blockdraft.trainer.cli.main import main
from blockdraft.trainer.cli.opening import open_pair
from blockdraft.trainer.evaluation.decoding import main_dtype


def test_evaluate_prints_and_writes_figures(draft_dir, target_dir, data_file, tmp_path, capsys):
    pair = [str(target_dir), str(draft_dir)]
    output = tmp_path / "figures.json"
    options = ["--data", str(data_file), "--num_prompts", "2", "--max_new_tokens", "4", "--output", str(output)]
    assert main(["evaluate", *pair, *options]) == 0
    table = capsys.readouterr().out
    assert "| tau (tokens a round)" in table and "| tau at temperature 1 " in table
    figures = json.loads(output.read_text())
    assert figures["equal_to_greedy"] is True and len(figures["answers"]) == 2
    assert figures["dtype"] == figures["draft_dtype"] == "float32"
    assert figures["at_temperature_1"]["decoding"] == "sampling temperature 1"


def test_evaluate_measures_what_is_asked_for(draft_dir, target_dir, data_file, tmp_path):
    """Sampled as it will be served, in another dtype, without the slow baselines; figures at temperature 1 have a row
    of their own in the card."""
    draft, output = shutil.copytree(draft_dir, tmp_path / "draft"), tmp_path / "figures.json"
    settings = ["--temperature", "0.8", "--top_p", "0.9", "--top_k", "20", "--seed", "3", "--block_size", "2"]
    settings += ["--draft_dtype", "bfloat16", "--skip_baselines", "--num_prompts", "2", "--max_new_tokens", "4"]
    command = ["evaluate", str(target_dir), str(draft), "--data", str(data_file), "--output", str(output), *settings]
    assert main([*command, "--card", "prompts"]) == 0
    figures = json.loads(output.read_text())
    assert figures["decoding"] == "sampling temperature 0.8 top_k 20 top_p 0.9" and figures["block_size"] == 2
    assert (figures["dtype"], figures["draft_dtype"]) == ("float32", "bfloat16")
    assert figures["plain_tokens_per_second"] == {} and figures["metrics"]["speedup"] is None
    answers = [answer["tokens"] for answer in figures["answers"]]
    assert main(command) == 0
    assert [answer["tokens"] for answer in json.loads(output.read_text())["answers"]] == answers
    results = json.loads((draft / "metrics.json").read_text())["prompts"]
    assert [result["protocol"]["decoding"] for result in results] == [figures["decoding"], "sampling temperature 1"]
    assert "float32, draft bfloat16" in (draft / "README.md").read_text()


def test_a_draft_has_the_targets_dtype_unless_another_is_asked_for(draft_dir, target_dir):
    args = TargetArguments(target=str(target_dir), target_dtype="bfloat16")
    for dtype, expected in ((None, torch.bfloat16), ("float32", torch.float32), ("auto", torch.float32)):
        target, _, draft = open_pair(args, str(draft_dir), dtype=dtype)
        assert (main_dtype(target), main_dtype(draft)) == (torch.bfloat16, expected)


def test_sampling_settings_leave_nothing_to_the_target():
    assert SamplingArguments().generation() == {"do_sample": False}
    sampled = SamplingArguments(temperature=1.0).generation()
    assert sampled == {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    with pytest.raises(ValueError, match="`top_k` is -1"):
        SamplingArguments(top_k=-1)


@pytest.mark.parametrize("command", ["evaluate", "doctor"])
def test_a_place_for_the_figures_is_looked_for_at_the_start(command, tmp_path, capsys):
    output = ["--output", str(tmp_path / "absent" / "figures.json")]
    assert main([command, "no-target", "no-draft", "--data", "no-data", *output]) == 2
    assert "`output`: " in (error := capsys.readouterr().err) and "not a folder that can be written to" in error
