"""What the configurations of DSpark drafts share, whatever their layers: the heads, and the layout of a block."""

import math

from huggingface_hub.dataclasses import strict

from .configuration_draft import ANCHOR_DRAFTS, DraftConfig

CONFIDENCE_INPUTS = ("post_norm", "pre_norm")


@strict
class DSparkConfig(DraftConfig):
    r"""
    A [`DraftConfig`] with the fields of DSpark's heads (arXiv 2607.05147). `block_size` counts drafted tokens, as the
    anchor's slot drafts too.

    Args:
        markov_rank (`int`, *optional*): Rank of the Markov head, which biases a slot's logits by the token before it;
            `None` for neither it nor a confidence head. 256 is the paper's.
        confidence_head (`bool`, *optional*): Whether there is a head that says how likely a slot's token is to be
            accepted. Default: with a Markov head.
        confidence_input (`str`): What it reads: `"post_norm"`, the draft's last hidden state, or `"pre_norm"`, the
            state before the final norm, which the released DeepSeek V4.1 drafter and the serving engines feed it.
        confidence_temperatures (`list[float]`, *optional*): A positive number for each slot that its confidence logit
            is divided by, as calibration fits them.

    Raises:
        ValueError: if a setting is missing or impossible; the message names it.
    """

    family_slot_layout = ANCHOR_DRAFTS
    fixed_in_training = (*DraftConfig.fixed_in_training, "markov_rank", "confidence_head", "confidence_input")

    markov_rank: int | None = 256
    confidence_head: bool | None = None
    confidence_input: str = "post_norm"
    confidence_temperatures: list[float | int] | None = None

    def derive_settings(self) -> None:
        super().derive_settings()
        if self.confidence_head is None:
            self.confidence_head = self.markov_rank is not None

    def check(self) -> None:
        super().check()
        rank, temperatures = self.markov_rank, self.confidence_temperatures
        self.require("markov_rank", rank is None or rank > 0, "it must be positive, or null for no Markov head")
        has_embedding = rank is not None or not self.confidence_head
        reason = "it reads the Markov head's embedding, and `markov_rank` is null"
        self.require("confidence_head", has_embedding, reason)
        is_known = self.confidence_input in CONFIDENCE_INPUTS
        self.require("confidence_input", is_known, f"it must be one of {CONFIDENCE_INPUTS}")
        self.require("is_causal", not self.is_causal, "the slots of a DSpark block see each other in both directions")
        if temperatures is not None:
            is_valid = len(temperatures) == self.block_size and all(0 < t < math.inf for t in temperatures)
            reason = f"it needs a positive number for each of the {self.block_size} slots"
            self.require("confidence_temperatures", is_valid, reason)
