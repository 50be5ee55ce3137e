"""The state of a decoding loop: a sequence with its caller's rules, the target with its cache, a stopwatch."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from .rollback import Rollback
from .transformers_internals import inputs_after, prepares_inputs_itself, rotary_steps, take_any_prefix
from .verification import sample

# Sections of a decoding loop that are timed: the forwards, then its own work.
ROUND_PARTS = ("prefill", "target", "draft", "choose", "match", "commit", "rollback", "features")
# These look at nothing but the row of logits, so all rows of a block go through them at once.
PREFIX_FREE_PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
# Model inputs with a column for each token of the prompt whose last value holds for the answer.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# So many tokens that a cache gave up cost little in front of the next block; more get a forward of their own.
MOST_RERUN = 8


class Rules(NamedTuple):
    """What a caller asks of the tokens, as `generate` prepares it for a loop; unprepared where a user passes it."""

    logits_processor: LogitsProcessorList | None
    stopping_criteria: StoppingCriteriaList | None
    generation_config: GenerationConfig | None
    streamer: BaseStreamer | None


class Row(NamedTuple):
    """One sequence of a call: its prompt `[1, prompt]`, of which the first `padding` tokens are padding, the model's
    further inputs without that padding, a cache of its own among them, and which row of how many it is."""

    input_ids: torch.LongTensor
    padding: int
    inputs: dict
    number: int
    batch_size: int


@dataclass
class BlockDecodeOutput(ModelOutput):
    """What the decoding loops return under `return_dict_in_generate` for one sequence.

    Args:
        sequences: `[1, prompt + new tokens]` int64.
        accepted_lengths: tokens committed by each verification round, the bonus included, the prefill's token and
            anything after a stop or limit excluded: their mean is tau.
        verified_lengths: tokens that each verification round ran through the target, the anchor included.
        confidence_logits: of each round, one raw logit for every drafted token, whether verified or not: before
            temperatures and sigmoid. `None` for a draft without a confidence head.
        seconds: `prefill`, `target` (verification forwards), `draft` (draft forwards with their heads), `total` (the
            whole loop); the loop's own work: `choose` (drafted tokens), `match` (candidates with the target's scores),
            `commit` (stops, streaming), `rollback` (caches), `features` (reading them). Device time on CUDA,
            wall-clock elsewhere.
        scores: with `output_scores`, for each new token the target's processed logits `[1, vocab]` float32.
        logits: with `output_logits`, the same before the processors.
        cache: the target's cache; it covers all but the last token, and no padding.
    """

    sequences: torch.LongTensor | None = None
    accepted_lengths: list[int] | None = None
    verified_lengths: list[int] | None = None
    confidence_logits: list[list[float]] | None = None
    seconds: dict[str, float] | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    cache: Cache | None = None


class Stopwatch:
    """Times named sections of a loop where somebody reads the times: by wall-clock, or by CUDA events, which cost no
    synchronisation until they are read."""

    def __init__(self, is_read: bool):
        self._is_read, self._start, self._sections = is_read, time.perf_counter(), []

    @contextmanager
    def section(self, name: str, device: torch.device) -> Iterator[None]:
        begin = self._now(device) if self._is_read else None
        yield
        if self._is_read:
            self._sections.append((name, begin, self._now(device)))

    @staticmethod
    def _now(device: torch.device) -> float | torch.cuda.Event:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def seconds(self) -> dict[str, float] | None:
        """Seconds by section and in `total`; `None` where nobody reads them."""
        if not self._is_read:
            return None
        seconds = dict.fromkeys(ROUND_PARTS, 0.0)
        for name, begin, end in self._sections:
            if isinstance(end, float):
                seconds[name] += end - begin
            else:
                end.synchronize()
                seconds[name] += begin.elapsed_time(end) / 1000
        return seconds | {"total": time.perf_counter() - self._start}


class DecodedSequence:
    """One sequence while it is decoded: its tokens so far, and its caller's rules about them (processors, sampling,
    stops and streaming).

    `tokens` is one buffer: `tokens[:, :length]` is committed, candidates are written behind it, so that processors see
    the right prefix of each row without a copy. It starts at the first real token; processors and stopping criteria,
    which `generate` made for the whole batch, see the padding before it as well.
    """

    def __init__(self, row: Row, rules: Rules):
        config, criteria = rules.generation_config, rules.stopping_criteria
        prompt = row.input_ids.shape[1]
        limit = max(criteria.max_length or config.max_length, prompt + 1)
        self.row = row
        self._padded = row.input_ids.new_zeros(1, limit)
        self._padded[:, :prompt] = row.input_ids
        self.tokens = self._padded[:, row.padding :]
        self.length, self.max_length = prompt - row.padding, limit - row.padding
        self.do_sample, self.finished = config.do_sample, False
        self._processors, self._streamer = rules.logits_processor, rules.streamer
        self.prefix_free = all(isinstance(processor, PREFIX_FREE_PROCESSORS) for processor in self._processors)
        self._takes_any_prefix = take_any_prefix(self._processors)
        stops = (c.eos_token_id.tolist() for c in criteria if isinstance(c, EosTokenCriteria))
        self._stop_tokens = {token for tokens in stops for token in tokens}
        self._criteria = StoppingCriteriaList(
            c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
        )
        self.returns_details = bool(config.return_dict_in_generate)
        self._scores = [] if self.returns_details and config.output_scores else None
        self._logits = [] if self.returns_details and config.output_logits else None

    def process(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Scores: logits `[n, vocab]` from `position` on after the caller's processors, float32 beside the tokens."""
        scores = logits.to(self.tokens.device, torch.float32)
        if self.prefix_free:
            return self._processors(self.tokens[:, :position], scores)
        live = len(scores)
        if not self._takes_any_prefix:
            # Rows behind a stop token never count, and a constraint need not know what to allow there.
            ahead = self.tokens[0, self.length : position + len(scores) - 1].tolist()  # waits for the device
            stop = next((k for k, token in enumerate(ahead) if token in self._stop_tokens), len(ahead))
            live = max(0, self.length + stop + 1 - position)
        start = self.row.padding + position
        rows = [self._process_row(self._padded[:, : start + k], row) for k, row in enumerate(scores[:live])]
        return torch.cat([*rows, scores[live:]])

    def _process_row(self, prefix: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """`[1, prefix]` and `[vocab]` -> `[1, vocab]`. Some processors know the rows of their batch apart."""
        number, batch_size = self.row.number, self.row.batch_size
        if batch_size == 1:
            return self._processors(prefix, scores[None])
        return self._processors(prefix.repeat(batch_size, 1), scores.repeat(batch_size, 1))[number : number + 1]

    def choose(self, scores: torch.Tensor) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """One token a row `[n]` of scores `[n, vocab]`: the best; or, when sampling, one drawn, with the probabilities
        `[n, vocab]` that it was drawn from."""
        if not self.do_sample:
            return scores.argmax(dim=-1), None
        probs = scores.softmax(dim=-1)
        return sample(probs), probs

    def commit(self, tokens: list[int], logits: torch.Tensor, scores: torch.Tensor) -> int:
        """Commits `tokens`, which the buffer already holds, up to the first stop; `logits` and `scores`, `[len(tokens)
        or more, vocab]`, are what the target said at their positions. Returns how many were kept."""
        assert 0 < len(tokens) <= self.max_length - self.length
        kept = 0
        while kept < len(tokens) and not self.finished:
            if self._logits is not None:
                self._logits.append(logits[kept : kept + 1].to(self.tokens.device, torch.float32, copy=True))
            if self._scores is not None:
                self._scores.append(scores[kept : kept + 1].clone())
            kept += 1
            end = self.length + kept
            self.finished = tokens[kept - 1] in self._stop_tokens or end == self.max_length or self._is_stopped(end)
        self.length += kept
        if self._streamer is not None:
            self._streamer.put(torch.tensor([tokens[:kept]]))
        return kept

    def _is_stopped(self, end: int) -> bool:
        scores = None if self._scores is None else tuple(self._scores)
        tokens = self._padded[:, : self.row.padding + end]
        return len(self._criteria) > 0 and bool(self._criteria(tokens, scores).all())

    def commit_next(self, logits: torch.Tensor) -> int:
        """Chooses and commits one token from logits `[1, vocab]`."""
        scores = self.process(logits, self.length)
        token, _ = self.choose(scores)
        self.tokens[:, self.length] = token
        return self.commit(token.tolist(), logits, scores)

    def finish(self) -> BlockDecodeOutput:
        """Ends the stream. Returns the sequence `[1, padding + length]`, with the scores and logits asked for; made
        outside inference mode, they are ordinary tensors."""
        if self._streamer is not None:
            self._streamer.end()
        return BlockDecodeOutput(
            self._padded[:, : self.row.padding + self.length].clone(),
            scores=None if self._scores is None else tuple(scores.clone() for scores in self._scores),
            logits=None if self._logits is None else tuple(logits.clone() for logits in self._logits),
        )


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Where a module reads its input; `default` where its weights are offloaded and its hooks fetch both."""
    # A quantised head may keep all it has in buffers.
    device = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), default)
    return default if device.type == "meta" else device


class CachedTarget:
    """The target with its cache: a prefill, then forwards on short blocks.

    What a block needs is put together here, at less cost than `generate` does it, or by the target's class where it
    prepares inputs in a way of its own (positions that start at 1, a cache to be computed anew).
    """

    def __init__(self, model: PreTrainedModel, forward: Callable, max_length: int, stopwatch: Stopwatch, row: Row):
        self.model, self._forward, self._stopwatch = model, forward, stopwatch
        self.device = device_of(model, row.input_ids.device)
        self._prompt, self._inputs = row.input_ids[:, row.padding :], row.inputs
        self._prepares_inputs_itself = prepares_inputs_itself(model)
        self._rotary_steps = rotary_steps(model.config, max_length)
        self.cache = row.inputs["cache"]
        self._rollback: Rollback | None = None  # plain decoding takes nothing back
        self._lacking = 0  # last tokens of those that ran which the cache does not hold
        # Mask and positions up to `max_length`, sliced each round. Without holes there is no mask, and a target that
        # takes no positions gets none.
        self.mask, positions = row.inputs.get("attention_mask"), row.inputs.get("position_ids")
        if self.mask is not None:
            self.mask = nn.functional.pad(self.mask, (0, max_length - self.mask.shape[1]), value=1)
        self._takes_positions = positions is not None
        self.positions = torch.arange(max_length, device=self.device)[None]
        if self._takes_positions:
            steps = self.positions[:, 1 : max_length - positions.shape[-1] + 1].to(positions.device)
            self.positions = torch.cat([positions, positions[..., -1:] + steps], dim=-1)

    def longest_block(self, position: int) -> int:
        """How many tokens from `position` on a forward takes with the rotary angles that each would get alone."""
        return self._rotary_steps[bisect_right(self._rotary_steps, position)] - position

    def prefill(self) -> torch.Tensor:
        """Logits `[1, vocab]` after the prompt."""
        inputs = self._prepare(self._prompt, is_first_iteration=True, **self._inputs)
        # A static cache makes its tensors here: ordinary ones, which its owner may reset or fill outside the loop too.
        with self._stopwatch.section("prefill", self.device), torch.inference_mode(False), torch.no_grad():
            output = self._forward(**inputs, return_dict=True)
        # Inputs as far as the first new token, whose types are those of all that follow.
        self._inputs = inputs_after(self.model, output, self._inputs)
        return output.logits[:, -1]

    def prepare_rollback(self, sequence: DecodedSequence) -> None:
        """After the prefill of a sequence: gets ready to take tokens back. Raises a `ValueError` where the target
        cannot."""
        self._rollback = Rollback(self.cache)
        # Of the rows of a call the first one tells; a shorter answer has no round of several tokens.
        if sequence.row.number == 0 and sequence.max_length - sequence.length > 2:
            tokens = torch.cat([self._prompt, self._prompt[:, -1:].expand(-1, 2)], dim=1)
            self._rollback.check_states_are_read(lambda: self._run(tokens, self._prompt.shape[1]), n=2)

    def take_back(self, rejected: int, n: int) -> None:
        """Takes the last `rejected` tokens of the last forward's `n` back."""
        if rejected and self._rollback.copies:
            self._rollback.undo(self._lacking + n)
            self._lacking += n - rejected
        else:
            self._rollback.keep(rejected)
            self._lacking = 0

    def run_lacking(self, tokens: torch.LongTensor) -> None:
        """Lets the cache hold all of `tokens` `[1, L]`, of which it may lack the last ones after [`take_back`]."""
        if self._lacking:
            self._run(tokens, tokens.shape[1] - self._lacking)
            self._lacking = 0

    def forward(self, tokens: torch.LongTensor, position: int) -> torch.Tensor:
        """Logits `[n, vocab]` of the last n of `tokens` `[1, position + n]`, the ones that have not run yet."""
        start, end = position - self._lacking, tokens.shape[1]
        if self._lacking > MOST_RERUN or (self._lacking and self.longest_block(start) < end - start):
            self.run_lacking(tokens[:, :position])
            start = position
        if self._rollback is not None and self._rollback.copies:
            with self._stopwatch.section("rollback", self.device):
                self._rollback.save()
        return self._run(tokens, start)[position - start :]

    def _run(self, tokens: torch.LongTensor, position: int) -> torch.Tensor:
        """Logits `[n, vocab]` of the last n of `tokens` `[1, position + n]`, the ones that the cache does not hold."""
        end, n = tokens.shape[1], tokens.shape[1] - position
        inputs = {"cache": self.cache, "use_cache": True}
        if self.mask is not None:
            inputs["attention_mask"] = self.mask[:, :end].to(self.device)
        if self._takes_positions:
            start = 0 if self._prepares_inputs_itself else position
            inputs["position_ids"] = self.positions[..., start:end].to(self.device)
        for name in TOKEN_TYPES:
            if (types := self._inputs.get(name)) is not None:
                inputs[name] = types[:, -1:].expand(-1, n).to(self.device)
        if self._prepares_inputs_itself:
            inputs = self._prepare(tokens, next_sequence_length=n, **(self._inputs | inputs))
            if "logits_to_keep" in inputs:  # some classes set it to 1
                inputs["logits_to_keep"] = n
        else:
            inputs["input_ids"] = tokens[:, position:].to(self.device)
        with self._stopwatch.section("target", self.device):
            return self._forward(**inputs, return_dict=True).logits[0, -n:]

    def _prepare(self, tokens: torch.LongTensor, **inputs) -> dict:
        inputs = self.model.prepare_inputs_for_generation(tokens, **inputs)
        if inputs.get("cache") is None:
            # To be computed anew, from all tokens: Phi does so where LongRoPE's long factors begin.
            self.cache.reset()
            inputs["cache"] = self.cache
        return inputs
