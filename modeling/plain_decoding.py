"""Plain decoding, one token a forward: the baseline of a speed-up, and the parts block decoding shares with it."""

import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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

# These look at nothing but the row of logits, so all rows of a block go through them at once.
PREFIX_FREE_PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
IGNORED_SETTINGS = (
    "assistant_ensemble_weight",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "prefill_chunk_size",
)


@dataclass
class BlockDecodeOutput(ModelOutput):
    """What the decoding loops return under `return_dict_in_generate`.

    Args:
        sequences: `[1, prompt + new tokens]` int64.
        accepted_lengths: tokens committed by each verification round, the bonus included, the prefill's token and
            anything after a stop or limit excluded: their mean is tau.
        verified_lengths: tokens that each verification round ran through the target, the anchor included.
        confidence_logits: of each round, one raw logit for every drafted token, whether verified or not: before
            temperatures and sigmoid. `None` for a draft without a confidence head.
        seconds: `target` (prefill and verification forwards), `draft` (draft forwards and the choice of their tokens)
            and `total` (the whole loop). Device time on CUDA, wall-clock elsewhere.
        cache: the target's cache; it covers all but the last token.
    """

    sequences: torch.LongTensor | None = None
    accepted_lengths: list[int] | None = None
    verified_lengths: list[int] | None = None
    confidence_logits: list[list[float]] | None = None
    seconds: dict[str, float] | None = None
    cache: Cache | None = None


def sample(probs: torch.Tensor) -> torch.LongTensor:
    """Draws one token a row, `[..., vocab]` float -> `[...]`, by inverting the cumulative distribution.

    Rows need not sum to one; a token of weight zero is never drawn. (`torch.multinomial` makes a random number
    for each entry of the vocabulary, which takes as long as a small draft's forward.)
    """
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[..., -1:]
    # Strictly below the total, whatever the rounding.
    threshold = torch.minimum(torch.rand_like(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


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
        seconds = {"target": 0.0, "draft": 0.0}
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
    the right prefix of each row without a copy.
    """

    def __init__(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self.length, self.max_length = input_ids.shape[1], generation_config.max_length
        self.tokens = input_ids.new_zeros(1, self.max_length)
        self.tokens[:, : self.length] = input_ids
        self.do_sample = generation_config.do_sample
        self.finished = False
        self._processors = logits_processor
        self.prefix_free = all(isinstance(processor, PREFIX_FREE_PROCESSORS) for processor in logits_processor)
        eos = generation_config.eos_token_id
        self._stop_tokens = {eos} if isinstance(eos, int) else set(eos or ())
        self._criteria = StoppingCriteriaList(
            c for c in stopping_criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
        )
        self._streamer = streamer

    @property
    def budget(self) -> int:
        """How many more tokens may be committed."""
        return self.max_length - self.length

    def process(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Logits `[n, vocab]` from `position` on after the caller's processors: scores, or probabilities to sample."""
        scores = logits.to(self.tokens.device, torch.float32)
        if self.prefix_free:
            scores = self._processors(self.tokens[:, :position], scores)
        else:
            rows = [self._processors(self.tokens[:, : position + k], scores[k : k + 1]) for k in range(len(scores))]
            scores = torch.cat(rows)
        return scores.softmax(dim=-1) if self.do_sample else scores

    def choose(self, processed: torch.Tensor) -> torch.LongTensor:
        """One token a row `[n]` of what `process` returned."""
        return sample(processed) if self.do_sample else processed.argmax(dim=-1)

    def commit(self, tokens: list[int]) -> int:
        """Commits `tokens`, which the buffer already holds, up to the first stop. Returns how many were kept."""
        assert 0 < len(tokens) <= self.budget
        kept = 0
        while kept < len(tokens) and not self.finished:
            kept += 1
            prefix = self.tokens[:, : self.length + kept]
            self.finished = (
                tokens[kept - 1] in self._stop_tokens
                or prefix.shape[1] == self.max_length
                or (len(self._criteria) > 0 and bool(self._criteria(prefix, None).all()))
            )
        self.length += kept
        if self._streamer is not None:
            self._streamer.put(torch.tensor([tokens[:kept]]))
        return kept

    def commit_next(self, logits: torch.Tensor) -> int:
        """Chooses and commits one token from logits `[1, vocab]`."""
        token = self.choose(self.process(logits, self.length))
        self.tokens[:, self.length] = token
        return self.commit(token.tolist())

    def finish(self) -> torch.LongTensor:
        """Ends the stream. Returns `[1, length]`, an ordinary tensor outside inference mode."""
        if self._streamer is not None:
            self._streamer.end()
        return self.tokens[:, : self.length].clone()


class CachedTarget:
    """The target with its cache: a prefill, then forwards on short blocks, without per-round input preparation."""

    def __init__(self, model: PreTrainedModel, forward: Callable, max_length: int, stopwatch: Stopwatch, inputs: dict):
        self.model, self._forward, self._stopwatch = model, forward, stopwatch
        self.cache = inputs["cache"]
        # Mask and positions up to `max_length`, sliced each round. Without padding there is no mask, and a target that
        # takes no positions gets none.
        self.mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        if self.mask is not None:
            self.mask = nn.functional.pad(self.mask, (0, max_length - self.mask.shape[1]), value=1)
        self._takes_positions = positions is not None
        self.positions = torch.arange(max_length, device=model.device)[None]
        if self._takes_positions:
            steps = self.positions[:, 1 : max_length - positions.shape[-1] + 1].to(positions.device)
            self.positions = torch.cat([positions, positions[..., -1:] + steps], dim=-1)

    def prefill(self, input_ids: torch.LongTensor, inputs: dict) -> torch.Tensor:
        """Logits `[1, vocab]` after the prompt, whose `inputs` are those that `generate` prepared."""
        inputs = self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs)
        with self._stopwatch.lap("target", self.model.device):
            return self._forward(**inputs, return_dict=True).logits[:, -1]

    def forward(self, block: torch.LongTensor, position: int) -> torch.Tensor:
        """Logits `[n, vocab]` of a block `[1, n]` that starts at `position`."""
        end = position + block.shape[1]
        inputs = {"input_ids": block.to(self.model.device), "cache": self.cache, "use_cache": True}
        if self.mask is not None:
            inputs["attention_mask"] = self.mask[:, :end]
        if self._takes_positions:
            inputs["position_ids"] = self.positions[..., position:end]
        with self._stopwatch.lap("target", self.model.device):
            return self._forward(**inputs, return_dict=True).logits[0]


def check_call(name: str, model: PreTrainedModel, input_ids: torch.LongTensor, config: GenerationConfig, inputs: dict):
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"{name} decodes one sequence at a time, got a batch of {input_ids.shape[0]} (`num_beams` and "
            "`num_return_sequences` count too). Call it once for each prompt."
        )
    if inputs.get("inputs_embeds") is not None:
        raise ValueError(f"{name} reads tokens: pass `input_ids` instead of `inputs_embeds`.")
    if inputs.get("cache") is None:
        raise ValueError(f"{name} needs a cache: set `use_cache=True`.")
    if inputs["cache"].get_seq_length() > 0:
        raise ValueError(f"{name} starts from an empty `cache`; pass the whole prompt.")
    ignored = [setting for setting in IGNORED_SETTINGS if getattr(config, setting)]
    if ignored:
        warnings.warn(f"{name} ignores the generation settings {ignored}.", stacklevel=3)


def plain_decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs,
) -> BlockDecodeOutput | torch.LongTensor:
    """The same loop without a draft, one token a forward: the honest baseline of a speed-up, beside `generate` itself.

    Called like [`block_decode`]; its output counts no rounds.
    """
    if stopping_criteria is None:
        return model.generate(
            input_ids,
            logits_processor=logits_processor,
            generation_config=generation_config,
            streamer=streamer,
            custom_generate=partial(plain_decode, streamer=streamer),
            **model_kwargs,
        )
    check_call("plain_decode", model, input_ids, generation_config, model_kwargs)
    stopwatch = Stopwatch()
    sequence = TokenSequence(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    with torch.inference_mode():
        target = CachedTarget(model, model, sequence.max_length, stopwatch, model_kwargs)
        sequence.commit_next(target.prefill(input_ids, model_kwargs))
        while not sequence.finished:
            anchor = sequence.length - 1
            sequence.commit_next(target.forward(sequence.tokens[:, anchor : sequence.length], anchor))
    sequences = sequence.finish()
    if not generation_config.return_dict_in_generate:
        return sequences
    return BlockDecodeOutput(sequences, [], [], None, stopwatch.seconds(), target.cache)
