"""A third draft, which the package does not know: DSpark's heads on Kimi K3's layers. A config, a model and a line."""

import pytest
import torch
from huggingface_hub.dataclasses import strict

from blockdraft.configuration.configuration_dspark import DSparkConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.draft.dspark_heads import DSparkHeads, DSparkOutput
from blockdraft.modeling.draft.modeling_draft import draft_arguments
from blockdraft.modeling.draft.modeling_dspark import DSparkDraftModel, DSparkTokenForward
from blockdraft.modeling.families import DSPARK, FAMILIES, DraftFamily
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel


@strict
class KimiK3DSparkConfig(DSparkConfig, KimiK3DFlashConfig):
    model_type = "kimi_k3_dspark"


class KimiK3DSparkBackbone(DSparkDraftModel, KimiK3DFlashDraftModel):
    config_class = KimiK3DSparkConfig
    _no_split_modules = [*KimiK3DFlashDraftModel._no_split_modules, *DSparkDraftModel._no_split_modules]

    def __init__(self, config: KimiK3DSparkConfig):
        super().__init__(config)
        self.heads = DSparkHeads(config)
        self.post_init()

    @draft_arguments
    def forward(
        self,
        *args,
        previous_token_ids: torch.LongTensor | None = None,
        enable_confidence_head: bool = True,
        confidence_head_stop_gradient: bool = False,
        **kwargs,
    ) -> DSparkOutput:
        output = KimiK3DFlashDraftModel.forward(self, *args, **kwargs)
        hidden = output.last_hidden_state
        output = DSparkOutput(last_hidden_state=hidden, confidence_states=hidden, cache=output.cache)
        return self.read_heads(output, previous_token_ids, enable_confidence_head, confidence_head_stop_gradient)


class KimiK3DSparkModel(DSparkTokenForward, KimiK3DSparkBackbone):
    """With the forward on token ids, for use without a trainer."""


def add_kimi_k3_dspark(monkeypatch: pytest.MonkeyPatch) -> DraftFamily:
    """Gives it its line in the table of families."""
    classes = (f"{__name__}:KimiK3DSparkConfig", f"{__name__}:KimiK3DSparkModel")
    line = DraftFamily(KimiK3DSparkConfig.model_type, DSPARK, "kimi_k3", *classes)
    monkeypatch.setitem(FAMILIES, line.model_type, line)
    return line
