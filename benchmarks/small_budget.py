"""What makes a draft learn in few steps, on SmolLM2's answers (`examples/smollm2.sh` makes them).

`python -m benchmarks.small_budget [--max_steps 100]` trains the example's draft once with all that the trainer
does by default and once without each, and prints what 96 held-out answers say: teacher-forced, hence optimistic, but
alike for all.
"""

import argparse
from pathlib import Path

import torch
import yaml
from transformers import set_seed

from blockdraft.trainer.data.dataset import prepare_dataset
from blockdraft.trainer.evaluation.decoding_report import markdown_table
from blockdraft.trainer.loading import load_target, new_draft, new_trainer
from blockdraft.trainer.training_args import DraftTrainingArguments

RUN = Path("runs/smollm2")
HELD_OUT = 96
SHARED = ("per_device_train_batch_size", "num_anchors", "learning_rate", "train_sampling_strategy", "bf16")
# What differs from the example's settings: of the draft, and of training.
VARIANTS = {
    "the trainer's defaults": ({}, {}),
    "AdamW alone": ({}, {"muon": False}),
    "twice the learning rate": ({}, {"learning_rate": 4.0e-3}),
    "a window in every layer": ({"num_full_attention_layers": 0}, {}),
    "the whole context in every layer": ({"sliding_window": None}, {}),
    "a window of 16": ({"sliding_window": 16}, {}),
    "three target layers": ({"target_layer_ids": [1, 14, 27]}, {}),
    "blocks of 8, as many slots a step": ({"block_size": 8, "sliding_window": 5}, {"num_anchors": 50}),
    "ranks of a quarter and an eighth": ({"q_lora_rank": 144, "kv_lora_rank": 72}, {}),
}


def main(max_steps: int, names: list[str]) -> None:
    settings = yaml.safe_load((Path("examples/smollm2") / "train.yaml").read_text())
    target, tokenizer = load_target(str(RUN / "target"), dtype=settings["target_dtype"])
    rows, report = prepare_dataset(RUN / "train.jsonl", tokenizer, max_length=settings["max_length"])
    print(report, flush=True)
    parts = rows.train_test_split(test_size=HELD_OUT, seed=0)
    table = []
    for name in names:
        shape, changed = VARIANTS[name]
        set_seed(0)
        arguments = {setting: settings[setting] for setting in SHARED}
        args = DraftTrainingArguments(
            output_dir=str(RUN / "small_budget"),
            max_steps=max_steps,
            save_strategy="no",
            logging_steps=max_steps,
            eval_decode_prompts=0,
            report_to="none",
            use_cpu=True,
            **(arguments | changed),
        )
        shape = {key: settings[key] for key in ("num_draft_layers", "block_size", "target_layer_ids")} | shape
        trainer = new_trainer(
            new_draft(target, tokenizer, rows=parts["train"], **shape),
            target,
            args,
            train_dataset=parts["train"],
            eval_dataset=parts["test"],
            processing_class=tokenizer,
        )
        seconds = trainer.train().metrics["train_runtime"]
        measured = trainer.evaluate()
        figures = [measured["eval_loss"], measured["eval_acceptance_slot_1"], measured["eval_estimated_tau"]]
        table.append([name, *(f"{figure:.2f}" for figure in figures), f"{seconds / max_steps:.2f}"])
        print(" | ".join(table[-1]), flush=True)
    header = ["", "loss", "first slot accepted", "estimated tau", "seconds a step"]
    print(markdown_table(header, table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(2)
    main(options.max_steps, options.variants)
