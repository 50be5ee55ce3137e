"""A process that has nothing but a saved draft's folder."""

import os
import subprocess
import sys

import torch
from safetensors.torch import load_file

AUTO_MAP = {
    "AutoConfig": "configuration_kimi_k3_dflash.KimiK3DFlashConfig",
    "AutoModel": "modeling_kimi_k3_dflash.KimiK3DFlashDraftModel",
}


# Isolated mode and an empty code cache; the package is blocked even where it is installed.
FRESH_PROCESS = """
import sys
sys.modules["blockdraft"] = None
source, inputs, saved_again = sys.argv[1:]

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

draft = AutoModel.from_pretrained(source, trust_remote_code=True)
assert type(draft).__module__.startswith("transformers_modules."), type(draft).__module__
assert isinstance(draft.config, type(AutoConfig.from_pretrained(source, trust_remote_code=True)))
with torch.no_grad():
    hidden = draft(**load_file(inputs)).last_hidden_state
draft.save_pretrained(saved_again)
save_file({"hidden": hidden}, saved_again + "/outputs.safetensors")
"""


def run_fresh(source, inputs, saved_again, tmp_path):
    caches = {
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # what is compared bit for bit is computed alike
    }
    command = [sys.executable, "-I", "-c", FRESH_PROCESS, str(source), str(inputs), str(saved_again)]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ | caches, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return load_file(saved_again / "outputs.safetensors")["hidden"]


def code_files(directory):
    return {file.relative_to(directory).as_posix(): file.read_text() for file in directory.rglob("*.py")}
