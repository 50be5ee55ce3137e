"""The trainer of DSpark drafts on tiny targets: reference step, accumulation, teacher, heads, experts, resuming."""

import json

import pytest
import torch
from decoding_models import build_draft, build_target
from draft_trainers import arguments as draft_arguments
from draft_trainers import (
    assert_close,
    assert_packed_documents_equal_their_own_rows,
    loss_sums,
    make_rows,
    placed_batch,
    weights,
)
from dspark_trainers import dspark_draft, dspark_trainer, v41_target
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from blockdraft.modeling.target.target_features import decoder_layers
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.dspark_trainer import DSparkTrainer
from blockdraft.trainer.loading import load_draft

BLOCK = 4


@pytest.mark.parametrize("case_name", ["fp32", "noconf"])
@pytest.mark.parametrize("chunk_size", [3, 1024])
def test_loss_and_gradients_equal_reference(golden, tmp_path, case_name, chunk_size):
    """The trainer's own step on the reference's rows, features and anchors."""
    case = golden(f"v41_dspark_forward_{case_name}")
    options = case.meta["options"]["loss"]
    options["loss_decay_gamma"] = options["loss_decay_gamma"] or 0.0
    target = DeepseekV41ForCausalLM(DeepseekV41TextConfig(**case.meta["config"]))
    parameters = case.group("param")
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(parameters.pop("embed_tokens.weight"))
        target.get_output_embeddings().weight.copy_(parameters.pop("lm_head.weight"))
    has_confidence = "out.confidence_pred" in case.tensors
    config = DeepseekV41DSparkConfig.from_target_config(target.config, confidence_head=has_confidence)
    draft = DeepseekV41DSparkModel(config)
    missing = draft.load_state_dict(reference_names(parameters), strict=False).missing_keys
    assert all(name.endswith(("e_score_correction_bias", "bias_vl")) for name in missing)
    args = draft_arguments(tmp_path, loss_chunk_size=chunk_size, **options)
    trainer = DSparkTrainer(draft, target, args, train_dataset=make_rows())
    trainer.target_states = lambda inputs: (case["in.target_hidden_states"], case["in.target_last_hidden_states"])
    names = ("input_ids", "loss_mask", "anchor_positions", "block_keep_mask")
    batch = {name: case[f"in.{name}"] for name in names}
    loss = loss_sums(trainer, batch)
    assert trainer.place_blocks(batch, 0).targets.weights.sum() == loss.weight
    loss.loss.backward()
    tolerance = 5e-5
    assert loss.loss.item() == pytest.approx(case["out.loss"].item(), rel=tolerance)
    gradients = reference_names(case.group("grad"))
    found = {name: parameter.grad for name, parameter in draft.named_parameters() if name in gradients}
    assert found.keys() == gradients.keys()
    assert_close(found, gradients, tolerance)


def reference_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reference names of the experts' matrices, renamed to ours."""
    ours = {"gate_and_up_projs": "gate_up_proj", "down_projs": "down_proj"}
    return {
        name.rpartition(".")[0] + "." + ours[last] if (last := name.rpartition(".")[2]) in ours else name: tensor
        for name, tensor in tensors.items()
    }


def test_accumulation_changes_nothing(tmp_path):
    """One step over the same 8 rows, however they are cut into micro-batches; the experts' bias moves alike."""
    results = []
    for batch_size, accumulation in ((8, 1), (2, 4), (1, 8)):
        trainer = dspark_trainer(
            tmp_path,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
        )
        before = weights(trainer)
        trainer.train()
        after = weights(trainer)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {name for name in before if not name.endswith("bias_vl")}
        biases = {name: after.pop(name) for name in list(after) if "bias" in name}
        results.append((after, biases, trainer.state.log_history[0]))
    for after, biases, log in results[1:]:
        assert_close(after, results[0][0], 1e-5)
        assert all(torch.equal(bias, results[0][1][name]) for name, bias in biases.items())
        for name in ("loss", "l1_loss", "confidence_loss", "accept_rate", "busiest_expert"):
            assert log[name] == pytest.approx(results[0][2][name], rel=1e-5)


def test_padding_to_exactly_num_anchors_changes_nothing(tmp_path):
    """The reference's width gives the loss, the gradients and the experts' load of the narrowest one."""
    results = []
    for padding in (0, 5):
        trainer = dspark_trainer(tmp_path)
        batch = trainer.data_collator([make_rows()[i] for i in (0, 5)])  # row 5 has no anchor
        blocks = trainer.place_blocks(batch, 0)
        for name in ("anchor_positions", "block_keep_mask"):
            batch[name] = torch.nn.functional.pad(getattr(blocks, name), (0, padding))
        loss = loss_sums(trainer, batch, trainer.model.train())
        loss.loss.backward()
        gradients = {name: p.grad for name, p in trainer.model.named_parameters()}
        results.append((loss.loss.item(), gradients, torch.stack(trainer.expert_balance._step_loads)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert_close(results[1][1], results[0][1], 1e-5)
    assert torch.equal(results[1][2], results[0][2]) and results[0][2].sum() == 2 * 2 * BLOCK * 3


def test_resume_is_exact(tmp_path):
    common = {"optim": "adamw_torch", "learning_rate": 1e-3}
    straight = dspark_trainer(tmp_path / "a", max_steps=6, **common)
    straight.train()
    common |= {"save_strategy": "steps", "save_steps": 3}
    dspark_trainer(tmp_path / "b", max_steps=3, **common).train()
    resumed = dspark_trainer(tmp_path / "b", max_steps=6, **common)
    resumed.train(resume_from_checkpoint=True)
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    assert any(tensor.any() for name, tensor in weights(straight).items() if "e_score_correction_bias" in name)


def test_checkpoint_says_how_it_was_trained(tmp_path):
    trainer = dspark_trainer(tmp_path, save_strategy="steps", save_steps=2, confidence_head_stop_gradient=True)
    trainer.train()
    config = json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())
    assert config["objective"] == {
        "loss_type": "dspark",
        "loss_decay_gamma": 4.0,
        "num_anchors": 3,
        "ce_loss_alpha": 0.1,
        "l1_loss_alpha": 0.9,
        "confidence_head_alpha": 1.0,
        "confidence_head_stop_gradient": True,
        "expert_bias_step": 1e-3,
    }
    assert config["training"]["global_step"] == 2 and config["target"]["model_type"] == "qwen3"
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert saved.keys() == trainer.model.state_dict().keys()
    assert not any("embed_tokens" in key or "lm_head" in key for key in saved)
    again = DeepseekV41DSparkModel.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in weights(trainer).items())


@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "adapter"])
def test_an_earlier_calibration_does_not_outlive_the_weights(tmp_path, adapts):
    target = v41_target()
    draft = dspark_draft(target, confidence_temperatures=[1.5] * 4)
    draft.save_pretrained(tmp_path / "base")
    draft = AutoModel.from_pretrained(tmp_path / "base")
    peft_config = LoraConfig(r=2) if adapts else None
    arguments = draft_arguments(tmp_path / "out", max_steps=1)
    trainer = DSparkTrainer(draft, target, arguments, train_dataset=make_rows(), peft_config=peft_config)
    assert trainer.draft_config.confidence_temperatures == [1.5] * 4
    trainer.train()
    trainer.save_model()
    assert load_draft(str(tmp_path / "out")).config.confidence_temperatures is None


def test_logs(tmp_path):
    trainer = dspark_trainer(tmp_path)
    trainer.train()
    log = trainer.state.log_history[0]
    expected = ["loss", "ce_loss", "l1_loss", "confidence_loss", "accuracy", "estimated_tau", "estimated_tau_sampled"]
    expected += ["accept_rate", *(f"accept_rate_slot_{k}" for k in range(BLOCK)), "acceptance_slot_0"]
    expected += ["confidence_abs_error", "confidence_bias", "confidence_cumulative_bias"]
    expected += ["busiest_expert", "least_used_expert", "experts_below_0.5", "experts_above_2.0"]
    assert set(expected) <= set(log)
    terms = 0.1 * log["ce_loss"] + 0.9 * log["l1_loss"] + log["confidence_loss"]
    assert log["loss"] == pytest.approx(terms, rel=1e-4)
    assert 1 <= log["estimated_tau_sampled"] <= BLOCK + 1
    # What was counted belongs to the last batch: the draft takes others afterwards.
    features, block = torch.randn(1, 9, 2 * 32), torch.randn(1, BLOCK, 32)
    trainer.model.train()(noise_embeds=block, context_hidden_states=features)


def test_a_batch_without_anchors_reaches_every_parameter(tmp_path):
    rows = make_rows().select([5])
    trainer = dspark_trainer(tmp_path, rows, max_steps=1, per_device_train_batch_size=1)
    [batch], weight = trainer.get_batch_samples(iter([trainer.data_collator([rows[0]])]), 1, torch.device("cpu"))
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=weight)
    loss.backward()
    assert loss.item() == 0 and weight.item() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trainer.model.parameters())
    before = weights(trainer)
    trainer.train()
    assert all(torch.equal(tensor, weights(trainer)[name]) for name, tensor in before.items())


def test_slot_k_is_taught_by_the_state_at_the_position_before_its_token(tmp_path):
    """A draft whose logits are the target's own has no distance left; one slot off, it has."""
    trainer = dspark_trainer(tmp_path, draft_settings={"markov_rank": None}, num_anchors=2)
    batch = placed_batch(trainer, [make_rows()[i] for i in (0, 1)])
    features, last_hidden = trainer.target_states(batch)
    rows, slots = torch.arange(2)[:, None, None], torch.arange(BLOCK)

    def perfect(shift):
        positions = batch["blocks"].anchor_positions[..., None] + slots + shift
        states = last_hidden[rows, positions.clamp(max=last_hidden.shape[1] - 1)].flatten(1, 2)
        return lambda **_: type("Output", (), {"last_hidden_state": states, "confidence_states": states})

    for shift, is_perfect in ((0, True), (1, False), (-1, False)):
        metrics = loss_sums(trainer, batch, perfect(shift)).metrics()
        assert (metrics["l1_loss"] < 1e-5) == is_perfect
    assert loss_sums(trainer, batch, perfect(0)).metrics()["accept_rate"] == pytest.approx(1)


def test_the_confidence_term_trains_its_head_alone_if_told(tmp_path):
    alphas = {"ce_loss_alpha": 0.0, "l1_loss_alpha": 0.0}
    for stop_gradient in (False, True):
        trainer = dspark_trainer(tmp_path, confidence_head_stop_gradient=stop_gradient, **alphas)
        trainer.compute_loss(trainer.model, placed_batch(trainer, make_rows(2))).backward()
        moved = {name for name, p in trainer.model.named_parameters() if p.grad is not None and p.grad.any()}
        assert any("confidence_head" in name for name in moved)
        assert all("confidence_head" in name for name in moved) == stop_gradient


def test_a_confidence_head_without_weight_is_frozen_and_not_evaluated(tmp_path, monkeypatch):
    trainer = dspark_trainer(tmp_path, confidence_head_alpha=0.0)
    before = weights(trainer)
    monkeypatch.setattr(trainer.model, "confidence_logits", None)
    trainer.train()
    assert "confidence_loss" not in trainer.state.log_history[0] and "l1_loss" in trainer.state.log_history[0]
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, before[name]) == ("confidence_head" in name or name.endswith("bias_vl")), name
    assert trainer.draft_config.objective["confidence_head_alpha"] == 0


def test_without_markov_head_there_is_no_confidence_term(tmp_path):
    trainer = dspark_trainer(tmp_path, draft_settings={"markov_rank": None})
    trainer.train()
    log = trainer.state.log_history[0]
    assert trainer.draft_config.objective["confidence_head_alpha"] == 0
    assert "confidence_loss" not in log and "accept_rate" in log


def test_cross_entropy_alone_needs_no_teacher(tmp_path):
    """Then the target's forward ends after the last layer that the draft reads."""
    trainer = dspark_trainer(tmp_path, l1_loss_alpha=0.0, confidence_head_alpha=0.0)
    ran = []
    decoder_layers(trainer.target)[-1].register_forward_hook(lambda *_: ran.append(1))
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["estimated_tau"] >= 1 and "accept_rate" not in log and "l1_loss" not in log and not ran


def test_training_against_a_v41_target(tmp_path):
    """Released defaults of the draft's shape, features at the attention's input."""
    target = v41_target()
    settings = {"mask_token_id": None, "num_draft_layers": None, "block_size": None, "target_layer_ids": None}
    trainer = dspark_trainer(tmp_path, target=target, draft_settings=settings)
    assert trainer.draft_config.capture_point == "attention_input_mean"
    before = weights(trainer)
    trainer.train()
    changed = {name for name in before if not torch.equal(before[name], weights(trainer)[name])}
    assert changed == {name for name in before if not name.endswith("bias_vl")}


def test_mixed_precision_is_near_full_precision(tmp_path):
    logs = []
    for bf16 in (False, True):
        trainer, outputs = dspark_trainer(tmp_path, bf16=bf16, max_steps=1), []
        layer = trainer.target.get_decoder().layers[0].mlp
        for module in (next(m for m in layer.modules() if isinstance(m, nn.Linear)), trainer.draft.markov_head.head):
            module.register_forward_hook(lambda module, args, output, seen=outputs: seen.append(output.dtype))
        trainer.train()
        assert set(outputs) == {torch.bfloat16 if bf16 else torch.float32}  # of target and heads, held in fp32
        logs.append(trainer.state.log_history[0])
        assert all(tensor.dtype == torch.float32 for tensor in weights(trainer).values())
    for name in ("loss", "ce_loss", "l1_loss", "confidence_loss", "accept_rate"):
        assert logs[1][name] == pytest.approx(logs[0][name], rel=0.02) and logs[1][name] != logs[0][name]


def test_activation_checkpointing_changes_nothing(tmp_path):
    """The second routing of each token leaves bias and logged loads alone."""
    results = []
    for checkpointing in (False, True):
        trainer = dspark_trainer(tmp_path, activation_checkpointing=checkpointing, loss_chunk_size=5, max_steps=1)
        trainer.train()
        log = trainer.state.log_history[0]
        results.append((weights(trainer), log["busiest_expert"], log["loss"]))
    assert_close({n: t for n, t in results[1][0].items() if "bias_vl" not in n}, results[0][0], 1e-5)
    assert results[1][1:] == pytest.approx(results[0][1:])


def test_packed_documents_equal_their_own_rows(tmp_path):
    assert_packed_documents_equal_their_own_rows(dspark_trainer(tmp_path, target=build_target("k3")))


def test_evaluation_is_repeatable_and_counts_no_load(tmp_path):
    trainer = dspark_trainer(tmp_path)
    metrics = trainer.evaluate()
    assert trainer.evaluate() == pytest.approx(metrics | {"eval_supervised_tokens_per_second": pytest.approx(1, 1e9)})
    assert {"eval_loss", "eval_accept_rate", "eval_estimated_tau", "eval_confidence_bias"} <= set(metrics)
    assert not any(load.any() for load in trainer.expert_balance._step_loads)


def test_a_trainer_refuses_the_other_familys_draft_and_objective(tmp_path):
    target = build_target("qwen3")
    args = draft_arguments(tmp_path)
    with pytest.raises(ValueError, match="take DraftTrainer"):
        DSparkTrainer(build_draft(target, block_size=BLOCK), target, args, train_dataset=make_rows())
    with pytest.raises(ValueError, match="DSparkTrainer for"):
        DraftTrainer(dspark_draft(target), target, args, train_dataset=make_rows())
    with pytest.raises(ValueError, match="`loss_type` is 'variable_prefix'"):
        dspark_trainer(tmp_path, loss_type="variable_prefix")
    with pytest.raises(ValueError, match="`loss_type` is 'dspark'"):
        args = draft_arguments(tmp_path, loss_type="dspark")
        DraftTrainer(build_draft(target, block_size=BLOCK), target, args, train_dataset=make_rows())
    with pytest.raises(ValueError, match="all 0"):
        dspark_trainer(tmp_path, ce_loss_alpha=0.0, l1_loss_alpha=0.0, confidence_head_alpha=0.0)


def test_trainable_copies_of_embedding_and_head_are_refused(tmp_path):
    """The trainer's loss has no gradient for them, and a saved draft does not hold them."""
    target = v41_target()
    draft = dspark_draft(target)
    draft.initialize_embeddings_and_head(target.get_input_embeddings(), target.get_output_embeddings())
    args = draft_arguments(tmp_path)
    DSparkTrainer(draft, target, args)
    draft.set_embedding_head_trainable(True)
    with pytest.raises(ValueError, match=r"`draft.set_embedding_head_trainable\(False\)`"):
        DSparkTrainer(draft, target, args)


def test_settings_without_effect_are_named(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="blockdraft"):
        dspark_trainer(tmp_path, prefix_weight_base=0.5, ce_loss_alpha=0.2)
    assert "does not use prefix_weight_base." in caplog.text
    caplog.clear()
    target = build_target("qwen3")
    with caplog.at_level("WARNING", logger="blockdraft"):
        args = draft_arguments(tmp_path, l1_loss_alpha=0.5, expert_bias_step=0.0)
        DraftTrainer(build_draft(target, block_size=BLOCK), target, args, train_dataset=make_rows())
    assert "does not use expert_bias_step, l1_loss_alpha." in caplog.text


def test_no_warning_about_slots_that_cannot_differ(tmp_path, caplog):
    """Rotary positions tell a bidirectional block's slots apart."""
    with caplog.at_level("WARNING", logger="blockdraft"):
        trainer = dspark_trainer(tmp_path)
    assert not trainer.draft_config.is_causal and not caplog.text


def test_evaluate_decodes_for_real(tmp_path):
    trainer = dspark_trainer(tmp_path, eval_decode_prompts=4, eval_max_new_tokens=6)
    metrics = trainer.evaluate()
    assert metrics["eval_prompts"] == 4 and 1 <= metrics["eval_tau"] <= BLOCK + 1
    assert not any(value != value for value in metrics.values())
