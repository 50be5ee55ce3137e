"""The whole path on two CPU cores, on real chat: `make demo`.

The embedded Kimi K3 answers real prompts; a DFlash draft learns these answers; held-out prompts are decoded with it
and without it; the draft is saved, loaded by a process that does not know `blockdraft`, and described in a report.
Everything lands in `runs/kimi_k3_chitchat/`. Each stage keeps what it has: after Ctrl-C the same command goes on.
"""

import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from blockdraft.trainer.commands import TimeEstimate, load_draft, load_target, minutes, new_draft, train_draft
from blockdraft.trainer.data import prepare_dataset
from blockdraft.trainer.decoding_report import DecodingReport, markdown_table
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.evaluation import fastest_block_size, held_out_prompts
from blockdraft.trainer.interrupt import SaveOnInterrupt
from blockdraft.trainer.regenerate import regenerate
from blockdraft.trainer.report import write_report
from blockdraft.trainer.training_args import DraftTrainingArguments

from .corpus import prompts, split

TARGET_DIR = os.path.relpath(Path(__file__).parent / "target")


@dataclass(frozen=True)
class Sizes:
    """What fits into ten minutes on two cores."""

    seed: int = 0
    train_prompts: int = 3000
    eval_prompts: int = 100  # so that 1% of them is one
    batch_size: int = 64  # of regeneration: a step of 64 rows costs a few steps of one
    max_new_tokens: int = 96  # answers have 17 tokens on average
    max_prompt_length: int = 192  # in training only; longer than the rows that the target learned from
    block_size: int = 8
    served_block_sizes: tuple[int, ...] = (4, 6, 8)
    num_draft_layers: int = 1  # on a target of six layers a second one costs more than it brings
    target_layer_ids: tuple[int, ...] = (0, 2, 4)  # the default ids repeat on so shallow a target
    is_causal: bool = True
    sliding_window: int | None = 8  # what is near, without positions: see benchmarks/visibility.py
    rows_a_step: int = 16
    max_steps: int = 500
    learning_rate: float = 2e-3
    save_steps: int = 100


SIZES = Sizes()
# The whole demo, and `probe_seconds` before it, as measured on two cores of a Xeon (Sapphire Rapids).
DEMO_SECONDS, PROBE_SECONDS = 461.0, 0.95


def main(run_dir: Path = Path("runs/kimi_k3_chitchat"), sizes: Sizes = SIZES) -> None:
    """Runs every stage that is not complete yet, and prints what was measured."""
    started = time.monotonic()
    set_seed(sizes.seed)
    target, tokenizer = load_target(TARGET_DIR, dtype="float32")
    estimate = DEMO_SECONDS * probe_seconds(target) / PROBE_SECONDS
    print(f"About {minutes(estimate)} on this machine, less for what {run_dir} already has.", flush=True)
    parts = split()
    train_rows = random.Random(sizes.seed).sample(prompts(parts["draft"]), sizes.train_prompts)
    heldout_rows = prompts(parts["heldout"])
    eval_rows = heldout_rows[:: len(heldout_rows) // sizes.eval_prompts][: sizes.eval_prompts]

    limit = sizes.max_prompt_length
    train_answers = answer(target, tokenizer, train_rows, run_dir / "train_answers.jsonl", sizes, limit)
    eval_answers = answer(target, tokenizer, eval_rows, run_dir / "eval_answers.jsonl", sizes)
    trainer = train(target, tokenizer, train_answers, eval_answers, run_dir / "draft", sizes)
    measured = evaluate(trainer, run_dir, sizes)
    same = reload_elsewhere(run_dir / "draft")

    print(f"\n{measured}\n\nLoaded by AutoModel where blockdraft cannot be imported, {run_dir / 'draft'} gives")
    print(f"{'the same output, bit by bit' if same else 'ANOTHER OUTPUT'}. Report and plots: {run_dir / 'report.md'}.")
    memory = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"This run took {minutes(time.monotonic() - started)} and at most {memory / 2**20:.1f} GB of memory.")


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
    sizes: Sizes,
    max_prompt_length: int | None = None,
) -> Path:
    """The target's greedy answers to prompts; those already in the file stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = regenerate(
        target,
        tokenizer,
        Dataset.from_list(rows),
        path,
        max_new_tokens=sizes.max_new_tokens,
        generation_config=GenerationConfig(do_sample=False),
        batch_size=sizes.batch_size,
        max_prompt_length=max_prompt_length,
    )
    print(
        f"{path}: {report.resumed} answers were there, {report.written} written, {report.stopped} of them ended; "
        f"{report.too_long} prompts too long"
    )
    return path


def train(target, tokenizer, train_answers: Path, eval_answers: Path, output_dir: Path, sizes: Sizes) -> DraftTrainer:
    """Trains the draft on the answers, from the last checkpoint on, and saves it."""
    train_set, report = prepare_dataset(train_answers, tokenizer, max_length=tokenizer.model_max_length)
    print(f"{train_answers}: {report}")
    eval_set, _ = prepare_dataset(eval_answers, tokenizer, max_length=tokenizer.model_max_length)
    draft = new_draft(
        target,
        tokenizer,
        num_draft_layers=sizes.num_draft_layers,
        block_size=sizes.block_size,
        target_layer_ids=list(sizes.target_layer_ids),
        is_causal=sizes.is_causal,
        sliding_window=sizes.sliding_window,
    )
    args = DraftTrainingArguments(
        output_dir=str(output_dir),
        max_steps=sizes.max_steps,
        per_device_train_batch_size=sizes.rows_a_step,
        learning_rate=sizes.learning_rate,
        train_sampling_strategy="group_by_length",
        logging_steps=20,
        save_steps=sizes.save_steps,
        save_total_limit=1,
        seed=sizes.seed,
        use_cpu=True,
    )
    trainer = DraftTrainer(
        draft,
        target,
        args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        callbacks=[SaveOnInterrupt(), TimeEstimate()],
    )
    train_draft(trainer)
    return trainer


def evaluate(trainer: DraftTrainer, run_dir: Path, sizes: Sizes) -> str:
    """Decodes the held-out prompts, writes card and report, returns the table; measures a draft only once."""
    path, draft = run_dir / "evaluated.json", hash_of(trainer.model.state_dict())
    if path.exists() and (earlier := json.loads(path.read_text()))["draft"] == draft:
        return earlier["table"]
    prompts = held_out_prompts(trainer.eval_dataset, sizes.eval_prompts)
    fastest, reports = fastest_block_size(
        trainer.target, trainer.model, prompts, sizes.served_block_sizes, sizes.max_new_tokens
    )
    trainer.card_metrics = {"chitchat, held-out prompts": reports[sizes.block_size].headline()}
    trainer.save_model()
    write_report(run_dir, trainer.state.log_history, reports, command="make demo")
    text = table(reports, fastest)
    path.write_text(json.dumps({"draft": draft, "table": text}))
    return text


def table(reports: dict[int, DecodingReport], fastest: int) -> str:
    """What was measured, a column for each block size."""
    columns = []
    for report in reports.values():
        rounds = len(report.accepted_lengths)
        shares = " ".join(f"{100 * count / rounds:.0f}" for count in report.histogram.values())
        columns.append(report.rows() | {"% of rounds that commit 1, 2, ... tokens": shares})
    header = ["block size", *(f"{size}{' (fastest)' * (size == fastest)}" for size in reports)]
    return markdown_table(header, [[name, *(column[name] for column in columns)] for name in columns[0]])


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
    config = draft.config
    generator = torch.Generator().manual_seed(0)
    width = len(config.target_layer_ids) * config.hidden_size
    inputs = {
        "noise_embeds": torch.randn(1, config.block_size, config.hidden_size, generator=generator),
        "context_hidden_states": torch.randn(1, 32, width, generator=generator),
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
    try:
        main()
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted {interrupt}; the same command goes on from there.", file=sys.stderr)
        sys.exit(130)
