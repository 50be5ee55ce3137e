"""Targets, drafts and trainers by name: a target's class, the shape of a new draft, the trainer of its method."""

import pytest
import torch
from any_targets import MULTIMODAL, build_multimodal
from counting_pairs import counting_tokenizer
from decoding_models import build_draft, build_target, prompts
from peft import LoraConfig, get_peft_model

from blockdraft.modeling.families import DFLASH, DSPARK, FAMILIES
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.dspark_trainer import DSparkTrainer
from blockdraft.trainer.loading import TRAINERS, check_path, check_shape, load_target, new_draft


def test_every_method_has_a_trainer():
    assert TRAINERS == {DFLASH: DraftTrainer, DSPARK: DSparkTrainer}
    assert {family.method for family in FAMILIES.values()} <= TRAINERS.keys()


@pytest.mark.parametrize(
    ("draft_type", "shape", "message"),
    [
        ("dspork", {}, "`draft_type` is 'dspork'; choose one of dflash, dspark."),
        ("dflash", {"markov_rank": 8}, "`markov_rank` belongs to `draft_type` dspark; this draft is a dflash."),
        ("dspark", {"num_full_attention_layers": 1}, "`num_full_attention_layers` belongs to `draft_type` dflash"),
        ("dspark", {"num_draft_layer": 1}, "`num_draft_layer` is not a setting of a draft"),
    ],
)
def test_a_new_draft_has_no_settings_that_it_would_ignore(draft_type, shape, message):
    with pytest.raises(ValueError, match=message):
        new_draft(build_target("k3"), None, draft_type, mask_token_id=1, **shape)


def test_settings_are_those_of_the_configurations():
    common = {"num_draft_layers", "block_size", "mask_token_id", "target_layer_ids", "sliding_window", "is_causal"}
    for draft_type in FAMILIES:
        check_shape(draft_type, common)
    draft = new_draft(build_target("k3"), None, "dflash", mask_token_id=1, block_size=5, num_draft_layers=1)
    assert type(draft) is type(build_draft(build_target("k3"))) and draft.config.block_size == 5


def test_a_local_path_that_does_not_exist_is_no_hub_id(tmp_path):
    for name in (str(tmp_path / "none"), "./none", "runs/none/draft"):
        with pytest.raises(ValueError, match="`draft`: there is no directory"):
            check_path("draft", name)
    check_path("draft", str(tmp_path))
    check_path("draft", "owner/name")


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_target_that_reads_images_too_is_found(name, tmp_path):
    """Some are among the causal language models of transformers, some are not."""
    saved = build_multimodal(name)
    saved.save_pretrained(tmp_path)
    counting_tokenizer().save_pretrained(tmp_path)
    target, _ = load_target(str(tmp_path))
    assert type(target) is type(saved)
    with torch.no_grad():
        logits = target(prompts(1)[0]).logits
        torch.testing.assert_close(logits, saved(prompts(1)[0]).logits, atol=1e-4, rtol=1e-4)  # sdpa, eager


def test_a_target_with_an_adapter_is_found(tmp_path):
    base = build_target("qwen3")
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(build_target("qwen3"), LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    counting_tokenizer().save_pretrained(tmp_path / "adapter")
    target, _ = load_target(str(tmp_path / "adapter"))
    assert type(target) is type(base)
    with torch.no_grad():
        ours, theirs, plain = (model(prompts(1)[0]).logits for model in (target, adapted, base))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (ours - plain).abs().max() > 1e-2
