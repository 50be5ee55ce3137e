"""`blockdraft evaluate`."""

import json

from blockdraft.trainer.cli.main import main


def test_evaluate_prints_and_writes_figures(draft_dir, target_dir, data_file, tmp_path, capsys):
    pair = [str(target_dir), str(draft_dir)]
    output = tmp_path / "figures.json"
    options = ["--data", str(data_file), "--num_prompts", "2", "--max_new_tokens", "4", "--output", str(output)]
    assert main(["evaluate", *pair, *options]) == 0
    assert "| tau (tokens a round)" in capsys.readouterr().out
    figures = json.loads(output.read_text())
    assert figures["equal_to_greedy"] is True and len(figures["answers"]) == 2
