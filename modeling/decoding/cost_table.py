"""The schedule that verifies as many drafted tokens as pay for their time, and the measurement of what they cost."""

import math
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

import torch
from transformers import PreTrainedModel

from .block_decoding import block_decode
from .confidence_schedule import survivals

# Candidates less likely to survive than this are never verified.
MIN_SURVIVAL = 1e-6


@dataclass(frozen=True)
class CostTable:
    """Verifies while another candidate raises the tokens expected a second.

    Args:
        tokens: numbers of tokens through the target, strictly increasing. A single one says nothing about the price of
            a token: everything is verified.
        seconds: duration of a whole round, the draft's part included, with that many.

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
        likely = takewhile(lambda survival: survival >= MIN_SURVIVAL, survivals(confidences))
        expected = accumulate(likely, initial=1.0)  # tokens of a round that verifies 0, 1, ... candidates
        rates = [tokens / self.round_seconds(1 + length) for length, tokens in enumerate(expected)]
        # The first peak, found without a look at anything behind the next candidate.
        falls = (length for length, (rate, following) in enumerate(pairwise(rates)) if following <= rate)
        return next(falls, len(rates) - 1)


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
