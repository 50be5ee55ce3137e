"""What the targets' own cache layers check before they take tokens back."""


def check_crop(tokens_to_remove: int, record_past: bool, recorded: int, limit: int | None = None) -> None:
    """Refuses a `crop` that a layer cannot follow, with a `ValueError` if `tokens_to_remove` is positive, and a
    `RuntimeError` if the layer does not record, or has recorded fewer tokens since the last `crop`. `limit`: how many
    it keeps at most."""
    if tokens_to_remove > 0:
        raise ValueError(f"`crop({tokens_to_remove})`: pass a negative number, the tokens to take back.")
    if not record_past:
        raise RuntimeError("`crop` needs `cache.activate_past_recording()` before the tokens it takes back.")
    if recorded + tokens_to_remove < 0:
        kept = "" if limit is None else f" (at most {limit} are kept)"
        more = f"`crop({tokens_to_remove})` takes back more than the {recorded} tokens recorded since the last `crop`"
        raise RuntimeError(f"{more}{kept}.")
