"""Checks that tensors have the shapes that belong together: torch would broadcast, cut or gather without a word."""

import torch
from torch import Size, Tensor


def check_shape(name: str, tensor: Tensor | None, *sizes: int | str, reason: str = "") -> Size:
    """The shape of `tensor`. Raises a `ValueError` with both shapes if it has other `sizes`, of which a `str` names
    one that may be any, or if it is `None`."""
    if tensor is None:
        raise ValueError(f"`{name}` is missing.")
    shape = tensor.shape
    fits = len(shape) == len(sizes) and all(
        isinstance(size, str) or size == actual for size, actual in zip(sizes, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, sizes))
        raise ValueError(f"`{name}` has the shape {list(shape)}, not [{expected}]{reason and f': {reason}'}.")
    return shape


def check_visible(attention_mask: Tensor, batch: int, queries: int, keys: int, reason: str = "") -> None:
    """Raises a `ValueError` unless a mask is `[batch or 1, 1, queries, keys]`, bool or additive."""
    rows = 1 if attention_mask.shape[0] == 1 else batch
    check_shape("attention_mask", attention_mask, rows, 1, queries, keys, reason=reason)
    if not (attention_mask.is_floating_point() or attention_mask.dtype == torch.bool):
        raise ValueError(
            f"`attention_mask` of queries and keys is {attention_mask.dtype}: make it bool (True is visible) or "
            "additive (0 is visible, -inf is not)."
        )
