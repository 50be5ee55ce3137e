"""Block decoding: a draft proposes a block of tokens, one target forward verifies it; the output stays the target's.

One loop serves every block-parallel draft. Greedy decoding commits the target's own choices, so it equals plain greedy
decoding up to numerical ties. Sampling follows Leviathan et al. 2023 (https://huggingface.co/papers/2211.17192,
algorithm 1), so tokens keep the target's distribution. What is rejected leaves the target's cache by `crop`; layers
that have none, or whose state forgets, are copied instead (`rollback.py`).

A draft with a Markov head chooses its tokens one after the other, each biased by the one before. One with a confidence
head says how likely each token is to be accepted; a `confidence_schedule` then cuts the block before verification.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DFlashCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..target.target_features import FeatureCapture, capture_features
from ..target.target_shapes import shape_faults
from .decoding_state import BlockDecodeOutput, CachedTarget, DecodedSequence, Rules, Stopwatch, device_of
from .generate_call import DecodeOutput, Loop, enter
from .verification import match, verify


def block_decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    draft: PreTrainedModel | None = None,
    confidence_schedule: Callable[[list[float]], int] | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs,
) -> DecodeOutput:
    """Decodes with a block-parallel draft; the tokens are those of the target alone.

    Run it as `target.generate(**inputs, custom_generate=block_decode, draft=draft, max_new_tokens=256)`. A direct call
    goes through `generate` as well and takes the same arguments; only that can end at `stop_strings`, since `generate`
    does not pass the `tokenizer` on.

    The rows of a batch are decoded one after another, each without its padding and with a cache of its own, so each
    gives what its prompt alone gives, and a batch takes the sum of their times; `max_time` is that of all together.

    Args:
        model: the target, any transformers causal LM that keeps its whole past in a transformers cache, on any
            devices.
        input_ids: `[batch, prompt]` int64, padded on the left.
        logits_processor: functions of prefix and scores; the draft's distribution passes them too, each slot with its
            prefix.
        stopping_criteria: checked after every token, so that an answer ends where plain decoding would end it.
        generation_config: greedy or sampling, any number of returned sequences; what other modes need is refused.
        draft: the block-parallel draft trained for this target; it may lie on another device.
        confidence_schedule: how many of a round's candidates are worth verifying, given their calibrated confidences;
            `None` for all. Candidate k may be decided by the first k + 1 confidences only, or sampling would favour
            what the later ones favour. See `ConfidenceThreshold` and `CostTable`.
        streamer: receives the tokens of each round; for one sequence.
        model_kwargs: the target's inputs as `generate` prepares them, with an empty `cache`.

    Returns:
        Sequences `[batch, prompt + new tokens]`, shorter answers filled up with the pad token. With
        `return_dict_in_generate` a [`BlockDecodeOutput`], of a batch a [`BatchDecodeOutput`].

    Raises:
        ValueError: without a draft, with an `assistant_model`, `token_healing`, `synced_gpus`, settings of another
            decoding mode or processors that count their calls, with a cache that is absent, filled or cannot be rolled
            back, with a target whose state spaces start anew in a forward of several tokens, with a draft for a target
            of other shapes (see [`shape_faults`]), or with a `confidence_schedule` for a draft without a confidence
            head.
    """
    if draft is None:
        raise ValueError("block_decode needs `draft`: pass it to `generate` beside `custom_generate`.")
    decode_rows = partial(_decode_rows, draft=draft, confidence_schedule=confidence_schedule)
    rules = Rules(logits_processor, stopping_criteria, generation_config, streamer)
    return enter(Loop("block_decode", decode_rows), model, input_ids, rules, model_kwargs)


def _decode_rows(
    model: PreTrainedModel,
    sequences: Iterable[DecodedSequence],
    draft: PreTrainedModel,
    confidence_schedule: Callable | None,
) -> list[BlockDecodeOutput]:
    for fault in shape_faults(model, draft.config):
        raise ValueError(fault)
    if draft.compare_target is not None:
        draft.compare_target(model)
    if confidence_schedule is not None and draft.confidence_head is None:
        raise ValueError(
            "`confidence_schedule` cuts blocks where the draft's confidence is low, and this draft has no confidence "
            "head: leave the schedule out, or train a draft with one."
        )
    with capture_features(model, draft.config.target_layer_ids, draft.config.capture_point) as capture:
        return [_decode_row(model, draft, capture, sequence, confidence_schedule) for sequence in sequences]


def _decode_row(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    capture: FeatureCapture,
    sequence: DecodedSequence,
    confidence_schedule: Callable | None,
) -> BlockDecodeOutput:
    """A prefill, then rounds: draft, choose how many to verify, verify, commit, roll the cache back, read features."""
    stopwatch, accepted_lengths, verified_lengths, confidence_logits = Stopwatch(sequence.returns_details), [], [], []
    with torch.inference_mode():
        max_length = sequence.max_length + draft.config.block_size
        target = CachedTarget(model, capture.run, max_length, stopwatch, sequence.row)
        drafter = _Drafter(draft, target, stopwatch)
        target.cache.activate_past_recording()
        logits = target.prefill()
        features = drafter.visible_rows(capture.features(drafter.device))
        target.prepare_rollback(sequence)
        sequence.commit_next(logits)

        while not sequence.finished:
            anchor = sequence.length - 1
            n = min(drafter.num_candidates, sequence.max_length - sequence.length - 1)
            probs, confidence = drafter.propose(sequence, features, n) if n > 0 else (None, None)
            confidence_logits.append(features.new_empty(0) if confidence is None else confidence)
            if confidence_schedule is not None and n > 0:
                n = confidence_schedule(drafter.calibrate(confidence))
            n = min(n, target.longest_block(anchor) - 1)
            tokens = sequence.tokens[:, : sequence.length + n]
            logits = target.forward(tokens, anchor)
            with stopwatch.section("match", target.device):
                scores, candidates = sequence.process(logits, sequence.length), tokens[:, sequence.length :]
                if probs is None:  # greedy, or nothing was drafted
                    accepted, next_token = match(candidates, sequence.choose(scores)[0][None])
                else:
                    accepted, next_token = verify(candidates, probs[:, :n], scores.softmax(dim=-1)[None])
                # The round's one synchronisation with the device, but for a schedule's.
                *drafted, bonus, count = torch.cat([candidates[0], next_token, accepted]).tolist()
            with stopwatch.section("commit", target.device):
                sequence.tokens[:, sequence.length + count] = bonus
                kept = sequence.commit([*drafted[:count], bonus], logits, scores)
                accepted_lengths.append(kept)
                verified_lengths.append(1 + n)
            with stopwatch.section("rollback", target.device):
                target.take_back(1 + n - kept, 1 + n)
            with stopwatch.section("features", target.device):
                features = capture.features(drafter.device)
                # The block's are the last rows: a forward may have computed those before anew.
                start = features.shape[1] - 1 - n
                features = features[:, start : start + kept]
        if sequence.returns_details:
            target.run_lacking(sequence.tokens[:, : sequence.length - 1])

    output = sequence.finish()
    output.accepted_lengths, output.verified_lengths = accepted_lengths, verified_lengths
    if draft.confidence_head is not None and sequence.returns_details:
        values = iter(torch.cat([*confidence_logits, features.new_empty(0)]).tolist())  # all rounds in one read
        output.confidence_logits = [list(islice(values, len(row))) for row in confidence_logits]
    output.seconds, output.cache = stopwatch.seconds(), target.cache
    return output


class _Drafter:
    """The draft with its cache: turns newly verified features into the next block of candidates.

    `known` tokens of a block are clean and the rest masks. Where they are two (the draft never saw a block with one),
    the context ends one position earlier, and the newest feature is held back until the next round. What the prompt's
    mask hides never becomes context, so the draft counts real tokens only.
    """

    def __init__(self, draft: PreTrainedModel, target: CachedTarget, stopwatch: Stopwatch):
        config = draft.config
        self.draft, self.target, self._stopwatch = draft, target, stopwatch
        self.device = device_of(draft, target.device)
        self._embed_tokens, self._lm_head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
        self.num_candidates = config.num_drafted
        self._first_slot = config.block_size - config.num_drafted
        self.known = config.num_known_tokens
        block_device = device_of(self._embed_tokens, target.device)
        self._block = torch.full((1, config.block_size), config.mask_token_id, device=block_device)
        self._positions = torch.arange(target.positions.shape[-1], device=self.device)[None]
        self._num_hidden = 0 if target.mask is None else int((target.mask[0] == 0).sum())
        self._cache = DFlashCache(config=config)
        self._cache.activate_past_recording()
        self._held: torch.Tensor | None = None
        self._context_length = 0
        if draft.confidence_head is not None:
            temperatures = config.confidence_temperatures or [1.0] * config.block_size
            self._temperatures = torch.tensor(temperatures, device=self.device)

    def visible_rows(self, features: torch.Tensor) -> torch.Tensor:
        """The prompt's features `[1, prompt, features]` without the rows that its mask hides."""
        if self._num_hidden == 0:
            return features
        return features[:, self.target.mask[0, : features.shape[1]].bool().to(features.device)]

    def propose(
        self, sequence: DecodedSequence, features: torch.Tensor, n: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Drafts `n` candidates into the sequence's buffer.

        Args:
            sequence: its last committed token is the anchor, which the target has not run yet.
            features: `[1, new tokens, features]`, the target's hidden states of the tokens verified last.
            n: number of candidates wanted, at most `num_candidates`; the block keeps its full size.

        Returns:
            The probabilities `[1, n, vocab]` float32 that they were drawn from, or `None` when greedy, and their raw
            confidence logits `[n]` float32, or `None` without a confidence head.
        """
        draft, section = self.draft, self._stopwatch.section
        output = self._run_block(sequence, features)
        slots = slice(self._first_slot, self._first_slot + n)
        with section("draft", self.device):
            hidden = output.last_hidden_state[:, slots].to(device_of(self._lm_head, self.target.device))
            logits = draft.compute_logits(hidden, self._lm_head)[0]

        # Slot by slot where a slot needs the tokens before it.
        step = n if sequence.prefix_free and not draft.drafts_in_sequence else 1
        probs, position = [], sequence.length
        for rows, states in zip(logits.split(step), hidden[0].split(step), strict=True):
            if draft.drafts_in_sequence:
                with section("draft", self.device):
                    rows = draft.slot_logits(rows, sequence.tokens[:, position - 1].to(self.device), states)
            with section("choose", self.device):
                tokens, drawn_from = sequence.choose(sequence.process(rows, position))
                sequence.tokens[:, position : position + step] = tokens
                probs.append(drawn_from)
            position += step

        confidence = None
        if draft.confidence_head is not None:
            with section("draft", self.device):
                previous = sequence.tokens[0, sequence.length - 1 : sequence.length - 1 + n].to(self.device)
                confidence = draft.confidence_logits(output.confidence_states[0, slots], previous)
        return torch.cat(probs)[None] if sequence.do_sample else None, confidence

    def _run_block(self, sequence: DecodedSequence, features: torch.Tensor) -> ModelOutput:
        start = sequence.length - self.known - self._num_hidden
        if self._held is not None:
            features = torch.cat([self._held, features], dim=1)
        new = start - self._context_length
        context, self._held = features[:, :new], features[:, new:]
        self._block[:, : self.known] = sequence.tokens[:, sequence.length - self.known : sequence.length]
        end = start + self._block.shape[1]

        self._cache.set_previous_accepted_tokens(new)
        with self._stopwatch.section("draft", self.device):
            embeds = self.draft.embed_block(self._block, self._embed_tokens)
            output = self.draft(
                noise_embeds=embeds.to(self.device),
                context_hidden_states=context,
                position_ids=self._positions[:, self._context_length : end],
                cache=self._cache,
            )
        with self._stopwatch.section("rollback", self.device):
            # The block's rows are noise and leave the cache; the context's stay and are never computed again.
            self._cache.crop(-self._block.shape[1])
        self._context_length = start
        return output

    def calibrate(self, logits: torch.Tensor) -> list[float]:
        """Calibrated probabilities that a candidate is accepted if those before it are. Waits for the device."""
        return (logits / self._temperatures[: len(logits)]).sigmoid().tolist()
