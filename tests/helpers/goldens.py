"""The reference numbers under `tests/data/goldens`."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


@dataclass
class Golden:
    """One reference case: `meta` is its JSON (config, options, stability), `tensors` its arrays by full name."""

    meta: dict
    tensors: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def group(self, prefix: str) -> dict[str, torch.Tensor]:
        """Tensors named `prefix.*`, with the prefix taken off: `group("param")` is a state dict."""
        return {k.removeprefix(f"{prefix}."): v for k, v in self.tensors.items() if k.startswith(f"{prefix}.")}


def load_golden(name: str) -> Golden:
    """Reads `goldens/NAME.json` and, where there is one, `goldens/NAME.safetensors`."""
    tensors = GOLDENS / f"{name}.safetensors"
    meta = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
    return Golden(meta, load_file(tensors) if tensors.exists() else {})
