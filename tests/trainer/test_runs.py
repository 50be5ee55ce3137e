"""Runs that are given again: what they go on from, and who deletes an earlier one."""

import shutil

import pytest
import torch
from draft_trainers import LOAD_BEST, make_trainer, weights

from blockdraft.trainer.runs import is_finished, save_finished, train_draft
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


def test_a_shorter_run_is_another_run(tmp_path):
    """One that is longer goes on."""
    first = make_trainer(tmp_path, **SAVING)
    train_draft(first)
    save_finished(first)
    assert is_finished(first) and not is_finished(make_trainer(tmp_path, max_steps=4))
    for judge in (is_finished, train_draft):
        with pytest.raises(ValueError, match="it has taken 3 steps, and this one ends after 2"):
            judge(make_trainer(tmp_path, max_steps=2))


def test_a_named_checkpoint_is_the_one_that_a_run_goes_on_from(tmp_path, capsys):
    first = make_trainer(tmp_path / "a", **SAVING)
    train_draft(first)
    named = {"resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-2")}
    for name in "ab":
        again = make_trainer(tmp_path / name, **SAVING, **named)
        train_draft(again)
        assert f"Resuming from {named['resume_from_checkpoint']}, 1 of 3 steps" in capsys.readouterr().out
        torch.testing.assert_close(weights(again), weights(first), rtol=0, atol=0)
    other = make_trainer(tmp_path / "c", **SAVING, **named, learning_rate=0.06)
    with pytest.raises(ValueError, match="`learning_rate` was 0.05, now 0.06"):
        train_draft(other)
    with pytest.raises(ValueError, match="exclude each other"):
        train_draft(other, overwrite_output_dir=True)
