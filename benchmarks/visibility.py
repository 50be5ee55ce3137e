"""What a draft without positions must not see: the same training with other rules of visibility.

    make demo   # writes the answers that this trains on
    OMP_WAIT_POLICY=passive python -m benchmarks.visibility --max_steps 100 --seeds 0 1 2

Kimi K3's attention has no positional encoding. In a bidirectional block every masked slot then holds the same token
and sees the same keys, and which context row is the newest has to be found by content. A causal block tells slots
apart by the number of masks before them, a short `sliding_window` says what is near.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import set_seed

from blockdraft.trainer.commands import load_target, new_draft
from blockdraft.trainer.data import prepare_dataset
from blockdraft.trainer.decoding_report import markdown_table
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.evaluation import evaluate_decoding, held_out_prompts
from blockdraft.trainer.training_args import DraftTrainingArguments
from examples.kimi_k3_chitchat.demo import SIZES, TARGET_DIR

# (is_causal, sliding_window)
RULES = [(False, None), (True, None), (True, 32), (True, 8), (True, 4), (False, 8)]


def tau(rule: tuple[bool, int | None], seed: int, max_steps: int, answers: Path, prompts: int) -> float:
    """Tau without looping answers of a draft trained from `seed` for `max_steps` under a rule."""
    set_seed(seed)
    target, tokenizer = load_target(TARGET_DIR, dtype="float32")
    train_set, eval_set = (
        prepare_dataset(answers / name, tokenizer, tokenizer.model_max_length)[0]
        for name in ("train_answers.jsonl", "eval_answers.jsonl")
    )
    is_causal, sliding_window = rule
    draft = new_draft(
        target,
        tokenizer,
        num_draft_layers=SIZES.num_draft_layers,
        block_size=SIZES.block_size,
        target_layer_ids=list(SIZES.target_layer_ids),
        is_causal=is_causal,
        sliding_window=sliding_window,
    )
    with tempfile.TemporaryDirectory() as output_dir:
        args = DraftTrainingArguments(
            output_dir=output_dir,
            max_steps=max_steps,
            per_device_train_batch_size=SIZES.rows_a_step,
            learning_rate=SIZES.learning_rate,
            train_sampling_strategy="group_by_length",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            use_cpu=not torch.cuda.is_available(),
        )
        DraftTrainer(draft, target, args, train_dataset=train_set, processing_class=tokenizer).train()
    report = evaluate_decoding(
        target, draft, held_out_prompts(eval_set, prompts), SIZES.max_new_tokens, compare_with_plain=False
    )
    return report.tau_without_loops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, default=Path("runs/kimi_k3_chitchat"))
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()

    figures = {
        rule: [tau(rule, seed, options.max_steps, options.answers, options.prompts) for seed in options.seeds]
        for rule in RULES
    }
    rows = [
        [
            "yes" if is_causal else "no",
            str(window or "all"),
            f"{statistics.mean(taus):.2f}",
            f"{max(taus) - min(taus):.2f}",
        ]
        for (is_causal, window), taus in figures.items()
    ]
    print(markdown_table(["causal block", "sliding_window", "tau without looping answers", "spread over seeds"], rows))
    if options.json:
        values = [{"is_causal": c, "sliding_window": w, "tau": taus} for (c, w), taus in figures.items()]
        options.json.write_text(json.dumps({"max_steps": options.max_steps, "rules": values}, indent=2) + "\n")


if __name__ == "__main__":
    main()
