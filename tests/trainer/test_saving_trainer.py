"""What the drafts' Trainer saves and pushes: whole checkpoints, cards of their own weights, and what may fail."""

import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draft_models import draft_inputs
from draft_trainers import make_trainer, weights
from hub_runs import EVERY_SAVE, REPO, WaitForPush, assert_on_the_hub, pushed_weights
from hub_server import EXPIRED_TOKEN, READ_TOKEN, TOKEN, Fault
from huggingface_hub import HfApi, ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.hub_cards.background import UNPUBLISHED
from blockdraft.hub_cards.card import make_card
from blockdraft.hub_cards.retries import PublishError
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.saving_trainer import UNFINISHED_CHECKPOINTS
from blockdraft.trainer.training_args import DraftTrainingArguments

SAVE_EACH = {"save_strategy": "steps", "save_steps": 1}


def test_checkpoint_is_complete_and_holds_no_target(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    names = {file.name for file in checkpoint.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "README.md",
        "modeling_kimi_k3_dflash.py",
        "trainer_state.json",
    } <= names
    assert "training_args.bin" not in names
    assert not (tmp_path / UNFINISHED_CHECKPOINTS).exists()
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(trainer.model.state_dict())
        assert not any("embed_tokens" in key or "lm_head" in key for key in file.keys())
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["training"]["global_step"] == 2
    assert config["objective"] == {"loss_type": "fixed_anchor", "loss_decay_gamma": 4.0, "num_anchors": 3}
    assert config["target"]["model_type"] == "kimi_k3_text"
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in trainer.target.parameters())
    assert not any(module is trainer.target for module in trainer.model.modules())


def test_checkpoint_loads_where_the_package_is_absent(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    expected = {name: tensor.double().sum().item() for name, tensor in weights(trainer).items()}
    code = (
        "import sys, json; sys.modules['blockdraft'] = None\n"
        "from transformers import AutoModel\n"
        f"draft = AutoModel.from_pretrained({str(tmp_path / 'checkpoint-2')!r}, trust_remote_code=True)\n"
        "print(json.dumps({n: t.double().sum().item() for n, t in draft.state_dict().items()}))"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == expected


def test_unfinished_checkpoint_is_ignored(tmp_path, monkeypatch):
    """A save that dies half-way leaves the last complete checkpoint the newest."""
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1)

    def full_disk(output_dir):
        if output_dir.endswith("checkpoint-2"):
            raise OSError("No space left on device")

    monkeypatch.setattr(trainer, "_save_rng_state", full_disk)
    with pytest.raises(OSError, match="No space"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    again = make_trainer(tmp_path, save_strategy="steps", save_steps=1)
    (tmp_path / "checkpoint-1" / "rng_state.pth").unlink(missing_ok=True)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    assert (tmp_path / "checkpoint-2").exists() and not (tmp_path / UNFINISHED_CHECKPOINTS).exists()


@pytest.mark.parametrize("by", ["argument", "setting"])
def test_a_run_goes_on_from_the_checkpoint_that_is_named(tmp_path, by):
    """Also in another folder, and where there are later ones."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = make_trainer(tmp_path / "a", **settings)
    whole.train()
    named = str(tmp_path / "a" / "checkpoint-1")
    resumed = make_trainer(tmp_path / "b", **settings, resume_from_checkpoint=named if by == "setting" else None)
    resumed.train(**({"resume_from_checkpoint": named} if by == "argument" else {}))
    assert {path.name for path in (tmp_path / "b").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    anew = make_trainer(tmp_path / "c", **settings, resume_from_checkpoint=named)
    anew.train(resume_from_checkpoint=False)
    assert (tmp_path / "c" / "checkpoint-1").exists()


def test_what_cannot_be_resumed_is_refused(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    make_trainer(tmp_path, max_steps=1, **settings).train()
    trainer = make_trainer(tmp_path, max_steps=2, **settings)
    with pytest.raises(ValueError, match="checkpoint-1 lacks the state of the optimizer and the schedule, as `save_"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="no is no checkpoint of a training: it has no trainer_state.json"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "no"))
    assert trainer.state.global_step == 0


def test_best_checkpoint_is_recorded_under_its_final_name(tmp_path):
    trainer = make_trainer(
        tmp_path,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        max_steps=3,
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path and (best / "model.safetensors").exists()
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)


@pytest.mark.parametrize(("losses", "best"), [((1.0,), None), ((5.0, 2.0, 1.0), 2)])
def test_only_a_saved_checkpoint_is_the_best_one(tmp_path, losses, best):
    """Every step is evaluated, every second one saved; beside the best one no more than the last one is kept."""
    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(tmp_path, max_steps=4, load_best_model_at_end=True, save_total_limit=1, **settings)
    values = itertools.chain(losses, itertools.repeat(9.0))
    trainer.evaluate = lambda **_: {"eval_loss": next(values)}
    trainer.train()
    kept = tmp_path / f"checkpoint-{best or 4}"
    assert trainer.state.best_model_checkpoint == (str(kept) if best else None)
    assert [*tmp_path.glob("checkpoint-*")] == [kept]
    saved = load_file(kept / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights(trainer).items())
    trainer.save_model()
    said = json.loads((tmp_path / "config.json").read_text())["training"]
    assert (said["global_step"], said["epoch"]) == (best or 4, (best or 4) / 4)


def test_a_card_has_the_numbers_of_its_own_weights(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    settings |= {"eval_decode_prompts": 1, "eval_max_new_tokens": 4, "license": "mit", "datasets": ["org/chats"]}
    trainer = make_trainer(tmp_path, **settings)
    trainer.train()
    trainer.save_model()
    cards = {step: ModelCard.load(tmp_path / f"checkpoint-{step}/README.md") for step in (1, 2, 3)}
    assert [step for step, card in cards.items() if card.data.eval_results] == [2, 3]  # training ends with evaluation
    [result] = cards[2].data.eval_results
    evaluated = next(entry["eval_tau"] for entry in trainer.state.log_history if "eval_tau" in entry)
    assert result.metric_value == pytest.approx(evaluated, abs=1e-4) and "greedy, block 4" in result.dataset_config
    assert (tmp_path / "checkpoint-2/metrics.json").exists() and not (tmp_path / "checkpoint-1/metrics.json").exists()
    final = (tmp_path / "README.md").read_text()
    assert final == (tmp_path / "checkpoint-3/README.md").read_text()
    assert (ModelCard(final).data.license, ModelCard(final).data.datasets) == ("mit", ["org/chats"])
    measured = json.loads((tmp_path / "metrics.json").read_text())
    assert final == make_card(KimiK3DFlashConfig.from_pretrained(tmp_path), measured)
    trainer.record_decoding({"code": measured["held-out prompts"]})
    trainer.save_model()
    assert ModelCard.load(tmp_path / "README.md").data.eval_results[0].dataset_name == "code"
    trainer.state.global_step = 4  # other weights
    trainer.save_model()
    assert ModelCard.load(tmp_path / "README.md").data.eval_results is None


# ---- the Hub --------------------------------------------------------------------------------------------------------


FRESH_PROCESS = """
import sys
sys.modules["blockdraft"] = None
repo, revision, inputs, outputs = sys.argv[1:]
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

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
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # what is compared bit for bit is computed alike
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


def test_a_repository_without_the_right_to_write_is_an_error_at_the_start(hub, tmp_path, monkeypatch):
    """It exists and can be read: making it finds no fault."""
    HfApi().create_repo(REPO)
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    with pytest.raises(PublishError, match="no right to write.*write access"):
        make_trainer(tmp_path, **EVERY_SAVE)
    assert make_trainer(tmp_path, hub_model_id=REPO).push_to_hub(create_pr=True).pr_num == 1  # anybody may ask


def test_other_processes_push_nothing(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(DraftTrainer, "is_world_process_zero", lambda self: False)
    trainer = make_trainer(tmp_path, **EVERY_SAVE)
    trainer.train()
    trainer.save_model()
    assert trainer.push_to_hub() is None and hub.requests == []


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


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_disk_without_room_for_a_file_ends_a_run_at_its_last_checkpoint(tmp_path, file):
    """Whoever writes it: by the system's own limit, under which all smaller files fit."""
    trainer = make_trainer(tmp_path, **SAVE_EACH)
    write, (soft, hard) = trainer._write_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_into_little(directory):
        if directory.endswith("checkpoint-2"):
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "checkpoint-1" / file).stat().st_size - 1, hard))
        write(directory)

    trainer._write_checkpoint = write_into_little
    try:
        with pytest.raises(
            OSError, match="checkpoint-2 could not be saved .*; the checkpoints before it are complete"
        ):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    again = make_trainer(tmp_path, **SAVE_EACH)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


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
