"""Cases of the step benchmark, small enough for tests."""

import torch

from benchmarks.training_step import Case, TrainingStep, k3_config, v41_config

TINY = {
    "dflash": {
        "vocab_size": 199,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "block_size": 4,
    },
    "dspark": {
        "vocab_size": 199,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 20,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 12,
        "o_lora_rank": 10,
        "o_groups": 2,
        "sliding_window": 16,
        "markov_rank": 8,
        "initializer_range": 0.3,
    },
}


CONFIGS = {"dflash": k3_config, "dspark": v41_config}


def tiny_case(draft: str, tokens: int = 96, anchors: int = 12, **settings) -> Case:
    return Case(CONFIGS[draft](**(TINY[draft] | settings)), tokens, anchors)


def relative_difference(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """|tensor - expected| / |expected|, of the whole tensor."""
    return ((tensor - expected).double().norm() / expected.double().norm()).item()


def rounding_spread(step: TrainingStep, trials: int = 3) -> dict[str, float]:
    """How much each gradient changes, relatively, when every weight moves by an ulp: what rounding alone can do, which
    depends on a parameter's conditioning and not on the processor."""
    step.run()
    gradients = {name: gradient.clone() for name, gradient in step.gradients().items()}
    weights = {name: weight.detach().clone() for name, weight in step.draft.named_parameters()}
    spread = dict.fromkeys(gradients, 0.0)
    for seed in range(trials):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in step.draft.named_parameters():
                signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                weight.copy_(weights[name] * (1 + signs * torch.finfo(torch.float32).eps))
        step.run()
        for name, gradient in step.gradients().items():
            spread[name] = max(spread[name], relative_difference(gradient, gradients[name]))
    return spread
