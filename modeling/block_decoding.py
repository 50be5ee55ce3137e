"""Block decoding: a draft proposes a block of tokens, one target forward verifies it; the output stays the target's.

One loop serves every block-parallel draft, greedy and sampling. Run it through `generate`, which prepares processors,
stopping criteria and cache:

```python
output = target.generate(**inputs, custom_generate=block_decode, draft=draft, max_new_tokens=256)
```

Greedy decoding commits the target's own choices, so it equals plain greedy decoding up to numerical ties. Sampling
follows Leviathan et al. 2023 (https://huggingface.co/papers/2211.17192, algorithm 1), so tokens keep the target's
distribution. The target's cache needs nothing but `activate_past_recording` and `crop`.

A draft with a Markov head chooses its tokens one after the other, each biased by the one before. One with a confidence
head says how likely each token is to be accepted; a `confidence_schedule` then cuts the block before verification.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DFlashCache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..configuration.configuration_draft import ANCHOR_FIRST, DraftConfig
from .pairing import check_pair
from .plain_decoding import BlockDecodeOutput, CachedTarget, Stopwatch, TokenSequence, check_call, sample
from .target_features import capture_features

# Drafts with the target that they were last found to fit.
_checked_pairs: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref] = weakref.WeakKeyDictionary()


def match(candidates: torch.LongTensor, target_tokens: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy verification: keeps candidates as long as each is the target's own choice.

    Args:
        candidates: `[batch, n]` drafted tokens.
        target_tokens: `[batch, n + 1]`, the target's choice at each candidate's position and after the last one.

    Returns:
        `accepted` `[batch]`, how many leading candidates stay, and `next_token` `[batch]`, the choice after them.
    """
    accepted = (candidates == target_tokens[:, :-1]).cumprod(dim=-1).sum(dim=-1)
    return accepted, target_tokens.gather(1, accepted[:, None]).squeeze(1)


def verify(
    candidates: torch.LongTensor, draft_probs: torch.Tensor, target_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1), for any draft that knows its own distribution.

    A candidate x stays with probability min(1, p(x) / q(x)). The first one that does not is replaced by a draw from
    max(p - q, 0), normalised; when all stay, a bonus token is drawn from the last p.

    Args:
        candidates: `[batch, n]`, where row k was drawn from `draft_probs[:, k]`.
        draft_probs: `[batch, n, vocab]` float32, q.
        target_probs: `[batch, n + 1, vocab]` float32, p.

    Returns:
        `accepted` `[batch]`, how many leading candidates stay, and `next_token` `[batch]`.
    """
    n = candidates.shape[1]
    p = target_probs[:, :n].gather(-1, candidates[..., None]).squeeze(-1)
    q = draft_probs.gather(-1, candidates[..., None]).squeeze(-1)
    # Strict and without a division: a token the target excludes (p = 0) never passes.
    accepted = (torch.rand_like(p) * q < p).cumprod(dim=-1).sum(dim=-1)

    rows = torch.arange(len(candidates), device=candidates.device)
    last = target_probs[rows, accepted]
    if n > 0:
        rejected = (accepted < n)[:, None]
        residual = (last - draft_probs[rows, accepted.clamp(max=n - 1)] * rejected).clamp(min=0)
        # p and q equal up to rounding leave no residual; a rejection has probability zero there.
        last = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, last)
    return accepted, sample(last)


def known_tokens(config: DraftConfig) -> int:
    """Clean tokens at the start of a block: the anchor, and the one before it for a draft of variable prefixes."""
    variable_prefix = (config.objective or {}).get("loss_type") == "variable_prefix"
    return min(2, config.block_size - 1) if variable_prefix else 1


def num_candidates(config: DraftConfig) -> int:
    """How many tokens a draft proposes a round: slots predict their own token or, anchor first, the one after it."""
    return config.block_size - known_tokens(config) + (config.slot_layout == ANCHOR_FIRST)


class Proposal(NamedTuple):
    """What a draft says of the `n` candidates that it wrote into the sequence's buffer.

    Attributes:
        probs: `[1, n, vocab]` float32, the distributions they were drawn from; `None` when greedy.
        confidence_logits: `[n]` float32, raw; `None` without a confidence head.
    """

    probs: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None


class _Drafter:
    """The draft with its cache: turns newly verified features into the next block of candidates.

    `known` tokens of a block are clean and the rest masks. Where they are two (the draft never saw a block with one),
    the context ends one position earlier, and the newest feature is held back until the next round. The prompt's
    padding never becomes context, so the draft counts real tokens only.
    """

    def __init__(self, draft: PreTrainedModel, target: CachedTarget, stopwatch: Stopwatch):
        config = draft.config
        self.draft, self.target, self._stopwatch = draft, target, stopwatch
        self.known, self.num_candidates = known_tokens(config), num_candidates(config)
        self._first_slot = config.block_size - self.num_candidates
        self._block = torch.full((1, config.block_size), config.mask_token_id, device=target.model.device)
        self._positions = torch.arange(target.positions.shape[-1], device=draft.device)[None]
        self._padding = 0 if target.mask is None else int((target.mask[0] == 0).sum())
        self._cache = DFlashCache(config=config)
        self._cache.activate_past_recording()
        self._held: torch.Tensor | None = None
        self._context_length = 0
        if draft.confidence_head is not None:
            temperatures = config.confidence_temperatures or [1.0] * config.block_size
            self._temperatures = torch.tensor(temperatures, device=draft.device)

    def read_prompt(self, features: torch.Tensor) -> torch.Tensor:
        """Features `[1, prompt, features]` without the rows of padding."""
        if self._padding == 0:
            return features
        return features[:, self.target.mask[0, : features.shape[1]].bool().to(features.device)]

    def propose(self, sequence: TokenSequence, features: torch.Tensor, n: int) -> Proposal:
        """Drafts `n` candidates into the sequence's buffer.

        Args:
            sequence: its last committed token is the anchor, which the target has not run yet.
            features: `[1, new tokens, features]`, the target's hidden states of the tokens verified last.
            n: number of candidates wanted, at most `num_candidates`; the block keeps its full size.
        """
        draft, model = self.draft, self.target.model
        with self._stopwatch.lap("draft", draft.device):
            output = self._run_block(sequence, features)
            slots = slice(self._first_slot, self._first_slot + n)
            hidden = output.last_hidden_state[:, slots].to(model.device)
            logits = draft.compute_logits(hidden, model.get_output_embeddings())[0]

            # Slot by slot where a slot needs the tokens before it.
            step = n if sequence.prefix_free and draft.markov_head is None else 1
            processed, previous = [], []
            for k in range(0, n, step):
                position = sequence.length + k
                rows = logits[k : k + step]
                if draft.markov_head is not None:
                    token = sequence.tokens[:, position - 1].to(draft.device)
                    transition, embedding = draft.markov_head(token)
                    rows = rows + transition.to(rows)
                    previous.append(embedding)
                processed.append(sequence.process(rows, position))
                sequence.tokens[:, position : position + step] = sequence.choose(processed[-1])

            confidence = None
            if draft.confidence_head is not None:
                confidence = draft.confidence_logits(output.confidence_states[0, slots], torch.cat(previous))
        return Proposal(torch.cat(processed)[None] if sequence.do_sample else None, confidence)

    def _run_block(self, sequence: TokenSequence, features: torch.Tensor) -> ModelOutput:
        draft, embed_tokens = self.draft, self.target.model.get_input_embeddings()
        start = sequence.length - self.known - self._padding
        if self._held is not None:
            features = torch.cat([self._held, features], dim=1)
        new = start - self._context_length
        context, self._held = features[:, :new], features[:, new:]
        self._block[:, : self.known] = sequence.tokens[:, sequence.length - self.known : sequence.length]
        end = start + self._block.shape[1]

        embeds = draft.embed_block(self._block, embed_tokens)
        self._cache.set_previous_accepted_tokens(new)
        output = draft(
            noise_embeds=embeds.to(draft.device),
            context_hidden_states=context,
            position_ids=self._positions[:, self._context_length : end],
            cache=self._cache,
        )
        # The block's rows are noise and leave the cache; the context's stay and are never computed again.
        self._cache.crop(-self._block.shape[1])
        self._context_length = start
        return output

    def confidences(self, logits: torch.Tensor) -> list[float]:
        """Calibrated probabilities that a candidate is accepted if those before it are. Waits for the device."""
        return (logits / self._temperatures[: len(logits)]).sigmoid().tolist()


def _check_pair_once(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    checked = _checked_pairs.get(draft)
    if checked is None or checked() is not target:
        check_pair(target, draft)
        _checked_pairs[draft] = weakref.ref(target)


def block_decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    draft: PreTrainedModel | None = None,
    confidence_schedule: Callable[[list[float]], int] | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs,
) -> BlockDecodeOutput | torch.LongTensor:
    """Decodes with a block-parallel draft; the tokens are those of the target alone.

    Meant for `target.generate(..., custom_generate=block_decode, draft=draft)`. A direct call, recognised by its lack
    of `stopping_criteria`, goes through `generate` as well and takes the same settings. To stream, call directly:
    `generate` does not hand its streamer to a `custom_generate` function.

    Args:
        model: the target, any transformers causal LM whose cache can be cropped.
        input_ids: `[1, prompt]` int64.
        logits_processor: the caller's processors; the draft's distribution passes them too, each slot with its prefix.
        stopping_criteria: checked after every token, so that an answer ends where plain decoding would end it.
        generation_config: greedy or sampling (`do_sample`), lengths, stop tokens, `return_dict_in_generate`.
        draft: the block-parallel draft trained for this target; it may lie on another device.
        confidence_schedule: how many of a round's candidates are worth verifying, given their calibrated confidences;
            `None` for all. Candidate k may be decided by the first k + 1 confidences only, or sampling would favour
            what the later ones favour. See [`ConfidenceThreshold`] and [`CostTable`].
        streamer: receives the tokens of each round.
        model_kwargs: the target's inputs as `generate` prepares them, with an empty `cache`.

    Returns:
        Sequences `[1, prompt + new tokens]`, or a [`BlockDecodeOutput`] with `return_dict_in_generate`.

    Raises:
        ValueError: without a draft, with more than one sequence, with a cache that is absent, filled or cannot be
            rolled back, with a draft that belongs to another target (see [`check_pair`]), or with a
            `confidence_schedule` for a draft without a confidence head.
    """
    if draft is None:
        raise ValueError("block_decode needs `draft`: pass it to `generate` beside `custom_generate`.")
    if stopping_criteria is None:
        return model.generate(
            input_ids,
            logits_processor=logits_processor,
            generation_config=generation_config,
            streamer=streamer,
            custom_generate=partial(block_decode, streamer=streamer),
            draft=draft,
            confidence_schedule=confidence_schedule,
            **model_kwargs,
        )
    check_call("block_decode", model, input_ids, generation_config, model_kwargs)
    _check_pair_once(model, draft)
    if confidence_schedule is not None and draft.confidence_head is None:
        raise ValueError(
            "`confidence_schedule` cuts blocks where the draft's confidence is low, and this draft has no confidence "
            "head: leave the schedule out, or train a draft with one."
        )

    stopwatch, accepted_lengths, verified_lengths, confidence_logits = Stopwatch(), [], [], []
    sequence = TokenSequence(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    config = draft.config
    with torch.inference_mode(), capture_features(model, config.target_layer_ids, config.capture_point) as capture:
        room = sequence.max_length + config.block_size
        target = CachedTarget(model, capture.run, room, stopwatch, model_kwargs)
        drafter = _Drafter(draft, target, stopwatch)
        target.cache.activate_past_recording()
        logits = target.prefill(input_ids, model_kwargs)
        # Known only now: some cache layers learn what they hold in their first forward.
        if not target.cache.is_croppable:
            stuck = sorted({type(layer).__name__ for layer in target.cache.layers if not layer.is_croppable})
            raise ValueError(
                f"block_decode takes back rejected tokens, but layers {stuck} of the target's cache keep a state "
                "without a record of the past. Decode this target without a draft, or give it cache layers that "
                "support `activate_past_recording` and `crop`."
            )
        target.cache.crop(0)
        features = drafter.read_prompt(capture.features(draft.device))
        sequence.commit_next(logits)

        while not sequence.finished:
            anchor = sequence.length - 1
            n = min(drafter.num_candidates, sequence.budget - 1)
            proposal = drafter.propose(sequence, features, n) if n > 0 else Proposal()
            confidence_logits.append(proposal.confidence_logits)
            if confidence_schedule is not None and n > 0:
                n = confidence_schedule(drafter.confidences(proposal.confidence_logits))
            block = sequence.tokens[:, anchor : anchor + 1 + n]
            processed = sequence.process(target.forward(block, anchor), sequence.length)
            candidates = block[:, 1:]
            if proposal.probs is None:
                accepted, next_token = match(candidates, sequence.choose(processed)[None])
            else:
                accepted, next_token = verify(candidates, proposal.probs[:, :n], processed[None])
            # The round's one synchronisation with the device, but for a schedule's.
            *drafted, bonus, count = torch.cat([candidates[0], next_token, accepted]).tolist()
            sequence.tokens[:, sequence.length + count] = bonus
            kept = sequence.commit([*drafted[:count], bonus])
            accepted_lengths.append(kept)
            verified_lengths.append(1 + n)
            target.cache.crop(kept - 1 - n)
            features = capture.features(draft.device)[:, :kept]

    sequences = sequence.finish()
    if not generation_config.return_dict_in_generate:
        return sequences
    if draft.confidence_head is None:
        confidence_logits = None
    else:
        confidence_logits = [[] if logits is None else logits.tolist() for logits in confidence_logits]
    return BlockDecodeOutput(
        sequences, accepted_lengths, verified_lengths, confidence_logits, stopwatch.seconds(), target.cache
    )
