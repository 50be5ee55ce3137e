"""What the targets' own cache layers check before they take tokens back."""


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
