"""What the configurations of block-parallel drafts share: the layout of a block, what is read of the target, both
views of the settings that engines read, validation."""

from importlib import import_module
from itertools import pairwise
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .validation import CheckedConfig

DRAFT_SCHEMA_VERSION = 1

LAYER_OUTPUT = "layer_output"
# DeepSeek V4.1's own: the mean over the hyper-connection streams of what enters a layer's attention.
ATTENTION_INPUT_MEAN = "attention_input_mean"

# Slot 0 of a block always holds the anchor. It drafts nothing, or it drafts the next token, as every slot then does.
ANCHOR_GIVEN, ANCHOR_DRAFTS = "1+N", "N"

# Settings without a default: `None` means that they are missing.
REQUIRED = ("block_size", "mask_token_id", "target_layer_ids")


@strict
class DraftConfig(CheckedConfig):
    r"""
    Fields of a block-parallel draft's self-describing configuration.

    Args:
        block_size (`int`): Slots of a block, at least 2, the anchor's included.
        mask_token_id (`int`): Token that stands for a position to be predicted; an id of the target's vocabulary that
            no text contains.
        target_layer_ids (`list[int]`): Zero-based target layers whose hidden states the draft reads, strictly
            increasing.
        target_hidden_size (`int`, *optional*): Width of those hidden states where it is not `hidden_size`, the width
            of the target's embedding and head.
        capture_point (`str`): Where they are read: `"layer_output"`, that is `hidden_states[i + 1]`, or
            `"attention_input_mean"`.
        num_target_layers (`int`): Depth of the target; `None` where it is not known, and the layers' ids are not
            checked.
        slot_layout (`str`): `"1+N"`: slot 0 holds the anchor and predicts nothing, the others predict their own token.
            `"N"`: slot 0 holds the anchor and every slot predicts the token after its own. Default: the family's.
            Engines read it as `sample_from_anchor`, which is written beside it.
        is_causal (`bool`): Whether a slot sees only earlier slots of its block. Default: slots see each other in both
            directions, as in the papers.
        sliding_window (`int`, *optional*): Context positions that a query sees (with `"1+N"` its own included); `None`
            for all.
        output_multiplier, final_logit_softcapping, input_embedding_scale (`float`): Transforms of the target's logits
            and input embeddings that the draft has to repeat. Default: none.
        attention_backend (`str`): `attn_implementation` where that is not given.
        target (`dict`): Identity of the target, see [`target_record`].
        objective, training (`dict`): What the draft was trained on and how.

    Raises:
        ValueError: if a setting is missing or impossible, or two views of it differ; the message names it. A stored
            configuration without `slot_layout` is refused, since engines would have to guess it.
    """

    # Settings that no run changes halfway, though the weights would fit.
    fixed_in_training: ClassVar[tuple[str, ...]] = (
        "model_type",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_hidden_layers",
        "sliding_window",
    )
    # What a family is defined for.
    family_slot_layout: ClassVar[str] = ANCHOR_GIVEN
    family_capture_points: ClassVar[tuple[str, ...]] = (LAYER_OUTPUT,)
    attention_backends: ClassVar[tuple[str, ...]] = ("eager", "sdpa")
    # Names under which engines and other checkpoints keep settings: in a nested dict, or (`engine_view_key` None) at
    # the top level. The attribute is the one truth.
    engine_view_key: ClassVar[str | None] = None
    engine_view: ClassVar[dict[str, str]] = {}
    # The module beside this one that builds the configuration from a target's. A saved draft does not ship it.
    builder: ClassVar[str]

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
    attention_backend: str = "sdpa"
    target: dict | None = None
    objective: dict | None = None
    training: dict | None = None

    def __new__(cls, *args, **kwargs):
        config = super().__new__(cls)
        if kwargs:
            config.__dict__["_given"] = set(kwargs)  # until `__post_init__`, which cannot tell a default from a value
        return config

    def __post_init__(self, sample_from_anchor: bool | None = None, **kwargs):
        given = self.__dict__.pop("_given", set())
        if self.engine_view_key is None:
            view = {name: kwargs.pop(name) for name in self.engine_view if name in kwargs}
        else:
            view = dict(kwargs.pop(self.engine_view_key, None) or {})
        self._read_view(view, given)
        self.derive_settings()
        if sample_from_anchor is not None and sample_from_anchor != self.sample_from_anchor:
            raise ValueError(
                f"`sample_from_anchor` is {sample_from_anchor} but `slot_layout` is {self.slot_layout!r}; it is true "
                'where slot 0 predicts too ("N"). Leave it out, it follows from the layout.'
            )
        super().__post_init__(**{"attn_implementation": self.attention_backend} | kwargs)

    def _read_view(self, view: dict, given: set[str]) -> None:
        prefix = "" if self.engine_view_key is None else f"{self.engine_view_key}."
        if view.pop("projector_type", None) is not None:
            raise ValueError(f"`{prefix}projector_type` is set: drafts with a projector are another architecture.")
        for engine_name, value in view.items():
            if engine_name not in self.engine_view:
                known = list(self.engine_view)
                raise ValueError(f"`{prefix}{engine_name}` is not a setting of this draft; known: {known}.")
            name = self.engine_view[engine_name]
            current = getattr(self, name)
            is_missing = name not in given or (current is None and name in REQUIRED)
            if not is_missing and current != value:
                raise ValueError(f"`{name}` is {current!r} but `{prefix}{engine_name}` is {value!r}; give one value.")
            setattr(self, name, value)

    def derive_settings(self) -> None:
        """Settings that were not given and follow from others."""
        if self.slot_layout is None:
            self.slot_layout = self.family_slot_layout

    def to_dict(self) -> dict:
        """The configuration with both views: the attributes, and the names that engines read."""
        output = super().to_dict()
        view = {engine_name: output[name] for engine_name, name in self.engine_view.items()}
        output |= view if self.engine_view_key is None else {self.engine_view_key: view}
        output["sample_from_anchor"] = self.sample_from_anchor
        return output

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        if "slot_layout" not in config_dict:
            raise ValueError(
                f"The stored {cls.model_type} configuration has no `slot_layout`, so which slots of a block are "
                f'drafted is unknown. Add "slot_layout": "{cls.family_slot_layout}" if that is how it was trained.'
            )
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def from_target_config(
        cls,
        target_config: PreTrainedConfig,
        mask_token_id: int | None = None,
        num_draft_layers: int | None = None,
        block_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        **overrides,
    ) -> "DraftConfig":
        """
        The configuration of a draft for any causal language model. The function of this name in the module that
        `builder` names says what is the default where an argument is `None`.

        Args:
            target_config: the target's configuration; a multimodal one is read through `get_text_config()`.
            mask_token_id: `propose_mask_token_ids` lists candidates; needed unless the target's configuration has one.
            num_draft_layers, block_size, target_layer_ids: decoder layers of the draft, slots, layers to read.
            overrides: any field of the configuration.

        Raises:
            ValueError: if a setting is missing or impossible, or the class came with a saved draft, not the package.
        """
        try:
            builder = import_module(f".{cls.builder}", __package__)
        except ModuleNotFoundError:
            raise ValueError("This class came with a saved draft. Install blockdraft to build new drafts.") from None
        shape = (mask_token_id, num_draft_layers, block_size, target_layer_ids)
        return builder.from_target_config(cls, target_config, *shape, **overrides)

    @property
    def sample_from_anchor(self) -> bool:
        """Whether the anchor's slot drafts too."""
        return self.slot_layout == ANCHOR_DRAFTS

    @property
    def num_known_tokens(self) -> int:
        """Clean tokens at the start of a block: the anchor and, for a draft that was trained on variable prefixes only
        and has never seen a block with one, the token before it."""
        variable_prefix = (self.objective or {}).get("loss_type") == "variable_prefix"
        return min(2, self.block_size - 1) if variable_prefix else 1

    @property
    def num_drafted(self) -> int:
        """Tokens that one block drafts: slots without a known token, and the anchor's own where that drafts too."""
        return self.block_size - self.num_known_tokens + self.sample_from_anchor

    @property
    def features_width(self) -> int:
        """Width of a context row: the hidden states of all target layers that the draft reads, side by side."""
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    @property
    def context_windows(self) -> list[int | None]:
        """The `sliding_window` on the context, for each layer."""
        return [self.sliding_window] * self.num_hidden_layers

    def check(self) -> None:
        super().check()
        self.check_version("draft_schema_version", DRAFT_SCHEMA_VERSION)
        for name in REQUIRED:
            if getattr(self, name) is None:
                raise ValueError(f"`{name}` is missing: a draft configuration has to state it.")
        self.require("block_size", self.block_size >= 2, "a block holds the anchor and at least one slot")
        self._check_layer_ids()
        self._check_mask_token()
        layout, points = self.family_slot_layout, list(self.family_capture_points)
        self.require("slot_layout", self.slot_layout == layout, f'a {self.model_type} draft has "{layout}"')
        reason = f"a {self.model_type} draft reads one of {points}"
        self.require("capture_point", self.capture_point in points, reason)
        backends = list(self.attention_backends)
        reason = f"a {self.model_type} draft attends with one of {backends}"
        self.require("attention_backend", self.attention_backend in backends, reason)
        for name in ("output_multiplier", "input_embedding_scale"):
            self.require(name, getattr(self, name) > 0, "it must be positive")
        for name in ("final_logit_softcapping", "sliding_window"):
            value = getattr(self, name)
            self.require(name, value is None or value > 0, "it must be null or positive")

    def _check_layer_ids(self) -> None:
        """They are strictly increasing layers that every engine can tap."""
        layer_ids, depth = self.target_layer_ids, self.num_target_layers
        increasing = all(a < b for a, b in pairwise(layer_ids))
        is_valid = bool(layer_ids) and increasing and layer_ids[0] >= 0
        self.require("target_layer_ids", is_valid, "give strictly increasing zero-based layers")
        if depth is not None:
            last = last_layer_id(depth, self.capture_point)
            reason = f"of a target with {depth} layers, serving engines can tap ids up to {last}"
            self.require("target_layer_ids", layer_ids[-1] <= last, reason)

    def _check_mask_token(self) -> None:
        """It is a row of the target's embedding and neither bos nor eos."""
        mask, eos = self.mask_token_id, self.eos_token_id
        inside = f"it must lie inside the target's vocabulary, 0..{self.vocab_size - 1}"
        self.require("mask_token_id", 0 <= mask < self.vocab_size, inside)
        self.require(
            "mask_token_id",
            mask != self.bos_token_id and mask not in (eos if isinstance(eos, list) else [eos]),
            "it is the target's bos or eos token, and the draft would learn that token as noise. "
            "`propose_mask_token_ids(tokenizer, vocab_size)` lists reserved or unused ids",
        )


def last_layer_id(num_target_layers: int, capture_point: str) -> int:
    """The highest layer that engines can tap: they hand out the last layer's output after the final norm only; what
    enters that layer they do hand out."""
    return num_target_layers - (2 if capture_point == LAYER_OUTPUT else 1)
