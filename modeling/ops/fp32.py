"""Parts that are computed in fp32 whatever the dtype of the model that holds them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast


class KeepsFp32(nn.Module):
    """Parameters and buffers named in `fp32_names`, made in fp32, stay fp32 under `.to(dtype)` and the like, and so do
    the parameters' gradients."""

    fp32_names: tuple[str, ...] = ("weight",)

    def _apply(self, fn: Callable, recurse: bool = True):
        named = [getattr(self, name) for name in self.fp32_names]
        kept = [*named, *(tensor.grad for tensor in named if tensor.is_leaf)]

        def apply(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if applied.dtype != torch.float32 and any(tensor is one for one in kept):
                return tensor.to(applied.device)
            return applied

        return super()._apply(apply, recurse)


class Fp32Weight(KeepsFp32):
    """A weight in fp32. A call returns a copy of it, since hooks that bring offloaded or sharded weights do so for
    calls, and may take them away again behind one."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float32))

    def forward(self) -> Tensor:
        return self.weight.clone()


class Fp32Linear(KeepsFp32, nn.Linear):
    """A bias-free linear layer with a weight in fp32, whatever the model's dtype."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False, dtype=torch.float32)

    def forward(self, hidden_states: Tensor, in_fp32: bool = True) -> Tensor:
        """In fp32, or with the weight rounded to the dtype of `hidden_states`."""
        if not in_fp32:
            return nn.functional.linear(hidden_states, self.weight.to(hidden_states.dtype))
        with maybe_autocast(hidden_states.device.type, enabled=False):
            return nn.functional.linear(hidden_states.float(), self.weight)
