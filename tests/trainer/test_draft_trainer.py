"""The draft trainer on tiny K3 and Qwen3 targets: exact accumulation, resuming, packed rows, checkpoints, logs."""

import pytest
import torch
from decoding_models import build_draft, build_target
from draft_trainers import (
    BLOCK,
    assert_close,
    assert_packed_documents_equal_their_own_rows,
    make_rows,
    make_trainer,
    placed_batch,
    weights,
)
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from blockdraft.trainer.draft_trainer import EVALUATION_STEP, DraftTrainer
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
        batch = placed_batch(trainer, [rows[i[0]] for i in indices], step)
        assert value == pytest.approx(trainer.compute_loss(trainer.model, batch).item(), rel=1e-4)


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
    [batch], weight = trainer.get_batch_samples(iter([trainer.data_collator([rows[0]])]), 1, torch.device("cpu"))
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=weight)
    loss.backward()
    assert loss.item() == 0 and weight.item() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trainer.model.parameters())
    trainer.train()


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
    """As under FSDP and DeepSpeed; one that was dispatched stays."""
    moved = []
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: moved.append(model))
    monkeypatch.setattr(DraftTrainingArguments, "place_model_on_device", False)
    trainer = make_trainer(tmp_path)
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


def test_warns_where_masked_slots_cannot_differ(tmp_path, caplog):
    target = build_target("k3")
    with caplog.at_level("WARNING", logger="blockdraft"):
        make_trainer(tmp_path, draft=build_draft(target, block_size=BLOCK, is_causal=False, sliding_window=None))
    assert "is_causal" in caplog.text


def test_compute_loss_places_the_blocks_of_a_batch(tmp_path):
    """Those of this step in training, those of every evaluation in evaluation mode."""
    trainer = make_trainer(tmp_path)
    rows = [make_rows()[i] for i in (0, 1)]
    for training, at, step in ((True, 5, 5), (False, 5, EVALUATION_STEP)):
        trainer.model.train(training)
        trainer.state.global_step = at
        found = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
        assert torch.equal(found, trainer.compute_loss(trainer.model, placed_batch(trainer, rows, step)))


def test_blocks_are_made_once_a_batch_and_before_the_target_runs(tmp_path, monkeypatch):
    trainer, order = make_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=2, eval_strategy="epoch"), []
    place_blocks, target_states = trainer.place_blocks, trainer.target_states
    monkeypatch.setattr(trainer, "place_blocks", lambda *args: order.append("blocks") or place_blocks(*args))
    monkeypatch.setattr(trainer, "target_states", lambda inputs: order.append("target") or target_states(inputs))
    trainer.train()
    # Two windows of two batches, then the one batch of an evaluation.
    assert order == ["blocks", "blocks", "target", "target"] * 2 + ["blocks", "target"]


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_several_data_sets_and_streams_are_evaluated(tmp_path):
    trainer = make_trainer(tmp_path, eval_decode_prompts=2, eval_max_new_tokens=4, eval_strategy="steps", eval_steps=2)
    chat, code = make_rows(4), make_rows(6, seed=1)
    alone = trainer.evaluate(chat)
    streamed = trainer.evaluate(chat.to_iterable_dataset())
    same = [name for name in alone if "per_second" not in name and "share" not in name and "tau" not in name]
    assert "eval_tau" in streamed and {n: streamed[n] for n in same} == {n: alone[n] for n in same}
    both = trainer.evaluate({"chat": chat, "code": code})
    assert {name: both[name.replace("eval_", "eval_chat_")] for name in same} == {name: alone[name] for name in same}
    assert "eval_code_tau" in both and both["eval_code_loss"] != both["eval_chat_loss"]
    trainer.eval_dataset = {"chat": chat, "code": code.to_iterable_dataset()}
    trainer.train()
    logged = [log for log in trainer.state.log_history if "eval_code_loss" in log]
    assert [log["step"] for log in logged] == [2] and any("eval_chat_tau" in log for log in trainer.state.log_history)


def test_evaluate_decodes_for_real(tmp_path):
    trainer = make_trainer(tmp_path, eval_decode_prompts=4, eval_max_new_tokens=6)
    trainer.model.train()
    metrics = trainer.evaluate()
    assert trainer.model.training
    assert metrics["eval_prompts"] == 4 and 1 <= metrics["eval_tau"] <= BLOCK
    assert {"eval_loss", "eval_accuracy", "eval_tau_without_loops", "eval_acceptance_slot_1"} <= set(metrics)
    assert not any(value != value for value in metrics.values())  # what was not measured is left out, not NaN
    assert trainer.state.log_history[-1]["eval_tau"] == metrics["eval_tau"]
    # The same anchors each time: the loss moves with the draft alone.
    assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"]


def test_what_decodes_is_the_draft_in_its_targets_dtype(tmp_path):
    """As it will be served; and it is trained on in its own."""
    trainer = make_trainer(tmp_path, target_name="qwen3", eval_decode_prompts=2, eval_max_new_tokens=4)
    trainer.target.to(torch.bfloat16)
    before = weights(trainer)
    metrics = trainer.evaluate()
    assert metrics["eval_prompts"] == 2 and metrics["eval_tau_low"] <= metrics["eval_tau"] <= metrics["eval_tau_high"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    trainer.save_model()
    card = (tmp_path / "README.md").read_text()
    assert "bfloat16, draft bfloat16" in card and "fewer than 32 prompts are a rough measure" in card


def test_each_set_keeps_its_own_workers(tmp_path):
    sets = {"chat": make_rows(4), "code": make_rows(6, seed=1)}
    alone = {name: make_trainer(tmp_path).evaluate(rows)["eval_loss"] for name, rows in sets.items()}
    trainer = make_trainer(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer.eval_dataset = sets
    for given in (None, None, sets):
        metrics = trainer.evaluate(given)
        assert {name: metrics[f"eval_{name}_loss"] for name in sets} == alone
    assert {name: trainer.evaluate(rows)["eval_loss"] for name, rows in sets.items()} == alone
    assert trainer.get_eval_dataloader("chat") is trainer.get_eval_dataloader("chat")


def test_a_card_has_every_set_of_the_evaluation(tmp_path):
    trainer = make_trainer(tmp_path, eval_decode_prompts=1, eval_max_new_tokens=4)
    sets = {"chat": make_rows(4), "code": make_rows(6, seed=1)}
    for given, names in ((sets, ["chat", "code"]), (sets["chat"], ["held-out prompts"])):
        trainer.evaluate(given)
        trainer.save_model()
        results = ModelCard.load(tmp_path / "README.md").data.eval_results
        assert [result.dataset_name for result in results] == names


def test_predict_points_to_evaluate(tmp_path):
    with pytest.raises(ValueError, match="use `evaluate`"):
        make_trainer(tmp_path).predict(make_rows())
