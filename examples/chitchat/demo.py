"""The whole path on two CPU cores, on real chat: `make demo`, or `make demo DRAFT=dspark`.

An embedded target answers real prompts; a draft learns these answers; held-out prompts are decoded with it and without
it; the draft is saved, loaded by a process that does not know `blockdraft`, and described in a report. A DSpark draft
is calibrated on other held-out prompts first, and decodes with each confidence schedule. Everything lands in
`runs/chitchat_DRAFT/`. Each stage keeps what it has: after Ctrl-C the same command goes on.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from blockdraft.modeling.decoding.confidence_schedule import ConfidenceThreshold
from blockdraft.modeling.target.target_identity import weights_fingerprint
from blockdraft.trainer.data.dataset import prepare_dataset
from blockdraft.trainer.data.regenerate import regenerate
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.evaluation.calibration import calibrate, split_prompts
from blockdraft.trainer.evaluation.decoding import compare_schedules, cost_table, fastest_block_size, held_out_prompts
from blockdraft.trainer.evaluation.decoding_report import DecodingReport, markdown_table
from blockdraft.trainer.evaluation.report_folder import write_calibration, write_report
from blockdraft.trainer.interrupt import SaveOnInterrupt
from blockdraft.trainer.loading import load_draft, load_target, new_draft, new_trainer
from blockdraft.trainer.runs import TimeEstimate, train_draft
from blockdraft.trainer.training_args import DraftTrainingArguments
from blockdraft.trainer.training_log import minutes

from .corpus import prompts, split
from .target_model import target_dir

# A step on a few tokens is thousands of small operations: a second thread slows it down.
DECODING_THREADS = 1


@dataclass(frozen=True)
class Demo:
    """What one demo does: sizes that fit into its minutes on two cores."""

    draft_type: str
    target: str
    shape: dict  # of the draft, beside what follows from the target
    max_steps: int
    learning_rate: float
    # The whole demo, and `probe_seconds` before it, as measured on two cores of a Xeon (Sapphire Rapids).
    demo_seconds: float
    target_probe_seconds: float
    served_block_sizes: tuple[int, ...] = ()  # dflash
    calibration_rounds: int = 0  # dspark: to measure on, half as many again to fit on
    confidence_threshold: float = 0.0  # dspark
    seed: int = 0
    train_prompts: int = 3000
    eval_prompts: int = 100  # so that 1% of them is one
    batch_size: int = 64  # of regeneration: a step of 64 rows costs a few steps of one
    max_new_tokens: int = 96  # answers have 17 tokens on average
    max_prompt_length: int = 192  # in training only; longer than the rows that the target learned from
    rows_a_step: int = 16
    save_steps: int = 100


DEMOS = {
    "dflash": Demo(
        draft_type="dflash",
        target="kimi_k3",
        shape={
            "num_draft_layers": 1,  # on a target of six layers a second one costs more than it brings
            "block_size": 8,
            "target_layer_ids": [0, 2, 4],  # every second one
            "is_causal": True,
            "sliding_window": 8,  # what is near, without positions: see benchmarks/visibility.py
        },
        max_steps=500,
        learning_rate=2e-3,
        demo_seconds=461.0,
        target_probe_seconds=0.95,
        served_block_sizes=(4, 6, 8),
    ),
    "dspark": Demo(
        draft_type="dspark",
        target="deepseek_v41",
        shape={},  # the target's own: one stage, blocks of 5
        max_steps=280,
        learning_rate=2e-3,
        demo_seconds=730.0,
        target_probe_seconds=1.4,
        calibration_rounds=5000,
        confidence_threshold=0.3,
        train_prompts=2200,
    ),
}


def main(demo: Demo, run_dir: Path) -> None:
    """Runs every stage that is not complete yet, and prints what was measured."""
    started = time.monotonic()
    set_seed(demo.seed)
    target, tokenizer = load_target(str(target_dir(demo.target)), dtype="float32")
    estimate = demo.demo_seconds * probe_seconds(target) / demo.target_probe_seconds
    print(f"About {minutes(estimate)} on this machine, less for what {run_dir} already has.", flush=True)
    parts = split()
    train_rows = random.Random(demo.seed).sample(prompts(parts["draft"]), demo.train_prompts)
    heldout_rows = prompts(parts["heldout"])
    eval_rows = heldout_rows[:: len(heldout_rows) // demo.eval_prompts][: demo.eval_prompts]

    limit = demo.max_prompt_length
    train_answers = answer(target, tokenizer, train_rows, run_dir / "train_answers.jsonl", demo, limit)
    eval_answers = answer(target, tokenizer, eval_rows, run_dir / "eval_answers.jsonl", demo)
    trainer = train(target, tokenizer, train_answers, eval_answers, run_dir / "draft", demo)
    measured = []
    with threads(DECODING_THREADS):
        if demo.calibration_rounds:
            measured.append(calibrate_confidence(trainer, unseen_prompts(heldout_rows, eval_rows), run_dir, demo))
        measured.append(evaluate(trainer, run_dir, demo))
    same = reload_elsewhere(run_dir / "draft")

    print("", "\n\n".join(measured), "", sep="\n")
    print(f"Loaded by AutoModel where blockdraft cannot be imported, {run_dir / 'draft'} gives")
    print(f"{'the same output, bit by bit' if same else 'ANOTHER OUTPUT'}. Report and plots: {run_dir / 'report.md'}.")
    memory = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    memory /= 2**30 if sys.platform == "darwin" else 2**20  # bytes there, else KiB
    print(f"This run took {minutes(time.monotonic() - started)} and at most {memory:.1f} GB of memory.")


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Work with at most so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(number, before))
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def probe_seconds(target: PreTrainedModel) -> float:
    """Time of forwards of the size that training takes, after one to warm up."""
    rows = torch.arange(16 * 192).view(16, 192) % target.config.vocab_size
    target(rows)
    start = time.perf_counter()
    for _ in range(3):
        target(rows)
    return time.perf_counter() - start


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    path: Path,
    demo: Demo,
    max_prompt_length: int | None = None,
) -> Path:
    """The target's greedy answers to prompts; those already in the file stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = regenerate(
        target,
        tokenizer,
        Dataset.from_list(rows),
        path,
        max_new_tokens=demo.max_new_tokens,
        generation_config=GenerationConfig(do_sample=False),
        batch_size=demo.batch_size,
        max_prompt_length=max_prompt_length,
    )
    print(
        f"{path}: {report.resumed} answers were there, {report.written} written, {report.stopped} of them ended; "
        f"{report.too_long} prompts too long"
    )
    return path


def unseen_prompts(rows: list[dict], seen: list[dict]) -> list[dict]:
    """Rows of conversations that have no row in `seen`."""
    conversations = {conversation(row) for row in seen}
    return [row for row in rows if conversation(row) not in conversations]


def conversation(row: dict) -> str:
    """The conversation that a prompt of [`~corpus.prompts`] is from."""
    return row["id"].split(":")[0]


def encode(tokenizer: PreTrainedTokenizerBase, rows: list[dict]) -> list[list[int]]:
    """Prompts as token ids."""
    messages = [row["messages"] for row in rows]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def train(target, tokenizer, train_answers: Path, eval_answers: Path, output_dir: Path, demo: Demo) -> DraftTrainer:
    """Trains the draft on the answers, from the last checkpoint on, and saves it."""
    train_set, report = prepare_dataset(train_answers, tokenizer, max_length=tokenizer.model_max_length)
    print(f"{train_answers}: {report}")
    eval_set, _ = prepare_dataset(eval_answers, tokenizer, max_length=tokenizer.model_max_length)
    args = DraftTrainingArguments(
        output_dir=str(output_dir),
        max_steps=demo.max_steps,
        per_device_train_batch_size=demo.rows_a_step,
        learning_rate=demo.learning_rate,
        train_sampling_strategy="group_by_length",
        logging_steps=20,
        save_steps=demo.save_steps,
        save_total_limit=1,
        seed=demo.seed,
        use_cpu=True,
    )
    trainer = new_trainer(
        new_draft(target, tokenizer, demo.draft_type, **demo.shape),
        target,
        args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        callbacks=[SaveOnInterrupt(), TimeEstimate()],
    )
    train_draft(trainer)
    return trainer


def calibrate_confidence(trainer: DraftTrainer, rows: list[dict], run_dir: Path, demo: Demo) -> str:
    """Fits the confidence head's temperatures, which the draft decodes and is saved with; returns the measure."""
    target, draft, tokenizer = trainer.target, trainer.model, trainer.processing_class

    def measure() -> dict:
        report = calibrate(
            target,
            draft,
            *split_prompts(encode(tokenizer, rows), seed=demo.seed, conversations=[conversation(row) for row in rows]),
            max_new_tokens=demo.max_new_tokens,
            rounds=demo.calibration_rounds,
        )
        write_calibration(run_dir, report, command=f"make demo DRAFT={demo.draft_type}")
        return {"temperatures": report.temperatures, "text": f"{report.table()}\n\n{report.summary()}"}

    measured = once(run_dir / "calibrated.json", draft, [asdict(demo), weights_fingerprint(target), rows], measure)
    draft.config.confidence_temperatures = measured["temperatures"]
    return measured["text"]


def evaluate(trainer: DraftTrainer, run_dir: Path, demo: Demo) -> str:
    """Decodes the held-out prompts, writes card and report, returns the table."""
    target, draft = trainer.target, trainer.model
    prompts = held_out_prompts(trainer.eval_dataset, demo.eval_prompts)

    def measure() -> dict:
        if demo.served_block_sizes:
            sizes = demo.served_block_sizes
            _, reports = fastest_block_size(target, draft, prompts, sizes, demo.max_new_tokens)
            as_trained, header = reports[draft.config.block_size], "block size"
        else:
            schedules = {
                "off": None,
                f"threshold {demo.confidence_threshold:g}": ConfidenceThreshold(demo.confidence_threshold),
                "cost table": cost_table(target, draft, prompts[0], demo.max_new_tokens),
            }
            reports = compare_schedules(target, draft, prompts, schedules, demo.max_new_tokens)
            as_trained, header = reports["off"], "confidence schedule"
        trainer.record_decoding({"chitchat, held-out prompts": as_trained.headline()})
        trainer.save_model()
        write_report(run_dir, trainer.state.log_history, reports, command=f"make demo DRAFT={demo.draft_type}")
        return {"text": table(header, reports)}

    settings = [asdict(demo), weights_fingerprint(target), prompts]
    return once(run_dir / "evaluated.json", draft, settings, measure)["text"]


def once(path: Path, draft: PreTrainedModel, settings: list, measure: Callable[[], dict]) -> dict:
    """What `measure` returns, from `path` where the same weights were measured under the same settings before."""
    settings_hash = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    key = {"draft": hash_of(draft.state_dict()), "settings": settings_hash}
    if path.exists() and key.items() <= (earlier := json.loads(path.read_text())).items():
        return earlier
    measured = key | measure()
    path.write_text(json.dumps(measured))
    return measured


def table(header: str, reports: dict[int | str, DecodingReport]) -> str:
    """What was measured, a column for each way to serve the draft."""
    fastest = max(reports, key=lambda way: reports[way].speedup)
    columns = []
    for report in reports.values():
        rounds = len(report.accepted_lengths)
        shares = " ".join(f"{100 * count / rounds:.0f}" for count in report.histogram.values())
        columns.append(report.rows() | {"% of rounds that commit 1, 2, ... tokens": shares})
    names = [name for name in columns[0] if name != header]
    return markdown_table(
        [header, *(f"{way}{' (fastest)' * (way == fastest)}" for way in reports)],
        [[name, *(column[name] for column in columns)] for name in names],
    )


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of tensors' bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


RELOAD = """
import sys
sys.modules["blockdraft"] = None  # from here on, importing it fails
import hashlib, torch
from safetensors.torch import load_file
from transformers import AutoModel

directory, inputs, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
draft = AutoModel.from_pretrained(directory, trust_remote_code=True)
with torch.no_grad():
    output = draft(**load_file(inputs)).last_hidden_state
print(hashlib.sha256(output.numpy().tobytes()).hexdigest())
"""


def reload_elsewhere(draft_dir: Path) -> bool:
    """Whether the saved draft gives the same output, bit by bit, in a process that has only its directory."""
    draft = load_draft(str(draft_dir))
    config, context = draft.config, 32
    generator = torch.Generator().manual_seed(0)
    width = len(config.target_layer_ids) * config.hidden_size
    inputs = {
        "noise_embeds": torch.randn(1, config.block_size, config.hidden_size, generator=generator),
        "context_hidden_states": torch.randn(1, context, width, generator=generator),
        "position_ids": torch.arange(context + config.block_size)[None],
    }
    with torch.no_grad():
        expected = hash_of({"output": draft(**inputs).last_hidden_state})
    with tempfile.TemporaryDirectory() as folder:
        save_file(inputs, Path(folder) / "inputs.safetensors")
        arguments = [str(draft_dir.absolute()), "inputs.safetensors", str(torch.get_num_threads())]
        environment = os.environ | {"HF_MODULES_CACHE": folder, "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [sys.executable, "-c", RELOAD, *arguments], cwd=folder, env=environment, capture_output=True, text=True
        )
    if process.returncode:
        raise RuntimeError(f"{draft_dir} does not load without blockdraft:\n{process.stderr}")
    return process.stdout.split()[-1] == expected


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", choices=DEMOS, default="dflash")
    parser.add_argument("--run_dir", type=Path, help="(runs/chitchat_DRAFT)")
    options = parser.parse_args()
    try:
        main(DEMOS[options.draft], options.run_dir or Path(f"runs/chitchat_{options.draft}"))
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted {interrupt}; the same command resumes from there.", file=sys.stderr)
        sys.exit(130)
