"""Plain decoding, one token a forward: the honest baseline of a speed-up, beside `generate` itself."""

from collections.abc import Iterable

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .decoding_state import BlockDecodeOutput, CachedTarget, DecodedSequence, Rules, Stopwatch
from .generate_call import DecodeOutput, Loop, enter


def plain_decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    **model_kwargs,
) -> DecodeOutput:
    """The loop of [`block_decode`] without a draft. Called in the same ways; its output counts no rounds."""
    rules = Rules(logits_processor, stopping_criteria, generation_config, streamer)
    return enter(Loop("plain_decode", _decode_rows), model, input_ids, rules, model_kwargs)


def _decode_rows(model: PreTrainedModel, sequences: Iterable[DecodedSequence]) -> list[BlockDecodeOutput]:
    return [_decode_row(model, sequence) for sequence in sequences]


def _decode_row(model: PreTrainedModel, sequence: DecodedSequence) -> BlockDecodeOutput:
    stopwatch = Stopwatch(sequence.returns_details)
    with torch.inference_mode():
        target = CachedTarget(model, model, sequence.max_length, stopwatch, sequence.row)
        sequence.commit_next(target.prefill())
        while not sequence.finished:
            sequence.commit_next(target.forward(sequence.tokens[:, : sequence.length], sequence.length - 1))
    output = sequence.finish()
    output.accepted_lengths, output.verified_lengths = [], []
    output.seconds, output.cache = stopwatch.seconds(), target.cache
    return output
