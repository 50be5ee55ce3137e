"""Chat templates of real models (`tests/data/chat_templates.md` says whose), each with a small tokenizer: bytes, one
merge of two new lines, and the special tokens that the template writes."""

import functools
import json
import lzma
import re
from pathlib import Path

from chat_templates import KIMI_K3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

DATA = Path(__file__).parent.parent / "data" / "chat_templates.json.xz"
SPECIAL = re.compile(r"<[|｜][^\s<>{}'\"|｜]+[|｜]>|<[|]\w+>|<\w+[|]>|<(?:start|end)_of_\w+>")


def _entries() -> dict[str, dict]:
    kimi_k3 = {"template": KIMI_K3, "eos": "<|end_of_msg|>", "stops": ["<|end_of_msg|>"]}
    kimi_k3["special"] = ["<|open|>", "<|close|>", "<|sep|>"]
    return json.loads(lzma.decompress(DATA.read_bytes())) | {"kimi_k3": kimi_k3}


ENTRIES = _entries()


@functools.cache
def real_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the template of that name; shared, not to be changed."""
    entry = ENTRIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    written = [*entry["stops"], *entry.get("special", []), *SPECIAL.findall(entry["template"])]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=entry.get("bos"),
        eos_token=entry["eos"],
        extra_special_tokens=list(dict.fromkeys(written)),
    )
    tokenizer.chat_template = entry["template"]
    return tokenizer


def generation_config(name: str) -> GenerationConfig:
    """What that model's generation config says of where answers stop."""
    return GenerationConfig(eos_token_id=real_tokenizer(name).convert_tokens_to_ids(ENTRIES[name]["stops"]))
