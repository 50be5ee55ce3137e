"""Files appear whole or not at all."""

import pytest

from blockdraft.modeling.atomic_save import staged_directory


def test_files_are_moved_and_others_stay(tmp_path):
    (tmp_path / "kept").write_text("old")
    (tmp_path / "replaced").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other").write_text("old")
    with staged_directory(tmp_path) as staging:
        (staging / "replaced").write_text("new")
        (staging / "folder").mkdir()
        (staging / "folder" / "inside").write_text("new")
        assert (tmp_path / "replaced").read_text() == "old"
    files = {file.name: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    assert files == {"kept": "old", "replaced": "new", "inside": "new", "other": "old"}


def test_an_exception_moves_nothing(tmp_path):
    with pytest.raises(OSError, match="No space"), staged_directory(tmp_path / "new") as staging:
        (staging / "config.json").write_text("{")
        raise OSError("No space left on device")
    assert list((tmp_path / "new").iterdir()) == []


def test_the_config_is_moved_last(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr("os.replace", lambda source, target: moved.append(target.name))
    with staged_directory(tmp_path) as staging:
        for name in ("config.json", "model.safetensors", "a.py"):
            (staging / name).write_text("")
    assert moved == ["a.py", "model.safetensors", "config.json"]
