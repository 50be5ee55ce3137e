"""Plain decoding, one token a forward: the baseline of a speed-up, and the parts block decoding shares with it."""

import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from .generate_call import (
    TOKEN_TYPES,
    BatchDecodeOutput,
    BlockDecodeOutput,
    Row,
    call_generate,
    check_call,
    find_streamer,
    is_prepared,
    join_rows,
    split_rows,
)

# Sections of a decoding loop that are timed: the forwards, then its own work.
ROUND_PARTS = ("prefill", "target", "draft", "choose", "match", "commit", "rollback", "features")
# These look at nothing but the row of logits, so all rows of a block go through them at once.
PREFIX_FREE_PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def sample(probs: torch.Tensor) -> torch.LongTensor:
    """Draws one token a row, `[..., vocab]` float -> `[...]`, by inverting the cumulative distribution.

    Rows need not sum to one; a token of weight zero is never drawn. (`torch.multinomial` makes a random number
    for each entry of the vocabulary, which takes as long as a small draft's forward.)
    """
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[..., -1:]
    # Strictly below the total, whatever the rounding.
    threshold = torch.minimum(torch.rand_like(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, threshold, right=True)
    # A parallel scan's sums may rise by a rounding error where nothing was added.
    return torch.where(probs.gather(-1, drawn) > 0, drawn, probs.argmax(dim=-1, keepdim=True)).squeeze(-1)


class Stopwatch:
    """Time of named sections: wall-clock, or CUDA events, which cost no synchronisation until they are read."""

    def __init__(self):
        self._start = time.perf_counter()
        self._laps: dict[str, list[tuple]] = {}

    @contextmanager
    def lap(self, name: str, device: torch.device):
        begin = self._now(device)
        yield
        self._laps.setdefault(name, []).append((begin, self._now(device)))

    @staticmethod
    def _now(device: torch.device) -> float | torch.cuda.Event:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def seconds(self) -> dict[str, float]:
        seconds = dict.fromkeys(ROUND_PARTS, 0.0)
        for name, laps in self._laps.items():
            for begin, end in laps:
                if isinstance(end, float):
                    seconds[name] += end - begin
                else:
                    end.synchronize()
                    seconds[name] += begin.elapsed_time(end) / 1000
        return seconds | {"total": time.perf_counter() - self._start}


class TokenSequence:
    """The tokens so far and the caller's rules about them: processors, sampling, stops and streaming.

    `tokens` is one buffer: `tokens[:, :length]` is committed, candidates are written behind it, so that processors see
    the right prefix of each row without a copy. It starts at the first real token; processors and stopping criteria,
    which `generate` made for the whole batch, see the padding before it as well.
    """

    def __init__(
        self,
        row: Row,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        prompt = row.input_ids.shape[1]
        limit = max(stopping_criteria.max_length or generation_config.max_length, prompt + 1)
        self._row, self._padding = row, row.padding
        self._padded = row.input_ids.new_zeros(1, limit)
        self._padded[:, :prompt] = row.input_ids
        self.tokens = self._padded[:, self._padding :]
        self.length, self.max_length = prompt - self._padding, limit - self._padding
        self.do_sample = generation_config.do_sample
        self.finished = False
        self._processors = logits_processor
        self.prefix_free = all(isinstance(processor, PREFIX_FREE_PROCESSORS) for processor in logits_processor)
        # Transformers' own take any prefix, but for the one that calls a function of the user's.
        self._takes_any_prefix = all(
            type(processor).__module__ == LogitsProcessor.__module__
            and not isinstance(processor, PrefixConstrainedLogitsProcessor)
            for processor in logits_processor
        )
        stops = (c.eos_token_id.tolist() for c in stopping_criteria if isinstance(c, EosTokenCriteria))
        self._stop_tokens = {token for tokens in stops for token in tokens}
        self._criteria = StoppingCriteriaList(
            c for c in stopping_criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
        )
        self._streamer = streamer
        keep = generation_config.return_dict_in_generate
        self._scores = [] if keep and generation_config.output_scores else None
        self._logits = [] if keep and generation_config.output_logits else None

    @property
    def budget(self) -> int:
        """How many more tokens may be committed."""
        return self.max_length - self.length

    def score(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Logits `[n, vocab]` from `position` on after the caller's processors, float32 beside the tokens."""
        scores = logits.to(self.tokens.device, torch.float32)
        if self.prefix_free:
            return self._processors(self.tokens[:, :position], scores)
        live = len(scores) if self._takes_any_prefix else self._live_rows(position, len(scores))
        start = self._padding + position
        rows = [self._process_row(self._padded[:, : start + k], row) for k, row in enumerate(scores[:live])]
        return torch.cat([*rows, scores[live:]])

    def _live_rows(self, position: int, n: int) -> int:
        """How many of `n` rows from `position` on may count: those behind a stop token never do, and a constraint need
        not know what to allow there. Waits for the device."""
        ahead = self.tokens[0, self.length : position + n - 1].tolist()
        stop = next((k for k, token in enumerate(ahead) if token in self._stop_tokens), len(ahead))
        return max(0, self.length + stop + 1 - position)

    def _process_row(self, prefix: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """`[1, prefix]` and `[vocab]` -> `[1, vocab]`. Some processors know the rows of their batch apart."""
        number, batch_size = self._row.number, self._row.batch_size
        if batch_size == 1:
            return self._processors(prefix, scores[None])
        return self._processors(prefix.repeat(batch_size, 1), scores.repeat(batch_size, 1))[number : number + 1]

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[n, vocab]` as they are, or probabilities to sample from."""
        return scores.softmax(dim=-1) if self.do_sample else scores

    def choose(self, weights: torch.Tensor) -> torch.LongTensor:
        """One token a row `[n]` of what `weigh` returned."""
        return sample(weights) if self.do_sample else weights.argmax(dim=-1)

    def commit(self, tokens: list[int], logits: torch.Tensor, scores: torch.Tensor) -> int:
        """Commits `tokens`, which the buffer already holds, up to the first stop. Returns how many were kept.

        Args:
            tokens: new tokens.
            logits, scores: `[len(tokens) or more, vocab]`, what the target said at their positions.
        """
        assert 0 < len(tokens) <= self.budget
        kept = 0
        while kept < len(tokens) and not self.finished:
            self._record(logits[kept : kept + 1], scores[kept : kept + 1])
            kept += 1
            end = self.length + kept
            self.finished = tokens[kept - 1] in self._stop_tokens or end == self.max_length or self._is_stopped(end)
        self.length += kept
        if self._streamer is not None:
            self._streamer.put(torch.tensor([tokens[:kept]]))
        return kept

    def _record(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        if self._logits is not None:
            self._logits.append(logits.to(self.tokens.device, torch.float32, copy=True))
        if self._scores is not None:
            self._scores.append(scores.clone())

    def _is_stopped(self, end: int) -> bool:
        if len(self._criteria) == 0:
            return False
        scores = None if self._scores is None else tuple(self._scores)
        return bool(self._criteria(self._padded[:, : self._padding + end], scores).all())

    def commit_next(self, logits: torch.Tensor) -> int:
        """Chooses and commits one token from logits `[1, vocab]`."""
        scores = self.score(logits, self.length)
        token = self.choose(self.weigh(scores))
        self.tokens[:, self.length] = token
        return self.commit(token.tolist(), logits, scores)

    def finish(self) -> BlockDecodeOutput:
        """Ends the stream. Returns the sequence `[1, padding + length]`, with the scores and logits asked for; made
        outside inference mode, they are ordinary tensors."""
        if self._streamer is not None:
            self._streamer.end()
        return BlockDecodeOutput(
            self._padded[:, : self._padding + self.length].clone(),
            scores=None if self._scores is None else tuple(scores.clone() for scores in self._scores),
            logits=None if self._logits is None else tuple(logits.clone() for logits in self._logits),
        )


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Where a module reads its input; `default` where its weights are offloaded and its hooks fetch both."""
    # A quantised head may keep all it has in buffers.
    device = next((tensor.device for tensor in chain(module.parameters(), module.buffers())), default)
    return default if device.type == "meta" else device


def rotary_steps(config: PreTrainedConfig, max_length: int) -> list[int]:
    """Ascending lengths, `max_length` among them: a forward that ends beyond one of them turns all its positions by
    other angles than one that ends there (LongRoPE, dynamic NTK)."""
    config = config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}  # only rotary models have the field
    steps = [max_length]
    for parameters in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
        kind = parameters.get("rope_type") or "default"
        if kind == "longrope":
            steps.append(parameters["original_max_position_embeddings"])
        elif "dynamic" in kind:
            steps += range(config.max_position_embeddings, max_length)
    return sorted(steps)


class CachedTarget:
    """The target with its cache: a prefill, then forwards on short blocks.

    What a block needs is put together here, at less cost than `generate` does it; where the target's class has a way
    of its own to prepare inputs (positions that start at 1, a cache to be computed anew), by the class.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable, max_length: int, stopwatch: Stopwatch, row: Row):
        self.model, self._forward, self._stopwatch = model, forward, stopwatch
        self.device = device_of(model, row.input_ids.device)
        self._prompt, self._inputs = row.input_ids[:, row.padding :], row.inputs
        own = type(model).prepare_inputs_for_generation
        self._has_own_way = own is not GenerationMixin.prepare_inputs_for_generation
        self._rotary_steps = rotary_steps(model.config, max_length)
        self.cache = row.inputs["cache"]
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

    def span(self, position: int) -> int:
        """How many tokens from `position` on a forward takes with the rotary angles that each would get alone."""
        return self._rotary_steps[bisect_right(self._rotary_steps, position)] - position

    def prefill(self) -> torch.Tensor:
        """Logits `[1, vocab]` after the prompt."""
        inputs = self._prepare(self._prompt, is_first_iteration=True, **self._inputs)
        # A static cache makes its tensors here: ordinary ones, which its owner may reset or fill outside the loop too.
        with self._stopwatch.lap("prefill", self.device), torch.inference_mode(False), torch.no_grad():
            output = self._forward(**inputs, return_dict=True)
        # Inputs as far as the first new token, whose types are those of all that follow.
        self._inputs = self.model._update_model_kwargs_for_generation(output, self._inputs, is_encoder_decoder=False)
        return output.logits[:, -1]

    def forward(self, tokens: torch.LongTensor, position: int) -> torch.Tensor:
        """Logits `[n, vocab]` of the last n of `tokens` `[1, position + n]`, the ones that the cache does not hold."""
        end, n = tokens.shape[1], tokens.shape[1] - position
        inputs = {"cache": self.cache, "use_cache": True}
        if self.mask is not None:
            inputs["attention_mask"] = self.mask[:, :end].to(self.device)
        if self._takes_positions:
            start = 0 if self._has_own_way else position
            inputs["position_ids"] = self.positions[..., start:end].to(self.device)
        for name in TOKEN_TYPES:
            if (types := self._inputs.get(name)) is not None:
                inputs[name] = types[:, -1:].expand(-1, n).to(self.device)
        if self._has_own_way:
            inputs = self._inputs | inputs
            if "logits_to_keep" in inputs:
                inputs["logits_to_keep"] = n
            inputs = self._prepare(tokens, next_sequence_length=n, **inputs)
        else:
            inputs["input_ids"] = tokens[:, position:].to(self.device)
        with self._stopwatch.lap("target", self.device):
            return self._forward(**inputs, return_dict=True).logits[0, -n:]

    def _prepare(self, tokens: torch.LongTensor, **inputs) -> dict:
        inputs = self.model.prepare_inputs_for_generation(tokens, **inputs)
        if inputs.get("cache") is None:
            # To be computed anew, from all tokens: Phi does so where LongRoPE's long factors begin.
            self.cache.reset()
            inputs["cache"] = self.cache
        return inputs


def plain_decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs,
) -> BlockDecodeOutput | BatchDecodeOutput | torch.LongTensor:
    """The same loop without a draft, one token a forward: the honest baseline of a speed-up, beside `generate` itself.

    Called like [`block_decode`]; its output counts no rounds.
    """
    prepared = (logits_processor, stopping_criteria, generation_config)
    if not is_prepared(*prepared, model_kwargs):
        model_kwargs |= {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        return call_generate(
            plain_decode, model, input_ids, streamer, generation_config=generation_config, **model_kwargs
        )
    streamer = find_streamer("plain_decode", model, streamer)
    check_call("plain_decode", input_ids, *prepared, streamer, model_kwargs)
    outputs = []
    for row in split_rows(input_ids, model_kwargs):
        stopwatch, sequence = Stopwatch(), TokenSequence(row, *prepared, streamer)
        with torch.inference_mode():
            target = CachedTarget(model, model, sequence.max_length, stopwatch, row)
            sequence.commit_next(target.prefill())
            while not sequence.finished:
                sequence.commit_next(target.forward(sequence.tokens[:, : sequence.length], sequence.length - 1))
        output = sequence.finish()
        output.accepted_lengths, output.verified_lengths = [], []
        output.seconds, output.cache = stopwatch.seconds(), target.cache
        outputs.append(output)
    return join_rows(outputs, generation_config)
