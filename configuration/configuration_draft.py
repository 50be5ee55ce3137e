"""What the configurations of block-parallel drafts share: layout, target identity, validation, builders' helpers."""

import hashlib
import json

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

DRAFT_SCHEMA_VERSION = 1

# Settings that engines and older checkpoints keep in a nested `dflash_config`, by their name there. The top-level
# attribute is the one truth.
NESTED_SETTINGS = {
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
    "output_multiplier": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "input_embedding_scale": "input_embedding_scale",
    "causal": "is_causal",
}


@strict
class DraftConfig(PreTrainedConfig):
    r"""
    Fields of a block-parallel draft's self-describing configuration.

    Args:
        block_size (`int`):
            Tokens of a block, at least 2, the anchor included.
        mask_token_id (`int`):
            Token that stands for a position to be predicted; an id of the target's vocabulary that no text contains.
        target_layer_ids (`list[int]`):
            Zero-based target layers whose hidden states the draft reads, strictly increasing.
        capture_point (`str`):
            Where they are read: `"layer_output"`, that is `hidden_states[i + 1]`.
        num_target_layers (`int`):
            Depth of the target.
        slot_layout (`str`):
            `"1+N"`: slot 0 holds the anchor and predicts nothing, slots 1.. are drafted.
        is_causal (`bool`):
            Whether a slot sees only earlier slots of its block.
        sliding_window (`int`, *optional*):
            Context positions that a query sees, its own included; `None` for all.
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

    draft_schema_version: int = DRAFT_SCHEMA_VERSION
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    capture_point: str = "layer_output"
    num_target_layers: int | None = None
    slot_layout: str = "1+N"
    is_causal: bool = False
    sliding_window: int | None = None
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    input_embedding_scale: float | int = 1.0
    target: dict | None = None
    objective: dict | None = None
    training: dict | None = None

    def __post_init__(self, dflash_config: dict | None = None, sample_from_anchor: bool | None = None, **kwargs):
        self._read_nested(dict(dflash_config or {}))
        if sample_from_anchor is not None and sample_from_anchor != (self.slot_layout == "N"):
            raise ValueError(
                f"`sample_from_anchor` is {sample_from_anchor} but `slot_layout` is {self.slot_layout!r}; it is true "
                'where slot 0 predicts too ("N"). Leave it out, it follows from the layout.'
            )
        super().__post_init__(**kwargs)
        self.check_draft()

    def _read_nested(self, nested: dict) -> None:
        if nested.pop("projector_type", None) is not None:
            raise ValueError(
                "`dflash_config.projector_type` is set: drafts with a projector are another architecture."
            )
        for nested_name, value in nested.items():
            if nested_name not in NESTED_SETTINGS:
                raise ValueError(
                    f"`dflash_config.{nested_name}` is not a setting of this draft; known: {list(NESTED_SETTINGS)}."
                )
            name = NESTED_SETTINGS[nested_name]
            current = getattr(self, name)
            default = type(self).__dataclass_fields__[name].default
            if current != default and current != value:
                raise ValueError(
                    f"`{name}` is {current!r} but `dflash_config.{nested_name}` is {value!r}; give one value."
                )
            setattr(self, name, value)

    def to_dict(self) -> dict:
        """The configuration with both views: top-level keys and the nested `dflash_config` that engines read."""
        output = super().to_dict()
        output["dflash_config"] = {nested_name: output[name] for nested_name, name in NESTED_SETTINGS.items()}
        output["sample_from_anchor"] = self.slot_layout == "N"
        return output

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        if "slot_layout" not in config_dict:
            raise ValueError(
                f"The stored {cls.model_type} configuration has no `slot_layout`, so which slots of a block are "
                'drafted is unknown. Add "slot_layout": "1+N" (slot 0 is the anchor) if that is how it was trained.'
            )
        return super().from_dict(config_dict, **kwargs)

    def check_draft(self) -> None:
        """Raises a `ValueError` that names the first setting of the block contract that cannot be."""
        for name in ("block_size", "mask_token_id", "target_layer_ids"):
            if getattr(self, name) is None:
                raise ValueError(f"`{name}` is missing: a draft configuration has to state it.")
        if self.block_size < 2:
            raise ValueError(f"`block_size` is {self.block_size}: a block holds the anchor and at least one slot.")
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        check_mask_token(self.mask_token_id, self.vocab_size, self.bos_token_id, self.eos_token_id)
        if self.slot_layout != "1+N":
            raise ValueError(f'`slot_layout` is {self.slot_layout!r}: a DFlash draft has the layout "1+N".')
        if self.capture_point != "layer_output":
            raise ValueError(f'`capture_point` is {self.capture_point!r}: only "layer_output" is known.')
        for name in ("output_multiplier", "input_embedding_scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be positive.")
        for name in ("final_logit_softcapping", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"`{name}` is {value}: it must be null or positive.")


def check_layer_ids(layer_ids: list[int], num_target_layers: int | None) -> None:
    """Raises a `ValueError` unless `layer_ids` are strictly increasing layers that every engine can tap."""
    if not layer_ids or any(b <= a for a, b in zip(layer_ids, layer_ids[1:], strict=False)) or layer_ids[0] < 0:
        raise ValueError(
            f"`target_layer_ids` is {layer_ids}: give strictly increasing zero-based layers. The default ids repeat "
            "on very shallow targets; pass explicit ids there."
        )
    if num_target_layers is not None and layer_ids[-1] > num_target_layers - 2:
        raise ValueError(
            f"`target_layer_ids` is {layer_ids}: the target has {num_target_layers} layers and its last one "
            f"cannot be tapped by serving engines, so ids go up to {num_target_layers - 2}."
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


def propose_mask_token_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """
    Ids of a target's vocabulary that can serve as the mask token, best first: the tokenizer's own mask token, reserved
    or unused special tokens by name, then embedding rows that no token has.

    Args:
        tokenizer: the target's.
        vocab_size: rows of the target's embedding.

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
    candidates = [id_ for id_ in dict.fromkeys(own + sorted(reserved) + without_token) if id_ not in taken]
    if not candidates:
        raise ValueError(
            "The tokenizer has no mask, reserved or unused token and the embedding no free row. Pass as "
            "`mask_token_id` a token that your data do not contain (a rare control character, or one of a script that "
            "you do not train on)."
        )
    return candidates


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the tokenizer's vocabulary: the same text gives the same ids only where it agrees."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()


def target_record(target, tokenizer: PreTrainedTokenizerBase | None, revision: str | None = None) -> dict:
    """
    Identity of a loaded target, as stored in `DraftConfig.target`.

    Args:
        target (`PreTrainedModel`): the frozen target.
        tokenizer: its tokenizer; `None` leaves its fingerprint out.
        revision: commit hash or branch that the target was loaded at.
    """
    text_config = target.config.get_text_config()
    rows = target.get_input_embeddings().weight
    sample = rows[:: max(1, len(rows) // 64)].detach().float().cpu().contiguous()
    return {
        "name_or_path": target.config.name_or_path,
        "revision": revision,
        "architecture": type(target).__name__,
        "model_type": text_config.model_type,
        "hidden_size": text_config.hidden_size,
        "num_hidden_layers": text_config.num_hidden_layers,
        "dtype": str(target.dtype).removeprefix("torch."),
        "embedding_rows": len(rows),
        "embedding_sha256": hashlib.sha256(sample.numpy().tobytes()).hexdigest(),
        "tokenizer_length": None if tokenizer is None else len(tokenizer),
        "tokenizer_sha256": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
    }
