"""Block decoding: a draft proposes a block of tokens, one target forward verifies it; the output stays the target's.

One loop serves every block-parallel draft, greedy and sampling. Run it through `generate`, which prepares processors,
stopping criteria and cache:

```python
output = target.generate(**inputs, custom_generate=block_decode, draft=draft, max_new_tokens=256)
```

Greedy decoding commits the target's own choices, so it equals plain greedy decoding up to numerical ties. Sampling
follows Leviathan et al. 2023 (https://huggingface.co/papers/2211.17192, algorithm 1), so tokens keep the target's
distribution. The target's cache needs nothing but `activate_past_recording` and `crop`.
"""

from functools import partial

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DFlashCache
from transformers.generation.streamers import BaseStreamer

from .pairing import check_pair
from .plain_decoding import BlockDecodeOutput, CachedTarget, Stopwatch, TokenSequence, check_call, sample
from .target_features import capture_features


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


class _Drafter:
    """The draft with its cache: turns newly verified features into the next block of candidates.

    `known` tokens of a block are clean and the rest masks: the anchor alone, or two for a draft trained on variable
    prefixes, which never saw a block with one. The context then ends one position earlier, and the newest feature is
    held back until the next round.
    """

    def __init__(self, draft: PreTrainedModel, target: CachedTarget, stopwatch: Stopwatch):
        config = draft.config
        self.draft, self.target, self._stopwatch = draft, target, stopwatch
        variable_prefix = (config.objective or {}).get("loss_type") == "variable_prefix"
        self.known = min(2, config.block_size - 1) if variable_prefix else 1
        self.num_candidates = config.block_size - self.known
        self._block = torch.full((1, config.block_size), config.mask_token_id, device=target.model.device)
        self._cache = DFlashCache(config=config)
        self._cache.activate_past_recording()
        self._held: torch.Tensor | None = None
        self._context_length = 0

    def propose(self, sequence: TokenSequence, features: torch.Tensor, n: int) -> torch.Tensor | None:
        """Drafts `n` candidates into the sequence's buffer.

        Args:
            sequence: its last committed token is the anchor, which the target has not run yet.
            features: `[1, new tokens, features]`, the target's hidden states of the tokens verified last.
            n: number of candidates wanted, at most `num_candidates`; the block keeps its full size.

        Returns:
            With sampling the distributions drawn from, `[1, n, vocab]` float32; `None` when greedy.
        """
        draft, model, start = self.draft, self.target.model, sequence.length - self.known
        if self._held is not None:
            features = torch.cat([self._held, features], dim=1)
        new = start - self._context_length
        context, self._held = features[:, :new], features[:, new:]
        self._block[:, : self.known] = sequence.tokens[:, start : sequence.length]
        end = start + self._block.shape[1]

        with self._stopwatch.lap("draft", draft.device):
            embeds = draft.embed_block(self._block, model.get_input_embeddings())
            self._cache.set_previous_accepted_tokens(new)
            mask = self.target.mask
            hidden = draft(
                noise_embeds=embeds.to(draft.device),
                context_hidden_states=context,
                attention_mask=None if mask is None else mask[:, :end].to(draft.device),
                position_ids=self.target.positions[..., self._context_length : end].to(draft.device),
                cache=self._cache,
            ).last_hidden_state[:, self.known : self.known + n]
            # The block's rows are noise and leave the cache; the context's stay and are never computed again.
            self._cache.crop(-self._block.shape[1])
            self._context_length = start
            logits = draft.compute_logits(hidden.to(model.device), model.get_output_embeddings())[0]

        # Slot by slot where a slot needs the tokens before it.
        step = n if sequence.prefix_free else 1
        processed = []
        for k in range(0, n, step):
            position = sequence.length + k
            processed.append(sequence.process(logits[k : k + step], position))
            sequence.tokens[:, position : position + step] = sequence.choose(processed[-1])
        return torch.cat(processed)[None] if sequence.do_sample else None


def block_decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    draft: PreTrainedModel | None = None,
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
        streamer: receives the tokens of each round.
        model_kwargs: the target's inputs as `generate` prepares them, with an empty `cache`.

    Returns:
        Sequences `[1, prompt + new tokens]`, or a [`BlockDecodeOutput`] with `return_dict_in_generate`.

    Raises:
        ValueError: without a draft, with more than one sequence, with a cache that is absent, filled or cannot be
            rolled back, or with a draft that belongs to another target (see [`check_pair`]).
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
            **model_kwargs,
        )
    check_call("block_decode", model, input_ids, generation_config, model_kwargs)
    check_pair(model, draft)

    stopwatch, accepted_lengths = Stopwatch(), []
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
        features = capture.features(draft.device)
        sequence.commit_next(logits)

        while not sequence.finished:
            anchor = sequence.length - 1
            n = min(drafter.num_candidates, sequence.budget - 1)
            draft_probs = drafter.propose(sequence, features, n) if n > 0 else None
            block = sequence.tokens[:, anchor : anchor + 1 + n]
            processed = sequence.process(target.forward(block, anchor), sequence.length)
            candidates = block[:, 1:]
            if draft_probs is None:
                accepted, next_token = match(candidates, sequence.choose(processed)[None])
            else:
                accepted, next_token = verify(candidates, draft_probs, processed[None])
            # The round's one synchronisation with the device.
            *drafted, bonus, count = torch.cat([candidates[0], next_token, accepted]).tolist()
            sequence.tokens[:, sequence.length + count] = bonus
            kept = sequence.commit([*drafted[:count], bonus])
            accepted_lengths.append(kept)
            target.cache.crop(kept - 1 - n)
            features = capture.features(draft.device)[:, :kept]

    return sequence.result(accepted_lengths, stopwatch, target.cache, generation_config.return_dict_in_generate)
