"""What is recorded of a run, and which other runs are told from it."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from decoding_models import build_draft, build_target
from draft_trainers import BLOCK, make_rows, make_trainer
from huggingface_hub import ModelCard
from transformers import AutoModel, TrainingArguments

from blockdraft.hub_cards.repository_files import PUBLISHED
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.run_record import (
    TRAINING_ARGUMENTS,
    batch_difference,
    read_run,
    rows_fingerprint,
    write_arguments,
)

SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
# What 0.1.0 recorded of a training.
EARLIER = ("global_step", "epoch", "batch_size", "learning_rate", "lr_scheduler_type", "seed", "dtype", "train_rows")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, **SAVING)
    trainer.train()
    trainer.save_model()
    return folder / "checkpoint-1"


OTHERS = [
    {"learning_rate": 0.06},
    {"lr_scheduler_type": "cosine"},
    {"lr_scheduler_kwargs": {"num_cycles": 2}},
    {"warmup_steps": 3},
    {"optim": "adamw_torch"},
    {"optim_args": "momentum=0.5"},
    {"weight_decay": 0.1},
    {"adam_beta2": 0.95},
    {"max_grad_norm": 2.0},
    {"train_sampling_strategy": "group_by_length"},
    {"seed": 1},
    {"data_seed": 1},
    {"num_anchors": 2},
    {"loss_decay_gamma": 2.0},
    {"loss_type": "variable_prefix"},
]


@pytest.mark.parametrize("changed", OTHERS, ids=lambda changed: next(iter(changed)))
def test_a_run_with_other_arguments_is_another_run(checkpoint, changed):
    [(name, value)] = changed.items()
    trainer = make_trainer(checkpoint.parent, **SAVING, **changed)
    for folder in (checkpoint, checkpoint.parent):
        with pytest.raises(ValueError, match=f"holds another run: .*`{name}` was .*, now .*overwrite_output_dir"):
            trainer.check_same_run(folder)


def test_what_changes_no_weight_is_the_same_run(checkpoint):
    settings = {"logging_steps": 7, "save_total_limit": 3, "eval_decode_prompts": 1, "run_name": "again"}
    settings |= {"max_steps": 9, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    make_trainer(checkpoint.parent, **settings).check_same_run(checkpoint)


def test_other_rows_are_another_run(checkpoint):
    for rows in (make_rows(7), make_rows(8, seed=1)):
        with pytest.raises(ValueError, match=rf"rows to train on are others \(8 then, {len(rows)} now\)"):
            make_trainer(checkpoint.parent, rows).check_same_run(checkpoint)


def test_another_target_or_start_is_another_run(checkpoint, tmp_path):
    trainer = make_trainer(checkpoint.parent)
    given = {"args": trainer.args, "train_dataset": trainer.train_dataset}
    target = build_target("k3")
    target.lm_head.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match="the target's weights are others"):
        DraftTrainer(trainer.model, target, **given).check_same_run(checkpoint)
    with pytest.raises(ValueError, match="the target's dtype was float32, now bfloat16"):
        DraftTrainer(trainer.model, build_target("k3").bfloat16(), **given).check_same_run(checkpoint)

    torch.manual_seed(3)
    build_draft(build_target("k3"), block_size=BLOCK).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`initial_weights` was random, now "):
        make_trainer(checkpoint.parent, draft=AutoModel.from_pretrained(tmp_path)).check_same_run(checkpoint)
    make_trainer(checkpoint.parent, draft=AutoModel.from_pretrained(checkpoint)).check_same_run(checkpoint)


def test_what_an_earlier_version_recorded_is_compared(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    config = json.loads((folder / "config.json").read_text())
    config["training"] = {name: config["training"][name] for name in EARLIER}
    (folder / "config.json").write_text(json.dumps(config))
    make_trainer(checkpoint.parent, weight_decay=0.1, optim="adamw_torch").check_same_run(folder)
    with pytest.raises(ValueError, match="`learning_rate` was 0.05, now 0.06"):
        make_trainer(checkpoint.parent, learning_rate=0.06).check_same_run(folder)


def test_another_number_of_rows_a_step_is_said_in_numbers(checkpoint, caplog):
    before = {"global_step": 100, "batch_size": 64, "per_device_train_batch_size": 4, "ranks": 8}
    before |= {"gradient_accumulation_steps": 2}
    fewer = before | {"batch_size": 32, "ranks": 4}
    assert batch_difference(before, fewer) == (
        "a step had 64 rows = 4 rows x 2 accumulated x 8 ranks, and has 32 now = 4 rows x 2 accumulated x 4 ranks: "
        "after 100 steps 6400 rows had been read, this run would take them for 3200, and 3200 rows would be read "
        "again. Set `gradient_accumulation_steps` to 4, or `ignore_data_skip` to go on with the beginning of an epoch"
    )
    more = batch_difference({"global_step": 100, "batch_size": 64}, before | {"batch_size": 96, "ranks": 12})
    assert "a step had 64 rows, and has 96 now" in more and "3200 rows would be left out. Train on 64 again" in more
    assert batch_difference(before, before | {"ranks": 4, "gradient_accumulation_steps": 4}) is None

    with pytest.raises(ValueError, match="a step had 2 rows.*and has 4 now.*2 rows would be left out"):
        make_trainer(checkpoint.parent, per_device_train_batch_size=4).check_same_run(checkpoint)
    with caplog.at_level("WARNING", logger="blockdraft"):
        trainer = make_trainer(checkpoint.parent, per_device_train_batch_size=4, ignore_data_skip=True)
        trainer.check_same_run(checkpoint)
    assert "2 rows would be left out" in caplog.text


def test_the_recipe_is_in_configuration_and_card(tmp_path):
    settings = {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 0.5}
    trainer = make_trainer(tmp_path, **settings, max_grad_norm=0.5, gradient_accumulation_steps=3, max_steps=1)
    trainer._data_settings = {"max_length": 64}
    trainer.save_model()
    recorded = read_run(tmp_path)["training"]
    expected = settings | {"muon": True, "max_grad_norm": 0.5, "gradient_accumulation_steps": 3, "batch_size": 6}
    expected |= {"ranks": 1, "max_length": 64, "initial_weights": "random", "train_rows": 8, "adam_beta1": 0.9}
    assert {name: recorded[name] for name in expected} == expected
    card = ModelCard.load(tmp_path / "README.md").content
    for line in ("| optim | adamw_torch |", "| muon | True |", "| max length | 64 |", "| weight decay | 0.1 |"):
        assert line in card
    assert "sha256" not in card and "initial weights" not in card


def test_arguments_are_kept_without_secrets_and_places(checkpoint, tmp_path):
    kept = json.loads((checkpoint / TRAINING_ARGUMENTS).read_text())
    assert (kept["learning_rate"], kept["lr_scheduler_type"], kept["num_anchors"]) == (0.05, "constant", 3)
    assert TRAINING_ARGUMENTS in PUBLISHED
    args = TrainingArguments(str(tmp_path), use_cpu=True, hub_token="hf_secret", run_name="/home/me/run")
    args.deepspeed, args.fsdp_config = "ds.json", {"activation_checkpointing": True, "places": ["~/x", "y"]}
    write_arguments(tmp_path, args)
    text = (tmp_path / TRAINING_ARGUMENTS).read_text()
    assert not any(private in text for private in (str(tmp_path), "hf_secret", "ds.json", "/home", "~"))
    assert json.loads(text)["fsdp_config"] == {"activation_checkpointing": True, "places": [None, "y"]}


def test_rows_are_known_by_what_is_trained_on():
    rows = make_rows(300)
    known = rows_fingerprint(rows)
    assert known == rows_fingerprint(list(rows)) == rows_fingerprint(rows.add_column("note", ["x"] * 300))
    few = make_rows(8)
    assert rows_fingerprint(few) == rows_fingerprint(few.to_iterable_dataset())
    changed = few.to_list()
    changed[5]["input_ids"][-1] += 1
    assert rows_fingerprint(Dataset.from_list(changed)) != rows_fingerprint(few)
    assert rows_fingerprint(iter(few)) is None
