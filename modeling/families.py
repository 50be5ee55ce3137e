"""The families of drafts, and what each is called elsewhere: command line, cards, reports, demos.

A further draft is a configuration, a model and a line here.
"""

from dataclasses import dataclass

from ..configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from ..configuration.configuration_draft import DraftConfig
from ..configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from .deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from .draft.modeling_draft import DraftPreTrainedModel
from .kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel


@dataclass(frozen=True)
class Method:
    """How drafts of a family are trained and draft.

    Attributes:
        name: as its paper writes it.
        paper: where it is described.
    """

    name: str
    paper: str


DFLASH = Method("DFlash", "https://arxiv.org/abs/2602.06036")
DSPARK = Method("DSpark", "https://arxiv.org/abs/2607.05147")


@dataclass(frozen=True)
class DraftFamily:
    """A family of drafts.

    Attributes:
        method: [`DFLASH`] or [`DSPARK`].
        config, model: its classes.
        backbone: the model type whose layers it is made of, a tag of its cards.
    """

    method: Method
    config: type[DraftConfig]
    model: type[DraftPreTrainedModel]
    backbone: str


# By `draft_type` of the command line.
FAMILIES = {
    "dflash": DraftFamily(DFLASH, KimiK3DFlashConfig, KimiK3DFlashDraftModel, "kimi_k3"),
    "dspark": DraftFamily(DSPARK, DeepseekV41DSparkConfig, DeepseekV41DSparkModel, "deepseek_v41"),
}


def family_of(config: DraftConfig) -> DraftFamily:
    """The family of a draft's configuration, by `model_type`: a draft that was loaded with the code beside it has
    classes of its own.

    Raises:
        ValueError: if no family has that model type.
    """
    for family in FAMILIES.values():
        if family.config.model_type == config.model_type:
            return family
    known = ", ".join(family.config.model_type for family in FAMILIES.values())
    raise ValueError(f"`model_type` is {config.model_type!r}, which is none of the drafts here: {known}.")
