"""Parts that are computed in fp32 whatever the dtype of the model that holds them."""

from collections.abc import Callable

import torch
from torch import nn


class KeepsFp32(nn.Module):
    """Parameters and buffers named in `fp32_names`, made in fp32, stay fp32 under `.to(dtype)` and the like."""

    fp32_names: tuple[str, ...] = ("weight",)

    def _apply(self, fn: Callable, recurse: bool = True):
        kept = [getattr(self, name) for name in self.fp32_names]

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            applied = fn(tensor)
            if applied.dtype != torch.float32 and any(tensor is one for one in kept):
                return tensor.to(applied.device)
            return applied

        return super()._apply(apply, recurse)
