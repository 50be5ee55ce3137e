"""The doctor's checks that measure nothing: of target, tokenizer and draft, and of the rows."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...hub_cards.serving import has_released_layout, masked_slots_are_alike
from ...modeling.deepseek_v41.engine_fit import ENGINES, engine_misfits
from ...modeling.ops.number_formats import dtype_name
from ...modeling.target.mask_tokens import propose_mask_token_ids
from ...modeling.target.pairing import Mismatch, compared_weights
from ...modeling.target.target_features import capture_features, decoder_layers
from ...modeling.target.target_transforms import HEAD_NOT_CALLED, embedding_faults, logit_faults
from ..data.loss_mask import supervised_runs
from ..data.provenance import OWN_ANSWERS, author, chat_template_digest
from ..data.rendering import apply_template, rendered_ids, stop_tokens
from .findings import Check, Finding, fault, ok, skipped, warning

MAY_BE_ZERO = ("bias_vl",)  # parameters of two and more dimensions that training may leave at zero


def free_mask_tokens(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that can stand for unknown positions, best first; empty where only the data could tell."""
    try:
        return propose_mask_token_ids(tokenizer, len(target.get_input_embeddings().weight))
    except ValueError:
        return []


# ---- target, tokenizer and draft ------------------------------------------------------------------------------------


def _mismatch(mismatches: Sequence[Mismatch], part: str) -> Finding | None:
    """What `check_pair` has to say of the target, or of its tokenizer."""
    found = [mismatch for mismatch in mismatches if mismatch.part == part]
    message = " ".join(mismatch.message for mismatch in found)
    if any(mismatch.certain for mismatch in found):
        return fault(message, stops=any(mismatch.breaks for mismatch in found))
    fix = (
        "If the function is the same (an adapter that was merged, another commit with the same weights), go by the "
        "measurements on rows; otherwise load the target of the training."
    )
    return warning(message, fix) if found else None


def _target(mismatches: Sequence[Mismatch], config: PreTrainedConfig, record: dict) -> Finding:
    if finding := _mismatch(mismatches, "target"):
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
    if finding := _mismatch(mismatches, "tokenizer"):
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


def _mask_token(
    config: PreTrainedConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, free_masks: list[int]
) -> Finding:
    mask, rows = config.mask_token_id, len(target.get_input_embeddings().weight)
    fix = f"Take the id of the training; for a new draft, one of {free_masks[:3]}."
    if mask >= rows:
        return fault(f"`mask_token_id` is {mask}, not a row of the target's embedding, 0..{rows - 1}", fix, stops=True)
    roles = {
        "bos": {tokenizer.bos_token_id},
        "eos": set(stop_tokens(tokenizer, target.generation_config)),
        "unk": {tokenizer.unk_token_id},
    }
    if taken := [role for role, ids in roles.items() if mask in ids]:
        return fault(f"{mask} is the {' and '.join(taken)} token, which the draft takes for noise", fix)
    if mask == tokenizer.pad_token_id:
        return warning(f"{mask} is the padding token, which some templates also write", fix)
    return ok(f"{mask}, {tokenizer.decode([mask])!r}" if mask < len(tokenizer) else f"{mask}, a free row")


def _heads(config: PreTrainedConfig, target: PreTrainedModel) -> Finding:
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings()
    if (width := embedding.shape[-1]) != config.hidden_size:
        found = f"the target's embedding is {width} wide, the draft's `hidden_size` is {config.hidden_size}"
        return fault(found, "Load the target of the training, as wide as its draft.", stops=True)
    # A quantised head keeps packed numbers and has no such weight; what is offloaded has no numbers here.
    tables = {"embedding": embedding, "head": getattr(head, "weight", None)}
    tables = {what: table for what, table in tables.items() if type(table) is nn.Parameter and not table.is_meta}
    for what, table in tables.items():
        if table.is_floating_point() and table.itemsize > 1 and not (torch.isfinite(table).all() and table.any()):
            return fault(f"the target's {what} is NaN, infinite or all zero")
    tied, weight = getattr(target.config, "tie_word_embeddings", False), tables.get("head")
    if tied and len(tables) == 2 and (weight.shape != embedding.shape or (weight != embedding.to(weight)).any()):
        found = "the target ties its head to the embedding, but the loaded head has other numbers"
        return fault(found, "Load it with from_pretrained, and call tie_weights() after any change of its embedding.")
    if weight is not None and len(weight) < config.vocab_size:
        return fault(f"the head has {len(weight)} rows for a vocabulary of {config.vocab_size}")
    size = f"{type(head).__name__}, whose numbers are not looked at" if weight is None else f"{len(weight)} rows"
    return ok(f"{'tied, ' if tied else ''}{size}")


def _dtype(config: PreTrainedConfig, record: dict, draft: PreTrainedModel) -> Finding:
    trained, now, quantised = config.target or {}, record["dtype"], record["quantization"]
    dtype = dtype_name(draft.dtype)
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
    matrices = {name: value for name, value in values.items() if value.dim() > 1 and not name.endswith(MAY_BE_ZERO)}
    broken = [name for name, value in values.items() if not torch.isfinite(value).all()]
    empty = [name for name, value in matrices.items() if not value.any()]
    problems = {"NaN or infinite": broken, "all zero": empty}
    if found := [f"{what}: {', '.join(names[:3])}" for what, names in problems.items() if names]:
        return fault("; ".join(found))
    return ok(f"{draft.num_parameters():,} parameters, all finite, no matrix of zeros")


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
    Check("target", _target, "Load the target of the training, or train for this one."),
    Check("tokenizer", _tokenizer, "Load the tokenizer that was saved with the draft."),
    Check("target layers", _target_layers, "Set them as in training, or load the training's target."),
    Check("mask token", _mask_token),
    Check("heads", _heads, "Load the target's weights again, or the head that belongs to it."),
    Check("dtype", _dtype),
    Check("visibility", _visibility, "Set `is_causal` to true, or a `sliding_window`, as in training."),
    Check("training", _training, "Train it, or load the checkpoint that was trained."),
    Check("weight values", _weight_values, "Take an earlier checkpoint; lower the rate if the loss was NaN."),
    Check("engine", _engine),
)
# Of what a forward of the target on a few tokens shows.
TRANSFORMS = (
    Check("logits", _logits, "Take the settings from the target: sampling depends on them."),
    Check("embedding scale", _embedding_scale),
)


# ---- rows -----------------------------------------------------------------------------------------------------------


def _token_ids(rows: Sequence[dict], target: PreTrainedModel) -> Finding:
    highest, size = max(max(row["input_ids"]) for row in rows), len(target.get_input_embeddings().weight)
    if highest >= size:
        return fault(f"token {highest} in the rows, {size} rows in the target's embedding", stops=True)
    return ok(f"all below {size}")


def _mask_token_in_data(rows: Sequence[dict], config: PreTrainedConfig) -> Finding:
    if count := sum(row["input_ids"].count(config.mask_token_id) for row in rows):
        return fault(f"the mask token {config.mask_token_id} occurs {count} times in the rows")
    return ok("it does not occur")


def _stop_token(rows: Sequence[dict], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Finding:
    stops = stop_tokens(tokenizer, target.generation_config)
    last = [row["input_ids"][end - 1] for row in rows for _, end in supervised_runs(row["loss_mask"])]
    if not stops or not last:
        return skipped("there is no answer" if stops else "the target has none")
    share = sum(token in stops for token in last) / len(last)
    found = f"{share:.0%} of {len(last)} answers end with a stop token ({sorted(stops)})"
    return (warning if share < 0.1 else ok)(found)


def _prompts(rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Answers follow what the template writes in front of them, if the rows were made with it."""
    if tokenizer.chat_template is None:
        return skipped("the tokenizer has no chat template")
    message = [{"role": "user", "content": "a"}]
    try:
        without, prompt = (
            rendered_ids(tokenizer, apply_template(tokenizer, message, add_generation_prompt=asked))
            for asked in (False, True)
        )
    except ValueError as error:
        return skipped(f"the chat template does not take a lone user message: {error}")
    # A template that ends the conversation where no answer is asked for does not show what it writes before one.
    lead = prompt[len(without) :] if prompt[: len(without)] == without else []
    starts = [(row["input_ids"], start) for row in rows for start, _ in supervised_runs(row["loss_mask"])]
    if not lead or not starts:
        return skipped("the template does not show what it writes before an answer" if starts else "no answer")
    # Thinking templates may add to it: the first token has to be near, the whole need not be.
    share = sum(lead[0] in ids[max(0, start - 2 * len(lead)) : start] for ids, start in starts) / len(starts)
    found = f"{share:.0%} of {len(starts)} answers follow the template's {tokenizer.decode(lead)!r}"
    return (fault if share < 0.5 else ok)(found)


ROWS = (
    Check("token ids", _token_ids, "Encode the data with the target's tokenizer."),
    Check("mask token in data", _mask_token_in_data, "Train with a mask token that no text contains."),
    Check("stop token", _stop_token, "Give `stop_token_ids`: a draft learns where answers end."),
    Check("prompts", _prompts, "Make the rows with the template that is served, or serve with theirs."),
)


def check_provenance(
    provenance: dict[str, dict],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict | None,
    target_revision: str | None = None,
) -> list[Finding]:
    """A finding "data origin" for each file that `blockdraft regenerate` wrote, by its settings in `provenance` (those
    of [`DataReport`]): whether with this target, and under the template and `template_kwargs` that are served."""
    findings = []
    serve = "Regenerate the answers with the template and `template_kwargs` that are served, or serve with theirs."
    for file, settings in provenance.items():
        name, kwargs = Path(file).name, settings["template_kwargs"]
        origin, here = f"{name}: answers of {Path(settings['target']).name}", target.config.name_or_path or "unnamed"
        if settings["chat_template_sha256"] != chat_template_digest(tokenizer):
            finding = fault(f"{origin} under another chat template", serve)
        elif (kwargs or {}) != (template_kwargs or {}):
            finding = fault(f"{origin} with `template_kwargs` {kwargs}, now {template_kwargs}", serve)
        elif (answers := author(settings, target, tokenizer, target_revision)) != OWN_ANSWERS:
            fix = "If that is another model, `blockdraft regenerate` the answers with this target."
            finding = warning(f"{name}: answers are {answers}; this target is {here}", fix)
        else:
            finding = ok(f"{origin}, this target, under the template of the tokenizer")
        findings.append(finding.of("data origin"))
    return findings
