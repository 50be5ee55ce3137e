"""One training step of either draft on random states: what the trainers compute, and the dense reference of it.

No target runs: features, last states, embedding and head are random tensors of the case's sizes.
"""

import tempfile
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.dspark_trainer import DSparkTrainer
from blockdraft.trainer.training_args import DraftTrainingArguments

from .dense_reference import dense_dflash_loss, dense_dspark_loss
from .work import Sizes, visible_keys

Way = Literal["dense", "dense_sdpa", "fast", "objective"]
MASK_TOKEN_ID = 3  # no special token of either family
TAPS = {"num_target_layers": 5, "target_layer_ids": [1, 2, 3], "capture_point": "layer_output"}


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        config: of the draft, 3 taps.
        tokens, anchors: of its one row; every token is supervised.
    """

    config: KimiK3DFlashConfig | DeepseekV41DSparkConfig
    tokens: int
    anchors: int

    @property
    def name(self) -> str:
        family = "K3 DFlash" if isinstance(self.config, KimiK3DFlashConfig) else "V4.1 DSpark"
        return f"{family}, {self.tokens:,} x {self.anchors}"


def k3_config(**settings) -> KimiK3DFlashConfig:
    """The benchmark's K3 draft, which sees its whole context."""
    shape = {
        "vocab_size": 32768,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "block_size": 16,
        "is_causal": True,
        "mask_token_id": MASK_TOKEN_ID,
    }
    return KimiK3DFlashConfig(**(TAPS | shape | settings))


def v41_config(**settings) -> DeepseekV41DSparkConfig:
    """The benchmark's V4.1 draft."""
    shape = {
        "vocab_size": 32768,
        "hidden_size": 512,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 192,
        "o_lora_rank": 64,
        "o_groups": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 128,
        "markov_rank": 64,
        "block_size": 5,
        "mask_token_id": MASK_TOKEN_ID,
    }
    return DeepseekV41DSparkConfig(**(TAPS | shape | settings))


class _GivenStates:
    """A trainer that finds the target's states in its batch."""

    def target_states(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return inputs["features"], inputs["last_states"]


class GivenStatesDraftTrainer(_GivenStates, DraftTrainer):
    pass


class GivenStatesDSparkTrainer(_GivenStates, DSparkTrainer):
    pass


class TrainingStep:
    """
    A draft, its trainer and a batch with placed blocks, the same for every way of computing the step.

    Args:
        case: the sizes.
        way: `"fast"` is what the trainer does; `"dense"` is the reference, with attention by its definition and
            experts one by one; `"dense_sdpa"` is the same with SDPA on the dense mask; `"objective"` is the trainer's
            head and loss alone, on given states of the draft.
        device: where it runs.
        dtype: of the weights.
        autocast: to this dtype.
    """

    def __init__(
        self,
        case: Case,
        way: Way = "fast",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
    ):
        torch.manual_seed(0)
        config = case.config
        is_dflash = isinstance(config, KimiK3DFlashConfig)
        self.way, self.device, self.autocast = way, torch.device(device), autocast
        with self.device:
            draft_class = KimiK3DFlashDraftModel if is_dflash else DeepseekV41DSparkModel
            is_reference = way in ("dense", "dense_sdpa")
            experts = {"experts_implementation": "eager"} if is_reference and not is_dflash else {}
            attention = "eager" if way == "dense" else "sdpa"
            # `to` leaves the parts that are fp32 by design alone.
            self.draft = draft_class._from_config(config, attn_implementation=attention, **experts).to(dtype)
            target = _embedding_and_head(config, dtype)
            length = case.tokens
            self.batch = {
                "input_ids": torch.randint(MASK_TOKEN_ID + 1, config.vocab_size, (1, length)),
                "attention_mask": torch.ones(1, length, dtype=torch.long),
                "loss_mask": torch.ones(1, length),
                "row_id": torch.zeros(1, dtype=torch.long),
                "features": torch.randn(1, length, config.features_width, dtype=dtype),
                "last_states": torch.randn(1, length, config.hidden_size, dtype=dtype),
            }
        self._folder = tempfile.TemporaryDirectory(prefix="step_")
        args = DraftTrainingArguments(
            output_dir=self._folder.name,
            num_anchors=case.anchors,
            use_cpu=self.device.type == "cpu",
            report_to="none",
            disable_tqdm=True,
        )
        trainer_class = GivenStatesDraftTrainer if is_dflash else GivenStatesDSparkTrainer
        self.trainer = trainer_class(self.draft, target, args)
        self.blocks = self.trainer.place_blocks(self.batch, step=0)
        self.draft.train()

    def loss(self) -> Tensor:
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            if self.way in ("dense", "dense_sdpa"):
                return self._dense_loss()
            model = self.draft if self.way == "fast" else self._given_output
            return self.trainer.compute_loss(model, self.batch | {"blocks": self.blocks})

    def _given_output(self, noise_embeds: Tensor, **kwargs) -> ModelOutput:
        """In place of the draft's forward: the block's own embeddings, as if they were its output."""
        states = noise_embeds.detach().requires_grad_()
        return ModelOutput(last_hidden_state=states, confidence_states=states)

    def _dense_loss(self) -> Tensor:
        trainer, blocks = self.trainer, self.blocks.to(self.device)
        anchors = {"anchor_positions": blocks.anchor_positions, "block_keep_mask": blocks.block_keep_mask}
        batch = self.batch | anchors
        ends = (trainer.target.get_input_embeddings(), trainer.target.get_output_embeddings())
        if isinstance(trainer, DSparkTrainer):
            states = (batch["features"], batch["last_states"])
            return dense_dspark_loss(self.draft, *ends, *states, batch, trainer.alphas, trainer.gamma)
        return dense_dflash_loss(self.draft, *ends, batch["features"], batch, trainer.gamma)

    def run(self) -> float:
        """Forward and backward, gradients from nothing; returns the loss."""
        self.draft.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        return loss.item()  # waits for the device

    def sizes(self) -> Sizes:
        """What its necessary work depends on."""
        blocks, config = self.blocks, self.draft.config
        anchors = (blocks.anchor_positions, blocks.block_keep_mask)
        slots, rows = len(blocks.targets.index), blocks.input_ids.numel()
        return Sizes(self.batch["input_ids"].numel(), rows, slots, visible_keys(config, *anchors))

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last run."""
        return {name: p.grad for name, p in self.draft.named_parameters() if p.grad is not None}


def _embedding_and_head(config: KimiK3DFlashConfig | DeepseekV41DSparkConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A target of which only embedding and head count: its layers are as narrow as can be."""
    target_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_target_layers,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM._from_config(target_config, dtype=dtype)
