"""Confidence schedules: how many of a round's drafted tokens are worth verifying.

A confidence c_k estimates the probability that candidate k is accepted if those before it are; their running product,
the survival a_k, that it is reached and accepted. [`ConfidenceThreshold`] verifies while the survival is high,
[`CostTable`] while another token raises the tokens expected a second (DSpark's schedule, as DeepSeek V4.1 is served).

Both are lossless: whether a candidate is verified depends on the confidences up to its own, which are functions of the
tokens before it. A rule that looked at later confidences and then stopped before them would not be: which tokens get
verified would depend on what they are.
"""

import math
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

import torch
from transformers import PreTrainedModel

from .block_decoding import block_decode

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


@dataclass(frozen=True)
class CostTable:
    """Verifies while another candidate raises the tokens expected a second.

    Args:
        tokens: numbers of tokens through the target, strictly increasing.
        seconds: duration of a whole round, the draft's part included, with that many.

    One entry says nothing about the price of a token: everything is verified.

    Raises:
        ValueError: if the lists do not fit together, or hold what is no number of tokens or no duration.
    """

    tokens: Sequence[int]
    seconds: Sequence[float]

    def __post_init__(self):
        if len(self.tokens) != len(self.seconds) or not self.tokens:
            raise ValueError(
                f"`tokens` and `seconds` have {len(self.tokens)} and {len(self.seconds)} entries: give one duration "
                "for each number of tokens, and at least one."
            )
        if self.tokens[0] < 1 or any(b <= a for a, b in pairwise(self.tokens)):
            raise ValueError(f"`tokens` is {list(self.tokens)}: give strictly increasing positive numbers.")
        if not all(0 < seconds < math.inf for seconds in self.seconds):
            raise ValueError(f"`seconds` is {list(self.seconds)}: durations are positive and finite.")

    def round_seconds(self, tokens: int) -> float:
        """Duration of a round: the table's at the largest entry that is not above `tokens`, or at its first."""
        return self.seconds[max(0, bisect_right(self.tokens, tokens) - 1)]

    def __call__(self, confidences: list[float]) -> int:
        """Number of candidates to verify, from the calibrated confidences of all."""
        if len(self.tokens) == 1:
            return len(confidences)
        [length] = synchronous_lengths([survivals(confidences)], self.round_seconds)
        return length


class _RoundTimer:
    """A schedule that verifies each length in turn and times the rounds: from one call to the next lies one round."""

    def __init__(self, num_candidates: int):
        self.seconds: dict[int, list[float]] = {length: [] for length in range(num_candidates + 1)}
        self._order = random.Random(0)
        self._lengths: list[int] = []
        self._running: tuple[int, float] | None = None

    def start_answer(self) -> None:
        self._running = None

    def __call__(self, confidences: list[float]) -> int:
        now = time.perf_counter()
        if self._running is not None:
            length, begin = self._running
            self.seconds[length].append(now - begin)
        if not self._lengths:
            self._lengths = self._order.sample([*self.seconds], len(self.seconds))
        # A round close to the answer's limit drafts fewer.
        length = min(self._lengths.pop(), len(confidences))
        self._running = length, time.perf_counter()
        return length


def measure_cost_table(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    input_ids: torch.LongTensor,
    max_new_tokens: int = 128,
    rounds: int = 20,
    **inputs,
) -> CostTable:
    """Measures what a round costs on this machine, by the number of tokens that it verifies.

    Decodes the prompt greedily, again and again, in rounds that verify 1 to g + 1 tokens in mixed order, g being the
    draft's number of candidates. What counts is a round's whole duration: verification, draft and the loop's own work.
    The table holds medians, made monotone: one more token makes no round cheaper.

    Args:
        target, draft: a pair that [`block_decode`] takes, in eval mode; the draft has a confidence head.
        input_ids: `[1, prompt]` int64, as long as prompts are in use: attention to a longer one costs more.
        max_new_tokens: length of the answers, which do not stop by themselves; the shorter, the more prefills.
        rounds: timed rounds of each length.
        inputs: further inputs of `generate`, such as `attention_mask`.

    Raises:
        ValueError: if `max_new_tokens` has no room for a round of g candidates and the next one, which ends its time.
    """
    longest = draft.config.num_drafted
    # The prefill's token, a round that commits g + 1, and two more, since a round with room for one drafts nothing.
    if max_new_tokens < longest + 4:
        raise ValueError(
            f"`max_new_tokens` is {max_new_tokens}: a round that verifies all {longest} candidates can only be timed "
            f"in answers of at least {longest + 4} tokens."
        )
    timer = _RoundTimer(longest)
    settings = {"do_sample": False} | inputs | {"max_new_tokens": max_new_tokens, "eos_token_id": None}
    while min(map(len, timer.seconds.values())) < rounds + 1:
        timer.start_answer()
        block_decode(target, input_ids, draft=draft, confidence_schedule=timer, **settings)
    # The first round of each length may have warmed something up.
    medians = [statistics.median(seconds[1:]) for seconds in timer.seconds.values()]
    return CostTable([length + 1 for length in timer.seconds], list(accumulate(medians, max)))
