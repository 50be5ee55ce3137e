"""What the configurations check their settings with."""


def is_natural(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_positive_int(value) -> bool:
    return is_natural(value) and value > 0


def require(condition: bool, name: str, value, reason: str) -> None:
    """Raises a `ValueError` that names a setting, unless `condition`."""
    if not condition:
        raise ValueError(f"`{name}` is {value!r}: {reason}.")
