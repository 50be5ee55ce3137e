"""A step on features from disk beside a step that runs the target, both families.

`OMP_NUM_THREADS=1 python -m benchmarks.offline [--repeats 12]` writes the features of a few random rows, then takes
steps with the target and without it in turn, loading of the batch included. A step without the target should take
what is left of the other one without the target's forward. It prints medians, by the clock and in seconds of processor
time, which say more where something else is running. Files come from the system's cache.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from blockdraft.modeling.families import family_of
from blockdraft.modeling.target.embedding_and_head import load_embedding_and_head
from blockdraft.trainer.evaluation.decoding_report import markdown_table
from blockdraft.trainer.loading import new_trainer
from blockdraft.trainer.training_args import DraftTrainingArguments

from .measuring import OtherLoad, busy_at_start
from .training_step import MASK_TOKEN_ID, k3_config, v41_config

TOKENS, ROWS, ANCHORS, VOCABULARY = 1024, 8, 64, 8192
TARGET = {"num_hidden_layers": 12, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}


def save_target(folder: str, hidden_size: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=hidden_size, max_position_embeddings=TOKENS, **TARGET)
    LlamaForCausalLM(config).save_pretrained(folder)


def random_rows() -> Dataset:
    """A third of each is a prompt."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MASK_TOKEN_ID + 1, VOCABULARY, (ROWS, TOKENS), generator=generator).tolist()
    mask = [0] * (TOKENS // 3) + [1] * (TOKENS - TOKENS // 3)
    return Dataset.from_list([{"input_ids": row, "loss_mask": mask, "row_id": i} for i, row in enumerate(ids)])


def now() -> np.ndarray:
    """Seconds of the clock and of this process's processor time."""
    return np.array([time.perf_counter(), time.process_time()])


class Steps:
    """Steps of one trainer, and what they and the target's forward in them take, see [`now`]."""

    def __init__(self, trainer):
        self.trainer, self.taken, self.target_taken = trainer, [], []
        self._read, self._target = trainer._target_states.read, np.zeros(2)
        trainer._target_states.read = self._timed_read
        trainer.model.train()
        self._batches = self._endless()

    def _timed_read(self, *args, **kwargs):
        start = now()
        states = self._read(*args, **kwargs)
        self._target += now() - start
        return states

    def _endless(self):
        while True:
            yield from self.trainer.get_train_dataloader()

    def take(self) -> float:
        self._target, start = np.zeros(2), now()
        trainer, batch = self.trainer, next(self._batches)
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        self.taken.append(now() - start)
        self.target_taken.append(self._target)
        trainer.model.zero_grad()
        return loss.item()


def measure(config, repeats: int) -> list[list[str]]:
    config.vocab_size, config.num_target_layers = VOCABULARY, TARGET["num_hidden_layers"]
    rows, name = random_rows(), config.model_type
    with tempfile.TemporaryDirectory(prefix="offline_") as folder:
        save_target(folder, config.hidden_size)
        features = Path(folder, "features")

        def trainer(target, **settings):
            torch.manual_seed(1)
            args = DraftTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                num_anchors=ANCHORS,
                eval_decode_prompts=0,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                **settings,
            )
            return new_trainer(family_of(config).model(config), target, args, train_dataset=rows)

        stored = {"features": str(features)}
        whole = LlamaForCausalLM.from_pretrained(folder).eval()
        trainer(whole, cache_features=True, **stored).cache_features()
        online, offline = Steps(trainer(whole)), Steps(trainer(load_embedding_and_head(folder), **stored))
        losses = [(online.take(), offline.take()) for _ in range(repeats + 1)]
        size = sum(path.stat().st_size for path in features.iterdir())
    difference = max(abs(one - other) / one for one, other in losses)
    step, forward, without = (
        np.median(taken[1:], axis=0) for taken in (online.taken, online.target_taken, offline.taken)
    )
    rest = np.median(np.subtract(online.taken, online.target_taken)[1:], axis=0)
    return [
        [name, clock, *(f"{value[at]:.3f}" for value in (step, forward, rest, without)), f"{(without / rest)[at]:.2f}"]
        + [f"{size / 1e6 / ROWS:.1f}", f"{difference:.0e}"]
        for at, clock in enumerate(("clock", "processor"))
    ]


def main(repeats: int) -> None:
    if line := busy_at_start():
        print(line)
    load = OtherLoad()
    table = [row for config in (k3_config(), v41_config()) for row in measure(config, repeats)]
    header = ["draft", "by", "online step s", "target's forward s", "without it s", "offline step s", "of that"]
    header.append("MB a row")
    print(markdown_table([*header, "loss differs"], table))
    print(f"Something else had {load.share():.0%} of the processors.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=12)
    main(parser.parse_args().repeats)
