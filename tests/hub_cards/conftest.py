"""Directories to publish."""

import json
import shutil
from pathlib import Path

import pytest
from draft_models import tiny_draft

from blockdraft.hub_cards.card import write_card


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory) -> Path:
    """A draft's directory as it may be on a disk, with files that are nobody's business."""
    directory = tmp_path_factory.mktemp("drafts") / "saved"
    draft = tiny_draft()
    draft.save_pretrained(directory)
    write_card(directory, draft.config)
    private = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "notes.py", ".env", "data.jsonl")
    for name in private:
        (directory / name).write_bytes(b"private")
    for name in ("trainer_state.json", "tokenizer.json", "report.json", "acceptance.png"):
        (directory / name).write_text("{}")
    for name in ("custom_generate/generate.py", "checkpoint-1/optimizer.pt", "runs/events"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("")
    return directory


@pytest.fixture
def saved(saved_once, tmp_path) -> Path:
    """A copy, to change."""
    return Path(shutil.copytree(saved_once, tmp_path / "saved"))


@pytest.fixture
def adapter(tmp_path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "user/draft"}))
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        (directory / name).write_text(name)
    (directory / "README.md").write_text("---\nlicense: mit\n---\n")
    return directory
