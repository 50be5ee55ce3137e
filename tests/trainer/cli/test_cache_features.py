"""`blockdraft cache-features`, and `train` on what it wrote."""

import json

import yaml
from transformers import AutoConfig

from blockdraft.trainer.cli.main import main


def test_train_reads_what_it_wrote(config_file, target_dir, tmp_path, capsys):
    """With the target's layers out of reach."""
    features, output = tmp_path / "features", tmp_path / "draft"
    settings = [str(config_file), "--features", str(features), "--output_dir", str(output)]
    assert main(["cache-features", *settings]) == 0
    out = capsys.readouterr().out
    assert " GB to write (8 rows, " in out and f"The features of all rows are in {features}." in out
    manifest = json.loads((features / "manifest.json").read_text())
    assert manifest["complete"] and manifest["rows"] == 8 and manifest["chat_template_sha256"]
    assert not list(output.iterdir())

    assert main(["train", *settings]) == 2
    assert "`eval_decode_prompts` is 1: with `features` the target is not loaded" in capsys.readouterr().err
    assert main(["train", *settings, "--eval_decode_prompts", "0"]) == 0
    record = AutoConfig.from_pretrained(output).target
    assert record == manifest["target"] and record["weights_sha256"]

    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(yaml.safe_load(config_file.read_text()) | {"target_layer_ids": [0, 2]}))
    assert main(["train", str(other), *settings[1:], "--eval_decode_prompts", "0"]) == 2
    assert "`target_layer_ids`: [1, 3] there, [0, 2] here" in capsys.readouterr().err


def test_a_folder_must_be_named(config_file, capsys):
    assert main(["cache-features", str(config_file)]) == 2
    assert "`features` is missing" in capsys.readouterr().err


def test_with_an_engines_files_the_target_is_not_loaded(config_file, draft_type, tmp_path, capsys, monkeypatch):
    """What V4.1's draft reads is not in them."""
    monkeypatch.setattr("blockdraft.trainer.loading.load_decoded", None)  # which loads layers
    (tmp_path / "served").mkdir()
    settings = [str(config_file), "--features", str(tmp_path / "features"), "--output_dir", str(tmp_path / "draft")]
    served = ["--served_features", str(tmp_path / "served"), "--served_layer_ids", "2", "4"]
    assert main(["cache-features", *settings, *served]) == 2
    err = capsys.readouterr().err
    if draft_type == "dspark":
        assert "`target_layer_ids` has [1], layers with an Engram" in err
    else:
        assert "0 of 8 rows have states in" in err and "8 have none: rows " in err
