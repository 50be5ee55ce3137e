"""The doctor's checks of target, tokenizer and draft that need no data."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...hub_cards.serving import has_released_layout, masked_slots_are_alike
from ...modeling.deepseek_v41.engine_fit import ENGINES, engine_misfits
from ...modeling.target.mask_tokens import propose_mask_token_ids
from ...modeling.target.pairing import Mismatch, compared_weights
from ...modeling.target.target_features import capture_features, decoder_layers
from ...modeling.target.target_transforms import HEAD_NOT_CALLED, embedding_faults, logit_faults
from .findings import Check, Finding, fault, ok, skipped, warning

MAY_BE_ZERO = ("bias_vl",)  # parameters of two and more dimensions that training may leave at zero
PERHAPS_THE_SAME = (
    "If the function is the same (an adapter that was merged, another commit with the same weights), go by the "
    "measurements on rows; otherwise load the target of the training."
)


def free_mask_tokens(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that can stand for unknown positions, best first; empty where only the data could tell."""
    try:
        return propose_mask_token_ids(tokenizer, len(target.get_input_embeddings().weight))
    except ValueError:
        return []


def stop_tokens(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that end an answer."""
    stops = target.generation_config.eos_token_id if target.generation_config else None
    return {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])} - {None}


def _mismatch(mismatches: Sequence[Mismatch], part: str) -> Finding | None:
    """What `check_pair` has to say of the target, or of its tokenizer."""
    if not (found := [mismatch for mismatch in mismatches if mismatch.part == part]):
        return None
    message, stops = " ".join(mismatch.message for mismatch in found), any(mismatch.breaks for mismatch in found)
    certain = any(mismatch.certain for mismatch in found)
    return fault(message, stops=stops) if certain else warning(message, PERHAPS_THE_SAME)


def _target(mismatches: Sequence[Mismatch], config: PreTrainedConfig, record: dict) -> Finding:
    if (finding := _mismatch(mismatches, "target")) is not None:
        return finding
    if not config.target:
        return warning("the draft does not say what target it was trained for")
    compared = compared_weights(config.target, record)
    weights = "the weights of the training" if compared else "the training's shape; its weights could not be compared"
    return ok(f"{record['architecture']}, {weights}")


def _tokenizer(mismatches: Sequence[Mismatch], config: PreTrainedConfig, record: dict) -> Finding:
    tokens, trained = f"{record['tokenizer_length']} tokens", config.target or {}
    if record["tokenizer_length"] > record["embedding_rows"]:
        return fault(f"{tokens} for {record['embedding_rows']} embedding rows")
    if (finding := _mismatch(mismatches, "tokenizer")) is not None:
        return finding
    if trained.get("tokenizer_sha256") is None:
        return skipped(f"{tokens}; the draft has no record to compare with")
    split = "text is split alike" if trained.get("tokenization_sha256") else "how text was split is not recorded"
    return ok(f"{tokens}, those of the training; {split}")


def _target_layers(config: PreTrainedConfig, target: PreTrainedModel) -> Finding:
    try:
        with capture_features(target, config.target_layer_ids, config.capture_point):
            return ok(f"{config.capture_point} of {config.target_layer_ids}, of {len(decoder_layers(target))} layers")
    except ValueError as error:
        return fault(str(error), stops=True)


def _mask_token(config: PreTrainedConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Finding:
    mask, rows = config.mask_token_id, len(target.get_input_embeddings().weight)
    fix = f"Take the id of the training; for a new draft, one of {free_mask_tokens(target, tokenizer)[:3]}."
    if mask >= rows:
        return fault(f"`mask_token_id` is {mask}, not a row of the target's embedding, 0..{rows - 1}", fix, stops=True)
    roles = {"bos": {tokenizer.bos_token_id}, "eos": stop_tokens(target, tokenizer), "unk": {tokenizer.unk_token_id}}
    if taken := [role for role, ids in roles.items() if mask in ids]:
        return fault(f"{mask} is the {' and '.join(taken)} token, which the draft takes for noise", fix)
    if mask == tokenizer.pad_token_id:
        return warning(f"{mask} is the padding token, which some templates also write", fix)
    return ok(f"{mask}, {tokenizer.decode([mask])!r}" if mask < len(tokenizer) else f"{mask}, a free row")


def _heads(config: PreTrainedConfig, target: PreTrainedModel) -> Finding:
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    if (width := embedding.weight.shape[-1]) != config.hidden_size:
        found = f"the target's embedding is {width} wide, the draft's `hidden_size` is {config.hidden_size}"
        return fault(found, "Load the target of the training, as wide as its draft.", stops=True)
    # A quantised head keeps packed numbers and has no such weight; what is offloaded has no numbers here.
    weight = getattr(head, "weight", None)
    tables = {"embedding": embedding.weight, "head": weight}
    tables = {what: table for what, table in tables.items() if type(table) is nn.Parameter and not table.is_meta}
    for what, table in tables.items():
        if table.is_floating_point() and table.itemsize > 1 and not (torch.isfinite(table).all() and table.any()):
            return fault(f"the target's {what} is NaN, infinite or all zero")
    tied = getattr(target.config, "tie_word_embeddings", False)
    if tied and len(tables) == 2 and weight is not embedding.weight and not _same(weight, embedding.weight):
        found = "the target ties its head to the embedding, but the loaded head has other numbers"
        return fault(found, "Load it with from_pretrained, and call tie_weights() after any change of its embedding.")
    if "head" in tables and len(weight) < config.vocab_size:
        return fault(f"the head has {len(weight)} rows for a vocabulary of {config.vocab_size}")
    size = f"{len(weight)} rows" if "head" in tables else f"{type(head).__name__}, whose numbers are not looked at"
    return ok(f"{'tied, ' if tied else ''}{size}")


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second.to(first))


def _dtype(config: PreTrainedConfig, record: dict, draft: PreTrainedModel) -> Finding:
    trained, now, quantised = config.target or {}, record["dtype"], record["quantization"]
    dtype = str(draft.dtype).removeprefix("torch.")
    formats = f"target and features {now}{f' ({quantised})' if quantised else ''}, draft {dtype}"
    if trained and quantised != (then := trained.get("quantization")):
        found = f"{formats}; quantisation of the target in training: {then or 'none'}"
        return warning(found, "Train or adapt the draft on features of the target as it is served.")
    if (then := trained.get("dtype")) and then != now:
        return warning(f"{formats}; features were {then} in training", f"Load the target with dtype {then}.")
    if dtype == "float16":
        return warning(f"{formats}; float16 overflows at 65,504", "Load the draft in bfloat16 or float32.")
    return ok(formats)


def _visibility(config: PreTrainedConfig) -> Finding:
    if masked_slots_are_alike(config):
        return fault("bidirectional, without positions and without a window: all masked slots predict the same token")
    full = config.to_dict().get("num_full_attention_layers")
    reach = f"{config.sliding_window or 'unlimited'}{f', unlimited in the last {full} layer(s)' if full else ''}"
    return ok(f"{'causal' if config.is_causal else 'bidirectional'} in the block, context window {reach}")


def _training(config: PreTrainedConfig) -> Finding:
    if not (training := config.training):
        return warning("no record of a training", "Rely on the measured checks, or save the draft with the trainer.")
    steps, epochs, rows = training.get("global_step") or 0, training.get("epoch") or 0, training.get("batch_size")
    found = f"{steps} steps{f' of {rows} rows' if rows else ''}, {epochs:.2f} epochs"
    return ok(found) if steps else fault("0 steps: the draft is untrained")


def _weight_values(draft: PreTrainedModel) -> Finding:
    """NaN, infinite, or a whole matrix of zeros: no training leaves them behind."""
    values = dict(draft.named_parameters())
    broken = [name for name, value in values.items() if not torch.isfinite(value).all()]
    matrices = {name: value for name, value in values.items() if value.dim() > 1 and not name.endswith(MAY_BE_ZERO)}
    empty = [name for name, value in matrices.items() if not value.any()]
    problems = {"NaN or infinite": broken, "all zero": empty}
    if found := [f"{what}: {', '.join(names[:3])}" for what, names in problems.items() if names]:
        return fault("; ".join(found))
    count = sum(value.numel() for value in values.values())
    return ok(f"{count:,} parameters, all finite, no matrix of zeros")


def _engine(config: PreTrainedConfig, target: PreTrainedModel, engine: str) -> Finding:
    if not engine:
        return skipped(f"name one to have it looked at: {' or '.join(ENGINES)}")
    if not has_released_layout(config):
        return skipped(f"what is known of {ENGINES[engine]} concerns DSpark drafts in the released layout")
    misfits = engine_misfits(config, engine, False, target.config.to_dict())
    fix = f"See `blockdraft export --for {engine}`."
    return warning(" ".join(misfits), fix) if misfits else ok(f"fits {ENGINES[engine]}")


def _logits(seen: dict[str, Tensor], config: PreTrainedConfig) -> Finding:
    if "head_output" not in seen:
        return skipped(HEAD_NOT_CALLED)
    faults = logit_faults(seen, config)
    return fault(" ".join(faults)) if faults else ok("the draft's transform of the head's output is the target's")


def _embedding_scale(seen: dict[str, Tensor], config: PreTrainedConfig) -> Finding:
    faults, scale = embedding_faults(seen, config), f"{config.input_embedding_scale:g}"
    fix = f"Set it to what the target multiplies by, unless the draft was trained with {scale}."
    return warning(" ".join(faults), fix) if faults else ok(f"{scale}; the target shows no other")


PAIR = (
    Check("target", "mismatches config record", _target, "Load the target of the training, or train for this one."),
    Check("tokenizer", "mismatches config record", _tokenizer, "Load the tokenizer that was saved with the draft."),
    Check("target layers", "config target", _target_layers, "Set them as in training, or load the training's target."),
    Check("mask token", "config target tokenizer", _mask_token),
    Check("heads", "config target", _heads, "Load the target's weights again, or the head that belongs to it."),
    Check("dtype", "config record draft", _dtype),
    Check("visibility", "config", _visibility, "Set `is_causal` to true, or a `sliding_window`, as in training."),
    Check("training", "config", _training, "Train it, or load the checkpoint that was trained."),
    Check("weight values", "draft", _weight_values, "Take an earlier checkpoint; lower the rate if the loss was NaN."),
    Check("engine", "config target engine", _engine),
)
# Of what a forward of the target on a few tokens shows.
TRANSFORMS = (
    Check("logits", "seen config", _logits, "Take the settings from the target: sampling depends on them."),
    Check("embedding scale", "seen config", _embedding_scale),
)
