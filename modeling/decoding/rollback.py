"""Taking rejected tokens back from a cache: by `crop` where a layer has it, else by a copy of what the layer held.

Layers of linear attention and state spaces forget: their state after some of the tokens of a forward is nowhere. They
are copied before a forward, and where a token of it is rejected, the whole forward is undone in all layers. Who runs
the target then runs the accepted tokens again, in front of the next ones.
"""

from collections.abc import Callable

import torch
from transformers import Cache

from .transformers_internals import (
    cannot_be_copied,
    clear_state,
    contents,
    held_lengths,
    is_linear,
    stop_recording,
    stuck_layers,
)


class Rollback:
    """Of a cache that records its past (`activate_past_recording`) and holds a prompt, which it keeps.

    Args:
        cache: of the target.

    Attributes:
        copies: whether some layers are copied, so that a forward is taken back as a whole or not at all.

    Raises:
        ValueError: if tokens cannot be taken back from this cache.
    """

    def __init__(self, cache: Cache):
        self._cache, self._copied = cache, stuck_layers(cache)
        self.copies = bool(self._copied)
        if bad := _names(layer for layer in self._copied if cannot_be_copied(layer)):
            raise ValueError(
                f"block_decode takes back rejected tokens, but layers {bad} of the target's cache keep a state that "
                "neither `crop` nor a copy of the layer brings back. Decode this target without a draft, or give it "
                "cache layers that support `activate_past_recording` and `crop`."
            )
        if len(lengths := held_lengths(cache)) > 1:
            raise ValueError(
                f"block_decode takes back rejected tokens, but layers of the target's cache hold {lengths} rows: some "
                "are of an image that cross-attention reads, not of tokens. Decode this prompt without a draft, or "
                "without its images."
            )
        cache.crop(0)
        for layer in self._copied:
            stop_recording(layer)
        self._cropped = [layer for layer in cache.layers if layer not in self._copied]
        self._contents: list[dict] = []

    def check_states_are_read(self, run: Callable[[], torch.Tensor], n: int) -> None:
        """Raises a `ValueError` for a target whose forward of several tokens starts linear layers from nothing, not
        from their states: `run` gives the logits of one on `n` tokens, which is undone."""
        linear = [layer for layer in self._copied if is_linear(layer)]
        if not linear:
            return
        before = [contents(layer) for layer in linear]
        logits = []
        for is_cleared in (False, True):
            if is_cleared:
                for layer in linear:
                    clear_state(layer)
            self.save()
            logits.append(run())
            self.undo(n)
        _put_back(linear, before)
        if torch.equal(*logits):
            raise ValueError(
                f"block_decode verifies several tokens in one forward, and there the layers {_names(linear)} of the "
                "target's cache are not read: its state spaces start anew with every forward of more than one token. "
                "Decode this target without a draft."
            )

    def save(self) -> None:
        """Before a forward."""
        self._contents = [contents(layer) for layer in self._copied]

    def undo(self, n: int) -> None:
        """Takes back all `n` tokens of the last forward."""
        for layer in self._cropped:
            layer.crop(-n)
        _put_back(self._copied, self._contents)

    def keep(self, rejected: int = 0) -> None:
        """Takes back the last `rejected` tokens of the last forward; 0 where layers are copied."""
        for layer in self._cropped:
            layer.crop(-rejected)


def _put_back(layers: list, contents_of_each: list[dict]) -> None:
    for layer, held in zip(layers, contents_of_each, strict=True):
        vars(layer).update(held)


def _names(layers) -> list[str]:
    return sorted({type(layer).__name__ for layer in layers})
