"""
A run that is disturbed at random moments, and the same run undisturbed: do they end alike, bit for bit?

    python -m benchmarks.faults [--faults 50] [--kinds kill] [--steps 300]
    python -m benchmarks.faults --faults 30 --interval 60 --steps 40000 --save_steps 20 --nan_rows 2 \\
        --kinds kill full_disk sigterm

Tiny target, tiny draft, a process for each stretch of the run, which goes on from the last complete checkpoint of the
one before. `kill` is SIGKILL; `full_disk` a limit of the system on the size of files, under which a save fails;
`sigterm` what a scheduler sends. A moment may lie inside a save, which is counted. With `--nan_rows` the target
overflows on some rows; in the undisturbed run nothing of these is supervised. Fails if a stretch does not go on, if
more than the steps since the last save are lost, or if the ends differ.
"""

import argparse
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.interrupt import SaveOnInterrupt
from blockdraft.trainer.runs import train_draft
from blockdraft.trainer.saving_trainer import UNFINISHED_CHECKPOINTS
from blockdraft.trainer.training_args import DraftTrainingArguments

ROWS, VOCABULARY, MASK, OVERFLOWS = 64, 64, 63, 62  # the last two are token ids
LOGGED = ("step", "grad_norm", "learning_rate")  # a logged loss is a mean since the log or the start before it
KINDS = ("kill", "full_disk", "sigterm")
ENDED, DISK_FULL, SIGNALLED, FAILED = 0, 28, 130, 1  # how a process leaves


# ---- what a checkpoint holds ----------------------------------------------------------------------------------------


def saved_state(checkpoint: Path) -> dict:
    """All that a checkpoint holds of a training's state; of its log what is neither a time nor a rate."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    log = [{name: entry[name] for name in LOGGED} for entry in state.pop("log_history") if "loss" in entry]
    # Of our own runs; what Python and numpy keep of random numbers is more than tensors.
    files = {path.name: torch.load(path, weights_only=False) for path in checkpoint.glob("*.pt*")}
    return files | {"state": state, "log": log, "weights": load_file(next(checkpoint.glob("*.safetensors")))}


def differences(ours, theirs, where: str = "") -> Iterator[str]:
    """Where two nested states are not equal bit for bit."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and ours.keys() == theirs.keys():
        for name in theirs:
            yield from differences(ours[name], theirs[name], f"{where}/{name}")
    elif isinstance(theirs, list | tuple) and isinstance(ours, list | tuple) and len(ours) == len(theirs):
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{where}/{index}")
    elif isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        if not torch.equal(ours, theirs):
            yield where
    elif not numpy.array_equal(ours, theirs):
        yield where


# ---- a stretch of the run, in a process of its own ------------------------------------------------------------------


class Progress(TrainerCallback):
    """Tells the steps that were taken, from the first one that is begun on."""

    def __init__(self, pipe: int):
        self._pipe = pipe

    def on_train_begin(self, args, state, control, **kwargs):
        self._tell(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self._tell(state.global_step)

    def _tell(self, step: int) -> None:
        os.write(self._pipe, f"{step}\n".encode())


def make_trainer(
    folder: Path, steps: int, save_steps: int, nan_rows: int = 0, supervised: bool = True
) -> DraftTrainer:
    """The run; the first `nan_rows` rows have a token on which the target overflows, or are not `supervised`."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "pad_token_id": 0}
    target = Qwen3ForCausalLM(Qwen3Config(**shape))
    if supervised:
        target.get_input_embeddings().weight.data[OVERFLOWS] = float("inf")
    draft = {"mask_token_id": MASK, "num_draft_layers": 1, "block_size": 4, "target_layer_ids": [0, 2]}
    draft = KimiK3DFlashDraftModel(KimiK3DFlashConfig.from_target_config(target.config, **draft))
    rows = []
    for row_id in range(ROWS):
        ids = torch.randint(1, OVERFLOWS, (12 + row_id % 16,)).tolist()
        mask = [1] * len(ids)
        if row_id < nan_rows:
            ids, mask = ([*ids[:-1], OVERFLOWS], mask) if supervised else (ids, [0] * len(ids))
        rows.append({"input_ids": ids, "loss_mask": mask, "row_id": row_id})
    args = DraftTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=steps,
        num_anchors=2,
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=save_steps,
        save_total_limit=2,
        max_skipped_share=0.5,
        eval_decode_prompts=0,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return DraftTrainer(draft, target, args, train_dataset=Dataset.from_list(rows))


def run_stretch(pipe: int, run: dict, seconds: float | None, limit: int) -> int:
    """Trains in this process from the last checkpoint on, after `seconds` with a `limit` on the size of files. Returns
    how it ended."""
    try:
        trainer = make_trainer(**run)
        trainer.add_callback(SaveOnInterrupt())
        trainer.add_callback(Progress(pipe))
        if seconds is not None:
            limits = (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, limits))
            timer.daemon = True
            timer.start()
        train_draft(trainer)
        return ENDED
    except KeyboardInterrupt:
        return SIGNALLED
    except Exception as error:
        if "could not be saved" in str(error):
            return DISK_FULL
        os.write(pipe, traceback.format_exc().encode())
        return FAILED


class Stretch:
    """A process that trains, with what it says."""

    def __init__(self, run: dict, seconds: float | None = None, limit: int = 0):
        self._pipe, pipe = os.pipe()
        sys.stdout.flush()
        # A copy of this process, which has imported everything and started no threads.
        self.pid = os.fork()
        if self.pid == 0:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1), os.dup2(nowhere, 2)
            os._exit(run_stretch(pipe, run, seconds, limit))
        os.close(pipe)
        self.said = ""

    def listen(self, seconds: float | None = None) -> bool:
        """Reads what the process says for some time, or until it says something or ends; returns whether it lives."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._pipe], [], [], left)[0]:
                return True
            if not (said := os.read(self._pipe, 1 << 16)):
                return False
            self.said += said.decode()
            if end is None:
                return True

    def leave(self) -> int:
        """Waits for the end; the exit code, or the negative signal."""
        while self.listen():
            pass
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def step(self) -> int:
        """The last step that was taken, of what was said."""
        return int(self.said.rpartition("\n")[0].rpartition("\n")[2] or 0)


# ---- the whole ------------------------------------------------------------------------------------------------------


def disturbed_run(run: dict, faults: int, kinds: list[str], span: float, chance: random.Random) -> Counter:
    """Trains to the end with faults at random moments, up to `span` seconds after a stretch has begun its first step.
    Returns what was counted; a `RuntimeError` if a stretch fails or loses more than it may."""
    folder, counted, kept = run["folder"], Counter(), 0
    while True:
        kind = chance.choice(kinds) if counted["faults"] < faults else None
        seconds = chance.uniform(0, span)
        stretch = Stretch(run, seconds if kind == "full_disk" else None, chance.randrange(1000, 100_000))
        stretch.listen()
        if kind in ("kill", "sigterm") and stretch.listen(seconds):
            os.kill(stretch.pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        code = stretch.leave()
        if code == FAILED:
            raise RuntimeError(f"A stretch of the run failed after {counted}:\n{stretch.said}")
        last = int((get_last_checkpoint(folder) or "-0").rpartition("-")[2])
        if code == ENDED:
            return counted
        lost = stretch.step - last
        allowed = run["save_steps"] if code == -signal.SIGKILL else 2 * run["save_steps"] if code == DISK_FULL else 0
        if last < kept or lost > allowed:
            raise RuntimeError(f"Step {stretch.step} was taken, and step {last} is what remains; before {kept} did.")
        kept = last
        counted.update({"faults": 1, f"{kind}": 1, "inside a save": int((folder / UNFINISHED_CHECKPOINTS).exists())})
        counted["most steps lost"] = max(counted["most steps lost"], lost)


def measure(
    faults: int, kinds: list[str], steps: int, save_steps: int, nan_rows: int, interval: float | None, seed: int
):
    """Runs both, again as long as a run ends before all faults have come, and prints what was counted."""
    chance, counted, runs = random.Random(seed), Counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        common = {"steps": steps, "save_steps": save_steps, "nan_rows": nan_rows}
        start = time.monotonic()
        straight = Stretch({"folder": Path(folder, "undisturbed"), "supervised": nan_rows == 0} | common)
        if straight.leave() != ENDED:
            raise RuntimeError(f"The undisturbed run failed:\n{straight.said}")
        taken = time.monotonic() - start
        print(f"Undisturbed: {steps} steps in {taken:.0f} s, saved every {save_steps}.", flush=True)
        expected = saved_state(Path(folder, "undisturbed", f"checkpoint-{steps}"))
        span = 2 * (interval or taken / faults)  # half of it on average
        while counted["faults"] < faults:
            place = Path(folder, "disturbed")
            shutil.rmtree(place, ignore_errors=True)
            found = disturbed_run({"folder": place} | common, faults - counted["faults"], kinds, span, chance)
            runs += 1
            most = max(counted["most steps lost"], found["most steps lost"])
            counted += found
            counted["most steps lost"] = most
            ends = differences(saved_state(place / f"checkpoint-{steps}"), expected)
            if found := list(ends):
                raise RuntimeError(f"The ends differ in {len(found)} places: {', '.join(found[:10])}")
            print(f"Run {runs} ended bit for bit as the undisturbed one. So far: {dict(counted)}", flush=True)
        print(
            f"{counted['faults']} faults in {runs} runs of {steps} steps and {(time.monotonic() - start) / 60:.0f} "
            f"minutes, {counted['inside a save']} of them inside a save: every stretch went on from the last complete "
            f"checkpoint, at most {counted['most steps lost']} steps were lost at a time, and every run ended bit for "
            "bit as the undisturbed one."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["kill"])
    parser.add_argument("--steps", type=int, default=300, help="of the run")
    parser.add_argument("--save_steps", type=int, default=1)
    parser.add_argument("--nan_rows", type=int, default=0, help=f"of {ROWS}")
    parser.add_argument("--interval", type=float, help="mean seconds between faults; default: one run for all of them")
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    measure(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
