"""Confidence schedules: how many of a round's drafted tokens are worth verifying.

A confidence c_k estimates the probability that candidate k is accepted if those before it are; their running product,
the survival a_k, that it is reached and accepted. [`ConfidenceThreshold`] verifies while the survival is high,
`CostTable` while another token raises the tokens expected a second (the schedule of DSpark, arXiv 2607.05147).

Both are lossless: whether a candidate is verified depends on the confidences up to its own, which are functions of the
tokens before it. A rule that looked at later confidences and then stopped before them would not be: which tokens get
verified would depend on what they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

# Candidates less likely to survive than this are never verified.
MIN_SURVIVAL = 1e-6


def survivals(confidences: Sequence[float]) -> list[float]:
    """Probability of each candidate to be reached and accepted: the running product of the confidences."""
    return list(accumulate(confidences, mul))


def rank_candidates(survivals: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Candidates of several requests, the likeliest to survive first.

    Args:
        survivals: for each request those of its candidates, never increasing.

    Returns:
        (request, slot) of those of at least 1e-6, by falling survival; equal ones by slot, then by request. So each
        request's part of any prefix of the list is a prefix of its candidates.
    """
    candidates = [
        (-survival, slot, request)
        for request, row in enumerate(survivals)
        for slot, survival in enumerate(row)
        if survival >= MIN_SURVIVAL
    ]
    return [(request, slot) for _, slot, request in sorted(candidates)]


def throughputs(survivals: Sequence[Sequence[float]], round_seconds: Callable[[int], float]) -> list[float]:
    """Tokens a second expected from a round that verifies the first m of [`rank_candidates`], for m = 0, 1, ...

    Args:
        survivals: for each of R requests those of its candidates.
        round_seconds: duration of a round with that many tokens through the target; m candidates make R + m of them.
    """
    requests = len(survivals)
    gains = [survivals[request][slot] for request, slot in rank_candidates(survivals)]
    tokens = accumulate(gains, initial=float(requests))
    return [expected / round_seconds(requests + m) for m, expected in enumerate(tokens)]


def first_peak(values: Sequence[float]) -> int:
    """Index from which the next value no longer rises: found without a look at anything behind that next value."""
    return next((m for m, (value, following) in enumerate(pairwise(values)) if following <= value), len(values) - 1)


def admit(survivals: Sequence[Sequence[float]], budget: int) -> list[int]:
    """How many candidates of each request are among the best `budget` of all."""
    admitted = [0] * len(survivals)
    for request, _ in rank_candidates(survivals)[:budget]:
        admitted[request] += 1
    return admitted


def synchronous_lengths(survivals: Sequence[Sequence[float]], round_seconds: Callable[[int], float]) -> list[int]:
    """Candidates to verify of each request, from this round's own survivals: up to the first peak of throughput.

    Lossless, as the walk never looks beyond the candidate that it decides on. Arguments as in [`throughputs`].
    """
    return admit(survivals, first_peak(throughputs(survivals, round_seconds)))


def asynchronous_lengths(
    survivals: Sequence[Sequence[float]],
    earlier: Sequence[Sequence[float]],
    round_seconds: Callable[[int], float],
) -> list[int]:
    """The same with a number of candidates that is best over all m for an earlier round's survivals, as engines do.

    Lossless, as this round's survivals decide only which candidates share that number. A request without an earlier
    round has survivals of one there.
    """
    values = throughputs(earlier, round_seconds)
    return admit(survivals, values.index(max(values)))


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Verifies the leading candidates whose survival is at least `threshold`.

    Args:
        threshold: in [0, 1]; 0 verifies everything.

    Raises:
        ValueError: if it is outside.
    """

    threshold: float

    def __post_init__(self):
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"`threshold` is {self.threshold}: survival is a probability, from 0 to 1.")

    def __call__(self, confidences: list[float]) -> int:
        """Number of candidates to verify, from the calibrated confidences of all."""
        return sum(survival >= self.threshold for survival in survivals(confidences))
