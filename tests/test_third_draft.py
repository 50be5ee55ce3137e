"""A further draft is a config, a model and a line in the table: then it trains, decodes, saves and has a card."""

import os
import subprocess
import sys

import pytest
import torch
from decoding_models import MASK, build_target, prompts
from draft_trainers import BLOCK, arguments, make_rows
from kimi_k3_dspark import KimiK3DSparkConfig, KimiK3DSparkModel, add_kimi_k3_dspark
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from blockdraft.hub_cards.card import check_card, make_card
from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.families import DraftFamily, family_of
from blockdraft.modeling.target.target_identity import target_record
from blockdraft.trainer.dspark_trainer import DSparkTrainer
from blockdraft.trainer.loading import new_draft, new_trainer

SETTINGS = {"is_causal": False, "sliding_window": 6, "num_full_attention_layers": 0, "markov_rank": 4}


@pytest.fixture(autouse=True)
def family(monkeypatch) -> DraftFamily:
    AutoConfig.register(KimiK3DSparkConfig.model_type, KimiK3DSparkConfig)
    AutoModel.register(KimiK3DSparkConfig, KimiK3DSparkModel)
    yield add_kimi_k3_dspark(monkeypatch)
    CONFIG_MAPPING._extra_content.pop(KimiK3DSparkConfig.model_type)
    MODEL_MAPPING._extra_content.pop(KimiK3DSparkConfig)


@pytest.fixture(scope="module")
def target():
    return build_target("qwen3")


@pytest.fixture
def draft(target) -> KimiK3DSparkModel:
    torch.manual_seed(1)
    shape = {"num_draft_layers": 2, "block_size": BLOCK, "target_layer_ids": [1, 3]}
    return new_draft(target, None, "kimi_k3_dspark", MASK, **shape, **SETTINGS)


def test_it_is_found_and_is_what_its_parents_are(draft, family):
    assert family_of(draft.config) is family and type(draft) is KimiK3DSparkModel
    config = draft.config
    assert config.sample_from_anchor and config.num_drafted == BLOCK and config.context_windows == [6, 6]
    assert draft.drafts_in_sequence and draft.confidence_head is draft.heads.confidence_head is not None
    names = {name.split(".")[0] for name in draft.state_dict()}
    assert names == {"fc", "hidden_norm", "layers", "norm", "heads"}
    assert config.to_dict()["dflash_config"]["block_size"] == BLOCK and config.to_dict()["markov_rank"] == 4


def test_it_trains_and_decodes_as_its_target_alone(draft, target, tmp_path):
    args = arguments(tmp_path, max_steps=12, optim="adamw_torch", learning_rate=1e-2, save_strategy="no")
    trainer = new_trainer(draft, target, args, train_dataset=make_rows())
    assert type(trainer) is DSparkTrainer
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < losses[0]
    assert all((value != before[name]).any() for name, value in draft.state_dict().items())

    draft.eval()
    for prompt in prompts(2):
        options = {"max_new_tokens": 16, "do_sample": False}
        output = block_decode(target, prompt, draft=draft, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, target.generate(prompt, **options))
        assert sum(output.accepted_lengths) + len(output.accepted_lengths) >= 15


def test_the_forward_on_token_ids(draft, target):
    draft.initialize_embeddings_and_head(target.get_input_embeddings(), target.get_output_embeddings())
    ids = torch.randint(1, 60, (2, 12))
    features = torch.randn(2, 12, draft.config.features_width)
    output = draft(input_ids=ids, context_hidden_states=features, loss_mask=torch.ones(2, 12), num_anchors=3)
    assert output.draft_logits.shape == (2, 3, BLOCK, target.config.vocab_size)
    assert output.confidence_pred.shape == output.target_ids.shape == (2, 3, BLOCK)


def test_its_card_says_what_it_is(draft, target):
    draft.config.target = target_record(target, None)
    card = make_card(draft.config)
    check_card(card)
    for said in ("DSpark", "2607.05147", "kimi_k3_dspark", "- kimi_k3\n"):
        assert said in card


FRESH = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

source, folder = sys.argv[1:]
draft = AutoModel.from_pretrained(source, trust_remote_code=True)
assert type(draft).__module__.startswith("transformers_modules."), type(draft)
with torch.no_grad():
    hidden = draft(**load_file(folder + "/inputs.safetensors")).last_hidden_state
save_file({"hidden": hidden}, folder + "/outputs.safetensors")
"""


def test_it_is_saved_and_loaded(draft, tmp_path):
    inputs = {"noise_embeds": torch.randn(1, BLOCK, draft.config.hidden_size)}
    inputs["context_hidden_states"] = torch.randn(1, 7, draft.config.features_width)
    save_file(inputs, tmp_path / "inputs.safetensors")
    draft.eval().save_pretrained(tmp_path / "saved")
    loaded = AutoModel.from_pretrained(tmp_path / "saved")
    assert type(loaded) is KimiK3DSparkModel and loaded.config.to_dict().keys() >= draft.config.to_dict().keys()
    with torch.no_grad():
        expected = loaded(**load_file(tmp_path / "inputs.safetensors")).last_hidden_state

    # By the code that was saved beside it, which imports this package: what is the draft's own is not in it.
    caches = {"HF_HOME": str(tmp_path / "home"), "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", FRESH, str(tmp_path / "saved"), str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ | caches, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    torch.testing.assert_close(load_file(tmp_path / "outputs.safetensors")["hidden"], expected)
