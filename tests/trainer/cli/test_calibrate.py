"""`blockdraft calibrate`, and what its temperatures are for."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from blockdraft.trainer.cli.main import main


@pytest.mark.parametrize("draft_type", ["dspark"], scope="session", indirect=True)
def test_calibrate_writes_temperatures_and_schedules_cut(draft_dir, target_dir, data_file, tmp_path, capsys):
    draft = shutil.copytree(draft_dir, tmp_path / "draft")
    pair, figures = [str(target_dir), str(draft)], tmp_path / "figures"
    options = ["--data", str(data_file), "--max_new_tokens", "12", "--rounds", "8", "--output", str(figures)]
    assert main(["calibrate", *pair, *options]) == 0
    assert "| ECE before" in capsys.readouterr().out
    assert {path.name for path in figures.iterdir()} == {"calibration.md", "calibration.json", "reliability.png"}
    temperatures = json.loads((draft / "config.json").read_text())["confidence_temperatures"]
    assert len(temperatures) == 4 and all(temperature > 0 for temperature in temperatures)

    assert main(["calibrate", *pair, *options, "--max_new_tokens", "11"]) == 0
    assert f"The calibration in {figures} is replaced: `max_new_tokens` was 12, now 11." in capsys.readouterr().out
    other = shutil.copytree(draft, tmp_path / "other")
    config = (other / "config.json").read_bytes()
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    assert main(["calibrate", pair[0], str(other), *options]) == 2
    assert f"{figures} holds the calibration of another draft" in capsys.readouterr().err
    assert (other / "config.json").read_bytes() == config

    generate = ["generate", *pair, "hello there", "--max_new_tokens", "6"]
    assert main(generate) == 0
    uncut, _ = capsys.readouterr().out.rsplit("\n[", 1)
    for schedule in (["--confidence_threshold", "0.9"], ["--confidence_cost_table", "true"]):
        assert main([*generate, *schedule]) == 0
        assert capsys.readouterr().out.rsplit("\n[", 1)[0] == uncut
    options = ["--data", str(data_file), "--num_prompts", "1", "--max_new_tokens", "4"]
    assert main(["evaluate", *pair, *options, "--confidence_threshold", "1"]) == 0
    assert "threshold" in capsys.readouterr().out
