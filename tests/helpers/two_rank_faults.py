"""What two processes do together, started by torchrun, in folders of the first argument: a run, the same one killed
and resumed, and runs with a row that one rank alone has, spoilt or unsupervised."""

import os
import sys
from pathlib import Path

from draft_trainers import make_rows, make_trainer
from killed_runs import SETTINGS, KillAfter, Killed
from spoilt_rows import spoil_features, unsupervised

output_dir = Path(sys.argv[1])
settings = SETTINGS | {"per_device_train_batch_size": 1}
make_trainer(output_dir / "straight", **settings).train()
trainer = make_trainer(output_dir / "killed", **settings)
trainer.add_callback(KillAfter(3))
try:
    trainer.train()
except Killed:
    trainer.accelerator.wait_for_everyone()
make_trainer(output_dir / "killed", **settings).train(resume_from_checkpoint=True)
settings |= {"max_steps": 4, "gradient_accumulation_steps": 2, "optim": "sgd"}
make_trainer(output_dir / "unsupervised", unsupervised(make_rows()), **settings).train()
trainer = make_trainer(output_dir / "spoilt", **settings)
spoil_features(trainer)
trainer.train()
# A process that exits while threads of its group are running may abort, even with the group closed: leave them behind.
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
sys.stdout.flush()
os._exit(0)
