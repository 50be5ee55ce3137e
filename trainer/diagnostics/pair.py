"""The doctor's checks of target, tokenizer and draft that need no data.

The first ones read the draft's settings as stored, so that they work where its configuration cannot even be built.
"""

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...configuration.configuration_draft import ANCHOR_FIRST, ATTENTION_INPUT_MEAN, LAYER_OUTPUT, check_layer_ids
from ...modeling.deepseek_v41.engine_fit import ENGINES, engine_misfits
from ...modeling.target.mask_tokens import propose_mask_token_ids
from ...modeling.target.target_features import decoder_layers
from ...modeling.target.target_identity import is_other_revision
from ...modeling.target.target_transforms import HEAD_NOT_CALLED, embedding_faults, logit_faults, run_target
from .checkpoint import draft_type
from .findings import Finding, fault, ok, skipped, warning


def check_slot_layout(settings: dict) -> Finding:
    """The flag that says which slots draft, without which engines guess."""
    name, expected = "slot layout", draft_type(settings).config.family_slot_layout
    layout, from_anchor = settings.get("slot_layout"), settings.get("sample_from_anchor")
    mend = f'Set "slot_layout": "{expected}" in config.json.'
    if layout is None:
        return fault(name, "`slot_layout` is absent, so a reader has to guess which slots draft", mend)
    if layout != expected:
        return fault(name, f'`slot_layout` is "{layout}"; a {settings["model_type"]} draft has "{expected}"', mend)
    if from_anchor is not None and from_anchor != (layout == ANCHOR_FIRST):
        mend = "Take `sample_from_anchor` out of config.json, or save the draft again."
        return fault(name, f'`sample_from_anchor` is {from_anchor} beside `slot_layout` "{layout}"', mend)
    return ok(name, f'"{layout}"')


def check_engine_view(settings: dict) -> Finding:
    """The settings under the names that serving engines read, against the draft's own."""
    name, kind = "engine view", draft_type(settings).config
    view = settings if kind.engine_view_key is None else settings.get(kind.engine_view_key) or {}
    prefix = "" if kind.engine_view_key is None else f"{kind.engine_view_key}."
    differing = [
        f"`{ours}` is {settings.get(ours)!r} but `{prefix}{theirs}` is {view[theirs]!r}"
        for theirs, ours in kind.engine_view.items()
        if theirs in view and ours in settings and view[theirs] != settings[ours]
    ]
    if differing:
        mend = "Give both the value of the training and save the draft again: engines read the second."
        return fault(name, "; ".join(differing), mend)
    return ok(name, f"what engines read agrees; blocks of {settings.get('block_size')}")


def check_layers(settings: dict, target: PreTrainedModel) -> Finding:
    """Range and order of the layers to read, in the target at hand."""
    name, ids, depth = "layer ids", settings.get("target_layer_ids"), len(decoder_layers(target))
    mend = "Set `target_layer_ids` to the ids of the training, which count the target's layers from zero."
    try:
        check_layer_ids(ids, depth, settings.get("capture_point") or LAYER_OUTPUT)
    except (ValueError, TypeError) as error:
        return fault(name, str(error), mend)
    return ok(name, f"{ids} of {depth} layers")


def check_capture_point(settings: dict, target: PreTrainedModel) -> Finding:
    """Whether the features are read where this kind of target has them."""
    name, point = "capture point", settings.get("capture_point") or LAYER_OUTPUT
    has_streams = all(hasattr(layer, "attn_hc") for layer in decoder_layers(target))
    expected = ATTENTION_INPUT_MEAN if has_streams else LAYER_OUTPUT
    if point != expected:
        mend = f'Set "capture_point": "{expected}", or load the target that the draft was trained for.'
        return fault(name, f"`capture_point` is {point!r}; {type(target).__name__} has {expected!r}", mend)
    return ok(name, point)


def check_mask_token(settings: dict, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Whether the mask token is a row of the embedding that no text and no template uses."""
    name, mask = "mask token", settings.get("mask_token_id")
    rows = len(target.get_input_embeddings().weight)
    try:
        free = propose_mask_token_ids(tokenizer, rows)[:3]
        mend = f"Take the id of the training; for a new draft, one of {free}."
    except ValueError as error:
        mend = str(error)
    if not isinstance(mask, int) or not 0 <= mask < rows:
        return fault(name, f"`mask_token_id` is {mask!r}, not a row of the target's embedding, 0..{rows - 1}", mend)
    stops = target.generation_config.eos_token_id if target.generation_config else None
    used = {
        "bos": [tokenizer.bos_token_id],
        "eos": [tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])],
        "unk": [tokenizer.unk_token_id],
    }
    if roles := [role for role, ids in used.items() if mask in ids]:
        return fault(name, f"{mask} is the {' and '.join(roles)} token: the draft takes that for noise", mend)
    if mask == tokenizer.pad_token_id:
        return warning(name, f"{mask} is the padding token, which some templates also write", mend)
    return ok(name, f"{mask}, {tokenizer.decode([mask])!r}" if mask < len(tokenizer) else f"{mask}, a free row")


def check_target(settings: dict, target: PreTrainedModel, found: dict) -> Finding:
    """Whether this is the target of the training: shape, embedding, weights, revision. `found` is its
    [`~blockdraft.configuration.configuration_draft.target_record`]."""
    name, record = "target", settings.get("target") or {}
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    mend = f"Load the target of the training ({record.get('name_or_path') or 'not recorded'}), or train for this one."
    for setting, expected, actual in (
        ("hidden_size", settings.get("target_hidden_size") or settings.get("hidden_size"), found["hidden_size"]),
        ("num_hidden_layers", settings.get("num_target_layers"), found["num_hidden_layers"]),
        ("vocab_size", settings.get("vocab_size"), vocab_size),
        ("embedding rows", record.get("embedding_rows"), found["embedding_rows"]),
    ):
        if expected is not None and expected != actual:
            return fault(name, f"made for {setting} {expected}, this target has {actual}", mend)
    if not record:
        return warning(name, "the draft does not say what target it was trained for", mend)
    now, then = found["adapters"], record.get("adapters", found["adapters"])
    if now != then:
        adapters = f"PEFT adapters: {now or 'none'}, in training {then or 'none'}"
        if now and then:
            return fault(name, adapters, mend)
        mend = f"If the adapter was merged into the weights, the measurements on rows decide; otherwise: {mend}"
        return warning(name, f"{adapters}: the same function only where it was merged", mend)
    digests = {"embedding": "embedding_sha256", "layers": "weights_sha256"}
    digests = {part: digest for part, digest in digests.items() if record.get(digest) and found[digest]}
    if digests and record.get("dtype") == found["dtype"]:  # a cast changes what is hashed
        if other := [part for part, digest in digests.items() if record[digest] != found[digest]]:
            found_other = f"other weights than in training ({' and '.join(other)}): another revision or fine-tune"
            return fault(name, found_other, mend)
        return ok(name, f"{found['architecture']}, the weights of the training")
    revision = found["revision"]
    if is_other_revision(record.get("revision"), revision):
        return warning(name, f"revision {revision}, trained for {record['revision']}", mend)
    why = "the dtype differs" if digests else "they are not known"
    return ok(name, f"{found['architecture']}, the shape of the training; weights not compared, {why}")


def check_tokenizer(settings: dict, found: dict) -> Finding:
    """Whether the same text is the same tokens as in training; `found` is the [`target_record`] with the tokenizer."""
    name, record, tokens = "tokenizer", settings.get("target") or {}, found["tokenizer_length"]
    mend = "Load the tokenizer that was saved with the draft."
    if tokens > found["embedding_rows"]:
        return fault(name, f"{tokens} tokens for {found['embedding_rows']} embedding rows", mend)
    length, digest = record.get("tokenizer_length"), record.get("tokenizer_sha256")
    if length is not None and length != tokens:
        return fault(name, f"{tokens} tokens, {length} in training", mend)
    if digest is not None and digest != found["tokenizer_sha256"]:
        return fault(name, "the same number of tokens as in training, but other ones", mend)
    if digest is None:
        return skipped(name, f"{tokens} tokens; the draft has no record to compare with")
    split = record.get("tokenization_sha256")
    if split is None:
        return ok(name, f"{tokens} tokens, those of the training; how text was split is not recorded")
    if split != found["tokenization_sha256"]:
        differs = "the tokens of the training, but text is split otherwise (normaliser, pre-tokenizer, merges, bos)"
        return fault(name, differs, mend)
    return ok(name, f"{tokens} tokens, those of the training, and text is split alike")


def check_dtypes(settings: dict, found: dict, draft: PreTrainedModel | None) -> Finding:
    """Number formats: the draft has learned features of one, quantisation included. `found` is the target's record."""
    name, record = "dtype", settings.get("target") or {}
    now, then, quantised = found["dtype"], record.get("dtype"), found["quantization"]
    draft_dtype = "not loaded" if draft is None else str(draft.dtype).removeprefix("torch.")
    formats = f"target and features {now}{f' ({quantised})' if quantised else ''}, draft {draft_dtype}"
    if record and quantised != record.get("quantization"):
        mend = "Train or adapt the draft on features of the target as it is served."
        return warning(
            name, f"{formats}; quantisation of the target in training: {record.get('quantization') or 'none'}", mend
        )
    if then and then != now:
        return warning(name, f"{formats}; features were {then} in training", f"Load the target with dtype {then}.")
    if draft_dtype == "float16":
        return warning(name, f"{formats}; float16 overflows at 65,504", "Load the draft in bfloat16 or float32.")
    return ok(name, formats)


def check_heads(settings: dict, target: PreTrainedModel) -> Finding:
    """The target's embedding and head, which the draft borrows."""
    name = "heads"
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    if head is None:
        return fault(name, f"{type(target).__name__} has no LM head", "Load the target as a causal language model.")
    width, expected = embedding.weight.shape[-1], settings.get("hidden_size")
    if expected is not None and width != expected:
        mend = "Load the target of the training; a draft is as wide as its target's embedding and head."
        return fault(name, f"the target's embedding is {width} wide, the draft's `hidden_size` {expected}", mend)
    # A quantised head keeps packed numbers and has no such weight; what is offloaded has no numbers here.
    weight = getattr(head, "weight", None)
    tied = getattr(target.config, "tie_word_embeddings", False)
    tables = {"embedding": embedding.weight, "head": weight}
    tables = {what: table for what, table in tables.items() if type(table) is nn.Parameter and not table.is_meta}
    for what, table in tables.items():
        if table.is_floating_point() and table.itemsize > 1 and not (torch.isfinite(table).all() and table.any()):
            return fault(name, f"the target's {what} is NaN, infinite or all zero", "Load the target's weights again.")
    if tied and len(tables) == 2 and weight is not embedding.weight and not _same(weight, embedding.weight):
        mend = "Load the target with from_pretrained, and tie_weights() after any change of its embedding."
        return fault(name, "the target ties its head to the embedding, but the loaded head has other numbers", mend)
    vocab_size = settings.get("vocab_size")
    if "head" in tables and isinstance(vocab_size, int) and len(weight) < vocab_size:
        mend = "Load the head that belongs to the target."
        return fault(name, f"the head has {len(weight)} rows for a vocabulary of {vocab_size}", mend)
    size = f"{len(weight)} rows" if "head" in tables else f"{type(head).__name__}, whose numbers are not looked at"
    return ok(name, f"{'tied, ' if tied else ''}{size}")


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second.to(first))


def check_visibility(settings: dict) -> Finding:
    """Without positions, masked slots differ only by what they see."""
    name, causal, window = "visibility", settings.get("is_causal", False), settings.get("sliding_window")
    if settings["model_type"] == "kimi_k3_dflash" and not causal and window is None:
        found = "bidirectional, without positions and without a window: all masked slots predict the same token"
        return fault(name, found, "Set `is_causal` to true, or a `sliding_window`, as in training.")
    reach = f"context window {window or 'unlimited'}"
    if full := settings.get("num_full_attention_layers"):
        reach += f", unlimited in the last {full} layer(s)"
    return ok(name, f"{'causal' if causal else 'bidirectional'} in the block, {reach}")


def check_transforms(target: PreTrainedModel, draft: PreTrainedModel) -> list[Finding]:
    """Whether draft states become logits, and draft tokens are embedded, as in the target itself: measured on a few
    tokens. Findings "logits" and "embedding scale"."""
    seen = run_target(target, draft.config.vocab_size)
    if "head_output" not in seen:
        logits = skipped("logits", HEAD_NOT_CALLED)
    elif lines := logit_faults(seen, draft.config):
        mend = "Take `output_multiplier` and `final_logit_softcapping` from the target: sampling depends on them."
        logits = fault("logits", " ".join(lines), mend)
    else:
        logits = ok("logits", "the draft's transform of the head's output is the target's")
    scale = draft.config.input_embedding_scale
    if lines := embedding_faults(seen, draft.config):
        mend = f"Set it to what the target multiplies by, unless the draft was trained with {scale:g}."
        return [logits, warning("embedding scale", " ".join(lines), mend)]
    return [logits, ok("embedding scale", f"{scale:g}; the target shows no other")]


def check_engine(draft: PreTrainedModel, target: PreTrainedModel, engine: str | None) -> Finding:
    """What a serving engine would do otherwise; [`engine_misfits`] knows the DSpark layout."""
    name = "engine"
    if engine is None:
        return skipped(name, f"name one to have it looked at: {' or '.join(ENGINES)}")
    if draft.config.slot_layout != ANCHOR_FIRST:
        return skipped(name, f"what is known of {ENGINES[engine]} concerns DSpark drafts in the released layout")
    if misfits := engine_misfits(draft.config, engine, False, target.config.to_dict()):
        return warning(name, " ".join(misfits), f"See `blockdraft export --for {engine}`.")
    return ok(name, f"fits {ENGINES[engine]}")
