"""What a run needs at its end is tried before its first step."""

import shutil
from collections import namedtuple

import pytest
import torch
from any_targets import HYBRIDS, STARTING_ANEW, build
from datasets import Dataset
from decoding_models import build_draft
from draft_trainers import make_rows, make_trainer, weights

from blockdraft.trainer import trial
from blockdraft.trainer.draft_trainer import DraftTrainer

Usage = namedtuple("Usage", "total used free")
DECODES = {"eval_decode_prompts": 1, "eval_max_new_tokens": 8}


def trainer_of(target, output_dir, **arguments) -> DraftTrainer:
    args = make_trainer(output_dir, **arguments).args
    return DraftTrainer(
        build_draft(target, block_size=4, target_layer_ids=[0, 2]),
        target,
        args,
        train_dataset=make_rows(),
        eval_dataset=make_rows(),
    )


def test_a_target_that_cannot_be_decoded_is_told_before_the_first_step(tmp_path):
    trainer = trainer_of(build(STARTING_ANEW["mamba"]), tmp_path, **DECODES)
    before = weights(trainer)
    with pytest.raises(ValueError, match=r"start anew[\s\S]*`--eval_decode_prompts 0` trains without"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    trainer = trainer_of(build(STARTING_ANEW["mamba"]), tmp_path)
    trainer.train()
    trainer.save_model()
    assert trainer.state.global_step == 2 and (tmp_path / "model.safetensors").is_file()


def test_a_hybrid_is_trained_and_decoded(tmp_path):
    trainer = trainer_of(build(HYBRIDS["qwen3_5"]), tmp_path, **DECODES)
    trainer.train()
    assert trainer.evaluate()["eval_tau"] >= 1


@pytest.mark.parametrize("sets", ["one", "named"])
def test_rows_without_a_prompt_are_told_before_the_first_step(tmp_path, sets):
    """Also where only one of several sets has none."""
    trainer = make_trainer(tmp_path, **DECODES)
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "row_id": 0}])
    trainer.eval_dataset = rows if sets == "one" else {"good": make_rows(), "bad": rows}
    with pytest.raises(ValueError, match=r"tokens before an answer[\s\S]*`--eval_decode_prompts 0`"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_trial_changes_nothing(tmp_path):
    runs = []
    for arguments in ({}, DECODES):
        trainer = make_trainer(tmp_path, **arguments)
        trainer.model.train()
        torch.manual_seed(3)
        trial.try_ending(trainer)
        assert trainer.model.training
        runs.append((torch.rand(4), [tensor for _, tensor in sorted(weights(trainer).items())]))
        assert not list(tmp_path.iterdir())
    (first, first_weights), (second, second_weights) = runs
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4)) and torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(first_weights, second_weights, strict=True))


@pytest.mark.parametrize(
    ("free", "settings", "told"),
    [
        (0.9, {}, r"has .* GB free; the draft takes [\d.e-]+ GB\. Free some"),
        (1.1, {}, None),
        (2.9, {"save_strategy": "steps", "save_steps": 1}, "a checkpoint .* at least"),
        (
            1.9,
            {"save_strategy": "epoch", "save_only_model": True},
            "a checkpoint .* at least",
        ),
        (3.1, {"save_strategy": "steps", "save_steps": 1}, "and 2 checkpoints of at least"),
        (3.1, {"save_strategy": "steps", "save_steps": 0.5}, "and 2 checkpoints of at least"),
        (3.1, {"save_strategy": "steps", "save_steps": 2}, None),
        (3.1, {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 3}, "and 3 checkpoints of at least"),
        (5.1, {"save_strategy": "steps", "save_steps": 1, "max_steps": 9, "save_total_limit": 1}, None),
        (4.9, {"save_strategy": "steps", "save_steps": 1, "max_steps": 9, "save_total_limit": 1}, "and 2 checkpoints"),
    ],
)
def test_room_for_what_is_saved(tmp_path, monkeypatch, free, settings, told):
    """In drafts: an SGD step's checkpoint counts as two, as those of common optimizers do at least."""
    trainer = make_trainer(tmp_path, **settings)
    draft = sum(weight.numel() * 4 for weight in trainer.model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(0, 0, int(free * draft)))
    warnings = []
    monkeypatch.setattr(trial.logger, "warning", warnings.append)
    if told is not None and not told.startswith("and"):
        with pytest.raises(ValueError, match=f"`output_dir`.*{told}"):
            trial.try_ending(trainer)
    else:
        trial.try_ending(trainer)
        assert bool(warnings) == (told is not None) and (told or "") in "".join(warnings)


def test_a_place_that_cannot_be_written_to(tmp_path):
    trainer = make_trainer(tmp_path / "run")
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match="run"):
        trainer.train()
    assert trainer.state.global_step == 0
