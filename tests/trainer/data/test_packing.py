"""Packed rows: how they are made, that both drafts train on them as on their documents, and who cannot."""

import pytest
import torch
from datasets import Dataset
from decoding_models import COMMON, LLAMA_LIKE, build_target
from draft_trainers import assert_close, make_trainer, weights
from dspark_trainers import dspark_trainer
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from blockdraft.trainer.data.packing import best_fit, check_documents_apart, pack_rows

BLOCK = 4
LENGTHS = [1, 17, BLOCK - 1, 26, BLOCK, 9, BLOCK + 1, 13, 2]


def document_rows() -> Dataset:
    """Rows of lengths around the block's, some supervised from their first token on."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(1, 60, (length,), generator=generator).tolist()
        prompt = length // 3 if number % 2 else 0
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (length - prompt), "row_id": 100 + number})
    return Dataset.from_list(rows)


def test_rows_are_packed_whole_and_tightly():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 100, (500,), generator=generator).tolist()
    bins = best_fit(lengths, 128)
    assert sorted(index for bin in bins for index in bin) == list(range(500))
    assert all(sum(lengths[i] for i in bin) <= 128 for bin in bins)
    assert len(bins) <= 1.03 * sum(lengths) / 128 + 1
    assert best_fit([3, 8, 5, 2], 8) == [[0, 2], [1], [3]]
    with pytest.raises(ValueError, match="a row of 9 tokens does not fit a packed row of max_length=8"):
        best_fit([9], 8)


def test_packed_rows_hold_their_documents():
    rows = document_rows()
    packed = pack_rows(rows, 30)
    assert packed.column_names == ["input_ids", "loss_mask", "row_id", "document_ids", "document_row_ids"]
    found = {}
    for row in packed:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["document_ids"]) <= 30
        for number, name in enumerate(row["document_row_ids"], start=1):
            own = [i for i, document in enumerate(row["document_ids"]) if document == number]
            assert own == list(range(own[0], own[-1] + 1))
            found[name] = [[row[column][i] for i in own] for column in ("input_ids", "loss_mask")]
    assert found == {row["row_id"]: [row["input_ids"], row["loss_mask"]] for row in rows}
    assert len(set(packed["row_id"])) == len(packed) == 3  # 80 tokens
    assert pack_rows(rows, 30)["row_id"][:] == packed["row_id"][:]
    assert list(pack_rows(rows.to_iterable_dataset(), 30)) == list(packed)


def trainer_for(family: str, tmp_path, target_name: str, **arguments):
    if family == "dspark":
        return dspark_trainer(tmp_path, document_rows(), build_target(target_name), **arguments)
    return make_trainer(tmp_path, document_rows(), target_name, **arguments)


def placed(trainer, rows, step: int = 2) -> dict:
    batch = trainer.data_collator(list(rows))
    trainer.place_blocks(batch, step)
    return batch


def anchors_by_document(batch: dict) -> dict[int, list[int]]:
    """Anchors, counted from the start of their document, by the document's row id."""
    found = {}
    for row in range(len(batch["row_id"])):
        anchors = batch["anchor_positions"][row][batch["block_keep_mask"][row]].tolist()
        if "document_ids" not in batch:
            found[batch["row_id"][row].item()] = anchors
            continue
        documents = batch["document_ids"][row].tolist()
        for number in range(1, max(documents) + 1):
            start, name = documents.index(number), batch["document_row_ids"][row, number - 1].item()
            found[name] = [anchor - start for anchor in anchors if documents[anchor] == number]
    return found


@pytest.mark.parametrize(
    ("family", "target_name", "arguments"),
    [(family, name, {}) for family in ("dflash", "dspark") for name in ("k3", "qwen3", "gemma3", "gpt2")]
    + [("dflash", "gpt2", {"loss_type": "variable_prefix"})],
)
@torch.no_grad()
def test_documents_have_the_blocks_and_the_loss_of_their_own_rows(tmp_path, family, target_name, arguments):
    """Packed by document ids (K3) or by positions that start again (learned, rotary, with sliding windows)."""
    trainer = trainer_for(family, tmp_path, target_name, **arguments)
    alone = placed(trainer, trainer.train_dataset)
    packed = placed(trainer, pack_rows(trainer.train_dataset, 30))
    anchors = anchors_by_document(packed)
    assert anchors == anchors_by_document(alone) and len([a for a in anchors.values() if a]) >= 6
    together, separate = (trainer.block_loss(trainer.model, batch) for batch in (packed, alone))
    assert together.valid_blocks == separate.valid_blocks
    assert together.weight.item() == pytest.approx(separate.weight.item(), rel=1e-6)
    assert together.loss_sum.item() == pytest.approx(separate.loss_sum.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["dflash", "dspark"])
@torch.no_grad()
def test_each_document_has_the_loss_of_its_own_row(tmp_path, family):
    trainer = trainer_for(family, tmp_path, "qwen3")
    packed_row = max(pack_rows(trainer.train_dataset, 30), key=lambda row: len(row["document_row_ids"]))
    packed = placed(trainer, [packed_row])
    documents, keep = packed["document_ids"].gather(1, packed["anchor_positions"]), packed["block_keep_mask"]
    assert len(packed_row["document_row_ids"]) > 2
    for number, name in enumerate(packed_row["document_row_ids"], start=1):
        packed["block_keep_mask"] = keep & (documents == number)
        together = trainer.block_loss(trainer.model, packed)
        separate = trainer.block_loss(trainer.model, placed(trainer, [trainer.train_dataset[name - 100]]))
        assert together.loss.item() == pytest.approx(separate.loss.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_a_packed_step_is_the_step_on_its_documents(tmp_path, family):
    """The same weights after a step over the same documents, packed in 3 rows or in 9 rows of their own."""
    results = []
    for packed in (False, True):
        trainer = trainer_for(family, tmp_path, "qwen3", per_device_train_batch_size=9, max_steps=1)
        if packed:
            trainer.train_dataset = pack_rows(trainer.train_dataset, 30)
        trainer.train()
        results.append((weights(trainer), trainer.state.log_history[0]["loss"]))
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)
    assert_close({n: t for n, t in results[1][0].items() if "bias" not in n}, results[0][0], 1e-5)


def apart(target):
    """Whether packed rows of a target are accepted, by the features of all its layers."""
    batch = {"input_ids": torch.randint(1, 60, (2, 40))}

    def features(inputs):
        given = {"input_ids": inputs["input_ids"]}
        if "document_ids" in inputs:
            begins = inputs["document_ids"].diff(prepend=torch.zeros(2, 1, dtype=torch.long)) != 0
            columns = torch.arange(inputs["input_ids"].shape[1])
            given["position_ids"] = columns - (columns * begins).cummax(-1).values
        return target(**given, use_cache=False, output_hidden_states=True).hidden_states[-1]

    with torch.no_grad():
        check_documents_apart(target, features, batch)


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
    trainer = dspark_trainer(tmp_path, document_rows(), build_target("v41"), settings)
    batch = trainer.data_collator([pack_rows(trainer.train_dataset, 30)[0]])
    trainer.place_blocks(batch, 0)
    for _ in range(2):
        with pytest.raises(ValueError, match="DeepseekV41ForCausalLM cannot keep documents apart"):
            trainer.block_loss(trainer.model, batch)
