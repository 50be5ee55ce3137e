"""Tiny targets with random weights, and drafts for them, for the tests of features and decoding."""

import torch
from torch import nn
from torch.nn.functional import pad
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

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel

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


def tiny_v41(seed: int = 0) -> DeepseekV41ForCausalLM:
    """A window layer, every kind of compressed layer at ratios 2 and 1, candidates, Engram in two layers."""
    torch.manual_seed(seed)
    target = DeepseekV41ForCausalLM(
        DeepseekV41TextConfig(
            **COMMON,
            hidden_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=7,
            num_attention_heads=4,
            head_dim=16,
            qk_rope_head_dim=8,
            q_lora_rank=16,
            o_lora_rank=8,
            o_groups=2,
            rms_norm_eps=1e-6,
            n_routed_experts=4,
            num_experts_per_tok=2,
            sliding_window=6,
            compress_ratios=[0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
            kv_source_layer_ids=[1, 4],
            index_source_layer_ids=[1, 3, 4, 5],
            index_n_heads=2,
            index_head_dim=8,
            index_topk=4,
            candidate_source_layer_id=4,
            candidate_topk_blocks=3,
            candidate_block_size=3,
            hc_mult=2,
            hc_sinkhorn_iters=4,
            engram_layer_ids=[1, 4],
            engram_vocab_size=29,
            engram_n_heads=2,
            engram_head_dim=6,
            engram_max_ngram_size=3,
            engram_pad_token_id=0,
            engram_compressed_vocab_size=VOCAB_SIZE,
            engram_num_embeddings=[200, 240],
        )
    )
    target.model.engram_hash.set_token_map(torch.arange(VOCAB_SIZE))
    return target.eval()


TARGETS = {"qwen3": tiny_qwen3, "k3": tiny_k3, "gemma3": tiny_gemma3, "gpt2": tiny_gpt2}
# With hyper-connections, whose features are captured elsewhere.
ALL_TARGETS = TARGETS | {"v41": tiny_v41}


def build_target(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return ALL_TARGETS[name]().eval()


def draft_config(model: PreTrainedModel, **settings) -> KimiK3DFlashConfig:
    defaults = {"mask_token_id": MASK, "num_draft_layers": 2, "block_size": 8, "target_layer_ids": LAYER_IDS}
    return KimiK3DFlashConfig.from_target_config(model.config, **(defaults | settings))


def build_draft(model: PreTrainedModel, **settings) -> KimiK3DFlashDraftModel:
    """The real draft, untrained."""
    return KimiK3DFlashDraftModel(draft_config(model, **settings)).eval()


def build_dspark_draft(model: PreTrainedModel, **settings) -> DeepseekV41DSparkModel:
    """The real one, untrained: anchor first, with a Markov head strong enough to decide, and a confidence head."""
    torch.manual_seed(1)
    defaults = {
        "mask_token_id": MASK,
        "num_draft_layers": 1,
        "block_size": 8,
        "target_layer_ids": LAYER_IDS,
        "markov_rank": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "initializer_range": 0.6,
    }
    return DeepseekV41DSparkModel(
        DeepseekV41DSparkConfig.from_target_config(model.config, **(defaults | settings))
    ).eval()


def reveal(draft: PreTrainedModel, target: PreTrainedModel, answer: torch.LongTensor, fault_every: int = 5):
    """Makes an anchor-first draft propose a known answer, with a fault at each position that `fault_every` divides."""
    head = nn.functional.normalize(target.get_output_embeddings().weight.detach(), dim=-1)

    def replace(module, args, kwargs, output):
        positions = kwargs["position_ids"][0, -kwargs["noise_embeds"].shape[1] :] + 1
        tokens = answer[0, positions.clamp(max=answer.shape[1] - 1)]
        tokens = torch.where(positions % fault_every == 0, (tokens + 1) % MASK, tokens)
        output.last_hidden_state = 1e3 * head[tokens][None]
        return output

    draft.register_forward_hook(replace, with_kwargs=True)
    return draft


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


PAD = 0


def left_padded(rows: list[torch.LongTensor], content: int = PAD) -> dict:
    longest = max(row.shape[1] for row in rows)
    return {
        "input_ids": torch.cat([pad(row, (longest - row.shape[1], 0), value=content) for row in rows]),
        "attention_mask": torch.cat([pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows]),
    }
