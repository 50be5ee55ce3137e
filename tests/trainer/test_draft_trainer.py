"""The draft trainer on tiny K3 and Qwen3 targets: exact accumulation, resuming, packed rows, checkpoints, logs."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoding_models import build_draft, build_target
from draft_trainers import (
    BLOCK,
    assert_close,
    assert_packed_documents_equal_their_own_rows,
    make_rows,
    make_trainer,
    weights,
)
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.hub_cards.card import make_card
from blockdraft.modeling.target.target_features import decoder_layers
from blockdraft.trainer.draft_trainer import UNFINISHED_CHECKPOINTS, DraftTrainer
from blockdraft.trainer.training_args import DraftTrainingArguments
from blockdraft.trainer.training_settings import default_loss_decay_gamma


@pytest.mark.parametrize("loss_type", ["fixed_anchor", "variable_prefix"])
def test_accumulation_changes_nothing(tmp_path, loss_type):
    """One step over the same 8 rows, however they are cut into micro-batches."""
    results = []
    for batch_size, accumulation in ((8, 1), (2, 4), (1, 8)):
        trainer = make_trainer(
            tmp_path,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            loss_type=loss_type,
        )
        before = weights(trainer)
        trainer.train()
        results.append((weights(trainer), trainer.state.log_history[0]["loss"]))
        assert any(not torch.equal(before[name], results[-1][0][name]) for name in before)
    for result, loss in results[1:]:
        assert_close(result, results[0][0], 1e-5)
        assert loss == pytest.approx(results[0][1], rel=1e-5)


def test_short_last_window(tmp_path):
    """10 rows with windows of 8: the second step averages over its 2 rows alone."""
    rows = make_rows(10)
    trainer = make_trainer(
        tmp_path, rows, per_device_train_batch_size=1, gradient_accumulation_steps=8, max_steps=2, learning_rate=1e-9
    )
    trainer.train()
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    order = [list(window) for window in _sampled_rows(trainer, 10)]
    for step, (indices, value) in enumerate(zip((order[:8], order[8:]), logged, strict=True)):
        batch = trainer.data_collator([rows[i[0]] for i in indices])
        trainer.place_blocks(batch, step)
        assert value == pytest.approx(trainer.block_loss(trainer.model, batch).loss.item(), rel=1e-4)


def _sampled_rows(trainer: DraftTrainer, count: int) -> list[list[int]]:
    """Row ids in the order of the first epoch."""
    trainer.accelerator.free_memory()
    loader = trainer.get_train_dataloader()
    loader.set_epoch(0)
    return [batch["row_id"].tolist() for batch in loader][:count]


@pytest.mark.parametrize(
    ("strategy", "interrupted"), [("random", 3), ("random", 5), ("group_by_length", 5), ("batch_rebalance", 5)]
)
def test_resume_is_exact(tmp_path, strategy, interrupted):
    """In the first epoch or in the second one, of 4 steps each."""
    common = {"optim": "adamw_torch", "learning_rate": 1e-3, "train_sampling_strategy": strategy}
    straight = make_trainer(tmp_path / "a", max_steps=7, **common)
    straight.train()
    common |= {"save_strategy": "steps", "save_steps": interrupted}
    make_trainer(tmp_path / "b", max_steps=interrupted, **common).train()
    resumed = make_trainer(tmp_path / "b", max_steps=7, **common)
    resumed.train(resume_from_checkpoint=True)
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


@pytest.mark.parametrize("changed", [{"sliding_window": 3}, {"is_causal": False}, {"num_full_attention_layers": 0}])
def test_no_run_goes_on_under_another_rule_of_visibility(tmp_path, changed):
    """The weights would fit."""
    target, common = build_target("k3"), {"save_strategy": "steps", "save_steps": 1}
    shape = {"block_size": BLOCK, "num_draft_layers": 2}
    make_trainer(tmp_path, draft=build_draft(target, **shape), max_steps=1, **common).train()
    other = make_trainer(tmp_path, draft=build_draft(target, **(shape | changed)), max_steps=2, **common)
    with pytest.raises(ValueError, match=f"`{next(iter(changed))}` is .*was trained with"):
        other.train(resume_from_checkpoint=True)


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


def test_logs(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=4)
    trainer.train()
    log = trainer.state.log_history[0]
    for name in ("loss", "accuracy", "estimated_tau", "supervised_tokens_per_second", "rows_without_anchor"):
        assert name in log
    assert [name for name in log if name.startswith("acceptance_slot_")] == [f"acceptance_slot_{k}" for k in (1, 2, 3)]
    # Row 5 has no answer: one of 8 rows in an epoch.
    assert sum(entry.get("rows_without_anchor", 0) for entry in trainer.state.log_history) * 2 == pytest.approx(1)


def test_a_batch_without_anchors_reaches_every_parameter(tmp_path):
    rows = make_rows().select([5])
    trainer = make_trainer(tmp_path, rows, max_steps=1, per_device_train_batch_size=1)
    batch = trainer.data_collator([rows[0]])
    weight = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=weight)
    loss.backward()
    assert loss.item() == 0 and weight.item() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trainer.model.parameters())
    trainer.train()


def test_given_anchors_are_used(tmp_path):
    trainer = make_trainer(tmp_path)
    rows = make_rows()
    batch = trainer.data_collator([rows[0], rows[1]])
    given = {
        "anchor_positions": torch.tensor([[5, 7], [6, 0]]),
        "block_keep_mask": torch.tensor([[True, True], [True, False]]),
    }
    placed = batch | {name: tensor.clone() for name, tensor in given.items()}
    trainer.place_blocks(placed, step=3)
    assert all(torch.equal(placed[name], tensor) for name, tensor in given.items())


@pytest.mark.parametrize("target_name", ["k3", "gpt2", "gemma3"])
def test_features_are_layer_outputs_and_the_forward_stops(tmp_path, target_name):
    trainer = make_trainer(tmp_path, target_name=target_name)
    rows = make_rows()
    batch = trainer.data_collator([rows[0], rows[1]])
    features = trainer.target_features(batch)
    ids = trainer.draft_config.target_layer_ids
    hidden_states = trainer.target(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
    ).hidden_states
    expected = torch.cat([hidden_states[i + 1] for i in ids], dim=-1)
    valid = batch["attention_mask"].bool()
    assert torch.allclose(features[valid], expected[valid], atol=1e-5)
    ran = []
    layers = decoder_layers(trainer.target)
    layers[max(ids) + 1].register_forward_hook(lambda *_: ran.append(1))
    trainer.target_features(batch)
    assert not ran


def test_packed_documents_equal_their_own_rows(tmp_path):
    assert_packed_documents_equal_their_own_rows(make_trainer(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_type": "other"}, "loss_type"),
        ({"num_anchors": 0}, "num_anchors"),
        ({"loss_decay_gamma": -1.0}, "loss_decay_gamma"),
        ({"prefix_weight_base": 0.0}, "prefix_weight_base"),
        ({"ce_loss_alpha": float("inf")}, "ce_loss_alpha"),
        ({"confidence_head_alpha": -0.1}, "confidence_head_alpha"),
        ({"expert_bias_step": -1e-3}, "expert_bias_step"),
        ({"remove_unused_columns": True}, "remove_unused_columns"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen"),
    ],
)
def test_arguments_are_checked(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        DraftTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)


@pytest.mark.parametrize("name", ["compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"])
def test_functions_of_labels_are_refused(tmp_path, name):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match=f"`{name}`"):
        DraftTrainer(trainer.model, trainer.target, trainer.args, **{name: lambda *_: {}})


def test_the_target_goes_to_the_device_where_the_draft_waits(tmp_path, monkeypatch):
    """As under FSDP, DeepSpeed and evaluation in half precision; one that was dispatched stays."""
    moved = []
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: moved.append(model))
    trainer = make_trainer(tmp_path, fp16_full_eval=True)
    assert moved == [trainer.target]
    trainer.target.hf_device_map = {"": "cpu"}
    DraftTrainer(trainer.model, trainer.target, trainer.args)
    assert moved == [trainer.target]


def test_decay_defaults_to_the_paper(tmp_path):
    assert [default_loss_decay_gamma(size) for size in (7, 8, 10, 16)] == [4.0, 4.0, 5.0, 7.0]
    args = DraftTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert args.gamma(16) == 7.0
    args.loss_decay_gamma = 0.0
    assert args.gamma(16) is None


def test_rows_without_id_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    batch = trainer.data_collator([make_rows()[0]])
    del batch["row_id"]
    with pytest.raises(ValueError, match="row_id"):
        trainer.place_blocks(batch, 0)


def test_two_ranks_equal_one(tmp_path, two_ranks):
    single = make_trainer(tmp_path, per_device_train_batch_size=8, max_steps=1)
    single.train()
    assert_close(two_ranks["dflash"], weights(single), 1e-5)


def test_two_ranks_load_the_best_checkpoint(two_ranks):
    for rank in (two_ranks["rank0"], two_ranks["rank1"]):
        best = Path(rank["best"])
        saved = load_file(best / "model.safetensors")
        assert (best.parent.name, best.name) == ("run", "checkpoint-1")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in rank["weights"].items())


def test_two_ranks_share_out_the_rows_that_are_grouped_by_length(two_ranks):
    assert sorted(two_ranks["rank0"]["rows"] + two_ranks["rank1"]["rows"]) == [*range(8)]


def test_warns_where_masked_slots_cannot_differ(tmp_path, caplog):
    target = build_target("k3")
    with caplog.at_level("WARNING", logger="blockdraft"):
        make_trainer(tmp_path, draft=build_draft(target, block_size=BLOCK, is_causal=False, sliding_window=None))
    assert "is_causal" in caplog.text


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
    trainer.card_metrics = {"code": measured["held-out prompts"]}
    trainer.save_model()
    assert ModelCard.load(tmp_path / "README.md").data.eval_results[0].dataset_name == "code"
    trainer.state.global_step, trainer.card_metrics = 4, None  # other weights
    trainer.save_model()
    assert ModelCard.load(tmp_path / "README.md").data.eval_results is None
