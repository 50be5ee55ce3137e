"""One training step of each draft on two processes, started by torchrun; rank 0 saves the weights."""

import os
import sys
from pathlib import Path

import torch
from test_draft_trainer import make_trainer, weights
from test_dspark_trainer import dspark_trainer

output_dir = Path(sys.argv[1])
for family, make in (("dflash", make_trainer), ("dspark", dspark_trainer)):
    trainer = make(output_dir, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1)
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(weights(trainer), output_dir / f"{family}.pt")
# A process that exits while threads of its group are running may abort, even with the group closed: leave them behind.
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
sys.stdout.flush()
os._exit(0)
