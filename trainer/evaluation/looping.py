"""Detection of answers that loop."""

from collections.abc import Sequence


def is_looping(token_ids: Sequence[int], n: int = 4, times: int = 4) -> bool:
    """Whether an answer loops: the same `n` tokens come `times` times in a row, without a gap, anywhere in it.

    Shorter periods that divide `n` (a single token repeated 16 times) are found as well. A looping answer is easy to
    draft, so acceptance lengths are reported without such answers, too.

    Args:
        token_ids: of one answer, without the prompt.
        n: length of the repeated n-gram.
        times: how often it has to come in a row.

    Raises:
        ValueError: if `n` is less than 1 or `times` less than 2.
    """
    if n < 1 or times < 2:
        raise ValueError(f"n must be at least 1 and times at least 2, got n={n} and times={times}.")
    run = 0
    for i in range(n, len(token_ids)):
        run = run + 1 if token_ids[i] == token_ids[i - n] else 0
        if run == n * (times - 1):
            return True
    return False
