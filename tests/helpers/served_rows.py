"""Features that vLLM wrote (`tests/data/served`), their target, and the rows that they are of."""

import shutil
from pathlib import Path

import torch
from datasets import Dataset
from decoding_models import build_draft
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

FOLDER = Path(__file__).parents[1] / "data" / "served"
FILES = FOLDER / "vllm-0.32.0"
TARGET = FOLDER / "target"
SERVED_IDS, LAYER_IDS, MASK = [1, 3, 4], [0, 2], 47
PROMPT = 5  # tokens of each row


def served_target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def served_rows() -> Dataset:
    tokens = {int(path.stem): load_file(path)["token_ids"].tolist() for path in sorted(FILES.iterdir())}
    masks = {row: [0] * PROMPT + [1] * (len(ids) - PROMPT) for row, ids in tokens.items()}
    return Dataset.from_list(
        [{"input_ids": ids, "loss_mask": masks[row], "row_id": row} for row, ids in tokens.items()]
    )


def served_draft(target: PreTrainedModel, **settings):
    settings = {"block_size": 4, "target_layer_ids": LAYER_IDS, "mask_token_id": MASK} | settings
    torch.manual_seed(1)
    return build_draft(target, **settings)


def copy_files(folder: Path, names: dict[int, str] | None = None) -> Path:
    """The files of these rows (all of them) under these names, in a new folder."""
    folder.mkdir()
    for row, name in (names or {row: str(row) for row in range(4)}).items():
        shutil.copy(FILES / f"{row}.safetensors", folder / f"{name}.safetensors")
    return folder
