"""The two ways into a decoding loop, which [`enter`] tells apart, and what both of them do around it.

- `target.generate(..., custom_generate=block_decode, draft=draft)`: `generate` prepares its arguments and calls the
  loop's function with them, which calls [`run`].
- `block_decode(target, input_ids, draft=draft, ...)`: a user calls the loop's function, with the arguments of
  `generate`. That goes through `generate` as well, which prepares them and calls [`run`].
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module
from transformers.utils import ModelOutput

from .decoding_state import TOKEN_TYPES, BlockDecodeOutput, DecodedSequence, Row, Rules
from .transformers_internals import (
    encoded_kinds,
    find_kept_arguments,
    holds_tokens,
    is_prepared,
    other_mode,
    settings_without_effect,
)

# They count their calls, and a loop that looks ahead makes other calls than one a token.
COUNTING_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "`guidance_scale`",
    SynthIDTextWatermarkLogitsProcessor: "a SynthID `watermarking_config`",
}
# Model inputs with a column for each token of the prompt.
TOKEN_INPUTS = ("position_ids", *TOKEN_TYPES)


@dataclass
class BatchDecodeOutput(ModelOutput):
    """What the decoding loops return under `return_dict_in_generate` for a batch.

    Args:
        sequences: `[batch, prompt + longest answer]` int64, shorter answers filled up with the pad token.
        rows: the output of each row, with statistics and a cache of its own and without the filling.
    """

    sequences: torch.LongTensor | None = None
    rows: list[BlockDecodeOutput] | None = None


DecodeOutput = BlockDecodeOutput | BatchDecodeOutput | torch.LongTensor


class Loop(NamedTuple):
    """A decoding loop: the name of its function, and what decodes the rows of a call, given the target."""

    name: str
    decode_rows: Callable[[PreTrainedModel, Iterable[DecodedSequence]], list[BlockDecodeOutput]]


def enter(
    loop: Loop, model: PreTrainedModel, input_ids: torch.Tensor | None, rules: Rules, kwargs: dict
) -> DecodeOutput:
    """Runs a loop whose function `generate` called, with prepared arguments, or a user, with those of `generate`."""
    # What `torch.compile(model)` returns wraps the model, and has no `generate` of its own.
    model = model._modules.get("_orig_mod", model)
    if not is_prepared(rules.generation_config):
        return _call_generate(loop, model, input_ids, **rules._asdict(), **kwargs)
    kept = find_kept_arguments(model)
    _check_kept_arguments(loop.name, model, kept)
    streamer = kept.get("streamer") if rules.streamer is None else rules.streamer
    return run(loop, streamer, model, input_ids, *rules[:-1], **kwargs)


def _call_generate(
    loop: Loop, model: PreTrainedModel, inputs, streamer=None, tokenizer=None, stopping_criteria=None, **kwargs
) -> DecodeOutput:
    """Calls `generate` with [`run`] as its loop. Streamer and tokenizer, which `generate` would not pass on, arrive:
    the one as an argument of `run`, the other in the criterion of `stop_strings`."""
    if _setting("token_healing", model, kwargs):
        raise ValueError(
            "`generate` cannot honour `token_healing` here, since it keeps no tokenizer beside a loop of ours: call "
            "`input_ids = model.heal_tokens(input_ids, tokenizer)` first and leave the setting out."
        )
    _check_kept_arguments(loop.name, model, kwargs)
    strings = _setting("stop_strings", model, kwargs)
    if strings is not None and tokenizer is not None:
        criteria = [*(stopping_criteria or ()), StopStringCriteria(tokenizer, strings)]
        stopping_criteria, kwargs["stop_strings"] = StoppingCriteriaList(criteria), None
    kwargs |= {"streamer": streamer, "stopping_criteria": stopping_criteria}
    # The class's own: a target whose repository ships a `custom_generate` has that in its place.
    return type(model).generate(model, inputs, custom_generate=partial(run, loop, streamer), **kwargs)


def _setting(name: str, model: PreTrainedModel, kwargs: dict) -> Any:
    """What `generate` will take: the call's own, else that of the config passed, else the model's."""
    if name in kwargs:
        return kwargs[name]
    passed, own = kwargs.get("generation_config"), model.generation_config
    value = None if passed is None else getattr(passed, name)
    return getattr(own, name) if value is None else value


def _check_kept_arguments(name: str, model: PreTrainedModel, arguments: dict) -> None:
    """Refuses what `generate` does not pass on to a loop: an assistant, and ranks that are kept in step."""
    if arguments.get("assistant_model") is not None:
        raise ValueError(
            f"{name} cannot use an assistant: leave out `assistant_model`; block_decode takes its draft as `draft`."
        )
    if (synced_gpus := arguments.get("synced_gpus")) is None:
        synced_gpus = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    if synced_gpus and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ValueError(
            f"{name} cannot honour `synced_gpus`, set or implied by weights that ranks share (ZeRO-3, FSDP): a rank "
            "whose answer takes fewer forwards would leave the others waiting. Decode with plain `generate`, or with "
            "whole weights on each rank and `synced_gpus=False`."
        )


def run(
    loop: Loop, streamer, model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs
) -> DecodeOutput:
    """Runs a loop on arguments that `generate` prepared: refuses what it cannot do, decodes the rows of the batch one
    after another, joins them."""
    rules = Rules(logits_processor, stopping_criteria, generation_config, streamer)
    _check_call(loop.name, input_ids, rules, inputs)
    outputs = loop.decode_rows(model, (DecodedSequence(row, rules) for row in split_rows(input_ids, inputs)))
    if len(outputs) == 1:
        return outputs[0] if generation_config.return_dict_in_generate else outputs[0].sequences
    longest, pad = max(row.sequences.shape[1] for row in outputs), _pad_token(generation_config)
    filled = [nn.functional.pad(row.sequences, (0, longest - row.sequences.shape[1]), value=pad) for row in outputs]
    sequences = torch.cat(filled)
    return BatchDecodeOutput(sequences, outputs) if generation_config.return_dict_in_generate else sequences


def _check_call(name: str, input_ids: torch.LongTensor, rules: Rules, inputs: dict) -> None:
    """Refuses what the loops cannot do; warns of settings without effect."""
    config = rules.generation_config
    if (other := other_mode(config)) is not None:
        mode, settings = other
        raise ValueError(
            f"{name} decodes greedily or by sampling, and the settings ask for {mode}: leave out {settings}."
        )
    for processor in rules.logits_processor:
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
        _check_batch(name, rules, inputs)
    ignored, assisted = settings_without_effect(config)
    if ignored:
        warnings.warn(f"{name} ignores the generation settings {ignored}.", stacklevel=3)
    if assisted:
        warnings.warn(
            f"{name} ignores the settings of assisted decoding {assisted}: a draft proposes as many tokens as its "
            "`block_size` says. A `confidence_schedule` verifies fewer; else use a draft of smaller `block_size`.",
            stacklevel=3,
        )


def _check_batch(name: str, rules: Rules, inputs: dict) -> None:
    if rules.streamer is not None:
        raise ValueError(f"{name} streams one sequence: leave out `streamer`, or pass a single prompt.")
    can_differ = any(not isinstance(criterion, MaxLengthCriteria) for criterion in rules.stopping_criteria)
    if can_differ and _pad_token(rules.generation_config) is None:
        raise ValueError(f"{name} fills up the shorter answers of a batch: set `pad_token_id`.")
    known = {"attention_mask", "cache", *TOKEN_INPUTS}
    others = sorted(key for key, value in inputs.items() if isinstance(value, torch.Tensor) and key not in known)
    if others := others + encoded_kinds(inputs):
        raise ValueError(
            f"{name} cannot tell which part of {others} belongs to which prompt: pass one prompt at a time."
        )


def _pad_token(config: GenerationConfig) -> int | None:
    eos = config.eos_token_id
    first_eos = eos[0] if isinstance(eos, list) and eos else eos
    return config.pad_token_id if config.pad_token_id is not None else first_eos


def split_rows(input_ids: torch.LongTensor, model_kwargs: dict) -> Iterator[Row]:
    """The rows of a batch `[B, L]`, one after another, each as if its prompt came alone. Raises a `ValueError` for one
    that is nothing but padding."""
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
        yield Row(input_ids[number : number + 1], padding, inputs, number, len(input_ids))
