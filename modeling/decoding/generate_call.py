"""A decoding loop as `generate` calls it: what it keeps to itself, what cannot be honoured, a batch row by row."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module
from transformers.utils import ModelOutput

from ..target.cache_rollback import holds_tokens

UNSUPPORTED_MODES = {
    GenerationMode.ASSISTED_GENERATION: "`prompt_lookup_num_tokens`, `use_mtp` or `assistant_early_exit`",
    GenerationMode.BEAM_SEARCH: "`num_beams`",
    GenerationMode.BEAM_SAMPLE: "`num_beams`",
    GenerationMode.GROUP_BEAM_SEARCH: "`num_beam_groups`",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "`constraints` or `force_words_ids`",
    GenerationMode.CONTRASTIVE_SEARCH: "`penalty_alpha`",
    GenerationMode.DOLA_GENERATION: "`dola_layers`",
}
# They count their calls, and a loop that looks ahead makes other calls than one a token.
COUNTING_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "`guidance_scale`",
    SynthIDTextWatermarkLogitsProcessor: "a SynthID `watermarking_config`",
}
IGNORED_SETTINGS = (
    "assistant_ensemble_weight",
    "compile_config",
    "output_attentions",
    "output_hidden_states",
    "prefill_chunk_size",
    "speculation_type",
)
# Of assisted decoding, with the defaults that `generate` fills in, whether it assists or not.
ASSISTED_SETTINGS = {
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "target_lookbehind": 10,
}
# Model inputs with a column for each token of the prompt.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
TOKEN_INPUTS = ("position_ids", *TOKEN_TYPES)


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
            `commit` (stops, streaming), `rollback` (caches), `features` (concatenation). Device time on CUDA,
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


@dataclass
class BatchDecodeOutput(ModelOutput):
    """The same for a batch.

    Args:
        sequences: `[batch, prompt + longest answer]` int64, shorter answers filled up with the pad token.
        rows: the output of each row, with statistics and a cache of its own and without the filling.
    """

    sequences: torch.LongTensor | None = None
    rows: list[BlockDecodeOutput] | None = None


@dataclass
class Row:
    """One sequence of a call.

    Attributes:
        input_ids: `[1, prompt]`, padding included.
        padding: how many tokens on the left are padding.
        number, batch_size: which row of how many.
        inputs: the model's further inputs without that padding, a cache of the row's own among them.
    """

    input_ids: torch.LongTensor
    padding: int
    number: int
    batch_size: int
    inputs: dict


def is_prepared(
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList | None,
    generation_config: GenerationConfig | None,
    model_kwargs: dict,
) -> bool:
    """Whether `generate` has prepared these arguments, rather than that a user called the loop directly."""
    prepared = (logits_processor, stopping_criteria, generation_config)
    return all(argument is not None for argument in prepared) and bool({"cache", "use_cache"} & model_kwargs.keys())


def call_generate(
    decode: Callable,
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **kwargs,
) -> ModelOutput | torch.LongTensor:
    """Calls `generate` with `decode` as its loop. Streamer and tokenizer, which `generate` would not hand on, arrive:
    the one as an argument of `decode`, the other in the criterion of `stop_strings`.

    Raises:
        ValueError: with `token_healing`.
    """
    if _setting("token_healing", model, kwargs):
        raise ValueError(
            "`generate` cannot honour `token_healing` here, since it keeps no tokenizer beside a loop of ours: call "
            "`input_ids = model.heal_tokens(input_ids, tokenizer)` first and leave the setting out."
        )
    strings = _setting("stop_strings", model, kwargs)
    if strings is not None and tokenizer is not None:
        criteria = [*(stopping_criteria or ()), StopStringCriteria(tokenizer, strings)]
        stopping_criteria, kwargs["stop_strings"] = StoppingCriteriaList(criteria), None
    # The class's own: a target whose repository ships a `custom_generate` has that in its place.
    return type(model).generate(
        model,
        inputs,
        streamer=streamer,
        stopping_criteria=stopping_criteria,
        custom_generate=partial(decode, streamer=streamer),
        **kwargs,
    )


def _setting(name: str, model: PreTrainedModel, kwargs: dict) -> object:
    """What `generate` will take: the call's own, else that of the config passed, else the model's."""
    if name in kwargs:
        return kwargs[name]
    passed, own = kwargs.get("generation_config"), model.generation_config
    value = None if passed is None else getattr(passed, name)
    return getattr(own, name) if value is None else value


def find_streamer(name: str, model: PreTrainedModel, streamer: BaseStreamer | None) -> BaseStreamer | None:
    """The loop's own `streamer`, else that of the nearest `generate` call of the model that runs the loop, if any.

    `generate` does not hand it to a `custom_generate` function, but puts the prompt into it: nobody would ever put the
    answer there, or end it. The loop may be wrapped into any functions, so the call is looked for all the way up.

    Raises:
        ValueError: if that call has an `assistant_model`, which `generate` keeps to itself as well, or would keep the
            ranks of a distributed run in step.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe().f_back
    while frame is not None and not (frame.f_code is code and frame.f_locals["self"] is model):
        frame = frame.f_back
    if frame is None:
        return streamer
    if frame.f_locals["assistant_model"] is not None:
        raise ValueError(
            f"{name} cannot use an assistant: leave out `assistant_model`; block_decode takes its draft as `draft`."
        )
    synced = frame.f_locals["synced_gpus"]
    if synced is None:
        synced = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    if synced and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ValueError(
            f"{name} cannot honour `synced_gpus`, set or implied by weights that ranks share (ZeRO-3, FSDP): a rank "
            "whose answer takes fewer forwards would leave the others waiting. Decode with plain `generate`, or with "
            "whole weights on each rank and `synced_gpus=False`."
        )
    return frame.f_locals["streamer"] if streamer is None else streamer


def check_call(
    name: str,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    inputs: dict,
) -> None:
    """Raises a `ValueError` for what the loops cannot do; warns of settings without effect."""
    mode = config.get_generation_mode()
    if mode in UNSUPPORTED_MODES:
        raise ValueError(
            f"{name} decodes greedily or by sampling, and the settings ask for {mode.value}: leave out "
            f"{UNSUPPORTED_MODES[mode]}."
        )
    for processor in logits_processor:
        if type(processor) in COUNTING_PROCESSORS:
            raise ValueError(
                f"{name} cannot honour {COUNTING_PROCESSORS[type(processor)]}: {type(processor).__name__} keeps a "
                "state from token to token. Leave it out, or decode without a draft."
            )
    if inputs.get("inputs_embeds") is not None:
        raise ValueError(f"{name} reads tokens: pass `input_ids` instead of `inputs_embeds`.")
    if inputs.get("cache") is None:
        if config.use_cache:
            raise ValueError(
                f"{name} needs a transformers `Cache`, and this model keeps its state in another form: decode it with "
                "plain `generate`."
            )
        raise ValueError(f"{name} needs a cache: set `use_cache=True`.")
    if holds_tokens(inputs["cache"]):
        raise ValueError(f"{name} starts from an empty `cache`; pass the whole prompt.")
    if len(input_ids) > 1:
        _check_batch(name, stopping_criteria, config, streamer, inputs)
    ignored = [setting for setting in IGNORED_SETTINGS if getattr(config, setting)]
    assisted = [
        setting for setting, default in ASSISTED_SETTINGS.items() if getattr(config, setting) not in (None, default)
    ]
    if ignored:
        warnings.warn(f"{name} ignores the generation settings {ignored}.", stacklevel=3)
    if assisted:
        warnings.warn(
            f"{name} ignores the settings of assisted decoding {assisted}: a draft proposes as many tokens as its "
            "`block_size` says. A `confidence_schedule` verifies fewer; else use a draft of smaller `block_size`.",
            stacklevel=3,
        )


def _check_batch(
    name: str,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    inputs: dict,
) -> None:
    if streamer is not None:
        raise ValueError(f"{name} streams one sequence: leave out `streamer`, or pass a single prompt.")
    can_differ = any(not isinstance(criterion, MaxLengthCriteria) for criterion in stopping_criteria)
    if can_differ and _pad_token(config) is None:
        raise ValueError(f"{name} fills up the shorter answers of a batch: set `pad_token_id`.")
    known = {"attention_mask", "cache", *TOKEN_INPUTS}
    others = sorted(key for key, value in inputs.items() if isinstance(value, torch.Tensor) and key not in known)
    # Where the model can encode pictures by themselves, `generate` has done so, and keeps their features by kind.
    encoded = inputs.get("mm_encoder_outputs") or {}
    others += [f"{kind}s" for kind, features in encoded.items() if features is not None]
    if others:
        raise ValueError(
            f"{name} cannot tell which part of {others} belongs to which prompt: pass one prompt at a time."
        )


def _pad_token(config: GenerationConfig) -> int | None:
    eos = config.eos_token_id
    first_eos = eos[0] if isinstance(eos, list) and eos else eos
    return config.pad_token_id if config.pad_token_id is not None else first_eos


def split_rows(input_ids: torch.LongTensor, model_kwargs: dict) -> Iterator[Row]:
    """The rows of a batch `[B, L]`, one after another, each as if its prompt came alone.

    Raises:
        ValueError: if a row is nothing but padding.
    """
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs["cache"]
    for number in range(len(input_ids)):
        inputs, padding = dict(model_kwargs), 0
        if mask is not None:
            if not bool(mask[number].any()):
                raise ValueError(f"Row {number} of `attention_mask` is all 0: a prompt needs at least one token.")
            padding = int(mask[number].ne(0).int().argmax())
            rest = mask[number : number + 1, padding:]
            # `generate` keeps a mask of ones for FlashAttention, which finds the end of a static cache's tokens by it.
            is_needed = isinstance(cache, StaticCache) or not bool(rest.all())
            inputs["attention_mask"] = rest if is_needed else None
        for name in TOKEN_INPUTS:
            if (values := inputs.get(name)) is not None:
                # Positions of one row hold for all; those of some models have further dimensions in front.
                inputs[name] = values.narrow(-2, min(number, values.shape[-2] - 1), 1)[..., padding:]
        if len(input_ids) > 1:
            inputs["cache"] = copy.deepcopy(cache)
        yield Row(input_ids[number : number + 1], padding, number, len(input_ids), inputs)


def join_rows(
    outputs: list[BlockDecodeOutput], config: GenerationConfig
) -> BlockDecodeOutput | BatchDecodeOutput | torch.LongTensor:
    """What a call returns for the outputs of its rows."""
    if len(outputs) == 1:
        return outputs[0] if config.return_dict_in_generate else outputs[0].sequences
    longest, pad = max(output.sequences.shape[1] for output in outputs), _pad_token(config)
    filled = [
        nn.functional.pad(output.sequences, (0, longest - output.sequences.shape[1]), value=pad) for output in outputs
    ]
    sequences = torch.cat(filled)
    return BatchDecodeOutput(sequences, outputs) if config.return_dict_in_generate else sequences
