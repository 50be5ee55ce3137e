"""A run that is killed twice and resumed is the run that was not, bit for bit: its weights, optimizer, schedule and
random state, the order of its rows and the places of their anchors."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from datasets import Dataset, IterableDataset
from decoding_models import build_draft, build_target
from draft_trainers import BLOCK, assert_close, make_rows, make_trainer, weights
from dspark_trainers import dspark_trainer
from killed_runs import SETTINGS, STEPS, KillAfter, Killed
from peft import LoraConfig
from spoilt_rows import unsupervised
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.faults import differences, saved_state
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.runs import train_draft
from blockdraft.trainer.skipping_trainer import FEATURES


def whole(output_dir, rows, **settings) -> DraftTrainer:
    return make_trainer(output_dir, rows, **settings)


def with_dropout(output_dir, rows, **settings) -> DraftTrainer:
    """An adapter, whose dropout draws from the global random numbers."""
    base, target = output_dir.parent / "base", build_target("k3")
    if not base.exists():
        torch.manual_seed(1)
        build_draft(target, block_size=BLOCK).save_pretrained(base)
    torch.manual_seed(2)
    args = make_trainer(output_dir, rows, **settings).args
    draft = build_draft(target, block_size=BLOCK).from_pretrained(base)
    config = LoraConfig(r=2, lora_dropout=0.5)
    return DraftTrainer(draft, target, args, train_dataset=rows, peft_config=config)


def stream(rows: Dataset) -> IterableDataset:
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=3)


def noted(trainer: DraftTrainer, notes: dict[int, list]) -> DraftTrainer:
    """The trainer, which will note the rows and anchors of each step; a step that is taken again replaces them."""
    place_blocks, begun = trainer.place_blocks, set()

    def place(batch, step):
        blocks = place_blocks(batch, step)
        if step not in begun:
            notes[step] = []
            begun.add(step)
        notes[step].append((batch["row_id"].tolist(), blocks.anchor_positions.tolist()))
        return blocks

    trainer.place_blocks = place
    return trainer


@pytest.mark.parametrize(
    ("make", "rows", "settings"),
    [
        (whole, make_rows, {}),
        (whole, make_rows, {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2}),
        (whole, lambda: stream(make_rows()), {"gradient_accumulation_steps": 2}),
        (dspark_trainer, make_rows, {"dataloader_num_workers": 1}),
        (with_dropout, make_rows, {}),
    ],
    ids=["rows", "group_by_length", "stream", "dspark, a worker", "dropout"],
)
def test_killed_twice_is_the_same_run(tmp_path, make, rows, settings):
    """Epochs have four steps, or two: the first kill comes in the middle of one, the second at the end of one."""
    straight, notes = tmp_path / "straight", {}
    train_draft(noted(make(straight, rows(), **SETTINGS | settings), notes))
    assert sorted(notes) == [*range(STEPS)] and len({str(note) for note in notes.values()}) == STEPS

    killed, again = tmp_path / "killed", {}
    for at in (3, 4, None):
        trainer = noted(make(killed, rows(), **SETTINGS | settings), again)
        if again:  # whatever another process draws before it goes on
            torch.rand(7), random.random(), numpy.random.rand()
        if at is None:
            train_draft(trainer)
        else:
            trainer.add_callback(KillAfter(at))
            with pytest.raises(Killed):
                train_draft(trainer)
            assert get_last_checkpoint(killed).endswith(f"checkpoint-{at}")
    assert again == notes
    ours, theirs = (saved_state(folder / f"checkpoint-{STEPS}") for folder in (killed, straight))
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "weights", "log"} <= theirs.keys()
    assert [entry["step"] for entry in theirs["log"]] == [*range(1, STEPS + 1)]
    assert list(differences(ours, theirs)) == []


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """The folders of what two gloo processes do, see `two_rank_faults.py`."""
    output_dir = tmp_path_factory.mktemp("two_ranks")
    script = Path(__file__).parents[1] / "helpers" / "two_rank_faults.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parent)}
    result = subprocess.run([*command, str(output_dir)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return output_dir


def test_two_ranks_that_are_killed_are_the_same_run(two_ranks):
    ours, theirs = (saved_state(two_ranks / name / f"checkpoint-{STEPS}") for name in ("killed", "straight"))
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= theirs.keys()
    assert list(differences(ours, theirs)) == []


def test_one_process_goes_on_where_two_were(two_ranks, tmp_path):
    """With as many rows a step, and an optimizer that makes no more of a difference than it is."""
    folder = two_ranks / "unsupervised"
    trainer = make_trainer(
        tmp_path,
        unsupervised(make_rows()),
        **SETTINGS | {"optim": "sgd", "max_steps": 4, "per_device_train_batch_size": 4, "save_strategy": "no"},
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert_close(weights(trainer), saved_state(folder / "checkpoint-4")["weights"], 1e-6)


def test_a_bad_row_of_one_rank_is_left_out_on_both(two_ranks):
    ours, theirs = (saved_state(two_ranks / name / "checkpoint-4") for name in ("spoilt", "unsupervised"))
    assert list(differences(ours, theirs)) == []
    log = json.loads((two_ranks / "spoilt" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [entry[FEATURES] for entry in log if FEATURES in entry] == [1, 2]
