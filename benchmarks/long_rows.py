"""Peak memory of a training step over the length of its one row, beside the size of the features.

`OMP_NUM_THREADS=1 python -m benchmarks.long_rows [--lengths 8192 32768 65536]` trains both drafts on a narrow
target, whose weights count for nothing, with features from the target and from disk.
"""

import argparse
import gc
import tempfile

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


def peaks(config, length: int) -> list[float]:
    """MB: the features; the peaks above what was there before of the target's forward, of a step with it, and of one
    with features from disk."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": length}
    target = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()
    ids = torch.randint(MASK_TOKEN_ID + 1, VOCABULARY, (length,)).tolist()
    row = {"input_ids": ids, "loss_mask": [0] * (length // 2) + [1] * (length - length // 2), "row_id": 0}
    with tempfile.TemporaryDirectory(prefix="long_rows_") as folder:
        args = DraftTrainingArguments(
            output_dir=folder,
            num_anchors=ANCHORS,
            eval_decode_prompts=0,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = new_trainer(family_of(config).model(config), target, args, train_dataset=Dataset.from_list([row]))
        trainer.model.train()
        trainer.compute_loss(
            trainer.model, trainer.data_collator([row | {"input_ids": ids[:512], "loss_mask": [1] * 512}])
        ).backward()

        def peak(call) -> float:
            gc.collect()
            trainer.model.zero_grad()
            memory = PeakMemory(torch.device("cpu"))
            call()
            return memory.bytes() / 1e6

        def step() -> None:
            trainer.compute_loss(trainer.model, trainer.data_collator([row])).backward()

        online = [peak(lambda: trainer.target_states(trainer.data_collator([row]))), peak(step)]
        trainer.cache_features()
        size = length * config.features_width * 4 / 1e6
        return [size, *online, peak(step)]


def main(lengths: list[int]) -> None:
    table = []
    for name, config in DRAFTS.items():
        for length in lengths:
            size, *found = peaks(config, length)
            table.append([name, f"{length:,}", f"{size:.0f}", *(f"{mb:.0f} ({mb / size:.2f}x)" for mb in found)])
            print(table[-1], flush=True)
    header = ["draft", "tokens", "features MB", "target's forward MB", "step MB", "step from disk MB"]
    print(markdown_table(header, table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 65536])
    main(parser.parse_args().lengths)
