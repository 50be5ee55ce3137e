"""What the targets' own cache layers check before they take tokens back."""


def check_crop(tokens_to_remove: int, record_past: bool, recorded: int, at_most: str = "") -> None:
    """
    Refuses a `crop` that a layer cannot follow; it takes back the last `-tokens_to_remove` tokens.

    Args:
        record_past, recorded: whether the layer records, and how many tokens since the last `crop`; at_most: how many
            it can keep, in words.

    Raises:
        ValueError: if `tokens_to_remove` is positive.
        RuntimeError: if the cache does not record, or not that many tokens are recorded.
    """
    if tokens_to_remove > 0:
        raise ValueError(f"`crop({tokens_to_remove})`: pass a negative number, the tokens to take back.")
    if not record_past:
        raise RuntimeError("`crop` needs `cache.activate_past_recording()` before the tokens it takes back.")
    if recorded + tokens_to_remove < 0:
        raise RuntimeError(
            f"`crop({tokens_to_remove})` takes back more than the {recorded} tokens recorded since the last `crop`"
            f"{at_most}."
        )
