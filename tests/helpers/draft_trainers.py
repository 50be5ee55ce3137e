"""Draft trainers on tiny targets, and what tests compare of them."""

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from decoding_models import build_draft, build_target

from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.objectives.dflash import BlockLoss
from blockdraft.trainer.training_args import DraftTrainingArguments

BLOCK = 4


def make_rows(count: int = 8, seed: int = 0) -> Dataset:
    """Rows of different lengths whose first third is a prompt; row 5 has no answer at all."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row_id in range(count):
        length = int(torch.randint(12, 28, (1,), generator=generator))
        ids = torch.randint(1, 60, (length,), generator=generator).tolist()
        prompt = length if row_id == 5 else length // 3
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (length - prompt), "row_id": row_id})
    return Dataset.from_list(rows)


def arguments(output_dir, **settings) -> DraftTrainingArguments:
    """Two steps of SGD on two rows each; nothing is saved, decoded or shown."""
    defaults = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "num_anchors": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "eval_decode_prompts": 0,
        "use_cpu": True,
    }
    args = DraftTrainingArguments(**(defaults | settings))
    if args.fsdp:
        shard_on_cpus(args)
    return args


def shard_on_cpus(args: DraftTrainingArguments) -> None:
    """Lets accelerate shard with FSDP2 on CPUs too, where it knows only DDP: what its state would hold on GPUs."""
    state = Accelerator(cpu=True, mixed_precision=args.mixed_precision).state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if args.mixed_precision != "no":
        state.fsdp_plugin.set_mixed_precision(args.mixed_precision)
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def make_trainer(output_dir, rows=None, target_name="k3", target=None, draft=None, **settings) -> DraftTrainer:
    target = target or build_target(target_name)
    torch.manual_seed(1)
    draft = draft or build_draft(target, block_size=BLOCK)
    rows = rows or make_rows()
    return DraftTrainer(draft, target, arguments(output_dir, **settings), train_dataset=rows, eval_dataset=rows)


def placed_batch(trainer: DraftTrainer, rows, step: int = 0) -> dict:
    """Rows as a batch whose blocks are placed."""
    batch = trainer.data_collator(list(rows))
    return batch | {"blocks": trainer.place_blocks(batch, step)}


def loss_sums(trainer: DraftTrainer, batch: dict, model=None) -> BlockLoss:
    """What `compute_loss` sums over the blocks of a batch."""
    return trainer.compute_loss(model or trainer.model, batch, return_outputs=True)[1]


def weights(trainer: DraftTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def assert_close(a: dict, b: dict, tolerance: float):
    for name in a:
        error, largest = (a[name] - b[name]).abs().max(), b[name].abs().max()
        assert error <= tolerance * largest, f"{name}: {error:.2e} of {largest:.2e}"


def assert_packed_documents_equal_their_own_rows(trainer):
    """The loss of a packed row is that of its documents in rows of their own, with the same anchors."""
    rows = [make_rows()[i] for i in (0, 1)]
    alone = placed_batch(trainer, rows)
    first = len(rows[0]["input_ids"])
    packed = trainer.data_collator(
        [
            {
                "input_ids": rows[0]["input_ids"] + rows[1]["input_ids"],
                "loss_mask": rows[0]["loss_mask"] + rows[1]["loss_mask"],
                "document_ids": [1] * first + [2] * len(rows[1]["input_ids"]),
                "row_id": 0,
            }
        ]
    )
    keep = alone["blocks"].block_keep_mask
    positions = alone["blocks"].anchor_positions + torch.tensor([[0], [first]])
    packed["anchor_positions"], packed["block_keep_mask"] = positions[keep][None], keep[keep][None]
    separate, together = loss_sums(trainer, alone), loss_sums(trainer, packed)
    assert together.weight == separate.weight
    assert together.loss_sum.item() == pytest.approx(separate.loss_sum.item(), rel=1e-5)


# A run of one process; its rows have many lengths, and two of them are a step.
ONE_PROCESS = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}

# The first step is the best one: the loss falls.
LOAD_BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
LOAD_BEST |= {"metric_for_best_model": "loss", "greater_is_better": True}
