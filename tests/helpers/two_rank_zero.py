"""What two processes do under DeepSpeed's ZeRO-1, 2 and 3, started by torchrun: five steps of each draft, an
evaluation and a save, of which rank 0 keeps weights and metrics."""

import os
import sys
from pathlib import Path

import torch
from decoding_models import build_target
from draft_trainers import arguments, make_trainer
from engine_runs import FAMILIES, SGD, UNEVEN, five_steps

from blockdraft.trainer.sharding import apart_from_zero3

output_dir, view = Path(sys.argv[1]), {}
for stage in (1, 2, 3):
    settings = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,  # plain SGD
    }
    for family in FAMILIES:
        place = output_dir / f"{family}{stage}"
        run = {"per_device_train_batch_size": 4, "deepspeed": settings, "evaluated": True}
        view[f"{family}{stage}"] = five_steps(family, place, **SGD, **UNEVEN, **run)
# The last arguments ask for ZeRO-3, which transformers does to whatever it loads from now on.
target = build_target("qwen3")
if int(os.environ["RANK"]) == 0:
    target.save_pretrained(output_dir / "target")
torch.distributed.barrier()
args = arguments(output_dir / "again", deepspeed=settings)
for name, load in (
    ("sharded", type(target).from_pretrained),
    ("whole", apart_from_zero3()(type(target).from_pretrained)),
):
    loaded = load(output_dir / "target")
    try:
        make_trainer(output_dir / "again", target=loaded, deepspeed=settings)
        view[name] = ""
    except ValueError as error:
        view[name] = str(error)
if int(os.environ["RANK"]) == 0:
    torch.save(view, output_dir / "view.pt")
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)
