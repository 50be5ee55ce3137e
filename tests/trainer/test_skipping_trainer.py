"""Rows whose features or gradients are not finite: named, counted, and a step without them is as if nothing of them
were supervised."""

import json

import pytest
import torch
from datasets import Dataset
from draft_trainers import make_rows, make_trainer, weights
from dspark_trainers import dspark_trainer
from spoilt_rows import BAD, spoil_features, spoil_gradients, unsupervised

from blockdraft.trainer.runs import save_finished, train_draft
from blockdraft.trainer.skipping_trainer import FEATURES, GRADIENTS, names_of_rows

SETTINGS = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2}


@pytest.mark.parametrize(
    ("make", "spoil", "settings"),
    [
        (make_trainer, spoil_features, {}),
        (make_trainer, spoil_gradients, {"gradient_accumulation_steps": 2, "max_grad_norm": 0}),
        (dspark_trainer, spoil_features, {"gradient_accumulation_steps": 2}),
        (dspark_trainer, spoil_gradients, {}),
        (make_trainer, spoil_features, {"per_device_train_batch_size": 1, "max_steps": 8}),
    ],
    ids=["features", "gradients, no clipping", "dspark, features", "dspark, gradients", "alone in its step"],
)
def test_a_bad_row_is_as_if_nothing_of_it_were_supervised(tmp_path, caplog, make, spoil, settings):
    sound = make(tmp_path / "sound", unsupervised(make_rows()), **SETTINGS | settings)
    sound.train()
    spoilt = make(tmp_path / "spoilt", make_rows(), **SETTINGS | settings)
    spoil(spoilt)
    spoilt.train()
    for name, tensor in weights(sound).items():
        assert torch.equal(tensor, weights(spoilt)[name]), name
    same = ("loss", "grad_norm", "accuracy", "rows_without_anchor")
    logs = [
        [[entry.get(name) for name in same] for entry in trainer.state.log_history if "grad_norm" in entry]
        for trainer in (sound, spoilt)
    ]
    assert logs[0] == logs[1]
    why = FEATURES if spoil is spoil_features else GRADIENTS
    epochs = spoilt.state.epoch
    assert [entry[why] for entry in spoilt.state.log_history if why in entry] == [*range(1, int(epochs) + 1)]
    assert caplog.text.count(f"leaves out row {BAD}: ") == epochs and "row 5" not in caplog.text


def test_a_target_that_overflows(tmp_path, caplog):
    """On a token of its own: what its embedding is, is read by target and draft."""
    rows = make_rows().to_list()
    rows[BAD]["input_ids"][-1] = rows[BAD]["input_ids"][4] = 61
    trainer = make_trainer(tmp_path, Dataset.from_list(rows), max_steps=4)
    trainer.target.get_input_embeddings().weight.data[61] = float("inf")
    trainer.train()
    assert f"leaves out row {BAD}: features are not finite" in caplog.text
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


def test_counts_go_on_where_a_run_goes_on(tmp_path):
    for steps in (4, 12):
        trainer = make_trainer(tmp_path, max_steps=steps, save_strategy="steps", save_steps=4, learning_rate=1e-3)
        spoil_features(trainer)
        train_draft(trainer)
    save_finished(trainer)
    for folder in (tmp_path, tmp_path / "checkpoint-12"):
        log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        assert [entry[FEATURES] for entry in log if FEATURES in entry] == [1, 2, 3]
        assert [entry[GRADIENTS] for entry in log if FEATURES in entry] == [0, 0, 0]


def test_too_many_end_the_run(tmp_path):
    """No step is taken with them, and what was saved before is whole."""
    trainer = make_trainer(tmp_path, max_steps=8, save_strategy="steps", save_steps=1, max_skipped_share=1e-3)
    spoil_features(trainer, float("-inf"))
    with pytest.raises(FloatingPointError, match=r"2 of \d+ rows .* more than `max_skipped_share` \(0.001\) allows"):
        trainer.train()
    saved = tmp_path / f"checkpoint-{trainer.state.global_step}"
    assert trainer.state.global_step >= 4 and saved.exists()
    make_trainer(tmp_path, max_steps=trainer.state.global_step + 1).train(resume_from_checkpoint=str(saved))


def test_no_row_is_blamed_for_weights_that_diverge(tmp_path):
    trainer = make_trainer(tmp_path)
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    before = weights(trainer)
    with pytest.raises(
        FloatingPointError, match="step 1 are not finite .* though those of each row are.*learning_rate"
    ):
        trainer.train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    assert not any(FEATURES in entry for entry in trainer.state.log_history)


def test_packed_rows_are_named_with_their_documents():
    batch = {"row_id": torch.tensor([7, 8]), "document_ids": torch.tensor([[1, 1, 2], [1, 0, 0]])}
    batch["document_row_ids"] = torch.tensor([[20, 21], [22, 0]])
    assert names_of_rows(batch, torch.tensor([True, False])) == ["row 7 (documents 20, 21)"]
