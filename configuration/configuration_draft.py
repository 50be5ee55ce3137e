"""What the configurations of block-parallel drafts share: layout, target identity, validation, builders' helpers."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

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

    @property
    def context_windows(self) -> list[int | None]:
        """Of every layer, the `sliding_window` on its context."""
        return [self.sliding_window] * self.num_hidden_layers

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
