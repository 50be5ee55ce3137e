"""A run that is killed twice and resumed is the run that was not, bit for bit: its weights, optimizer, schedule and
random state, the order of its rows and the places of their anchors."""

import json
import random
from pathlib import Path

import numpy
import pytest
import torch
from datasets import Dataset, IterableDataset
from decoding_models import build_draft, build_target
from draft_trainers import BLOCK, make_rows, make_trainer
from dspark_trainers import dspark_trainer
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.runs import train_draft

STEPS = 6
LOGGED = ("step", "loss", "grad_norm", "learning_rate")
SETTINGS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
SETTINGS |= {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2}


class Killed(BaseException):
    """What no handler of errors catches, like the end of the process."""


class KillAfter(TrainerCallback):
    """In the middle of the step after this one, which is the last that is saved."""

    def __init__(self, step: int):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


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


def saved(folder: Path) -> dict:
    """All that a checkpoint holds of a training's state; of its log what is not a time or a window's rate."""
    state = json.loads((folder / "trainer_state.json").read_text())
    log = [{name: entry[name] for name in LOGGED} for entry in state.pop("log_history")]
    files = {path.name: torch.load(path, weights_only=False) for path in folder.glob("*.pt*")}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth"} <= files.keys()
    return files | {"state": state, "log": log, "weights": load_file(next(folder.glob("*.safetensors")))}


def assert_equal(ours, theirs, where: str = ""):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name in theirs:
            assert_equal(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(a, b, f"{where}.{index}")
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, numpy.ndarray):
        assert numpy.array_equal(ours, theirs), where
    else:
        assert ours == theirs, where


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
    assert_equal(saved(killed / f"checkpoint-{STEPS}"), saved(straight / f"checkpoint-{STEPS}"))
