"""Checkpoints that go to the Hub while training goes on: what fails, waits, is replaced, and is left by a run that was
cut off."""

import threading

import pytest
from draft_trainers import make_trainer
from hub_runs import EVERY_SAVE, REPO, WaitForPush, assert_on_the_hub
from hub_server import TOKEN, Fault
from transformers import TrainerCallback

from blockdraft.hub_cards.background import UNPUBLISHED
from blockdraft.trainer.runs import train_draft


@pytest.mark.parametrize("strategy", ["every_save", "all_checkpoints"])
def test_a_failed_push_is_made_up_for_at_the_next_save(hub, tmp_path, caplog, strategy):
    """No right to write for the first two saves: training goes on, each failure is said once, nothing is lost."""
    trainer = make_trainer(tmp_path, **EVERY_SAVE, hub_strategy=strategy)
    heads = {}

    def then(step):
        heads[step] = hub.repos[REPO].history()[0]
        if step == 2:
            hub.faults = []

    trainer.add_callback(WaitForPush(trainer, then))
    hub.faults = [Fault("/commit/", 403, times=100)]
    with caplog.at_level("WARNING", logger="blockdraft"):
        trainer.train()
    assert heads == {1: "initial commit", 2: "initial commit", 3: "Training in progress, step 3"}
    assert trainer.publisher.failures == 2 and trainer.publisher.error is None
    said = [record.getMessage() for record in caplog.records if "A push failed" in record.getMessage()]
    assert len(said) == 2 and all("user/draft" in line and "no right to write" in line for line in said)
    assert_on_the_hub(hub, trainer)
    if strategy == "all_checkpoints":  # the first two were deleted here meanwhile (`save_total_limit`)
        assert {f"checkpoint-{step}/optimizer.pt" for step in (1, 2, 3)} < set(hub.repos[REPO].tree())
    assert not (tmp_path / UNPUBLISHED).exists()


class PowerCut(TrainerCallback):
    """At the start of the step after `step`, or at the end."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise InterruptedError

    def on_train_end(self, args, state, control, **kwargs):
        raise InterruptedError


@pytest.mark.parametrize("last_step", [2, 3])
def test_what_a_run_that_was_cut_off_did_not_publish_the_next_one_does(hub, tmp_path, caplog, last_step):
    """No push of the first run succeeds, and its older checkpoints are deleted here; only what is whole and for this
    repository goes up."""
    settings = EVERY_SAVE | {"hub_strategy": "all_checkpoints"}
    trainer = make_trainer(tmp_path, **settings)
    trainer.add_callback(WaitForPush(trainer))
    trainer.add_callback(PowerCut(last_step))
    hub.faults = [Fault("/commit/", 403, times=1000)]
    with pytest.raises(InterruptedError):
        train_draft(trainer)
    staging = tmp_path / UNPUBLISHED
    assert {path.name for path in staging.glob("*/*")} == {f"checkpoint-{step + 1}" for step in range(last_step)}
    for name in ("user--draft@x/unfinished", "user--other@x/checkpoint-8"):
        (staging / name).mkdir(parents=True)
        (staging / name / "config.json").touch()

    hub.faults = []
    with caplog.at_level("WARNING", logger="blockdraft"):
        again = make_trainer(tmp_path, **settings)
    waiting = ", ".join(f"checkpoint-{step + 1}" for step in range(last_step))
    assert f"An earlier run did not publish {waiting} in user/draft:" in caplog.text
    assert "did not publish checkpoint-8 in another repository: dropped" in caplog.text
    train_draft(again)
    tree = hub.repos[REPO].tree()
    folders = {name.split("/")[0] for name in tree if name.startswith("checkpoint-")}
    assert folders == {f"checkpoint-{step}" for step in (1, 2, 3)}
    assert all(f"{folder}/optimizer.pt" in tree and f"{folder}/model.safetensors" in tree for folder in folders)
    assert_on_the_hub(hub, again)
    assert not staging.exists()


@pytest.mark.parametrize(("strategy", "overwrite"), [("every_save", False), ("all_checkpoints", True)])
def test_a_run_that_starts_anew_or_keeps_the_last_only_drops_what_was_left(hub, tmp_path, strategy, overwrite):
    snapshot = tmp_path / UNPUBLISHED / "user--draft@x" / "checkpoint-2"
    snapshot.mkdir(parents=True)
    trainer = make_trainer(tmp_path, **EVERY_SAVE, hub_strategy=strategy)
    assert snapshot.exists() == overwrite
    train_draft(trainer, overwrite_output_dir=overwrite)
    assert trainer.publisher.failures == 0 and not (tmp_path / UNPUBLISHED).exists()
    assert_on_the_hub(hub, trainer)


def test_a_push_that_fails_last_is_made_up_for_at_the_end(hub, tmp_path, caplog):
    """The token expires in the middle of training; a new one is there when it ends."""
    trainer = make_trainer(tmp_path, **EVERY_SAVE)

    def then(step):
        if step == 1:
            hub.users[TOKEN] = None

    class LogInAgain(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            hub.users[TOKEN] = "user"

    trainer.add_callback(WaitForPush(trainer, then))
    trainer.add_callback(LogInAgain())
    with caplog.at_level("WARNING", logger="blockdraft"):
        trainer.train()
    assert trainer.publisher.failures == 2 and caplog.text.count("expired (401)") == 2
    assert hub.repos[REPO].history()[:2] == [f"Training in progress, step {step}" for step in (3, 1)]
    assert_on_the_hub(hub, trainer)


def test_saves_go_on_while_an_upload_is_on_its_way(hub, tmp_path):
    """An upload that takes longer than training: the checkpoints meanwhile are skipped or, asked for, queued."""
    for always, steps in ((False, (3, 1)), (True, (3, 2, 1))):
        hub.repos.clear()
        trained = threading.Event()
        hub.before_commit = lambda trained=trained: trained.wait(20)

        class Trained(TrainerCallback):
            def on_train_end(self, args, state, control, trained=trained, **kwargs):
                trained.set()

        trainer = make_trainer(tmp_path / str(always), **EVERY_SAVE, hub_always_push=always)
        trainer.add_callback(Trained())
        trainer.train()
        expected = [f"Training in progress, step {step}" for step in steps]
        assert hub.repos[REPO].history() == [*expected, "initial commit"]
        assert_on_the_hub(hub, trainer)
