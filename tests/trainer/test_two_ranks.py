"""Two gloo processes that train, evaluate and save as one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draft_trainers import ONE_PROCESS, assert_close, make_trainer, weights
from dspark_trainers import dspark_trainer
from safetensors.torch import load_file

ORDERS = ("random", "group_by_length")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, dict]:
    """What two gloo processes save, see `two_rank_step.py`: by draft type, weights after the step that they take, one
    of them with rows without an anchor; by rank, its view of an evaluation and a run."""
    output_dir = tmp_path_factory.mktemp("two_ranks")
    for order in ORDERS:
        make_trainer(output_dir / order, train_sampling_strategy=order, **ONE_PROCESS | {"max_steps": 1}).train()
    script = Path(__file__).parents[1] / "helpers" / "two_rank_step.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parent)}
    result = subprocess.run([*command, str(output_dir)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return {path.stem: torch.load(path, weights_only=True) for path in output_dir.glob("*.pt")}


def test_two_ranks_train_a_dflash_draft_as_one_does(tmp_path, two_ranks):
    single = make_trainer(tmp_path, per_device_train_batch_size=8, max_steps=1)
    single.train()
    assert_close(two_ranks["dflash"], weights(single), 1e-5)


def test_two_ranks_train_a_dspark_draft_as_one_does(tmp_path, two_ranks):
    ranks = dict(two_ranks["dspark"])
    single = dspark_trainer(tmp_path, per_device_train_batch_size=8, max_steps=1)
    single.train()
    expected = weights(single)
    biases = [name for name in expected if "bias" in name]
    assert all(torch.equal(ranks.pop(name), expected[name]) for name in biases)
    assert_close(ranks, expected, 1e-5)


def test_two_ranks_share_out_the_rows_that_are_grouped_by_length(two_ranks):
    assert sorted(two_ranks["rank0"]["rows"] + two_ranks["rank1"]["rows"]) == [*range(8)]


def test_two_ranks_evaluate_each_row_once(tmp_path, two_ranks):
    """8 rows by 3: the second rank has one batch, the first one two."""
    single = make_trainer(tmp_path, per_device_eval_batch_size=3).evaluate()
    for name in ("eval_loss", "eval_accuracy", "eval_rows_without_anchor"):
        assert [two_ranks[rank]["evaluated"][name] for rank in ("rank0", "rank1")] == [pytest.approx(single[name])] * 2


def test_two_ranks_load_the_best_checkpoint(two_ranks):
    for rank in (two_ranks["rank0"], two_ranks["rank1"]):
        best = Path(rank["best"])
        saved = load_file(best / "model.safetensors")
        assert (best.parent.name, best.name) == ("run", "checkpoint-1")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in rank["weights"].items())


@pytest.mark.parametrize("order", ORDERS)
def test_two_ranks_go_on_where_one_process_was(tmp_path, two_ranks, order):
    """With as many rows a step: the same rows, in the same steps."""
    whole = make_trainer(tmp_path, train_sampling_strategy=order, **ONE_PROCESS)
    whole.train()
    for rank in (two_ranks["rank0"], two_ranks["rank1"]):
        assert_close(rank[order], weights(whole), 1e-5)


def test_two_ranks_leave_after_the_same_step_when_one_gets_a_signal(two_ranks):
    for rank in (two_ranks["rank0"], two_ranks["rank1"]):
        text, folder = rank["left"].split(" is saved in ")
        assert text == "after step 2, and step 2"
        assert [path.name for path in Path(folder).glob("checkpoint-*")] == ["checkpoint-2"]


def test_two_ranks_train_on_the_features_that_they_share(tmp_path, two_ranks):
    """No step of two epochs runs the target, whichever rank wrote a row."""
    single = make_trainer(tmp_path, per_device_train_batch_size=4, max_steps=4)
    single.train()
    for rank in (two_ranks["rank0"], two_ranks["rank1"]):
        assert not rank["forwards"]
        assert_close(rank["cached"], weights(single), 1e-5)
