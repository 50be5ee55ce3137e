"""What training reads of a frozen target: features, its head's input, and whether it keeps documents apart."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from decoding_models import COMMON, LLAMA_LIKE, build_target
from draft_trainers import BLOCK, make_rows, make_trainer, placed_batch
from dspark_trainers import dspark_trainer, v41_target
from packed_documents import document_rows
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from blockdraft.modeling.target.target_features import decoder_layers
from blockdraft.trainer.data.packing import pack_rows
from blockdraft.trainer.target_states import TargetStates, check_row_lengths


@pytest.mark.parametrize("target_name", ["k3", "gpt2", "gemma3"])
def test_features_are_layer_outputs_and_the_forward_stops(tmp_path, target_name):
    trainer = make_trainer(tmp_path, target_name=target_name)
    rows = make_rows()
    batch = trainer.data_collator([rows[0], rows[1]])
    [features] = trainer.target_states(batch)
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
    trainer.target_states(batch)
    assert not ran


@pytest.mark.parametrize("target_name", ["k3", "gpt2", "gemma3", "qwen3", "v41"])
def test_one_forward_gives_features_and_what_the_head_reads(tmp_path, target_name):
    target = v41_target() if target_name == "v41" else build_target(target_name)
    settings = {"mask_token_id": 83, "target_layer_ids": [1, 5]} if target_name == "v41" else None
    trainer = dspark_trainer(tmp_path, target=target, draft_settings=settings)
    batch, ran = trainer.data_collator(list(make_rows(2))), []
    handle = target.get_output_embeddings().register_forward_hook(lambda *_: ran.append("head"))
    layers = decoder_layers(target)
    layers[-1].register_forward_hook(lambda *_: ran.append("last layer"))
    features, last_hidden = trainer.target_states(batch)
    assert ran == ["last layer"]
    reader = TargetStates(target, trainer.draft_config, torch.device("cpu"))
    assert torch.equal(features, reader.read(batch)[0])
    handle.remove()
    logits = target(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    valid = batch["attention_mask"].bool()
    found = trainer.model.compute_logits(last_hidden, target.get_output_embeddings())
    assert torch.allclose(found[valid], logits[valid], atol=1e-5)


def test_a_target_whose_head_is_not_called_is_refused(tmp_path, monkeypatch):
    trainer = dspark_trainer(tmp_path)
    batch = trainer.data_collator(list(make_rows(2)))
    monkeypatch.setattr(trainer.target, "get_output_embeddings", lambda: torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM makes its logits without"):
        trainer.target_states(batch)


def apart(target):
    """Whether packed rows of a target are accepted, by the features of its last layer."""
    config = SimpleNamespace(target_layer_ids=[target.config.num_hidden_layers - 1], capture_point="layer_output")
    ids = torch.randint(1, 60, (2, 40))
    TargetStates(target, config, torch.device("cpu")).read({"input_ids": ids, "document_ids": torch.ones_like(ids)})


@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe", "mistral", "phi3"])
def test_attention_targets_keep_documents_apart(model_type):
    settings = LLAMA_LIKE | {"num_experts": 4, "sliding_window": 8, "num_hidden_layers": 2}
    settings |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "max_position_embeddings": 64}
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    for implementation in ("sdpa", "eager"):
        target.set_attn_implementation(implementation)
        apart(target)


def test_targets_that_mix_documents_are_refused(tmp_path):
    """A state along the row, compressed keys, attention without positions, and a batch that a trainer is given."""
    hybrid = AutoConfig.for_model(
        "qwen3_next",
        **LLAMA_LIKE | {"num_hidden_layers": 2},
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM cannot keep documents apart: its features change by"):
        apart(AutoModelForCausalLM.from_config(hybrid).eval())
    with pytest.raises(ValueError, match="BloomForCausalLM takes no `position_ids`"):
        apart(BloomForCausalLM(BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=4)).eval())
    opt = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="OPTForCausalLM cannot keep documents apart"):  # positions, but not its mask
        apart(AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **COMMON, **opt, ffn_dim=64)).eval())
    settings = {"mask_token_id": 63, "num_draft_layers": 1, "block_size": BLOCK, "target_layer_ids": [1, 3]}
    trainer = dspark_trainer(tmp_path, document_rows(), build_target("v41"), draft_settings=settings)
    batch = placed_batch(trainer, [pack_rows(trainer.train_dataset, 30)[0]])
    for _ in range(2):
        with pytest.raises(ValueError, match="DeepseekV41ForCausalLM cannot keep documents apart"):
            trainer.compute_loss(trainer.model, batch)


def test_rows_longer_than_a_targets_table_of_positions(tmp_path):
    """Refused before training, in any of the sets; in a stream when they come. Packed rows hold shorter ones."""
    row = {"input_ids": [1] * 1025, "loss_mask": [1] * 1025, "row_id": 0}
    long, short = Dataset.from_list([row]), make_rows(2)
    message = "1025 tokens, more than the 1024 positions of the target, GPT2LMHeadModel"
    with pytest.raises(ValueError, match=f"The longest row: {message}"):
        make_trainer(tmp_path, long, "gpt2")
    trainer = make_trainer(tmp_path, short, "gpt2")
    with pytest.raises(ValueError, match=f"The longest row: {message}"):
        check_row_lengths(trainer.target, [short, None, long])
    stream = make_trainer(tmp_path, long.to_iterable_dataset(), "gpt2")
    with pytest.raises(ValueError, match=f"The longest row of a batch: {message}"):
        stream.target_states(stream.data_collator([row]))
    row = {"input_ids": [1] * 600, "loss_mask": [1] * 600, "row_id": 0}
    packed = pack_rows(Dataset.from_list([row, row]), 1200)
    assert len(packed[0]["input_ids"]) == 1200
    check_row_lengths(trainer.target, [packed])
    check_row_lengths(build_target("qwen3"), [long])
