"""DeepSpeed's ZeRO on two CPU processes, where its package is installed: `pip install deepspeed`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from draft_trainers import assert_close
from engine_runs import FAMILIES, ONE_PROCESS, SGD, UNEVEN, five_steps
from safetensors.torch import load_file

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[Path, dict]:
    output_dir = tmp_path_factory.mktemp("zero")
    script = Path(__file__).parents[1] / "helpers" / "two_rank_zero.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parent), "DS_ACCELERATOR": "cpu"}
    result = subprocess.run([*command, str(output_dir)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return output_dir, torch.load(output_dir / "view.pt", weights_only=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_takes_evaluates_and_saves_the_steps_of_one_process(tmp_path, two_ranks, family):
    output_dir, view = two_ranks
    single = five_steps(family, tmp_path, evaluated=True, **SGD, **UNEVEN, **ONE_PROCESS["whole"])
    for stage in (1, 2, 3):
        steps = view[f"{family}{stage}"]
        assert_close(steps["weights"], single["weights"], 1e-5)
        saved = load_file(output_dir / f"{family}{stage}" / "model.safetensors")
        assert all(torch.equal(tensor, steps["weights"][name]) for name, tensor in saved.items())
        for name in ("eval_loss", "eval_accuracy", "eval_prompts", "eval_tau", "eval_tokens"):
            assert steps["metrics"][name] == pytest.approx(single["metrics"][name], rel=1e-5)


def test_zero3_leaves_the_target_whole(two_ranks):
    _, view = two_ranks
    assert "target's weights were shared out by ZeRO-3" in view["sharded"] and view["whole"] == ""
