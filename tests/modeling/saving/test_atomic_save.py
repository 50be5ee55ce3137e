"""Files appear whole or not at all."""

import os
from pathlib import Path

import pytest

from blockdraft.modeling.saving.atomic_save import staged_directory


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


class Windows:
    """`os` where directories cannot be opened, and files are synced through descriptors that may write."""

    name = "nt"

    def __init__(self):
        self.flags = {}

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        descriptor = os.open(path, flags)
        self.flags[descriptor] = flags
        return descriptor

    def fsync(self, descriptor):
        if not self.flags[descriptor] & (os.O_RDWR | os.O_WRONLY):
            raise OSError(9, "Bad file descriptor")


def test_files_are_synced_on_windows(tmp_path, monkeypatch):
    windows = Windows()
    monkeypatch.setattr("blockdraft.modeling.saving.atomic_save.os", windows)
    with staged_directory(tmp_path / "new") as staging:
        (staging / "folder").mkdir()
        for name in ("config.json", "folder/inside"):
            (staging / name).write_text(name)
    assert (tmp_path / "new/folder/inside").read_text() == "folder/inside" and windows.flags
