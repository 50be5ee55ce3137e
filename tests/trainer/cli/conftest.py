"""A tiny random target of each family, chat rows, and a draft that the command has trained on them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from chat_templates import CHATML
from cli_runs import SHAPES, TINY_TRAINING, TINY_V41
from decoding_models import tiny_k3
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.deepseek_v41.engram import compressed_token_map
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
from blockdraft.trainer.cli.main import main


@pytest.fixture(scope="session", params=SHAPES)
def draft_type(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def target_dir(draft_type, tmp_path_factory, chatml_backend) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(chatml_backend), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    special |= {"vocab_size": len(tokenizer) + 2}
    if draft_type == "dflash":
        model = KimiK3ForCausalLM(KimiK3TextConfig(**(tiny_k3().config.to_dict() | special)))
    else:
        special |= {
            "engram_pad_token_id": tokenizer.pad_token_id,
            "engram_compressed_vocab_size": int(compressed_token_map(tokenizer).max()) + 1,
            "dspark_noise_token_id": len(tokenizer),
        }
        model = DeepseekV41ForCausalLM(DeepseekV41TextConfig(**(TINY_V41 | special)))
        model.set_tokenizer(tokenizer)
    with torch.no_grad():  # as in trained targets, ids that the tokenizer does not have are never the likeliest
        model.get_output_embeddings().weight[len(tokenizer) :] = 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    words = "hello there what is the weather like today it is fine".split()
    rows = [
        {
            "id": i,
            "messages": [
                {"role": "user", "content": " ".join(words[: 2 + i % 4])},
                {"role": "assistant", "content": " ".join(words[i % 3 :])},
            ],
        }
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def config_file(draft_type, tmp_path_factory, target_dir, data_file) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = (
        TINY_TRAINING
        | SHAPES[draft_type]
        | {
            "target": str(target_dir),
            "train_data": str(data_file),
            "eval_fraction": 0.25,
            "output_dir": str(folder / "draft"),
        }
    )
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="session")
def draft_dir(config_file) -> Path:
    """What `train` has saved; not to be written to."""
    assert main(["train", str(config_file)]) == 0
    return config_file.parent / "draft"


@pytest.fixture
def own_run(draft_dir, config_file, tmp_path) -> tuple[Path, Path]:
    """A copy of that run which may be changed: its configuration file and its folder."""
    folder = shutil.copytree(draft_dir, tmp_path / "run")
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(config_file.read_text()) | {"output_dir": str(folder)}))
    return path, folder
