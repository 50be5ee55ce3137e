"""Counting pairs for the tests of the doctor: sound ones, and copies of them to plant a fault in."""

import copy
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from counting_pairs import counting_rows, counting_target, counting_tokenizer, write_draft
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from blockdraft.trainer.diagnostics.doctor import doctor
from blockdraft.trainer.diagnostics.findings import FAULT, WARNING, Finding

FEW = slice(4, None, 9)  # rows; their answers are long enough for a block
ONLY_WARNED_OF = {"dtype", "stop token", "embedding scale"}
LOG = [{"step": 400, "loss": 0.05, "accuracy": 0.98, "estimated_tau": 3.9}]


def cut_off(path: Path) -> None:
    path.write_text(path.read_text()[:-10])


@dataclass
class Patient:
    """A pair of its own, to plant a fault in."""

    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    rows: list[dict]

    def settings(self, **changes) -> None:
        """Changes config.json, the engines' view included; `None` takes a setting out."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        for settings in (config, config.get("dflash_config", {})):
            for name, value in changes.items():
                name = {"is_causal": "causal"}.get(name, name) if settings is not config else name
                if name in settings or settings is config:
                    settings[name] = value
                if value is None:
                    settings.pop(name, None)
        path.write_text(json.dumps(config))

    @property
    def config(self) -> PreTrainedConfig:
        return AutoConfig.from_pretrained(self.folder)

    def weights(self, edit: Callable[[dict], None]) -> None:
        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def examine(self, measure: bool = False, **settings) -> dict[str, Finding]:
        rows = self.rows if measure else None
        settings = {"max_new_tokens": 16} | settings
        found = doctor(self.target, self.tokenizer, self.folder, rows, **settings)
        return {finding.check: finding for finding in found}


def assert_found(findings: dict[str, Finding], check: str) -> Finding:
    """That a check found the planted fault, and says what to do."""
    finding = findings[check]
    assert finding.status == (WARNING if check in ONLY_WARNED_OF else FAULT), finding
    assert finding.found and finding.fix
    return finding


def fresh_weights(patient: Patient) -> None:
    patient.weights(lambda tensors: [nn.init.normal_(t, std=0.1) for t in tensors.values() if t.dim() > 1])


@functools.cache
def sound_target() -> PreTrainedModel:
    """Not to be changed."""
    return counting_target()


@functools.cache
def sound_rows() -> list[dict]:
    """Not to be changed."""
    return list(counting_rows(counting_tokenizer()))


def write_sound_drafts(folder: Path) -> dict[str, Path]:
    kinds = ("dflash", "dspark")
    return {kind: write_draft(kind, sound_target(), counting_tokenizer(), folder / kind) for kind in kinds}


def admit_patient(draft: Path, folder: Path) -> Patient:
    """Copies, of the draft into `folder`."""
    shutil.copytree(draft, folder)
    return Patient(folder, copy.deepcopy(sound_target()), counting_tokenizer(), copy.deepcopy(sound_rows()[FEW]))
