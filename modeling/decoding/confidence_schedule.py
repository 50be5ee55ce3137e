"""Confidence schedules: how many of a round's drafted tokens are worth verifying.

A confidence c_k estimates the probability that candidate k is accepted if those before it are; their running product,
the survival a_k, that it is reached and accepted. [`ConfidenceThreshold`] verifies while the survival is high,
`CostTable` while another token raises the tokens expected a second (the schedule of DSpark, arXiv 2607.05147).

Both are lossless: whether a candidate is verified depends on the confidences up to its own, which are functions of the
tokens before it. A rule that looked at later confidences and then stopped before them would not be: which tokens get
verified would depend on what they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


def survivals(confidences: Sequence[float]) -> list[float]:
    """Probability of each candidate to be reached and accepted: the running product of the confidences."""
    return list(accumulate(confidences, mul))


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
