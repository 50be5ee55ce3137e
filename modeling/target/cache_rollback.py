"""Caches that take tokens back: which can, and what their layers have in common."""

from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin


def holds_tokens(cache: Cache) -> bool:
    """Whether a cache has seen tokens, also one without any attention layer, which has no length."""
    if all(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return any(any(layer.has_previous_state.values()) for layer in cache.layers)
    return cache.get_seq_length() > 0


def stuck_layers(cache: Cache) -> list[str]:
    """
    Class names of the layers of a cache that cannot take tokens back, known only after the first forward: some layers
    learn in it what they hold. A layer class of a model's own that has no `crop` of its own is one of them, whatever
    it inherits: what it keeps beside keys and values (DeepSeek V4's compressed rows), the inherited one leaves there.
    """

    def takes_back(layer) -> bool:
        known = type(layer).__module__ == DynamicCache.__module__ or "crop" in vars(type(layer))
        return known and layer.is_croppable

    return sorted({type(layer).__name__ for layer in cache.layers if not takes_back(layer)})


def held_lengths(cache: Cache) -> list[int]:
    """How many rows the attention layers of a filled cache hold: one number, unless some hold what is no text."""
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    return sorted({int(layer.get_seq_length()) for layer in layers if layer.is_initialized})


def check_crop(tokens_to_remove: int, record_past: bool) -> None:
    """
    Refuses a `crop` that no layer can follow.

    Raises:
        ValueError: if `tokens_to_remove` is positive.
        RuntimeError: if the cache does not record.
    """
    if tokens_to_remove > 0:
        raise ValueError(f"`crop({tokens_to_remove})`: pass a negative number, the tokens to take back.")
    if not record_past:
        raise RuntimeError("`crop` needs `cache.activate_past_recording()` before the tokens it takes back.")
