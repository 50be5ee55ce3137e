"""The families of drafts, and what each is called elsewhere: command line, Auto classes, cards, reports, demos.

A further draft is a configuration, a model and a line here. Nothing is imported before a class is asked for.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..configuration.configuration_draft import DraftConfig
    from .draft.modeling_draft import DraftPreTrainedModel

HERE = __name__.rpartition(".")[0]
CONFIGURATION = f"{HERE.rpartition('.')[0]}.configuration"


class Method(NamedTuple):
    """How drafts of a family are trained and draft: its name as its paper writes it, and the paper's address."""

    name: str
    paper: str


DFLASH = Method("DFlash", "https://arxiv.org/abs/2602.06036")
DSPARK = Method("DSpark", "https://arxiv.org/abs/2607.05147")


@dataclass(frozen=True)
class DraftFamily:
    """A family of drafts.

    Attributes:
        model_type: of its configurations.
        method: [`DFLASH`] or [`DSPARK`].
        backbone: the model type whose layers it is made of, a tag of its cards.
        config_path, model_path: its classes, as `module:class`.
    """

    model_type: str
    method: Method
    backbone: str
    config_path: str
    model_path: str

    @property
    def config(self) -> "type[DraftConfig]":
        return resolve_name(self.config_path)

    @property
    def model(self) -> "type[DraftPreTrainedModel]":
        return resolve_name(self.model_path)


# By `draft_type` of the command line.
FAMILIES = {
    "dflash": DraftFamily(
        "kimi_k3_dflash",
        DFLASH,
        "kimi_k3",
        f"{CONFIGURATION}.configuration_kimi_k3_dflash:KimiK3DFlashConfig",
        f"{HERE}.kimi_k3.modeling_kimi_k3_dflash:KimiK3DFlashDraftModel",
    ),
    "dspark": DraftFamily(
        "deepseek_v41_dspark",
        DSPARK,
        "deepseek_v41",
        f"{CONFIGURATION}.configuration_deepseek_v41_dspark:DeepseekV41DSparkConfig",
        f"{HERE}.deepseek_v41.modeling_deepseek_v41_dspark:DeepseekV41DSparkModel",
    ),
}


def family_of(config: "DraftConfig") -> DraftFamily:
    """The family of a draft's configuration, by `model_type`: a draft that was loaded with the code beside it has
    classes of its own. Raises a `ValueError` if no family has that model type."""
    families = {family.model_type: family for family in FAMILIES.values()}
    if config.model_type not in families:
        known = ", ".join(families)
        raise ValueError(f"`model_type` is {config.model_type!r}, which is none of the drafts here: {known}.")
    return families[config.model_type]
