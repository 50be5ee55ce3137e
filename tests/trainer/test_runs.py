"""Runs that are given again: what they go on from, and who deletes an earlier one."""

import shutil

import pytest
import torch
from draft_trainers import LOAD_BEST, make_trainer, weights

from blockdraft.trainer.runs import train_draft
from blockdraft.trainer.training_args import DraftTrainingArguments

SAVING = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("settings", [LOAD_BEST, LOAD_BEST | {"load_best_model_at_end": False}])
def test_a_run_that_has_all_steps_gives_the_same_draft_again(tmp_path, settings):
    """The best one, if that was asked for, wherever the run lies by now."""
    first = make_trainer(tmp_path / "run", **SAVING, **settings)
    train_draft(first)
    assert first.state.best_global_step == 1
    (tmp_path / "run").rename(tmp_path / "moved")
    again = make_trainer(tmp_path / "moved", **SAVING, **settings)
    train_draft(again)
    assert again.state.global_step == 3
    torch.testing.assert_close(weights(again), weights(first), rtol=0, atol=0)


def test_the_main_process_deletes_an_earlier_run_and_the_others_wait(tmp_path, monkeypatch):
    train_draft(make_trainer(tmp_path, **SAVING))
    other, waited = make_trainer(tmp_path, max_steps=1), []
    monkeypatch.setattr(DraftTrainingArguments, "should_save", False)

    def wait_for_everyone():
        waited.append(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        for name in waited[0]:  # what the main process does meanwhile
            shutil.rmtree(tmp_path / name, ignore_errors=True)

    monkeypatch.setattr(other.accelerator, "wait_for_everyone", wait_for_everyone)
    train_draft(other, overwrite_output_dir=True)
    assert waited[0] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert other.state.global_step == 1 and other.state.log_history[0]["step"] == 1
