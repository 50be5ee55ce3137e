"""`blockdraft export`."""

import pytest
from safetensors import safe_open

from blockdraft.trainer.cli.main import main


@pytest.mark.parametrize("draft_type", ["dspark"], scope="session", indirect=True)
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
