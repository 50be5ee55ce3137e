"""Both drafts against tiny real architectures: scalings, a training step, decoding; quantised and adapted targets."""

import copy

import pytest
import torch
from any_targets import CASES, MASK, MULTIMODAL, Int8Linear, build, build_multimodal, quantise
from decoding_models import build_draft, build_target, prompts
from draft_trainers import make_rows
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers.utils import logging

from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.modeling.target.pairing import check_pair
from blockdraft.modeling.target.target_features import capture_features, decoder_layers
from blockdraft.modeling.target.target_identity import target_record
from blockdraft.modeling.target.target_transforms import transform_faults
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.dspark_trainer import DSparkTrainer
from blockdraft.trainer.training_args import DraftTrainingArguments

BLOCK = 4


def dflash(target, **settings) -> KimiK3DFlashDraftModel:
    torch.manual_seed(1)
    settings = {"num_draft_layers": 2, "block_size": BLOCK} | settings
    return KimiK3DFlashDraftModel(KimiK3DFlashConfig.from_target_config(target.config, MASK, **settings))


def dspark(target, **settings) -> DeepseekV41DSparkModel:
    torch.manual_seed(1)
    settings = {"num_draft_layers": 2, "block_size": BLOCK, "sliding_window": 6, "hc_sinkhorn_iters": 2} | settings
    return DeepseekV41DSparkModel(DeepseekV41DSparkConfig.from_target_config(target.config, MASK, **settings))


DRAFTS = {"dflash": (dflash, DraftTrainer), "dspark": (dspark, DSparkTrainer)}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> DraftTrainingArguments:
    return DraftTrainingArguments(
        output_dir=str(tmp_path_factory.mktemp("run")), num_anchors=3, report_to="none", use_cpu=True, bf16=False
    )


def step(draft, target, trainer_class, arguments) -> float:
    """The loss of two rows, whose gradient is left in the draft."""
    trainer = trainer_class(draft, target, copy.copy(arguments), train_dataset=make_rows(2))
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(list(trainer.train_dataset)))
    loss.backward()
    return loss.item()


def assert_trains(draft, target, trainer_class, arguments) -> None:
    loss = step(draft, target, trainer_class, arguments)
    assert 0 < loss < 1000
    without = [name for name, weight in draft.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not without
    assert all(weight.grad.isfinite().all() for weight in draft.parameters() if weight.requires_grad)
    assert all(not weight.requires_grad and weight.grad is None for weight in target.parameters())


def what_the_target_does(target) -> dict[str, torch.Tensor]:
    """A forward's tokens and logits, what its head reads and what its first layer reads."""
    seen = {"input_ids": prompts(1)[0]}
    hooks = [
        target.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.update(head=args[0])),
        decoder_layers(target)[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(first=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ),
    ]
    with torch.no_grad():
        seen["logits"] = target(seen["input_ids"], use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return seen


def _first_version(states: torch.Tensor) -> torch.Tensor:
    """Of several versions of a state, Gemma 3n's in front and hyper-connections' streams behind, the first."""
    if states.dim() == 3:
        return states
    return states[:, :, 0] if states.shape[0] == 1 else states[0]


def assert_decodes(target, draft) -> None:
    input_ids = prompts(1)[0]
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(input_ids)}
    expected = target.generate(input_ids, **settings)
    assert torch.equal(target.generate(input_ids, custom_generate=block_decode, draft=draft, **settings), expected)


@pytest.mark.parametrize("name", CASES)
def test_drafts_fit_train_and_decode(name, arguments):
    case = CASES[name]
    target = build(case)
    seen = what_the_target_does(target)
    for build_one, trainer_class in DRAFTS.values():
        draft = build_one(target).eval()
        logits = draft.compute_logits(seen["head"], target.get_output_embeddings())
        torch.testing.assert_close(logits, seen["logits"], atol=1e-5, rtol=1e-5)
        if case.embeds:
            embeds = draft.embed_block(seen["input_ids"], target.get_input_embeddings())
            torch.testing.assert_close(embeds, _first_version(seen["first"]), atol=1e-6, rtol=1e-6)
        assert transform_faults(target, draft.config) == []
        assert_trains(draft.train(), target, trainer_class, arguments)
    draft.eval()
    if case.takes_back:
        assert_decodes(target, draft)
    else:
        with pytest.raises(
            ValueError, match="block_decode (verifies several|takes back rejected|needs a transformers `Cache`)"
        ):
            assert_decodes(target, draft)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_multimodal_targets_text_decoder(name, arguments):
    target = build_multimodal(name)
    seen = what_the_target_does(target)
    draft = dflash(target)
    logits = draft.compute_logits(seen["head"], target.get_output_embeddings())
    torch.testing.assert_close(logits, seen["logits"], atol=1e-5, rtol=1e-5)
    assert transform_faults(target, draft.config) == []
    assert_trains(draft, target, DraftTrainer, arguments)
    assert_decodes(target, draft.eval())


# ---- what a target's settings do not tell ---------------------------------------------------------------------------


def test_what_an_unknown_target_does_is_measured(arguments, monkeypatch):
    """A target that scales under names nobody knows: the line names the value to set, and setting it mends it."""
    target = build(CASES["granite"])
    unknown = dflash(target, output_multiplier=1.0, input_embedding_scale=1.0)
    logit_line, embedding_line = transform_faults(target, unknown.config)
    assert "set `output_multiplier` to 0.25" in logit_line and "the target multiplies by 3" in embedding_line
    lines = []
    monkeypatch.setattr(logging.get_logger("blockdraft.trainer.draft_trainer"), "warning", lines.append)
    step(unknown, target, DraftTrainer, arguments)
    assert lines[:2] == [logit_line, embedding_line]
    assert transform_faults(target, dflash(target, output_multiplier=0.25, input_embedding_scale=3.0).config) == []
    capped = dflash(build(CASES["gemma2"]), final_logit_softcapping=None)
    (line,) = transform_faults(build(CASES["gemma2"]), capped.config)
    assert "`final_logit_softcapping` None" in line and "set" not in line


def test_mask_tokens_in_answers_are_counted(tmp_path):
    target = build_target("qwen3")
    rows = make_rows(4)
    mask = rows[0]["input_ids"][-1]
    held = sum(
        ids.count(mask)
        for ids in (
            [i for i, m in zip(*columns, strict=True) if m]
            for columns in zip(rows["input_ids"], rows["loss_mask"], strict=True)
        )
    )
    for mask_token_id, counted in ((mask, held), (MASK, None)):
        args = DraftTrainingArguments(
            output_dir=str(tmp_path),
            num_anchors=2,
            report_to="none",
            use_cpu=True,
            max_steps=1,
            logging_steps=1,
            per_device_train_batch_size=4,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = DraftTrainer(build_draft(target, mask_token_id=mask_token_id), target, args, train_dataset=rows)
        trainer.train()
        assert trainer.state.log_history[0].get("mask_tokens_in_answers") == counted


# ---- quantised heads and layers -------------------------------------------------------------------------------------


def test_a_head_without_a_gradient_is_refused(arguments):
    class InferenceOnly(Int8Linear):
        def forward(self, states):
            return super().forward(states.detach())

    target = build_target("qwen3")
    target.lm_head = InferenceOnly(target.lm_head)
    with pytest.raises(ValueError, match=r"head \(InferenceOnly\) passes no gradient"):
        step(dflash(target, target_layer_ids=[1, 3]), target, DraftTrainer, arguments)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_target_trains_and_decodes(kind, dtype, arguments):
    build_one, trainer_class = DRAFTS[kind]
    target = build_target("qwen3").to(dtype)
    quantise(target)
    assert not isinstance(target.get_output_embeddings(), nn.Linear)
    draft = build_one(target, target_layer_ids=[1, 3])
    assert_trains(draft, target, trainer_class, arguments)
    if dtype == torch.float32:
        assert_decodes(target, draft.eval())


def test_a_head_that_is_more_than_a_matrix_computes_as_its_target_does():
    """LoRA on a half-precision head, and a head with a scale for each token (a subclass of `nn.Linear`)."""

    class ScaledHead(nn.Linear):
        def forward(self, states):
            return super().forward(states) * torch.arange(self.out_features).to(states)

    target = build_target("qwen3").to(torch.bfloat16)
    adapted = get_peft_model(target, LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    states = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    scaled = ScaledHead(32, 64, bias=False).to(torch.bfloat16)
    for head in (adapted.get_output_embeddings(), scaled):
        for build_one, _ in DRAFTS.values():
            logits = build_one(target, target_layer_ids=[1, 3]).compute_logits(states.float(), head)
            torch.testing.assert_close(logits.bfloat16(), head(states))


# ---- adapters on the target -----------------------------------------------------------------------------------------


def adapted_target():
    return get_peft_model(
        build_target("qwen3"),
        LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False),
    )


def test_a_target_with_an_adapter(arguments):
    target = adapted_target()
    bare = build_target("qwen3")
    assert decoder_layers(target) is decoder_layers(target.get_base_model())
    with capture_features(target, [1, 3]) as adapted, capture_features(bare, [1, 3]) as plain, torch.no_grad():
        adapted.run(prompts(1)[0])
        plain.run(prompts(1)[0])
        assert (adapted.features() - plain.features()).abs().max() > 0.1
    record = target_record(target, None)
    assert (record["architecture"], record["adapters"]) == ("Qwen3ForCausalLM", ["LORA"])
    assert record == target_record(target.get_base_model(), None)
    for build_one, trainer_class in DRAFTS.values():
        draft = build_one(target, target_layer_ids=[1, 3])
        assert_trains(draft, target, trainer_class, arguments)
        assert draft.config.target["adapters"] == ["LORA"]
        assert_decodes(target, draft.eval())
        assert_decodes(target.get_base_model(), draft)
        with pytest.warns(UserWarning, match="adapters"):
            check_pair(bare, draft)


def test_an_adapter_with_virtual_tokens_is_refused():
    target = get_peft_model(build_target("qwen3"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="virtual tokens"):
        check_pair(target, build_draft(target))
