"""Peak memory of a training step over the length of its one row, beside the size of the features.

`OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=65536 python -m benchmarks.long_rows [--lengths 8192 32768 65536]` trains
both drafts on a narrow target, whose weights count for nothing, with features from the target and from disk. Each is
measured in a process of its own; with that variable, memory that is freed goes back to the system at once.
"""

import argparse
import gc
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from blockdraft.modeling.families import family_of
from blockdraft.trainer.evaluation.decoding_report import markdown_table
from blockdraft.trainer.loading import new_trainer
from blockdraft.trainer.training_args import DraftTrainingArguments

from .measuring import PeakMemory
from .training_step import MASK_TOKEN_ID, k3_config, v41_config

VOCABULARY, HIDDEN, LAYERS, TAPS, ANCHORS = 1024, 128, 6, [0, 1, 2, 3, 4], 64
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_target_layers": LAYERS, "target_layer_ids": TAPS}
NARROW = {"num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 64}
DRAFTS = {
    "K3 DFlash": k3_config(**SHAPE, **NARROW, intermediate_size=256, kv_lora_rank=64, sliding_window=16),
    "V4.1 DSpark": v41_config(**SHAPE, **NARROW, moe_intermediate_size=96, o_groups=2),
}
FORWARD, STEP, WRITE, FROM_DISK = "target's forward", "step", "writing", "step from disk"


def peak(draft: str, length: int, what: str, folder: str) -> float:
    """Most MB in use while this is done, above what was in use before."""
    torch.manual_seed(0)
    config = DRAFTS[draft]
    shape = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": length}
    target = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()
    ids = torch.randint(MASK_TOKEN_ID + 1, VOCABULARY, (length,)).tolist()
    row = {"input_ids": ids, "loss_mask": [0] * (length // 2) + [1] * (length - length // 2), "row_id": 0}
    args = DraftTrainingArguments(
        output_dir=folder,
        num_anchors=ANCHORS,
        eval_decode_prompts=0,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        features=str(Path(folder, "features")) if what == FROM_DISK else None,
    )
    trainer = new_trainer(family_of(config).model(config), target, args, train_dataset=Dataset.from_list([row]))
    trainer.model.train()

    def batch() -> dict:
        return trainer.data_collator([row])

    calls = {
        FORWARD: lambda: trainer.target_states(batch()),
        STEP: lambda: trainer.compute_loss(trainer.model, batch()).backward(),
        WRITE: trainer.cache_features,
    }
    short = row | {"input_ids": ids[:512], "loss_mask": [1] * 512}
    trainer.compute_loss(trainer.model, trainer.data_collator([short])).backward()  # what is made but once
    gc.collect()
    memory = PeakMemory(torch.device("cpu"))
    calls[STEP if what == FROM_DISK else what]()
    return memory.bytes() / 1e6


def peaks(draft: str, length: int) -> list[float]:
    with (
        tempfile.TemporaryDirectory(prefix="long_rows_") as folder,
        ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool,
    ):
        return [pool.submit(peak, draft, length, what, folder).result() for what in (FORWARD, STEP, WRITE, FROM_DISK)]


def main(lengths: list[int]) -> None:
    table = []
    for length in lengths:
        for draft, config in DRAFTS.items():
            size = length * config.features_width * 4 / 1e6
            found = [f"{mb:.0f} ({mb / size:.2f}x)" for mb in peaks(draft, length)]
            table.append([draft, f"{length:,}", f"{size:.0f}", *found])
            print(table[-1], flush=True)
    header = ["draft", "tokens", "features MB", *(f"{what} MB" for what in (FORWARD, STEP, WRITE, FROM_DISK))]
    print(markdown_table(header, table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 65536])
    main(parser.parse_args().lengths)
