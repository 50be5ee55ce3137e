"""What the Markov head and confidence scheduling bring: the same data and steps with and without them.

    make demo DRAFT=dspark   # writes the answers that this trains on
    OMP_WAIT_POLICY=passive python -m benchmarks.dspark --max_steps 250 --json dspark.json

For each seed two drafts are trained like the demo's: the backbone alone, whose slots know nothing of each other's
tokens, and one with Markov head and confidence head. The second one decodes twice: verifying everything, and cut
where the cumulative confidence, with temperatures fitted on other held-out prompts, falls below a threshold. Tau is
that of answers that do not loop; the rows that a verification sends through the target are what it costs.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from transformers import set_seed

from blockdraft.modeling.decoding.confidence_schedule import ConfidenceThreshold
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.evaluation.calibration import decode_rounds, fit_sequential_temperatures
from blockdraft.trainer.evaluation.decoding import compare_schedules, held_out_prompts
from blockdraft.trainer.evaluation.decoding_report import DecodingReport, markdown_table
from blockdraft.trainer.loading import load_target
from examples.chitchat.corpus import prompts, split
from examples.chitchat.demo import DEMOS, Demo, encode, train, unseen_prompts
from examples.chitchat.target_model import target_dir

BACKBONE, MARKOV, SCHEDULED = "backbone without Markov head", "with Markov head", "with confidence scheduling"
FIGURES = {"tau": "tau_without_loops", "rows a token": "rows_per_token"}


def trained(seed: int, shape: dict, options: argparse.Namespace) -> tuple[DraftTrainer, Demo]:
    """The demo's draft with another shape, trained from `seed` for `max_steps`."""
    demo = replace(DEMOS["dspark"], seed=seed, max_steps=options.max_steps, shape=DEMOS["dspark"].shape | shape)
    set_seed(seed)
    target, tokenizer = load_target(str(target_dir(demo.target)), dtype="float32")
    files = (options.answers / name for name in ("train_answers.jsonl", "eval_answers.jsonl"))
    with tempfile.TemporaryDirectory() as output_dir:
        return train(target, tokenizer, *files, Path(output_dir), demo), demo


def fit_temperatures(trainer: DraftTrainer, demo: Demo, rounds: int) -> list[float]:
    """Of the confidence head, on held-out conversations that are not decoded for the figures."""
    heldout = prompts(split()["heldout"])
    unseen = unseen_prompts(heldout, heldout[:: len(heldout) // demo.eval_prompts])
    encoded = encode(trainer.processing_class, unseen[:: max(1, len(unseen) // rounds)])
    decoded, _ = decode_rounds(trainer.target, trainer.model, encoded, rounds, demo.max_new_tokens)
    return fit_sequential_temperatures(decoded.logits, decoded.accepted, decoded.labelled)


def measure(seed: int, options: argparse.Namespace) -> dict[str, DecodingReport]:
    """The three ways, trained from one seed."""
    reports = {}
    for shape in ({"markov_rank": None}, {}):
        trainer, demo = trained(seed, shape, options)
        schedules = {MARKOV if trainer.model.markov_head else BACKBONE: None}
        if trainer.model.confidence_head:
            trainer.model.config.confidence_temperatures = fit_temperatures(trainer, demo, options.calibration_rounds)
            schedules[SCHEDULED] = ConfidenceThreshold(options.threshold)
        rows = held_out_prompts(trainer.eval_dataset, options.prompts)
        reports |= compare_schedules(
            trainer.target, trainer.model, rows, schedules, demo.max_new_tokens, compare_with_plain=False
        )
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, default=Path("runs/chitchat_dspark"))
    parser.add_argument("--max_steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--calibration_rounds", type=int, default=1000)
    parser.add_argument("--threshold", type=float, default=DEMOS["dspark"].confidence_threshold)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()

    by_seed = [measure(seed, options) for seed in options.seeds]
    figures = {
        way: {name: [reports[way].metrics()[key] for reports in by_seed] for name, key in FIGURES.items()}
        for way in (BACKBONE, MARKOV, SCHEDULED)
    }
    table = [[way, *(_with_spread(values) for values in columns.values())] for way, columns in figures.items()]
    print(markdown_table(["", *(f"{name}, mean (lowest to highest seed)" for name in FIGURES)], table))
    if options.json:
        settings = {name: getattr(options, name) for name in ("max_steps", "seeds", "prompts", "threshold")}
        options.json.write_text(json.dumps(settings | {"figures": figures}, indent=2) + "\n")


def _with_spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
