"""`blockdraft import`."""

import json
from pathlib import Path

import torch
from deepseek_v41_dspark_models import tiny_dspark
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save_file

import blockdraft
from blockdraft.modeling.deepseek_v41.deepseek_v41_release import export_deepseek, read_weight_map
from blockdraft.trainer.cli.main import main
from blockdraft.trainer.loading import load_draft


def test_what_was_exported_is_imported_again(tmp_path, capsys):
    draft = tiny_dspark().bfloat16()
    export_deepseek(draft, tmp_path / "released")
    assert main(["import", str(tmp_path / "released"), str(tmp_path / "draft")]) == 0
    assert f"Saved in {tmp_path / 'draft'}." in capsys.readouterr().out
    imported, expected = load_draft(str(tmp_path / "draft")), blockdraft.load_deepseek(tmp_path / "released")
    for other in (expected, draft):
        state = other.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in imported.state_dict().items())
    assert imported.config.to_dict() | {"_name_or_path": ""} == draft.config.to_dict() | {
        "_name_or_path": "",
        "auto_map": imported.config.auto_map,
        "architectures": imported.config.architectures,
        "dtype": "bfloat16",
    }
    assert main(["import", str(tmp_path / "released"), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    assert load_file(tmp_path / "wide" / "model.safetensors")["mtp.0.attn.wq_a.weight"].dtype == torch.float32


def test_wrong_sources_are_named(tmp_path, capsys):
    for argv, says in {
        (str(tmp_path / "none"), "out"): "`source`: there is no directory",
        (str(tmp_path), str(tmp_path)): "choose another folder",
        (str(tmp_path), str(tmp_path / "out")): "has no safetensors files",
        (str(tmp_path), str(tmp_path / "out"), "--format", "gguf"): "invalid choice: 'gguf'",
    }.items():
        assert main(["import", *argv]) == 2
        assert says in capsys.readouterr().err


def test_only_what_holds_the_draft_is_fetched_from_the_hub(hub, tmp_path):
    """A released checkpoint is hundreds of gigabytes."""
    folder = tmp_path / "released"
    export_deepseek(tiny_dspark(), folder)
    save_file({"embed.weight": torch.zeros(1)}, folder / "model-1.safetensors")
    weight_map = {"embed.weight": "model-1.safetensors", **dict.fromkeys(read_weight_map(folder), "mtp.safetensors")}
    weight_map["embed.weight"] = "model-1.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    HfApi().create_repo("user/released")
    revision = HfApi().upload_folder(repo_id="user/released", folder_path=folder).oid
    HfApi().delete_file("mtp.safetensors", "user/released")
    command = ["import", "user/released", str(tmp_path / "draft")]
    assert main(command) == 2
    assert main([*command, "--source_revision", revision]) == 0
    assert load_draft(str(tmp_path / "draft")).config.block_size == 4
    assert not list(Path(constants.HF_HUB_CACHE).rglob("model-1.safetensors"))
