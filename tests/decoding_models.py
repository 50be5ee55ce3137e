"""Tiny targets with random weights, and drafts for them, for the tests of features and decoding."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.modeling_kimi_k3 import KimiK3ForCausalLM
from blockdraft.modeling.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel

VOCAB_SIZE, MASK, LAYER_IDS = 64, 63, [1, 3]
# Wide enough weights for answers that neither loop at once nor end in ties.
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA_LIKE = COMMON | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def tiny_k3() -> KimiK3ForCausalLM:
    """KDA and MLA layers, mixture of experts, attention residuals."""
    return KimiK3ForCausalLM(
        KimiK3TextConfig(
            **(LLAMA_LIKE | {"num_key_value_heads": 4}),
            num_experts=4,
            num_experts_per_token=2,
            moe_intermediate_size=16,
            routed_expert_hidden_size=16,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            attn_res_block_size=2,
            linear_attn_config={
                "head_dim": 8,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
                "kda_layers": [1, 2, 4, 5],
                "full_attn_layers": [3, 6],
            },
        )
    )


def tiny_qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**LLAMA_LIKE))


def tiny_gemma3() -> Gemma3ForCausalLM:
    """Sliding-window layers, shorter than the answers, and scaled embeddings."""
    return Gemma3ForCausalLM(Gemma3TextConfig(**LLAMA_LIKE, sliding_window=8, tie_word_embeddings=False))


def tiny_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**COMMON, n_embd=32, n_layer=6, n_head=4))


TARGETS = {"qwen3": tiny_qwen3, "k3": tiny_k3, "gemma3": tiny_gemma3, "gpt2": tiny_gpt2}


def build_target(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return TARGETS[name]().eval()


def draft_config(model: PreTrainedModel, **settings) -> KimiK3DFlashConfig:
    defaults = {"mask_token_id": MASK, "num_draft_layers": 2, "block_size": 8, "target_layer_ids": LAYER_IDS}
    return KimiK3DFlashConfig.from_target_config(model.config, **(defaults | settings))


def build_draft(model: PreTrainedModel, **settings) -> KimiK3DFlashDraftModel:
    """The real draft, untrained."""
    return KimiK3DFlashDraftModel(draft_config(model, **settings)).eval()


class PartlyRightDraft(KimiK3DFlashDraftModel):
    """Proposes a known answer, with a fault at each position that `fault_every` divides; keeps what it was given."""

    def answer_with(self, target: PreTrainedModel, answer: torch.LongTensor, fault_every: int = 5):
        self.answer, self.fault_every = answer[0], fault_every
        self.head = target.get_output_embeddings().weight.detach()
        self.context, self.rounds = [], 0
        return self

    def forward(self, noise_embeds, context_hidden_states, attention_mask=None, position_ids=None, cache=None):
        rows = context_hidden_states.shape[1] + noise_embeds.shape[1]
        for layer in range(self.config.num_hidden_layers):
            cache.update(torch.zeros(1, 1, rows, 4), torch.zeros(1, 1, rows, 4), layer)
        assert noise_embeds.shape[1] == self.config.block_size
        assert position_ids.shape == (1, rows)
        assert cache.get_seq_length() == position_ids[0, -1] + 1
        self.context.append(context_hidden_states)
        self.rounds += 1
        positions = position_ids[0, -noise_embeds.shape[1] :]
        tokens = self.answer[positions.clamp(max=len(self.answer) - 1)]
        tokens = torch.where(positions % self.fault_every == 0, (tokens + 1) % MASK, tokens)
        # A token's own row of the head scores highest under that head.
        rows = torch.nn.functional.normalize(self.head, dim=-1)[tokens]
        return BaseModelOutputWithPast(last_hidden_state=1e3 * rows[None], cache=cache)


def partly_right_draft(target: PreTrainedModel, answer: torch.LongTensor, fault_every: int = 5, **settings):
    return PartlyRightDraft(draft_config(target, **settings)).eval().answer_with(target, answer, fault_every)


def prompts(count: int, length: int = 9) -> list[torch.LongTensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, MASK, (1, length + i), generator=generator) for i in range(count)]
