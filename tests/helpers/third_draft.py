"""A draft that the package does not know: DSpark's heads on Kimi K3's layers, a line in the table of families."""

import pytest
from huggingface_hub.dataclasses import strict
from torch import nn

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.families import DSPARK, FAMILIES, DraftFamily
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel


@strict
class ThirdConfig(KimiK3DFlashConfig):
    model_type = "third"

    markov_rank: int | None = 4
    confidence_head: bool = False
    confidence_input: str = "pre_norm"
    confidence_temperatures: list[float | int] | None = None


class ThirdModel(KimiK3DFlashDraftModel):
    """Proposes the number after the token before, whatever its weights."""

    config_class = ThirdConfig
    drafts_in_sequence = True

    def slot_logits(self, base_logits, previous_token_ids, hidden_states):
        next_ids = (previous_token_ids + 1).clamp(max=base_logits.shape[-1] - 1)
        return base_logits + 100 * nn.functional.one_hot(next_ids, base_logits.shape[-1]).to(base_logits)


def add_third_family(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = (f"{__name__}:ThirdConfig", f"{__name__}:ThirdModel")
    monkeypatch.setitem(FAMILIES, "third", DraftFamily("third", DSPARK, "kimi_k3", *classes))
