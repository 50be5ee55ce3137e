"""Documents to pack, and the trainers that take them."""

import torch
from datasets import Dataset
from decoding_models import build_target
from draft_trainers import BLOCK, make_trainer
from dspark_trainers import dspark_trainer

from blockdraft.trainer.draft_trainer import DraftTrainer

LENGTHS = [1, 17, BLOCK - 1, 26, BLOCK, 9, BLOCK + 1, 13, 2]


def document_rows() -> Dataset:
    """Rows of lengths around the block's, some supervised from their first token on."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(1, 60, (length,), generator=generator).tolist()
        prompt = length // 3 if number % 2 else 0
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (length - prompt), "row_id": 100 + number})
    return Dataset.from_list(rows)


def packing_trainer(method: str, tmp_path, target_name: str, **arguments) -> DraftTrainer:
    if method == "dspark":
        return dspark_trainer(tmp_path, document_rows(), build_target(target_name), **arguments)
    return make_trainer(tmp_path, document_rows(), target_name, **arguments)
