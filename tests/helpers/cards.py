"""Configurations and measurements for the tests of cards, and how to read a card."""

import ast
import re

import yaml
from deepseek_v41_dspark_models import TINY as TINY_DSPARK
from draft_models import TINY as TINY_DFLASH
from kimi_k3_dspark import KimiK3DSparkConfig

from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig

COMMIT = "c1899de289a04d12100db370d81485cdf75e47ca"


TARGET = {
    "name_or_path": "Qwen/Qwen3-0.6B",
    "revision": COMMIT,
    "architecture": "Qwen3ForCausalLM",
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "embedding_sha256": "ab" * 32,
    "tokenizer_sha256": None,
}


RECIPE = {
    "objective": {"loss_type": "fixed_anchor", "loss_decay_gamma": 4.0},
    "training": {"global_step": 1000, "learning_rate": 0.0006, "versions": {"torch": "2.13.0", "blockdraft": "0.1.0"}},
}


PROTOCOL = {
    "decoding": "greedy",
    "block_size": 4,
    "prompts": 40,
    "max_new_tokens": 64,
    "batch_size": 1,
    "dtype": "bfloat16",
    "draft_dtype": "float32",
    "hardware": "CPU (2 threads)",
}


CHAT = {
    "tau": 2.34567,
    "speedup": 1.5,
    "looping_share": 0.025,
    "intervals": {"tau": [2.1, 2.6], "speedup": [1.25, 1.75]},
    "acceptance_by_slot": [0.7, 0.4, 0.25],
}


METRICS = {"chat": CHAT | {"protocol": PROTOCOL}, "openai/openai_humaneval": {"tau": 3, "protocol": PROTOCOL}}


ADAPTER = {
    "base": "user/base-draft",
    "base_revision": "0123456789abcdef0123456789abcdef01234567",
    "peft_type": "LoRA",
    "r": 8,
    "trainable_parameters": 12_345,
    "total_parameters": 1_234_567,
}


def config(**settings) -> KimiK3DFlashConfig:
    return KimiK3DFlashConfig(**(TINY_DFLASH | {"target": TARGET} | RECIPE | settings))


def dspark_config(**settings) -> DeepseekV41DSparkConfig:
    return DeepseekV41DSparkConfig(**(TINY_DSPARK | {"target": TARGET} | RECIPE | settings))


def third_config(**settings) -> KimiK3DSparkConfig:
    return KimiK3DSparkConfig(**(TINY_DFLASH | {"target": TARGET, "markov_rank": 4} | RECIPE | settings))


def recipe(**settings) -> dict:
    return {"training": RECIPE["training"] | settings}


V41 = TARGET | {"model_type": "deepseek_v41_text", "architecture": "DeepseekV41ForCausalLM"}


def metadata(card: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1])


def code_of(card: str) -> str:
    """The card's one Python program."""
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ast.parse(code)
    return code


def table_of(card: str, heading: str) -> dict[str, str]:
    """Names and values of a section's table."""
    section = card.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line[2:-2].split(" | ", 1) for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}
