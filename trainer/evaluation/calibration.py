"""Confidence calibration: one temperature for each slot, so that the head's survival estimates are shares of rounds.

A confidence head predicts for each drafted token whether verification will accept it, given that those before were;
the product up to a slot is its *survival*, and a confidence schedule cuts by it. Heads tend to be over-confident.
Sequential temperature scaling (DSpark, arXiv 2607.05147; temperature scaling and the expected calibration error, ECE:
Guo et al. 2017, arXiv 1706.04599) divides the logit of slot k by T_k, chosen from left to right so that the survival
up to k is calibrated. It is fitted on some prompts and tested on others.

**Which slots have a label.** Decoding is greedy or sampled, as it will be served, with all temperatures 1 and no cut,
so every drafted token is verified. A slot at or after the last token of its answer has no label: what follows a stop
token was never text, and in all rounds but the last the slot of the stop itself is only known from the draft's wrong
guess. This leaves out the same slots whatever the draft proposed. (Leaving out only what the last round accepted past
the stop would keep the rejections there and drop the acceptances: confidence would look too high.)
"""

import os
import random
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ...hub_cards.card import CARD, rewrite_card
from ...modeling.decoding.block_decoding import block_decode
from ...modeling.ops.number_formats import dtype_name
from ...modeling.saving.atomic_save import staged_directory
from ..adapters import is_adapter, update_record
from .calibration_report import BINS, INTERVAL, CalibrationReport, Reliability, ReliabilityBins
from .decoding import answer_settings, changed, decode_prompt, eval_mode

logger = logging.get_logger(__name__)

BOOTSTRAP_SAMPLES = 1000
TEMPERATURES = torch.logspace(-1, 1, 41, dtype=torch.float64)
MIN_ROUNDS = 5000
FIT_SHARE = 1 / 3  # of prompts and rounds: the fit chooses one number a slot, an ECE needs many rounds in each bin
EPSILON = 1e-8


class DecodedRounds(NamedTuple):
    """What calibration reads of n verification rounds with at least one labelled slot, of g drafted slots each."""

    logits: Tensor  # `[n, g]` float64: raw confidence logits, 0 where there is no label
    accepted: Tensor  # `[n, g]` bool: whether verification accepted the slot and all before it
    labelled: Tensor  # `[n, g]` bool: whether that is known, see above; true for the leading slots of a round
    prompts: Tensor  # `[n]` int64: index of the round's prompt


# ---- mathematics ----------------------------------------------------------------------------------------------------


def expected_calibration_error(survival: Tensor, labels: Tensor, bins: int = BINS) -> Tensor:
    """ECE (Guo et al. 2017, section 2): over equal bins of [0, 1], the sum of the share of samples times
    |mean survival - mean label|.

    Args:
        survival (`[..., n]`): probabilities; clamped to [1e-8, 1 - 1e-8].
        labels (`[n]` or `[..., n]`): 0 or 1.

    Returns:
        `[...]` float64; NaN without samples.
    """
    survival = survival.double().clamp(EPSILON, 1 - EPSILON)
    gaps = survival.new_zeros(*survival.shape[:-1], bins).scatter_add(
        -1, _bin_of(survival, bins), survival - labels.double()
    )
    return gaps.abs().sum(-1) / survival.shape[-1]


def fit_sequential_temperatures(logits: Tensor, accepted: Tensor, labelled: Tensor | None = None) -> list[float]:
    """Sequential temperature scaling (DSpark, arXiv 2607.05147), slot by slot from the left.

    Of 41 temperatures, 0.1 to 10 in equal ratios, a slot gets the one with which the survival up to it, the earlier
    slots' temperatures being fixed, has the smallest ECE of 15 bins; the smallest temperature on ties.

    Args:
        logits (`[n, g]`): raw confidence logits.
        accepted (`[n, g]` bool): whether verification accepted the slot and all before it.
        labelled (`[n, g]` bool, *optional*): which of these count: leading slots of each round. Default: all.

    Returns:
        g temperatures.

    Raises:
        ValueError: if a slot has no label in any round.
    """
    labelled = torch.ones_like(accepted, dtype=torch.bool) if labelled is None else labelled
    survival = torch.ones(len(logits), dtype=torch.float64)
    temperatures = []
    for slot in range(logits.shape[1]):
        rows = labelled[:, slot]
        if not rows.any():
            raise ValueError(
                f"No round has a label for drafted token {slot + 1} of {logits.shape[1]}: answers end before it. "
                "Raise `max_new_tokens`, or take prompts with longer answers."
            )
        candidates = survival[rows] * torch.sigmoid(logits[rows, slot].double() / TEMPERATURES[:, None])
        best = expected_calibration_error(candidates, accepted[rows, slot]).argmin()  # the first of equal ones
        survival[rows] = candidates[best]
        temperatures.append(TEMPERATURES[best].item())
    return temperatures


def survival_probabilities(logits: Tensor, temperatures: Sequence[float] | None = None) -> Tensor:
    """Estimated probability that a slot and all before it are accepted: `[n, g]` float64, clamped as in the ECE."""
    divisor = torch.ones(()) if temperatures is None else torch.tensor(temperatures)
    survival = torch.sigmoid(logits.double() / divisor.double()).cumprod(-1)
    return survival.clamp(EPSILON, 1 - EPSILON)


def reliability(
    rounds: DecodedRounds,
    temperatures: Sequence[float] | None = None,
    bootstrap_samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 0,
) -> Reliability:
    """ECE by slot of decoded rounds under these temperatures (default: all 1), with the bootstrap interval of the mean
    and the bins of a reliability plot.

    The interval comes from `bootstrap_samples` draws of as many prompts as there are, with replacement: rounds of one
    answer are alike, so drawing rounds would make it too narrow. An ECE sums absolute gaps, to which drawing adds
    noise; the draws are therefore shifted so that their mean is the measured value.
    """
    survival = survival_probabilities(rounds.logits, temperatures)
    slots, count = survival.shape[1], int(rounds.prompts.max()) + 1
    weight = rounds.labelled.double()
    # Sums by prompt, slot and bin; everything else follows from these.
    place = (rounds.prompts[:, None] * slots + torch.arange(slots)) * BINS + _bin_of(survival, BINS)

    def sums(values: Tensor) -> Tensor:
        empty = torch.zeros(count * slots * BINS, dtype=torch.float64)
        return empty.scatter_add(0, place.flatten(), (values * weight).flatten()).view(count, slots, BINS)

    number, confidence, accepted = sums(torch.ones_like(survival)), sums(survival), sums(rounds.accepted.double())

    def ece(draws: Tensor) -> Tensor:
        """`[draws, prompts]` multiplicities -> `[draws, slots]`."""
        gaps = torch.einsum("rp,psb->rsb", draws, confidence - accepted).abs().sum(-1)
        return gaps / (draws @ number.sum(-1))

    present = number.sum((1, 2)).nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    drawn = present[torch.randint(len(present), (bootstrap_samples, len(present)), generator=generator)]
    draws = torch.zeros(bootstrap_samples, count, dtype=torch.float64).scatter_add(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )
    tails = torch.tensor([(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], dtype=torch.float64)
    [by_slot] = ece(torch.ones(1, count, dtype=torch.float64))
    means = ece(draws).nanmean(-1)
    low, high = (means - means.mean() + by_slot.mean()).quantile(tails).clamp(min=0).tolist()
    number, confidence, accepted = (values.sum(0) for values in (number, confidence, accepted))
    filled = [
        ReliabilityBins([int(n) for n in n_bins], (c_bins / n_bins).tolist(), (a_bins / n_bins).tolist())
        for n_bins, c_bins, a_bins in zip(number, confidence, accepted, strict=True)
    ]
    return Reliability(by_slot.tolist(), by_slot.mean().item(), (low, high), filled)


def perfect_ece(survival: Tensor, labelled: Tensor) -> float:
    """The mean ECE over slots that sampling alone would give: of labels drawn with exactly these probabilities.

    A bin's gap is then nearly normal, its variance the sum of a (1 - a), and the mean absolute value of a normal is
    sqrt(2 / pi) of its deviation. Rounds are assumed independent.
    """
    place = torch.arange(survival.shape[1]) * BINS + _bin_of(survival, BINS)
    variance = torch.zeros(survival.shape[1] * BINS, dtype=torch.float64).scatter_add(
        0, place.flatten(), (survival * (1 - survival) * labelled).flatten()
    )
    gaps = (2 / torch.pi * variance).sqrt().view(-1, BINS).sum(-1)
    return (gaps / labelled.sum(0)).mean().item()


def _bin_of(survival: Tensor, bins: int) -> Tensor:
    return (survival * bins).long().clamp(max=bins - 1)


# ---- decoding -------------------------------------------------------------------------------------------------------


def label_rounds(
    confidence_logits: Sequence[Sequence[float]], accepted_lengths: Sequence[int], answer_length: int, drafted: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Labels of one answer's rounds.

    Args:
        confidence_logits: for each round, one for each token it drafted; a round near the limit drafts fewer.
        accepted_lengths: tokens that each round committed, the bonus included, the prefill's token excluded.
        answer_length, drafted: tokens of the answer, the prefill's included; slots of a whole block.

    Returns:
        `logits` float64, `accepted` and `labelled` bool, `[rounds, drafted]`. A slot has a label if it drafted a token
        for a position before the answer's last token.
    """
    shape = (len(accepted_lengths), drafted)
    logits, labelled = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    committed = 1
    for i, (values, length) in enumerate(zip(confidence_logits, accepted_lengths, strict=True)):
        known = max(0, min(len(values), answer_length - committed - 1))
        logits[i, :known] = torch.tensor(values[:known], dtype=torch.float64)
        labelled[i, :known] = True
        committed += length
    # A round commits what it accepted and one token of the target's.
    accepted = torch.arange(drafted) < torch.tensor(accepted_lengths).view(-1, 1) - 1
    return logits, accepted & labelled, labelled


def decode_rounds(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    rounds: int,
    max_new_tokens: int = 256,
    generation_config: GenerationConfig | None = None,
    description: str = "Decoding",
    disable_tqdm: bool | None = None,
) -> tuple[DecodedRounds, int]:
    """Decodes prompts, one by one, until there are `rounds` labelled rounds or no prompts left; returns the rounds and
    how many prompts they took. The draft's temperatures are not applied and nothing is cut. Raises a `ValueError` if
    not a single round has a label."""
    config = answer_settings(target, generation_config, max_new_tokens)
    decode = partial(target.generate, custom_generate=block_decode, draft=draft)
    parts, found = [], 0
    with (
        eval_mode(target, draft),
        changed(draft.config, confidence_temperatures=None),
        tqdm(total=rounds, desc=description, unit="round", disable=disable_tqdm) as bar,
    ):
        for index, prompt in enumerate(prompts):
            tokens, _, output = decode_prompt(target, decode, prompt, config)
            logits, accepted, labelled = label_rounds(
                output.confidence_logits, output.accepted_lengths, len(tokens), draft.config.num_drafted
            )
            kept = labelled[:, 0]
            parts.append((logits[kept], accepted[kept], labelled[kept], torch.full((int(kept.sum()),), index)))
            bar.update(min(len(parts[-1][0]), rounds - found))
            found += len(parts[-1][0])
            if found >= rounds:
                break
    if not found:
        raise ValueError(
            f"None of {len(parts)} prompts gave a round with a label: the answers are too short. Raise "
            f"`max_new_tokens` ({max_new_tokens}), or take other prompts."
        )
    return DecodedRounds(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))), len(parts)


def split_prompts(
    prompts: Sequence[Sequence[int]],
    fit_share: float = FIT_SHARE,
    seed: int = 0,
    conversations: Sequence[Hashable] | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Shuffles prompts, without repetitions, into two parts: to fit on and to test on. Those of one conversation, the
    names of which are `conversations`, stay together. Raises a `ValueError` for fewer than two different prompts, or
    conversations."""
    unique: dict[tuple, Hashable] = {}
    for number, prompt in enumerate(map(tuple, prompts)):
        unique.setdefault(prompt, number if conversations is None else conversations[number])
    together: dict[Hashable, list[list[int]]] = {}
    for prompt, conversation in unique.items():
        together.setdefault(conversation, []).append(list(prompt))
    groups = [*together.values()]
    if len(groups) < 2:
        what = "prompts" if conversations is None else "conversations"
        raise ValueError(f"{len(groups)} different {what} are too few: calibration fits on some and tests on others.")
    random.Random(seed).shuffle(groups)
    fit = min(max(1, round(fit_share * len(groups))), len(groups) - 1)
    return [*chain(*groups[:fit])], [*chain(*groups[fit:])]


def calibrate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts_fit: Sequence[Sequence[int]],
    prompts_test: Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    rounds: int = MIN_ROUNDS,
    generation_config: GenerationConfig | None = None,
    bootstrap_samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 0,
    disable_tqdm: bool | None = None,
) -> CalibrationReport:
    """Fits a draft's confidence temperatures on decoded prompts and tests them on others. The draft is not changed:
    [`save_temperatures`] writes them into a saved one.

    Args:
        target, draft: a pair that fits [`block_decode`]; the draft has a confidence head.
        prompts_fit, prompts_test: token ids that the draft was not trained on; see [`split_prompts`].
        max_new_tokens: longest answer.
        rounds: test rounds wanted; half as many are decoded for the fit, which needs fewer.
        generation_config: of the answers, as they will be served; default: greedy.
        bootstrap_samples, seed: of the interval.
        disable_tqdm: hides the progress bars; `None` hides them if there is no terminal.

    Raises:
        ValueError: without a confidence head, without prompts, with a prompt in both parts, or if a slot never gets a
            label.
    """
    if draft.confidence_head is None:
        raise ValueError(
            f"The draft ({draft.config.model_type}) has no confidence head, so there is nothing to calibrate. Train a "
            "DSpark draft with `confidence_head_alpha` above 0."
        )
    for name, prompts in (("prompts_fit", prompts_fit), ("prompts_test", prompts_test)):
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError(f"`{name}` must be token ids of at least one prompt, none of them empty.")
    if shared := set(map(tuple, prompts_fit)) & set(map(tuple, prompts_test)):
        raise ValueError(
            f"{len(shared)} prompts are in both `prompts_fit` and `prompts_test`: a test on what was fitted shows "
            "nothing. `split_prompts` makes parts without common prompts."
        )
    decode = {"max_new_tokens": max_new_tokens, "generation_config": generation_config, "disable_tqdm": disable_tqdm}
    fit, fit_prompts = decode_rounds(target, draft, prompts_fit, (rounds + 1) // 2, description="Fitting", **decode)
    test, test_prompts = decode_rounds(target, draft, prompts_test, rounds, description="Testing", **decode)
    if len(test.logits) < MIN_ROUNDS:
        logger.warning(
            f"The expected calibration error is measured on {len(test.logits)} rounds of {test_prompts} prompts, "
            f"fewer than {MIN_ROUNDS}: with so few, a part of it is chance. Give more prompts."
        )
    temperatures = fit_sequential_temperatures(fit.logits, fit.accepted, fit.labelled)
    if not test.labelled.any(0).all():
        raise ValueError("A drafted token has no label in any test round: raise `max_new_tokens`.")
    labelled = test.labelled.sum(0)
    return CalibrationReport(
        temperatures=temperatures,
        before=reliability(test, None, bootstrap_samples, seed),
        after=reliability(test, temperatures, bootstrap_samples, seed),
        perfect_ece=perfect_ece(survival_probabilities(test.logits, temperatures), test.labelled),
        fit_prompts=fit_prompts,
        fit_rounds=len(fit.logits),
        test_prompts=test_prompts,
        test_rounds=len(test.logits),
        labelled=labelled.tolist(),
        accepted=(test.accepted.sum(0) / labelled).tolist(),
        max_new_tokens=max_new_tokens,
        do_sample=answer_settings(target, generation_config, max_new_tokens).do_sample,
        dtype=dtype_name(target.dtype),
    )


def save_temperatures(draft: PreTrainedModel, temperatures: list[float], directory: str | os.PathLike) -> Path:
    """Writes temperatures into the draft's config, in memory and in the draft's directory, atomically, and mentions
    them in the card there; weights and other files are not touched. In an adapter's directory they go into the header
    of its weights. Returns the file. Raises a `ValueError` unless there is one above 0 for each drafted token."""
    drafted = draft.config.num_drafted
    if len(temperatures) != drafted or not all(temperature > 0 for temperature in temperatures):
        raise ValueError(f"`temperatures` is {temperatures}: give {drafted} above 0, one for each drafted token.")
    draft.config.confidence_temperatures = list(temperatures)
    if is_adapter(str(directory)):
        return update_record(directory, confidence_temperatures=draft.config.confidence_temperatures)
    # The config that is there: the draft may have been loaded in another dtype.
    config = type(draft.config).from_pretrained(directory)
    config.confidence_temperatures = list(temperatures)
    if (Path(directory) / CARD).exists():
        rewrite_card(directory, config)
    with staged_directory(directory) as staging:
        config.save_pretrained(staging)
    return Path(directory) / "config.json"
