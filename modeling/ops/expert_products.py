"""Which implementation of transformers multiplies tokens with their experts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface


class ExpertProducts(ExpertsInterface):
    """As transformers' own; float64, which no grouped product of torch takes, goes expert by expert."""

    def get_interface(self, experts_implementation: str, default: Callable) -> Callable:
        chosen = super().get_interface(experts_implementation, default)
        if experts_implementation != "grouped_mm":
            return chosen

        def multiply(experts: nn.Module, hidden_states: Tensor, *args, **kwargs) -> Tensor:
            forward = default if hidden_states.dtype == torch.float64 else chosen
            return forward(experts, hidden_states, *args, **kwargs)

        return multiply


EXPERT_PRODUCTS = ExpertProducts()
