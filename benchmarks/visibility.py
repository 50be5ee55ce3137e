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
from dataclasses import replace
from pathlib import Path

from transformers import set_seed

from blockdraft.trainer.evaluation.decoding import evaluate_decoding, held_out_prompts
from blockdraft.trainer.evaluation.decoding_report import markdown_table
from blockdraft.trainer.loading import load_target
from examples.chitchat.demo import DEMOS, train
from examples.chitchat.target_model import target_dir

# (is_causal, sliding_window)
RULES = [(False, None), (True, None), (True, 32), (True, 8), (True, 4), (False, 8)]


def tau(rule: tuple[bool, int | None], seed: int, max_steps: int, answers: Path, prompts: int) -> float:
    """Tau without looping answers of the demo's draft, trained from `seed` for `max_steps` under a rule."""
    demo = DEMOS["dflash"]
    shape = demo.shape | {"is_causal": rule[0], "sliding_window": rule[1]}
    demo = replace(demo, seed=seed, max_steps=max_steps, shape=shape)
    set_seed(seed)
    target, tokenizer = load_target(str(target_dir(demo.target)), dtype="float32")
    files = (answers / name for name in ("train_answers.jsonl", "eval_answers.jsonl"))
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = train(target, tokenizer, *files, Path(output_dir), demo)
    rows = held_out_prompts(trainer.eval_dataset, prompts)
    report = evaluate_decoding(target, trainer.model, rows, demo.max_new_tokens, compare_with_plain=False)
    return report.tau_without_loops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, default=Path("runs/chitchat_dflash"))
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
