"""Two gloo processes that train, evaluate and save as one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draft_trainers import ONE_PROCESS, assert_close, make_trainer, weights
from dspark_trainers import dspark_trainer
from engine_runs import FAMILIES, MUON, SGD, TWO_PROCESSES, UNEVEN, five_steps
from engine_runs import ONE_PROCESS as ONE_PROCESS_ENGINES
from safetensors.torch import load_file

from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel

ORDERS = ("random", "group_by_length")
OF_TIME = ("per_second", "target_share", "draft_share", "rest_share")


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
    views = {path.stem: torch.load(path, weights_only=True) for path in output_dir.glob("*.pt")}
    return views | {"output_dir": output_dir}


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


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict[str, dict]:
    """By family, what five steps of one process give."""
    output_dir = tmp_path_factory.mktemp("one_process")
    return {family: five_steps(family, output_dir, **SGD, **ONE_PROCESS_ENGINES["whole"]) for family in FAMILIES}


def assert_same_steps(steps: dict, expected: dict):
    for ours, theirs in zip(steps["gradients"], expected["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        assert_close(ours, theirs, 1e-5)
    assert_close(steps["weights"], expected["weights"], 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulated_batches_are_one_batch(tmp_path, one_process, family):
    steps = five_steps(family, tmp_path, **SGD, **ONE_PROCESS_ENGINES["accumulated"])
    assert_same_steps(steps, one_process[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", TWO_PROCESSES)
def test_an_engine_takes_the_steps_of_one_process(two_ranks, one_process, engine, family):
    for rank in ("rank0", "rank1"):
        assert_same_steps(two_ranks[rank][engine][family], one_process[family])
        assert two_ranks[rank][engine]["served"]


@pytest.mark.parametrize("engine", TWO_PROCESSES)
def test_muon_is_saved_and_resumed(two_ranks, engine):
    """Bit for bit, on both ranks."""
    expected = two_ranks["rank0"][engine]["straight"]
    for rank in ("rank0", "rank1"):
        for name in ("straight", "resumed"):
            weights = two_ranks[rank][engine][name]
            assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_muon_and_adamw_multiply_differences_of_rounding(tmp_path, two_ranks):
    """Muon's iteration runs in bf16, and AdamW divides by the gradient's size: what they make of equal gradients to
    1e-5 is printed."""
    single = dspark_trainer(tmp_path, per_device_train_batch_size=8, max_steps=2, **MUON)
    single.train()
    for engine in TWO_PROCESSES:
        ranks = two_ranks["rank0"][engine]["straight"]
        errors = [
            ((ranks[name] - weight).abs().max() / weight.abs().max()).item()
            for name, weight in weights(single).items()
            if weight.any()
        ]
        print(f"{engine}: weights after 2 steps of Muon and AdamW differ by {max(errors):.1e} of their largest")
        assert max(errors) < 0.05


@pytest.mark.parametrize("engine", TWO_PROCESSES)
def test_ranks_evaluate_and_decode_what_one_process_would(tmp_path, two_ranks, engine):
    evaluated = [two_ranks[rank][engine] for rank in ("rank0", "rank1")]
    saved = two_ranks["output_dir"] / engine
    for draft, when in ((None, "before"), (DeepseekV41DSparkModel.from_pretrained(saved), "after")):
        single = dspark_trainer(tmp_path, draft=draft, **UNEVEN).evaluate()
        assert single["eval_prompts"] == 5
        for name, value in single.items():
            if name != "epoch" and not name.endswith(OF_TIME):
                assert [view[when][name] for view in evaluated] == [pytest.approx(value, rel=1e-5)] * 2, name


def test_fp32_parts_are_not_gathered_in_half_precision(two_ranks):
    for rank in ("rank0", "rank1"):
        dtypes = two_ranks[rank]["bf16"]
        assert {name.rpartition(".")[2] for name in dtypes} == {"wq_a", "attn_hc", "ffn_hc", "sinks_param", "proj"}
        for name, dtype in dtypes.items():
            assert dtype == ("torch.bfloat16" if name.endswith("wq_a") else "torch.float32"), name


def test_ranks_wait_for_a_slow_one_and_not_for_one_that_failed(two_ranks):
    assert two_ranks["rank0"]["slow"] == two_ranks["rank1"]["slow"] == ["0 of 2", "1 of 2"]
    assert two_ranks["rank1"]["failed"] == "no memory"
    assert two_ranks["rank0"]["failed"] == "ValueError on rank 1: no memory"
