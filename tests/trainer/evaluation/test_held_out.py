"""The trainer's evaluation on tiny K3 targets: several data sets, real decoding, several ranks, sharded models."""

import pytest
from draft_trainers import BLOCK, make_rows, make_trainer
from huggingface_hub import ModelCard
from transformers import Trainer

from blockdraft.trainer.draft_trainer import DraftTrainer


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


def test_two_ranks_evaluate_each_row_once(tmp_path, two_ranks):
    """8 rows by 3: the second rank has one batch, the first one two."""
    single = make_trainer(tmp_path, per_device_eval_batch_size=3).evaluate()
    for name in ("eval_loss", "eval_accuracy", "eval_rows_without_anchor"):
        assert [two_ranks[rank]["evaluated"][name] for rank in ("rank0", "rank1")] == [pytest.approx(single[name])] * 2


@pytest.mark.parametrize("by", ["fsdp", "zero3"])
def test_a_sharded_draft_waits_for_no_rank_for_ever(tmp_path, monkeypatch, by):
    """It is not decoded on one rank, and all ranks evaluate as many batches."""

    def shard(trainer):
        Trainer.create_accelerator_and_postprocess(trainer)
        trainer.is_fsdp_enabled = True

    monkeypatch.setattr(Trainer, "get_eval_dataloader", lambda trainer, rows: trainer.accelerator.even_batches)
    assert not make_trainer(tmp_path).get_eval_dataloader()
    if by == "fsdp":
        monkeypatch.setattr(DraftTrainer, "create_accelerator_and_postprocess", shard)
    else:
        monkeypatch.setattr("blockdraft.trainer.draft_trainer.is_deepspeed_zero3_enabled", lambda: True)
    assert make_trainer(tmp_path).get_eval_dataloader()
    with pytest.raises(ValueError, match="`eval_decode_prompts=0`"):
        make_trainer(tmp_path, eval_decode_prompts=1)


def test_predict_points_to_evaluate(tmp_path):
    with pytest.raises(ValueError, match="use `evaluate`"):
        make_trainer(tmp_path).predict(make_rows())
