"""Which target a draft was made for: its name, commit, and fingerprints of its weights and tokenizer."""

import hashlib
import json
import os
import re
from enum import Enum
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedTokenizerBase

from ..ops.number_formats import dtype_name

# Case, contractions, digits, quotes, runs of white space, accents in both forms, ligatures, other scripts.
PROBE = (
    "It's 3,141 or 2.718: I'D say \u201cyes\u201d.\n\n  def f(x):\n\treturn x ** 2\r\n"
    "caf\u00e9, cafe\u0301, \ufb01, \u4f60\u597d, \u0645\u0631\u062d\u0628\u0627, \U0001f600   "
)
PROBE_WORDS = 4096


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the tokenizer's vocabulary: the same ids are the same words only where it agrees."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()


def tokenization_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the ids of a text that shows normaliser, pre-tokenizer, merges and added bos: a probe, then words of
    the vocabulary, evenly spread. It stands for what the tokenizer does, not for its file, which versions of
    `tokenizers` write differently, nor for its template or the padding and truncation of its last call."""
    ids = sorted(tokenizer.get_vocab().values())
    spread = ids[:: -(-len(ids) // PROBE_WORDS)]
    words = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in spread]
    encoded = tokenizer("\n".join([PROBE, *words]), verbose=False)["input_ids"]  # silent on its length
    return hashlib.sha256(json.dumps(encoded).encode()).hexdigest()


def weights_fingerprint(model, values: int = 16) -> str | None:
    """SHA-256 of up to `values` numbers of each floating-point parameter, which a fine-tune changes though it leaves
    the embedding as it was; `None` where parameters are not in memory."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.is_meta:
            return None
        # A quantiser's tensor class has no elements to pick.
        if parameter.is_floating_point() and type(parameter) is torch.nn.Parameter:
            numbers = parameter.detach().reshape(-1)
            sample = numbers[:: max(1, len(numbers) // values)][:values]
            digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def loaded_commit(name: str, revision: str | None = None) -> str | None:
    """The commit that a branch or tag (`None`: the default branch) of a Hub repository was at when it was last loaded
    here: a branch moves on, and a loaded model does not know. For a directory, or where the Hub's cache does not have
    it, the revision as it is given."""
    if not name or os.path.isdir(name):
        return revision
    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # a directory that is gone
        return revision
    return Path(file).parent.name if isinstance(file, str) else revision


def is_other_revision(one: str | None, other: str | None) -> bool:
    """Whether two revisions are known to differ: a branch or tag may be at any commit."""
    if not one or not other or one == other:
        return False
    is_commit, is_other_commit = (re.fullmatch(r"[0-9a-f]{40}", revision) is not None for revision in (one, other))
    return is_commit == is_other_commit


def target_record(target, tokenizer: PreTrainedTokenizerBase | None, revision: str | None = None) -> dict:
    """
    Identity of a loaded target, as stored in `DraftConfig.target`.

    Args:
        target (`PreTrainedModel`): the frozen target, with or without PEFT adapters, under PEFT's wrapper or not.
        tokenizer: its tokenizer; `None` leaves its fingerprints out.
        revision: commit hash, branch or tag that the target was loaded at; of the latter two the commit is stored,
            where the Hub's cache knows it.
    """
    target = target.get_base_model() if hasattr(target, "get_base_model") else target
    text_config = target.config.get_text_config(decoder=True)
    name = target.config.name_or_path
    revision = loaded_commit(name, revision) if revision else None
    if os.path.isdir(name):
        name = os.path.basename(os.path.abspath(name))  # a draft is published, its author's folders are not
    rows = target.get_input_embeddings().weight
    sample = rows[:: max(1, len(rows) // 64)].detach()
    digest = None  # unknown while the rows are offloaded
    if not sample.is_meta:
        digest = hashlib.sha256(sample.float().cpu().contiguous().numpy().tobytes()).hexdigest()
    adapters = None
    if hasattr(target, "peft_config"):
        adapters = [config.peft_type.value for config in target.peft_config.values()]
    return {
        "name_or_path": name,
        "revision": revision,
        "architecture": type(target).__name__,
        "model_type": text_config.model_type,
        "hidden_size": text_config.hidden_size,
        "num_hidden_layers": text_config.num_hidden_layers,
        "dtype": dtype_name(target.dtype),
        "embedding_rows": len(rows),
        "embedding_sha256": digest,
        "weights_sha256": weights_fingerprint(target),
        "adapters": adapters,  # their kinds
        "quantization": _quantization(target),
        "tokenizer_length": None if tokenizer is None else len(tokenizer),
        "tokenizer_sha256": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "tokenization_sha256": None if tokenizer is None else tokenization_fingerprint(tokenizer),
    }


def _quantization(target) -> str | None:
    """The method by which a model's weights are quantised; `None` where they are not."""
    config = getattr(target.config, "quantization_config", None)
    if config is None:
        return None
    method = config["quant_method"] if isinstance(config, dict) else config.quant_method
    return method.value if isinstance(method, Enum) else method
