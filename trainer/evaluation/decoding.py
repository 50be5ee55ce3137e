"""Real decoding of held-out prompts, with the draft and without it, and whether the text is still the target's.

Every prompt is decoded alone (batch 1) by [`block_decode`], the loop that serves. What is compared takes turns prompt
by prompt, in one process with the same dtype and threads, so that the machine's noise affects all alike.
"""

import copy
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput, logging

from ...modeling.decoding.block_decoding import block_decode
from ...modeling.decoding.confidence_schedule import ConfidenceThreshold
from ...modeling.decoding.cost_table import CostTable, measure_cost_table
from ...modeling.decoding.plain_decoding import plain_decode
from ...modeling.ops.number_formats import dtype_name
from ..data.loss_mask import supervised_runs
from ..ranks import on_all_ranks
from .decoding_report import GREEDY, OFF, TEMPERATURE_1, Answer, DecodingReport

logger = logging.get_logger(__name__)

# A first difference from greedy decoding is a tie where the two best logits of plain decoding lie this close.
TIE_GAP, KIMI_K3_TIE_GAP = 1e-3, 1e-4
WARM_UP_TOKENS = 8
# What `generate` samples with where neither the caller nor the target says, and what leaves the distribution as it is.
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Calibrated confidences of a round's candidates -> how many of them to verify.
Schedule = Callable[[list[float]], int]
GENERATE, PLAIN_LOOP = "generate()", "plain loop"


def held_out_prompts(dataset, n: int) -> list[list[int]]:
    """Prompts of `n` rows, spread evenly over a training set that has a length; of all rows if there are fewer: the
    first `prompt_length` token ids, or those before the last supervised run of a row that does not say it, within its
    document. Rows whose document starts with the answer are left out and counted in a warning. Raises a `ValueError`
    if no row has a prompt."""
    count = len(dataset)
    rows = [dataset[i] for i in (range(count) if count <= n else (i * count // n for i in range(n)))]
    prompts = [prompt for row in rows if (prompt := _prompt(row))]
    if not prompts:
        raise ValueError(f"None of {len(rows)} evaluation rows has tokens before an answer (`loss_mask` 1).")
    if len(prompts) < len(rows):
        logger.warning(f"{len(rows) - len(prompts)} of {len(rows)} evaluation rows have no prompt before an answer.")
    return prompts


def _prompt(row: dict) -> list[int]:
    runs = supervised_runs(row["loss_mask"])
    if not runs:
        return []
    first = row.get("prompt_length", runs[-1][0])
    start = list(row["document_ids"]).index(row["document_ids"][first]) if "document_ids" in row else 0
    return [int(token) for token in row["input_ids"][start:first]]


def evaluate_decoding(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    generation_config: GenerationConfig | None = None,
    compare_with_plain: bool = True,
    confidence_schedule: Schedule | None = None,
    disable_tqdm: bool | None = None,
    at_temperature_1: bool = False,
    over_ranks: bool = False,
) -> DecodingReport:
    """Decodes every prompt with the draft and, to compare, with `generate()` and with the same loop without a draft.

    Args:
        target, draft: a pair that fits [`block_decode`], each in the dtype that it is to run in; both run in
            evaluation mode.
        prompts: token ids, not empty.
        max_new_tokens: longest answer in tokens; replaces the length settings of `generation_config`.
        generation_config: of the answers; default: greedy, with the target's stop tokens.
        compare_with_plain: without it, there is no speed-up and no check against greedy decoding, and it takes a
            fraction of the time.
        confidence_schedule: which drafted tokens are verified; `None` for all.
        disable_tqdm: hides the progress bar; `None` hides it if there is no terminal.
        at_temperature_1: decodes the prompts once more with the draft, sampled at temperature 1 from the whole
            vocabulary, for the report's `at_temperature_1`; what is measured so already is not measured twice.
        over_ranks: the processes of a training, all of which call this, share out the prompts; each gets the whole
            report. However long one of them takes, no collective times out.

    Raises:
        ValueError: without prompts, or if draft and target do not fit.
    """
    schedules = {_schedule_name(confidence_schedule): confidence_schedule}
    settings = {"disable_tqdm": disable_tqdm, "over_ranks": over_ranks}
    evaluate = partial(compare_schedules, target, draft, prompts, schedules, max_new_tokens, **settings)
    [report] = evaluate(generation_config, compare_with_plain).values()
    if at_temperature_1 and report.decoding != TEMPERATURE_1:
        sampling = copy.deepcopy(generation_config) or GenerationConfig()
        sampling.update(do_sample=True, temperature=1.0, **NEUTRAL)
        [report.at_temperature_1] = evaluate(sampling, compare_with_plain=False).values()
    return report


def promises_too_much(estimated_tau: float, tau: float) -> bool:
    """Whether a teacher-forced estimate of tau promises more than twice the drafted tokens that decoding accepts."""
    return estimated_tau - 1 > 2 * (tau - 1) + 0.3


def fastest_block_size(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    block_sizes: Sequence[int] | None = None,
    max_new_tokens: int = 64,
    generation_config: GenerationConfig | None = None,
    confidence_schedule: Schedule | None = None,
    disable_tqdm: bool | None = None,
) -> tuple[int, dict[int, DecodingReport]]:
    """Which block size to serve a draft with: a shorter block than the trained one can be faster, as drafting and
    verifying cost less and late slots are seldom accepted.

    Args: those of [`evaluate_decoding`], and `block_sizes`: at most the trained one; default: its quarters.

    Returns:
        The size with the highest speed-up, and the report of each; [`decoding_table`] shows them side by side.

    Raises:
        ValueError: if a size cannot be served, or as [`evaluate_decoding`].
    """
    trained, name = draft.config.block_size, _schedule_name(confidence_schedule)
    sizes = sorted(set(block_sizes or (max(2, trained * quarter // 4) for quarter in range(1, 5))))
    served = [_Served(size, name, confidence_schedule) for size in sizes]
    reports = _evaluate(target, draft, prompts, served, max_new_tokens, generation_config, True, disable_tqdm)
    by_size = dict(zip(sizes, reports, strict=True))
    return max(by_size, key=lambda size: by_size[size].speedup), by_size


def compare_schedules(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    schedules: dict[str, Schedule | None],
    max_new_tokens: int = 64,
    generation_config: GenerationConfig | None = None,
    compare_with_plain: bool = True,
    disable_tqdm: bool | None = None,
    over_ranks: bool = False,
) -> dict[str, DecodingReport]:
    """What confidence schedules change on the same prompts, decoded in turn.

    ```python
    costs = measure_cost_table(target, draft, torch.tensor([prompts[0]]))
    schedules = {"off": None, "threshold 0.3": ConfidenceThreshold(0.3), "cost table": costs}
    print(decoding_table([*compare_schedules(target, draft, prompts, schedules).values()]))
    ```

    Args: those of [`evaluate_decoding`], and `schedules`: by the name to report; `None` verifies every drafted token.

    Returns:
        The report of each, in the order given.

    Raises:
        ValueError: without schedules, or as [`evaluate_decoding`].
    """
    if not schedules:
        raise ValueError("`schedules` is empty: give at least one, `None` stands for verifying everything.")
    served = [_Served(draft.config.block_size, name, schedule) for name, schedule in schedules.items()]
    settings = (max_new_tokens, generation_config, compare_with_plain, disable_tqdm, over_ranks)
    return dict(zip(schedules, _evaluate(target, draft, prompts, served, *settings), strict=True))


@contextmanager
def changed(config: PreTrainedConfig, **settings) -> Iterator[None]:
    """A configuration with other values, for as long as the context is open."""
    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def served_block_size(draft: PreTrainedModel, block_size: int) -> AbstractContextManager[None]:
    """Lets a draft decode with a block no longer than the one it was trained with. Raises a `ValueError` if
    `block_size` is longer, or leaves no slot to draft."""
    trained = draft.config.block_size
    if not 2 <= block_size <= trained:
        raise ValueError(
            f"`block_size` is {block_size}: this draft, trained on blocks of {trained}, serves 2 to {trained}."
        )
    return changed(draft.config, block_size=block_size)


def main_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of most of a model's weights: a few may be kept in fp32."""
    sizes = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    [(dtype, _)] = sizes.most_common(1)
    return dtype


@contextmanager
def served_dtype(draft: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Lets a draft that is trained in fp32 decode in the dtype it will be served in, its target's; afterwards its
    weights are the numbers they were, in the same parameters."""
    if main_dtype(draft) == dtype:
        yield
        return
    kept = [(tensor, tensor.data) for tensor in chain(draft.parameters(), draft.buffers())]
    draft.to(dtype)
    try:
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


@contextmanager
def eval_mode(*models: PreTrainedModel) -> Iterator[None]:
    """Puts models into evaluation mode, then back into the mode each was in."""
    training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, training, strict=True):
            model.train(mode)


def cost_table(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int = 64
) -> CostTable:
    """What rounds cost on this machine, measured on answers to a prompt, with both models in evaluation mode."""
    input_ids = torch.tensor([list(prompt)], device=target.device)
    with eval_mode(target, draft):
        return measure_cost_table(target, draft, input_ids, max_new_tokens)


def answer_settings(
    target: PreTrainedModel, generation_config: GenerationConfig | None, max_new_tokens: int
) -> GenerationConfig:
    """A copy of the caller's settings, or greedy ones, with this limit, under which decoders return their numbers.
    If the caller leaves open whether to sample, the target's own setting decides."""
    config = copy.deepcopy(generation_config) or GenerationConfig(do_sample=False)
    if config.do_sample is None:
        config.do_sample = bool(target.generation_config.do_sample)
    if config.do_sample:
        for name, default in SAMPLING_DEFAULTS.items():
            if getattr(config, name) is None:
                own = getattr(target.generation_config, name)
                setattr(config, name, default if own is None else own)
    config.max_length, config.max_new_tokens, config.return_dict_in_generate = None, max_new_tokens, True
    return config


class _Served(NamedTuple):
    """One way to serve a draft: a column of a comparison."""

    block_size: int
    schedule_name: str
    schedule: Schedule | None


def _schedule_name(schedule: Schedule | None) -> str:
    if isinstance(schedule, ConfidenceThreshold):
        return f"threshold {schedule.threshold:g}"
    if isinstance(schedule, CostTable):
        return "cost table"
    return OFF if schedule is None else type(schedule).__name__


class Run(NamedTuple):
    """One call of one decoder."""

    tokens: list[int]  # of the answer
    wall: float  # seconds
    output: ModelOutput


def _evaluate(
    target,
    draft,
    prompts,
    served: list[_Served],
    max_new_tokens,
    generation_config,
    compare_with_plain,
    disable_tqdm,
    over_ranks=False,
) -> list[DecodingReport]:
    """One report for each way to serve the draft, from one interleaved measurement."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("`prompts` must be token ids of at least one prompt, none of them empty.")
    config = answer_settings(target, generation_config, max_new_tokens)

    def with_draft(way: _Served, **inputs):
        with served_block_size(draft, way.block_size):
            return target.generate(
                **inputs, custom_generate=block_decode, draft=draft, confidence_schedule=way.schedule
            )

    decoders: dict[str | int, Callable] = {i: partial(with_draft, way) for i, way in enumerate(served)}
    if compare_with_plain:
        decoders |= {GENERATE: target.generate, PLAIN_LOOP: partial(plain_decode, target)}
    check_equality = compare_with_plain and not config.do_sample

    def decode_share(rank: int, ranks: int) -> list[list[Answer]]:
        """Of every `ranks`-th prompt, one answer for each way to serve the draft."""
        answers, own = [], range(rank, len(prompts), ranks)
        with eval_mode(target, draft):
            for decode in decoders.values() if own else ():
                decode_prompt(target, decode, prompts[0], config, max_new_tokens=min(max_new_tokens, WARM_UP_TOKENS))
            for index in tqdm(own, desc="Decoding", disable=disable_tqdm if rank == 0 else True):
                prompt, order = prompts[index], random.Random(index).sample([*decoders], len(decoders))
                runs = {name: decode_prompt(target, decoders[name], prompt, config) for name in order}
                answers.append([_answer(runs, i, len(prompt)) for i in range(len(served))])
                plain = runs[GENERATE].tokens if check_equality else None
                for answer in answers[-1]:
                    if check_equality and answer.tokens != plain:
                        answer.difference = _difference(target, prompt, answer.tokens, plain, config)
        return answers

    shares = on_all_ranks(decode_share) if over_ranks else [decode_share(0, 1)]
    answers = [shares[index % len(shares)][index // len(shares)] for index in range(len(prompts))]
    device = target.device
    settings = {
        "max_new_tokens": max_new_tokens,
        "dtype": dtype_name(target.dtype),
        "draft_dtype": dtype_name(main_dtype(draft)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "tie_gap": KIMI_K3_TIE_GAP if target.config.model_type.startswith("kimi_k3") else TIE_GAP,
        "checks_equality": check_equality and target.dtype == torch.float32,
        "decoding": _decoding(config, target.generation_config),
    }
    reports = []
    for way, column in zip(served, zip(*answers, strict=True), strict=True):
        with served_block_size(draft, way.block_size):
            drafted = draft.config.num_drafted
        reports.append(DecodingReport(way.block_size, drafted, way.schedule_name, **settings, answers=[*column]))
    return reports


def _decoding(config: GenerationConfig, defaults: GenerationConfig) -> str:
    """How answers are chosen by [`answer_settings`], in words, without settings that change nothing."""
    if not config.do_sample:
        return GREEDY
    min_p = defaults.min_p if config.min_p is None else config.min_p
    values = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "min_p": min_p}
    settings = [f"{name} {value:g}" for name, value in values.items() if value not in (None, NEUTRAL.get(name))]
    return " ".join(["sampling", *settings])


def decode_prompt(
    target: PreTrainedModel, decode: Callable, prompt: Sequence[int], config: GenerationConfig, **settings
) -> Run:
    """Calls a decoder on one prompt, with `settings` in place of those of `config`."""
    config = copy.deepcopy(config)
    config.update(**settings)
    input_ids = torch.tensor([list(prompt)], device=target.device)
    start = time.perf_counter()
    # Where a trainer shards with ZeRO-3, the models here are whole, or all ranks decode the same prompt.
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "synced_gpus": False}
    output = decode(**inputs, generation_config=config)
    tokens = output.sequences[0, len(prompt) :].tolist()  # waits for the device
    return Run(tokens, time.perf_counter() - start, output)


def _answer(runs: dict[str | int, Run], way: int, prompt_length: int) -> Answer:
    run = runs[way]
    loop = run.output.seconds
    seconds = {"wall": run.wall} | {part: loop[part] for part in ("prefill", "target", "draft")}
    seconds["rest"] = loop["total"] - loop["prefill"] - loop["target"] - loop["draft"]
    lengths = (run.output.accepted_lengths, run.output.verified_lengths)
    answer = Answer(prompt_length, run.tokens, *lengths, seconds)
    if PLAIN_LOOP in runs:
        answer.plain = {name: (len(runs[name].tokens), runs[name].wall) for name in (GENERATE, PLAIN_LOOP)}
        if steps := len(runs[PLAIN_LOOP].tokens) - 1:
            answer.plain_step_seconds = runs[PLAIN_LOOP].output.seconds["target"] / steps
    return answer


def _difference(
    target: PreTrainedModel, prompt: Sequence[int], tokens: list[int], plain: list[int], config: GenerationConfig
) -> dict[str, float]:
    """Where an answer first differs from plain decoding, and how sure plain decoding was there. Where one of them only
    goes on behind the other's end, no tie between tokens explains it."""
    pairs = enumerate(zip(tokens, plain, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), None)
    if position is None:
        return {"position": min(len(tokens), len(plain)), "gap": math.inf}
    settings = {"max_new_tokens": position + 1, "output_scores": True}
    scores = decode_prompt(target, target.generate, prompt, config, **settings).output.scores
    best, second = scores[position][0].float().topk(2).values.tolist()
    return {"position": position, "gap": best - second}
