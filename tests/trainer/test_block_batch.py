"""The blocks of a batch: given or drawn, of packed rows as of their documents, made once."""

import pytest
import torch
from draft_trainers import assert_close, loss_sums, make_rows, make_trainer, placed_batch, weights
from dspark_trainers import dspark_trainer
from packed_documents import packing_trainer
from torch.utils._python_dispatch import TorchDispatchMode

from blockdraft.trainer.data.packing import pack_rows


def test_given_anchors_are_used(tmp_path):
    trainer = make_trainer(tmp_path)
    batch = trainer.data_collator([make_rows()[i] for i in (0, 1)])
    del batch["row_id"]  # nothing is drawn
    batch["anchor_positions"] = torch.tensor([[5, 7], [6, 0]])
    batch["block_keep_mask"] = torch.tensor([[True, True], [True, False]])
    blocks = trainer.place_blocks(batch, step=3)
    assert torch.equal(blocks.anchor_positions, batch["anchor_positions"])
    assert torch.equal(blocks.block_keep_mask, batch["block_keep_mask"])
    assert torch.equal(blocks.plan.anchor_positions, batch["anchor_positions"])


def test_rows_without_id_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    batch = trainer.data_collator([make_rows()[0]])
    del batch["row_id"]
    with pytest.raises(ValueError, match="row_id"):
        trainer.place_blocks(batch, 0)
    del batch["loss_mask"]
    with pytest.raises(ValueError, match="The batch has no `loss_mask`: collate rows with `DraftCollator`"):
        trainer.place_blocks(batch, 0)


class HostReads(TorchDispatchMode):
    """Notes what makes the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [make_trainer, dspark_trainer])
def test_the_host_does_not_wait_behind_the_targets_forward(tmp_path, monkeypatch, make):
    """From there to the loss of placed blocks, nothing is read from the device."""
    trainer = make(tmp_path)
    batch, reads = placed_batch(trainer, make_rows(2)), HostReads()
    target_states = trainer.target_states

    def read_target(inputs):
        states = target_states(inputs)
        reads.found.clear()
        return states

    monkeypatch.setattr(trainer, "target_states", read_target)
    with reads:
        loss = trainer.compute_loss(trainer.model, batch)
        assert not reads.found
        loss.item()
    assert reads.found


def test_anchors_of_packed_rows_stay_in_their_document(tmp_path):
    trainer = dspark_trainer(tmp_path, num_anchors=32)
    batch = trainer.data_collator(
        [{"input_ids": [5] * 9, "loss_mask": [1] * 9, "document_ids": [1] * 4 + [2] * 5, "row_id": 0}]
    )
    blocks = trainer.place_blocks(batch, 0)
    assert blocks.anchor_positions.tolist() == [[0, 1, 2, 4, 5, 6, 7]]
    assert blocks.targets.supervised.sum(-1).tolist() == [[3, 2, 1, 4, 3, 2, 1]]
    assert blocks.position_ids.tolist()[0][:9] == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert blocks.position_ids[0, 9:].view(7, 4)[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 3]


def anchors_by_document(batch: dict) -> dict[int, list[int]]:
    """Anchors, counted from the start of their document, by the document's row id."""
    found = {}
    for row in range(len(batch["row_id"])):
        anchors = batch["blocks"].anchor_positions[row][batch["blocks"].block_keep_mask[row]].tolist()
        if "document_ids" not in batch:
            found[batch["row_id"][row].item()] = anchors
            continue
        documents = batch["document_ids"][row].tolist()
        for number in range(1, max(documents) + 1):
            start, name = documents.index(number), batch["document_row_ids"][row, number - 1].item()
            found[name] = [anchor - start for anchor in anchors if documents[anchor] == number]
    return found


@pytest.mark.parametrize(
    ("method", "target_name", "arguments"),
    [(method, name, {}) for method in ("dflash", "dspark") for name in ("k3", "qwen3", "gemma3", "gpt2")]
    + [("dflash", "gpt2", {"loss_type": "variable_prefix"})],
)
@torch.no_grad()
def test_documents_have_the_blocks_and_the_loss_of_their_own_rows(tmp_path, method, target_name, arguments):
    """Packed by document ids (K3) or by positions that start again (learned, rotary, with sliding windows)."""
    trainer = packing_trainer(method, tmp_path, target_name, **arguments)
    alone = placed_batch(trainer, trainer.train_dataset, step=2)
    packed = placed_batch(trainer, pack_rows(trainer.train_dataset, 30), step=2)
    anchors = anchors_by_document(packed)
    assert anchors == anchors_by_document(alone) and len([a for a in anchors.values() if a]) >= 6
    together, separate = (loss_sums(trainer, batch) for batch in (packed, alone))
    assert together.valid_blocks == separate.valid_blocks
    assert together.weight.item() == pytest.approx(separate.weight.item(), rel=1e-6)
    assert together.loss_sum.item() == pytest.approx(separate.loss_sum.item(), rel=1e-5)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
@torch.no_grad()
def test_each_document_has_the_loss_of_its_own_row(tmp_path, method):
    trainer = packing_trainer(method, tmp_path, "qwen3")
    packed_row = max(pack_rows(trainer.train_dataset, 30), key=lambda row: len(row["document_row_ids"]))
    packed = trainer.data_collator([packed_row])
    blocks = trainer.place_blocks(packed, step=2)
    documents = packed["document_ids"].gather(1, blocks.anchor_positions)
    packed["anchor_positions"] = blocks.anchor_positions
    assert len(packed_row["document_row_ids"]) > 2
    for number, name in enumerate(packed_row["document_row_ids"], start=1):
        packed["block_keep_mask"] = blocks.block_keep_mask & (documents == number)
        together = loss_sums(trainer, packed)
        separate = loss_sums(trainer, placed_batch(trainer, [trainer.train_dataset[name - 100]], step=2))
        assert together.loss.item() == pytest.approx(separate.loss.item(), rel=1e-5)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_packed_step_is_the_step_on_its_documents(tmp_path, method):
    """The same weights after a step over the same documents, packed in 3 rows or in 9 rows of their own."""
    results = []
    for packed in (False, True):
        trainer = packing_trainer(method, tmp_path, "qwen3", per_device_train_batch_size=9, max_steps=1)
        if packed:
            trainer.train_dataset = pack_rows(trainer.train_dataset, 30)
        trainer.train()
        results.append((weights(trainer), trainer.state.log_history[0]["loss"]))
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)
    assert_close({n: t for n, t in results[1][0].items() if "bias" not in n}, results[0][0], 1e-5)
