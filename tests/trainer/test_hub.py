"""Training with pushes through a small Hub on loopback: what lies there, what a fresh process loads, what may fail."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from draft_models import draft_inputs
from draft_trainers import make_trainer, weights
from hub_server import EXPIRED_TOKEN, TOKEN, Fault
from safetensors.torch import load, load_file, save_file
from transformers import TrainerCallback

from blockdraft.hub_cards.upload import PublishError
from blockdraft.trainer.draft_trainer import UNFINISHED_CHECKPOINTS, DraftTrainer
from blockdraft.trainer.hub import UNPUBLISHED
from blockdraft.trainer.runs import train_draft
from blockdraft.trainer.training_args import DraftTrainingArguments

REPO = "user/draft"
EVERY_SAVE = {
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
    "push_to_hub": True,
    "hub_model_id": REPO,
}


class WaitForPush(TrainerCallback):
    """Waits for each push before the next step, and reports what the run then owes the Hub."""

    def __init__(self, trainer, then=lambda step: None):
        self.trainer, self.then = trainer, then

    def on_save(self, args, state, control, **kwargs):
        self.trainer.publisher.wait()
        self.then(state.global_step)


def pushed_weights(hub, revision="main", folder=""):
    return load(hub.repos[REPO].tree(revision)[f"{folder}model.safetensors"].content)


def assert_on_the_hub(hub, trainer, revision="main", folder=""):
    torch.testing.assert_close(pushed_weights(hub, revision, folder), weights(trainer), rtol=0, atol=0)


FRESH_PROCESS = """
import sys
sys.modules["blockdraft"] = None
repo, revision, inputs, outputs = sys.argv[1:]
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

torch.set_num_threads(2)
draft = AutoModel.from_pretrained(repo, revision=revision, trust_remote_code=True)
assert type(draft).__module__.startswith("transformers_modules."), type(draft).__module__
with torch.no_grad():
    hidden = draft(**load_file(inputs)).last_hidden_state
save_file({"hidden": hidden}, outputs)
"""


def test_train_push_every_save_and_load_elsewhere(hub, tmp_path):
    """Through a private repository into a process with empty caches that knows the Hub and nothing of the package."""
    trainer = make_trainer(tmp_path / "run", **EVERY_SAVE, hub_private_repo=True)
    trainer.add_callback(WaitForPush(trainer))
    trainer.train()
    repo = hub.repos[REPO]
    assert repo.private and trainer.publisher.failures == 0
    steps = [f"Training in progress, step {step}" for step in (3, 2, 1)]
    assert repo.history() == [*steps, "initial commit"]
    assert_on_the_hub(hub, trainer)
    assert not [name for name in repo.tree() if name.endswith((".bin", ".pt", ".pth")) or "trainer_state" in name]
    assert {"README.md", "modeling_kimi_k3_dflash.py", "config.json"} < set(repo.tree())
    assert json.loads(repo.tree()["config.json"].content)["training"]["global_step"] == 3
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint-3"}

    commit = trainer.push_to_hub("The end", tasks="text-generation")
    assert commit.commit_message == "The end" and trainer.publisher.published is commit
    save_file(draft_inputs(trainer.model), tmp_path / "inputs.safetensors")
    # From the file here too: where a tensor lies in memory decides the last bits of a product on some processors.
    with torch.no_grad():
        expected = trainer.model.eval()(**load_file(tmp_path / "inputs.safetensors")).last_hidden_state
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-I", "-c", FRESH_PROCESS, REPO, commit.oid]
    command += [str(tmp_path / "inputs.safetensors"), str(tmp_path / "outputs.safetensors")]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert torch.equal(load_file(tmp_path / "outputs.safetensors")["hidden"], expected)


@pytest.mark.parametrize(("strategy", "folders"), [("end", set()), ("checkpoint", {"last-checkpoint"})])
def test_strategies(hub, tmp_path, strategy, folders):
    trainer = make_trainer(tmp_path, **EVERY_SAVE, hub_strategy=strategy, hub_revision="runs")
    trainer.add_callback(WaitForPush(trainer))
    trainer.train()
    trainer.save_model()
    tree = hub.repos[REPO].tree("runs")
    assert {name.split("/")[0] for name in tree if "/" in name} - {"custom_generate"} == folders
    assert "training_args.bin" not in {name.split("/")[-1] for name in tree}
    assert_on_the_hub(hub, trainer, "runs")
    assert hub.repos[REPO].history("runs").count("Model save") == (strategy == "end")  # else nothing has changed
    if strategy == "checkpoint":
        assert_on_the_hub(hub, trainer, "runs", "last-checkpoint/")
        for name, file in tree.items():
            (tmp_path / "elsewhere" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "elsewhere" / name).write_bytes(file.content)
        again = make_trainer(tmp_path / "again", max_steps=4)
        again.train(resume_from_checkpoint=str(tmp_path / "elsewhere" / "last-checkpoint"))
        straight = make_trainer(tmp_path / "straight", max_steps=4)
        straight.train()
        torch.testing.assert_close(weights(again), weights(straight), rtol=0, atol=0)
    assert hub.repos[REPO].history() == ["initial commit"]


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
def test_what_a_run_that_was_cut_off_owes_is_owed_by_the_next_one(hub, tmp_path, caplog, last_step):
    """No push of the first run comes through, and its older checkpoints are deleted here; only what is whole and is
    owed to this repository goes up."""
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
    owed = ", ".join(f"checkpoint-{step + 1}" for step in range(last_step))
    assert f"An earlier run owes user/draft {owed}:" in caplog.text
    assert "owed another repository checkpoint-8, which is dropped" in caplog.text
    train_draft(again)
    tree = hub.repos[REPO].tree()
    folders = {name.split("/")[0] for name in tree if name.startswith("checkpoint-")}
    assert folders == {f"checkpoint-{step}" for step in (1, 2, 3)}
    assert all(f"{folder}/optimizer.pt" in tree and f"{folder}/model.safetensors" in tree for folder in folders)
    assert_on_the_hub(hub, again)
    assert not staging.exists()


@pytest.mark.parametrize(("strategy", "overwrite"), [("every_save", False), ("all_checkpoints", True)])
def test_a_run_that_starts_anew_or_keeps_the_last_only_owes_nothing_from_before(hub, tmp_path, strategy, overwrite):
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


def test_a_hub_out_of_reach_does_not_end_a_training(hub, tmp_path, caplog):
    """Not at its start, not in it, not when it is saved; an explicit push says so, and works when the Hub is back."""
    hub.faults = [Fault("repos/create", 503, times=1000)]
    with caplog.at_level("WARNING", logger="blockdraft"):
        trainer = make_trainer(tmp_path, **EVERY_SAVE)
        trainer.train()
        trainer.save_model()
    assert "Training starts all the same" in caplog.text and "Not on the Hub: checkpoint-3" in caplog.text
    assert "saved, but not on the Hub" in caplog.text and not hub.repos
    assert not (tmp_path / UNPUBLISHED).exists()
    with pytest.raises(PublishError, match="503"):
        trainer.push_to_hub()
    hub.faults = []
    assert trainer.push_to_hub(blocking=False, create_pr=True).result().pr_num == 1
    assert_on_the_hub(hub, trainer, "refs/pr/1")


def test_a_refusal_at_the_start_is_an_error(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", EXPIRED_TOKEN)
    with pytest.raises(PublishError, match="expired.*hf auth login"):
        make_trainer(tmp_path, **EVERY_SAVE)
    with pytest.raises(ValueError, match="`hub_token`.*hf auth login.*HF_TOKEN") as caught:
        DraftTrainingArguments(output_dir=str(tmp_path), use_cpu=True, push_to_hub=True, hub_token=TOKEN)
    assert TOKEN not in str(caught.value)


def test_other_processes_push_nothing(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(DraftTrainer, "is_world_process_zero", lambda self: False)
    trainer = make_trainer(tmp_path, **EVERY_SAVE)
    trainer.train()
    trainer.save_model()
    assert trainer.push_to_hub() is None and hub.requests == []


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


def test_a_full_disk_loses_nothing(hub, tmp_path, monkeypatch):
    """The save of step 2 fails: what is on disk and on the Hub is step 1, whole, and training goes on from there."""
    trainer = make_trainer(tmp_path, **EVERY_SAVE)
    save = trainer._save_optimizer_and_scheduler

    def full_disk(output_dir):
        if output_dir.endswith("checkpoint-2"):
            raise OSError(28, "No space left on device")
        save(output_dir)

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full_disk)
    with pytest.raises(OSError, match="checkpoint-2 could not be saved .*No space left.*before it are complete"):
        trainer.train()
    trainer.publisher.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1"}
    assert not (tmp_path / UNFINISHED_CHECKPOINTS).exists()
    assert pushed_weights(hub).keys() == weights(trainer).keys()
    assert hub.repos[REPO].history()[0] == "Training in progress, step 1"
    again = make_trainer(tmp_path, **EVERY_SAVE)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    assert_on_the_hub(hub, again)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_resume_files_run_no_code(tmp_path):
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    resumed = make_trainer(tmp_path, max_steps=2)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        file, ran = tmp_path / "checkpoint-1" / name, tmp_path / f"ran {name}"
        sound = file.read_bytes()
        torch.save({"state": Malicious(ran)}, file)
        with pytest.raises(Exception, match="Weights only load failed"):
            resumed.train(resume_from_checkpoint=True)
        assert not ran.exists()
        torch.load(file, weights_only=False)
        assert ran.exists()  # the file is what it is meant to be
        file.write_bytes(sound)
