"""`blockdraft regenerate`."""

from blockdraft.trainer.cli.main import main


def test_regenerate_writes_rows_to_train_on(target_dir, data_file, tmp_path, capsys):
    output = tmp_path / "answers.jsonl"
    command = ["regenerate", str(target_dir), str(data_file), str(output), "--max_new_tokens", "4"]
    assert main(command) == 0
    assert "8 answers written" in capsys.readouterr().out
    assert main(command) == 0
    assert "0 answers written" in capsys.readouterr().out
    assert len(output.read_text().splitlines()) == 8
