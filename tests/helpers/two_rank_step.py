"""What two processes do together, started by torchrun: one training step of each draft, whose weights rank 0 saves,
then an evaluation, an epoch of two steps, the first one being the best, the rest of runs that one process has begun,
two epochs on features that both have written, and a run in which one rank gets a signal, of which each rank saves its
view."""

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from draft_trainers import ONE_PROCESS, make_trainer, weights
from dspark_trainers import dspark_trainer
from transformers import TrainerCallback

from blockdraft.modeling.target.target_features import decoder_layers
from blockdraft.trainer.block_batch import BlockBatch
from blockdraft.trainer.interrupt import SaveOnInterrupt

output_dir = Path(sys.argv[1])
for family, make in (("dflash", make_trainer), ("dspark", dspark_trainer)):
    trainer = make(output_dir, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1)
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(weights(trainer), output_dir / f"{family}.pt")

rank = trainer.accelerator.process_index
trainer = make_trainer(
    output_dir / "run",
    per_device_eval_batch_size=3,
    train_sampling_strategy="group_by_length",
    save_strategy="steps",
    save_steps=1,
    eval_strategy="steps",
    eval_steps=1,
    load_best_model_at_end=True,
)
view = {"evaluated": trainer.evaluate(), "rows": []}
place_blocks, losses = trainer.place_blocks, itertools.chain([1.0], itertools.repeat(9.0))


def note_rows(batch: dict, step: int) -> BlockBatch:
    view["rows"] += batch["row_id"].tolist()
    return place_blocks(batch, step)


trainer.place_blocks, trainer.evaluate = note_rows, lambda **_: {"eval_loss": next(losses)}
torch.manual_seed(rank)  # ranks may have drawn differently before
trainer.train()
view |= {"best": trainer.state.best_model_checkpoint, "weights": weights(trainer)}
# A run that one process has begun, in either order of rows.
for order in ("random", "group_by_length"):
    trainer = make_trainer(
        output_dir / order, **ONE_PROCESS, train_sampling_strategy=order, per_device_train_batch_size=1
    )
    trainer.train(resume_from_checkpoint=True)
    view[order] = weights(trainer)


# Two epochs on features that both ranks have written.
trainer = make_trainer(output_dir / "features", cache_features=True, per_device_train_batch_size=2, max_steps=4)
trainer.cache_features()
view["forwards"] = []
decoder_layers(trainer.target)[0].register_forward_hook(lambda *_: view["forwards"].append(1))
trainer.train()
view["cached"] = weights(trainer)


class EndOfJob(TrainerCallback):
    """For the second rank alone, in the middle of the second step."""

    def on_substep_end(self, args, state, control, **kwargs):
        if rank == 1 and state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)


settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
trainer = make_trainer(output_dir / "signalled", **settings)
trainer.add_callback(SaveOnInterrupt())
trainer.add_callback(EndOfJob())
try:
    trainer.train()
except KeyboardInterrupt as interrupt:
    view["left"] = str(interrupt)
torch.save(view, output_dir / f"rank{rank}.pt")
# A process that exits while threads of its group are running may abort, even with the group closed: leave them behind.
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
sys.stdout.flush()
os._exit(0)
