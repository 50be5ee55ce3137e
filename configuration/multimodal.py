"""What the configurations of released multimodal checkpoints share, of which only the text side is built here."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

QUANTIZATION = "quantization_config"


@strict
class MultimodalConfig(PreTrainedConfig):
    r"""
    `text_config` becomes the configuration of the family's text model, the vision side is kept as it was read. `dtype`
    and `quantization_config` may stand inside or outside of the text side: its own count first, and it has them in
    both cases, since the text model alone is loaded.
    """

    # Under which other names than its own released files nest the text model.
    nested_types: ClassVar[tuple[str, ...]] = ()

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | None = None

    def __post_init__(self, **kwargs):
        text_class = self.sub_configs["text_config"]
        if isinstance(self.text_config, dict):
            nested, known = dict(self.text_config), (text_class.model_type, *self.nested_types)
            model_type = nested.pop("model_type", text_class.model_type)
            if model_type not in known:
                raise ValueError(
                    f"`text_config.model_type` is {model_type!r}; a {self.model_type} checkpoint nests "
                    f"{' or '.join(map(repr, known))}."
                )
            self.text_config = text_class(**nested)
        quantization = text_class.for_quantizer(kwargs.pop(QUANTIZATION, None))
        super().__post_init__(**kwargs)
        if self.text_config.dtype is None:
            self.text_config.dtype = self.dtype
        if quantization is not None and not hasattr(self.text_config, QUANTIZATION):
            self.text_config.quantization_config = quantization


def text_side(multimodal: type[MultimodalConfig], settings: dict) -> dict:
    """What the stored settings of a checkpoint, multimodal or not, say of its text model."""
    return multimodal.from_dict(settings).text_config.to_dict() if "text_config" in settings else settings
