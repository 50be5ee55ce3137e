"""What the configurations of block-parallel drafts share: layout, target identity, validation, builders' helpers."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import ClassVar

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DRAFT_SCHEMA_VERSION = 1

LAYER_OUTPUT = "layer_output"
# DeepSeek V4.1's own: the mean over the hyper-connection streams of what enters a layer's attention.
ATTENTION_INPUT_MEAN = "attention_input_mean"

ANCHOR_APART, ANCHOR_FIRST = "1+N", "N"


@strict
class DraftConfig(PreTrainedConfig):
    r"""
    Fields of a block-parallel draft's self-describing configuration.

    Args:
        block_size (`int`):
            Slots of a block, at least 2, the anchor's included.
        mask_token_id (`int`):
            Token that stands for a position to be predicted; an id of the target's vocabulary that no text contains.
        target_layer_ids (`list[int]`):
            Zero-based target layers whose hidden states the draft reads, strictly increasing.
        target_hidden_size (`int`, *optional*):
            Width of those hidden states where it is not `hidden_size`, the width of the target's embedding and head.
        capture_point (`str`):
            Where they are read: `"layer_output"`, that is `hidden_states[i + 1]`, or `"attention_input_mean"`.
        num_target_layers (`int`):
            Depth of the target.
        slot_layout (`str`):
            `"1+N"`: slot 0 holds the anchor and predicts nothing, the others predict their own token. `"N"`: slot 0
            holds the anchor and every slot predicts the token after its own.
        is_causal (`bool`):
            Whether a slot sees only earlier slots of its block.
        sliding_window (`int`, *optional*):
            Context positions that a query sees (with `"1+N"` its own included); `None` for all.
        output_multiplier, final_logit_softcapping, input_embedding_scale (`float`):
            Transforms of the target's logits and input embeddings that the draft has to repeat.
        target (`dict`):
            Identity of the target, see [`target_record`].
        objective, training (`dict`):
            What the draft was trained on and how.

    Raises:
        ValueError: if a setting is missing or impossible; the message names it. A stored configuration without
            `slot_layout` is refused, since engines would have to guess it.
    """

    # What a family is defined for, and the names under which engines and other checkpoints keep its settings: in a
    # nested dict, or (`engine_view_key` None) at the top level. The attribute is the one truth.
    family_slot_layout = ANCHOR_APART
    # Settings that no run changes halfway, though the weights would fit.
    fixed_in_training: ClassVar[tuple[str, ...]] = (
        "model_type",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_hidden_layers",
        "sliding_window",
    )
    family_capture_points = (LAYER_OUTPUT,)
    engine_view_key: ClassVar[str | None] = None
    engine_view: ClassVar[dict[str, str]] = {}

    draft_schema_version: int = DRAFT_SCHEMA_VERSION
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    capture_point: str = LAYER_OUTPUT
    num_target_layers: int | None = None
    slot_layout: str | None = None
    is_causal: bool = False
    sliding_window: int | None = None
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    input_embedding_scale: float | int = 1.0
    target: dict | None = None
    objective: dict | None = None
    training: dict | None = None

    def __post_init__(self, sample_from_anchor: bool | None = None, **kwargs):
        if self.slot_layout is None:
            self.slot_layout = self.family_slot_layout
        if self.engine_view_key is None:
            view = {name: kwargs.pop(name) for name in self.engine_view if name in kwargs}
        else:
            view = dict(kwargs.pop(self.engine_view_key, None) or {})
        self._read_view(view)
        if sample_from_anchor is not None and sample_from_anchor != (self.slot_layout == ANCHOR_FIRST):
            raise ValueError(
                f"`sample_from_anchor` is {sample_from_anchor} but `slot_layout` is {self.slot_layout!r}; it is true "
                'where slot 0 predicts too ("N"). Leave it out, it follows from the layout.'
            )
        super().__post_init__(**kwargs)
        self.check_draft()

    def _read_view(self, view: dict) -> None:
        prefix = "" if self.engine_view_key is None else f"{self.engine_view_key}."
        if view.pop("projector_type", None) is not None:
            raise ValueError(f"`{prefix}projector_type` is set: drafts with a projector are another architecture.")
        for engine_name, value in view.items():
            if engine_name not in self.engine_view:
                raise ValueError(
                    f"`{prefix}{engine_name}` is not a setting of this draft; known: {list(self.engine_view)}."
                )
            name = self.engine_view[engine_name]
            current = getattr(self, name)
            default = type(self).__dataclass_fields__[name].default
            if current != default and current != value:
                raise ValueError(f"`{name}` is {current!r} but `{prefix}{engine_name}` is {value!r}; give one value.")
            setattr(self, name, value)

    def to_dict(self) -> dict:
        """The configuration with both views: the attributes, and the names that engines read."""
        output = super().to_dict()
        view = {engine_name: output[name] for engine_name, name in self.engine_view.items()}
        output |= view if self.engine_view_key is None else {self.engine_view_key: view}
        output["sample_from_anchor"] = self.slot_layout == ANCHOR_FIRST
        return output

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        if "slot_layout" not in config_dict:
            raise ValueError(
                f"The stored {cls.model_type} configuration has no `slot_layout`, so which slots of a block are "
                f'drafted is unknown. Add "slot_layout": "{cls.family_slot_layout}" if that is how it was trained.'
            )
        return super().from_dict(config_dict, **kwargs)

    @property
    def num_drafted(self) -> int:
        """Tokens that one block drafts: slots without a known token, and the anchor's own where that drafts too. Known
        are the anchor and, for a draft that has seen variable prefixes only, the token before it."""
        variable_prefix = (self.objective or {}).get("loss_type") == "variable_prefix"
        known = min(2, self.block_size - 1) if variable_prefix else 1
        return self.block_size - known + (self.slot_layout == ANCHOR_FIRST)

    @property
    def features_width(self) -> int:
        """Channels of the target's hidden states that the draft reads a token, all layers together."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    def check_draft(self) -> None:
        """Raises a `ValueError` that names the first setting of the block contract that cannot be."""
        for name in ("block_size", "mask_token_id", "target_layer_ids"):
            if getattr(self, name) is None:
                raise ValueError(f"`{name}` is missing: a draft configuration has to state it.")
        if self.block_size < 2:
            raise ValueError(f"`block_size` is {self.block_size}: a block holds the anchor and at least one slot.")
        check_layer_ids(self.target_layer_ids, self.num_target_layers, self.capture_point)
        check_mask_token(self.mask_token_id, self.vocab_size, self.bos_token_id, self.eos_token_id)
        if self.slot_layout != self.family_slot_layout:
            raise ValueError(
                f'`slot_layout` is {self.slot_layout!r}: a {self.model_type} draft has "{self.family_slot_layout}".'
            )
        if self.capture_point not in self.family_capture_points:
            raise ValueError(
                f"`capture_point` is {self.capture_point!r}: a {self.model_type} draft reads one of "
                f"{list(self.family_capture_points)}."
            )
        for name in ("output_multiplier", "input_embedding_scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be positive.")
        for name in ("final_logit_softcapping", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"`{name}` is {value}: it must be null or positive.")


def last_layer_id(num_target_layers: int, capture_point: str) -> int:
    """The highest layer that engines can tap: they hand out the last layer's output after the final norm only; what
    enters that layer they do hand out."""
    return num_target_layers - (2 if capture_point == LAYER_OUTPUT else 1)


def check_layer_ids(layer_ids: list[int], num_target_layers: int | None, capture_point: str = LAYER_OUTPUT) -> None:
    """Raises a `ValueError` unless `layer_ids` are strictly increasing layers that every engine can tap."""
    if not layer_ids or any(b <= a for a, b in zip(layer_ids, layer_ids[1:], strict=False)) or layer_ids[0] < 0:
        raise ValueError(f"`target_layer_ids` is {layer_ids}: give strictly increasing zero-based layers.")
    if num_target_layers is None:
        return
    if layer_ids[-1] > (last := last_layer_id(num_target_layers, capture_point)):
        raise ValueError(
            f"`target_layer_ids` is {layer_ids}: of a target with {num_target_layers} layers, serving engines can "
            f"tap ids up to {last}."
        )


def check_mask_token(mask_token_id: int, vocab_size: int, bos: int | None, eos: int | list[int] | None) -> None:
    """Raises a `ValueError` unless the mask token is a row of the target's embedding and neither bos nor eos."""
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(
            f"`mask_token_id` is {mask_token_id}: it must lie inside the target's vocabulary, 0..{vocab_size - 1}."
        )
    if mask_token_id == bos or mask_token_id in (eos if isinstance(eos, list) else [eos]):
        raise ValueError(
            f"`mask_token_id` is {mask_token_id}, the target's bos or eos token: the draft would learn that token as "
            "noise. `propose_mask_token_ids(tokenizer, vocab_size)` lists reserved or unused ids."
        )


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """
    Default layers to read features from: evenly spaced from the second to the third-last layer (DFlash,
    arXiv 2602.06036, section 4), rounded half to even. Ids repeat where the target is very shallow.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def default_target_layer_ids(
    num_target_layers: int, num_draft_layers: int, capture_point: str = LAYER_OUTPUT
) -> list[int]:
    """
    [`build_target_layer_ids`] where these are layers that can be tapped and differ; on shallower targets, that many
    layers, or as many as there are, evenly spaced from the first to the last one that can be tapped.
    """
    layer_ids = build_target_layer_ids(num_target_layers, num_draft_layers)
    last = last_layer_id(num_target_layers, capture_point)
    if len(set(layer_ids)) == num_draft_layers and 0 <= min(layer_ids) and max(layer_ids) <= last:
        return sorted(layer_ids)
    if last < 0:
        raise ValueError(
            f"The target has {num_target_layers} layer(s), of which serving engines can tap none: a draft needs a "
            "deeper target."
        )
    count = min(num_draft_layers, last + 1)
    return [round(i * last / (count - 1)) for i in range(count)] if count > 1 else [last // 2]


# Bytes that no UTF-8 text contains.
NEVER_IN_TEXT = (0xC0, 0xC1, *range(0xF5, 0x100))


def propose_mask_token_ids(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, rows: Iterable[Mapping] | None = None
) -> list[int]:
    """
    Ids of a target's vocabulary that can serve as the mask token, best first: the tokenizer's own mask token, reserved
    or unused special tokens by name, embedding rows that no token has, then tokens of single bytes that no UTF-8 text
    contains (0xC0 and the like: byte-level and byte-fallback vocabularies have them).

    Args:
        tokenizer: the target's.
        vocab_size: rows of the target's embedding.
        rows: the data, read only where none of the above exists: then every token that their `input_ids` lack will do,
            special ones that the chat template does not name first, then the others from the last of the vocabulary
            on, as a rule its rarest.

    Returns:
        A list of ids, never bos, eos, pad or unk.

    Raises:
        ValueError: if there is none; the message says what to do.
    """
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    special = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items() if id_ < vocab_size}
    reserved = [
        id_ for id_, token in special.items() if any(word in token.lower() for word in ("reserved", "unused", "mask"))
    ]
    known = set(tokenizer.get_vocab().values())
    without_token = [id_ for id_ in range(vocab_size) if id_ not in known]
    own = [id_ for id_ in special if id_ == tokenizer.mask_token_id]
    candidates = own + sorted(reserved) + without_token + _bytes_in_no_text(tokenizer, vocab_size)
    candidates = [id_ for id_ in dict.fromkeys(candidates) if id_ not in taken]
    if not candidates and rows is not None:
        template = json.dumps(tokenizer.chat_template)
        used = taken | {id_ for id_, token in special.items() if token in template}
        for row in rows:
            used.update(row["input_ids"])
        ordinary = [id_ for id_ in reversed(range(vocab_size)) if id_ not in special]
        candidates = [id_ for id_ in [*special, *ordinary] if id_ not in used]
    if not candidates:
        raise ValueError(
            "The tokenizer has no mask, reserved or unused token, no token of a byte that no text contains, and the "
            "embedding no free row. Pass as `mask_token_id` a token that your data do not contain (a rare control "
            "character, or one of a script that you do not train on), or the data as `rows`."
        )
    return candidates


def _bytes_in_no_text(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Ids of single bytes that no UTF-8 text contains, as a byte-level or a byte-fallback vocabulary writes them."""
    vocab = tokenizer.get_vocab()
    ids = [vocab[name] for byte in NEVER_IN_TEXT for name in (chr(byte), f"<0x{byte:02X}>") if name in vocab]
    # A letter of an ordinary vocabulary reads like the byte's name, but it is text; a lone byte is none.
    return [id_ for id_ in ids if id_ < vocab_size and tokenizer.decode([id_]) == "\ufffd"]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the tokenizer's vocabulary: the same ids are the same words only where it agrees."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()


# Case, contractions, digits, quotes, runs of white space, accents in both forms, ligatures, other scripts.
PROBE = (
    "It's 3,141 or 2.718: I'D say \u201cyes\u201d.\n\n  def f(x):\n\treturn x ** 2\r\n"
    "caf\u00e9, cafe\u0301, \ufb01, \u4f60\u597d, \u0645\u0631\u062d\u0628\u0627, \U0001f600   "
)
PROBE_WORDS = 4096


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
    samples = []
    for parameter in model.parameters():
        if parameter.device.type == "meta":
            return None
        # A quantiser's tensor class has no elements to pick.
        if parameter.is_floating_point() and type(parameter) is torch.nn.Parameter:
            numbers = parameter.detach().reshape(-1)
            samples.append(numbers[:: max(1, len(numbers) // values)][:values].float().cpu())
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.numpy().tobytes())
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
    return _is_commit(one) == _is_commit(other)


def _is_commit(revision: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


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
    return {
        "name_or_path": name,
        "revision": revision,
        "architecture": type(target).__name__,
        "model_type": text_config.model_type,
        "hidden_size": text_config.hidden_size,
        "num_hidden_layers": text_config.num_hidden_layers,
        "dtype": str(target.dtype).removeprefix("torch."),
        "embedding_rows": len(rows),
        "embedding_sha256": digest,
        "weights_sha256": weights_fingerprint(target),
        "adapters": _adapters(target),
        "quantization": _quantization(target),
        "tokenizer_length": None if tokenizer is None else len(tokenizer),
        "tokenizer_sha256": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "tokenization_sha256": None if tokenizer is None else tokenization_fingerprint(tokenizer),
    }


def _adapters(target) -> list[str] | None:
    """The kinds of the PEFT adapters in a model; `None` without one."""
    if not hasattr(target, "peft_config"):
        return None
    return [config.peft_type.value for config in target.peft_config.values()]


def _quantization(target) -> str | None:
    """The method by which a model's weights are quantised; `None` where they are not."""
    config = getattr(target.config, "quantization_config", None)
    if config is None:
        return None
    method = config["quant_method"] if isinstance(config, dict) else config.quant_method
    return method.value if isinstance(method, Enum) else method
