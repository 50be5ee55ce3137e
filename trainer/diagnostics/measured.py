"""The doctor's measurements: how a draft does on rows that it is given, as it is configured and otherwise.

Blocks are teacher-forced, so a variant of a setting costs one forward of the draft. Where another layer, label, mask
token, window or scale than the configured one is better beyond chance, the configuration is not the training's.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...configuration.configuration_draft import ANCHOR_FIRST, DraftConfig
from ...modeling.decoding.plain_decoding import device_of
from ...modeling.draft.anchors import legal_anchors, legal_dspark_anchors, sample_anchors
from ...modeling.draft.block_targets import build_block_inputs
from ...modeling.target.mask_tokens import propose_mask_token_ids
from ...modeling.target.target_features import capture_features, decoder_layers
from ..data.dataset import OWN_ANSWERS, DraftCollator, author, chat_template_digest
from ..objectives.dflash import survival
from .findings import Finding, fault, ok, skipped, warning

MAX_ROWS, MAX_LENGTH, MAX_ANCHORS = 16, 1024, 32
BATCH_TOKENS, CHUNK = 2048, 1024  # tokens through the target, slots through its head, at once
MIN_ROWS = 4  # fewer say nothing about chance
ERRORS = 3  # standard errors that a difference must have
LEAST_GAIN = 0.1  # accepted tokens a block, and the share of those accepted as configured
MASK_CANDIDATES = 8


class Acceptance(NamedTuple):
    """What verification would accept of teacher-forced blocks.

    Attributes:
        rows (`[R]` float64): accepted tokens by row, summed over its blocks.
        blocks (`[R]` float64): blocks by row.
        slots (`[drafted]` float64): share of blocks accepted up to each drafted slot.
    """

    rows: Tensor
    blocks: Tensor
    slots: Tensor

    @property
    def mean(self) -> float:
        """Accepted tokens a block."""
        return (self.rows.sum() / self.blocks.sum()).item()


def gain(base: Acceptance, other: Acceptance) -> float:
    """Accepted tokens a block that `other` brings over `base`; 0 unless that is beyond chance, judged by rows."""
    difference, blocks = other.rows - base.rows, base.blocks.sum()
    mean = (difference.sum() / blocks).item()
    error = (difference.std() * math.sqrt(len(difference)) / blocks).item()
    return mean if mean > max(ERRORS * error, LEAST_GAIN, LEAST_GAIN * base.mean) else 0.0


@dataclass
class Blocks:
    """Rows with their blocks: `input_ids`, `attention_mask`, `loss_mask` `[B, S]`, `anchors`, `keep` `[B, N]`."""

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    anchors: Tensor
    keep: Tensor


class Rehearsal:
    """Rows with fixed anchors, on which a pair is measured again and again.

    Args:
        target, draft: a pair that fits, in evaluation mode.
        rows: with `input_ids`, `loss_mask`, `row_id`; up to 16 of those that have an anchor are taken, evenly spread,
            and of each its first 1,024 tokens.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, rows: Sequence[dict]):
        self.target, self.draft, self.config = target, draft, draft.config
        self.first_slot = self.config.block_size - self.config.num_drafted
        self.label_start = int(self.config.slot_layout == ANCHOR_FIRST)
        rows = [{name: row[name][:MAX_LENGTH] for name in ("input_ids", "loss_mask")} for row in rows]
        placed = [row for row in rows if self._legal_anchors(torch.tensor([row["loss_mask"]])).any()]
        self.rows_without_anchor = len(rows) - len(placed)
        chosen = placed[:: max(1, math.ceil(len(placed) / MAX_ROWS))]
        self.num_rows = len(chosen)
        longest = max((len(row["input_ids"]) for row in chosen), default=1)
        size = max(1, BATCH_TOKENS // longest)
        self.batches = [self._place(chosen[first : first + size]) for first in range(0, len(chosen), size)]
        self._kept_features: tuple[list[int], list[Tensor]] | None = None  # layers, and what they gave

    def _legal_anchors(self, loss_mask: Tensor, lengths: Tensor | None = None) -> Tensor:
        if self.label_start:
            return legal_dspark_anchors(loss_mask, lengths)
        return legal_anchors(loss_mask, self.config.block_size, lengths)

    def _place(self, rows: list[dict]) -> Blocks:
        batch = DraftCollator(pad_token_id=0)([row | {"row_id": i} for i, row in enumerate(rows)])
        legal = self._legal_anchors(batch["loss_mask"], batch["attention_mask"].sum(-1))
        anchors = sample_anchors(legal, MAX_ANCHORS, seed=0, step=0, row_ids=range(len(rows)))
        tensors = (batch["input_ids"], batch["attention_mask"], batch["loss_mask"], *anchors)
        return Blocks(*(tensor.to(self.target.device) for tensor in tensors))

    @torch.no_grad()
    def features(self) -> list[Tensor]:
        """`[B, S, F * H]` of each batch, for the layers now configured; those asked for first are kept."""
        layer_ids, kept = self.config.target_layer_ids, self._kept_features
        if kept is not None and kept[0] == layer_ids:
            return kept[1]
        with capture_features(self.target, layer_ids, self.config.capture_point, stop_after_last=True) as capture:
            found = []
            for rows in self.batches:
                capture.run(input_ids=rows.input_ids, attention_mask=rows.attention_mask, use_cache=False)
                found.append(capture.features(self.draft.device))
        if kept is None:
            self._kept_features = (layer_ids, found)
        return found

    @torch.no_grad()
    def acceptance(self, label_shift: int = 0, **settings) -> Acceptance:
        """Measures with `settings` of the configuration changed, and labels so many places later than they are."""
        accepted, blocks = [], []
        with changed(self.config, **settings):
            for rows, features in zip(self.batches, self.features(), strict=True):
                correct, counted = self._predict(rows, features, label_shift)
                accepted.append(survival(correct, counted)[..., self.first_slot :].sum(1).double().cpu())
                blocks.append(counted.any(-1).sum(-1).double().cpu())
        slots, blocks = torch.cat(accepted), torch.cat(blocks)  # [R, drafted] and [R]
        return Acceptance(slots.sum(-1), blocks, slots.sum(0) / blocks.sum())

    def _predict(self, rows: Blocks, features: Tensor, label_shift: int) -> tuple[Tensor, Tensor]:
        """Whether each slot's best token is its label, and which slots count: `[B, N, block_size]`."""
        config, draft, target = self.config, self.draft, self.target
        anchors, keep, size, width = rows.anchors, rows.keep, config.block_size, rows.input_ids.shape[1]
        known = max(1, self.first_slot)
        ids = build_block_inputs(rows.input_ids, anchors, keep, size, config.mask_token_id, known)
        embeds = draft.embed_block(ids, target.get_input_embeddings()).to(draft.device)
        blocks = {"anchor_positions": anchors.to(draft.device), "block_keep_mask": keep.to(draft.device)}
        states = draft(noise_embeds=embeds, context_hidden_states=features, **blocks).last_hidden_state

        slots = torch.arange(size, device=anchors.device)
        positions = anchors[..., None] + slots + self.label_start + label_shift
        lengths = rows.attention_mask.sum(-1)[:, None, None]
        inside = (positions < lengths) & (positions > 0) & (slots >= self.first_slot) & keep[..., None]
        positions = positions.clamp(1, width - 1)
        row = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        labels, previous = rows.input_ids[row, positions], rows.input_ids[row, positions - 1]
        counted = inside & (rows.loss_mask[row, positions] > 0)

        head, places, chosen = target.get_output_embeddings(), counted.flatten().nonzero().squeeze(-1), []
        states, previous, device = states.flatten(0, 1), previous.flatten(), device_of(head, target.device)
        for chunk in places.split(CHUNK):
            logits = draft.compute_logits(states[chunk.to(draft.device)].to(device), head)
            if draft.markov_head is not None:
                logits = logits + draft.markov_head(previous[chunk].to(draft.device))[0].to(logits)
            chosen.append(logits.argmax(-1).to(labels.device))
        correct = torch.zeros_like(counted).flatten()
        correct[places] = torch.cat(chosen) == labels.flatten()[places]
        return correct.view_as(counted), counted


@contextmanager
def changed(config, **settings) -> Iterator[None]:
    """A configuration with other values, for as long as the context is open."""
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


# ---- is another setting better? -------------------------------------------------------------------------------------


def compare_settings(rehearsal: Rehearsal, tokenizer: PreTrainedTokenizerBase, base: Acceptance) -> list[Finding]:
    """Findings on layer ids, labels, mask token, visibility and embedding scale, each against other values; `base` is
    as configured."""
    config = rehearsal.config
    ids, depth = config.target_layer_ids, len(decoder_layers(rehearsal.target))
    shifted = [[layer + by for layer in ids] for by in (-1, 1)]
    layers = [{"target_layer_ids": other} for other in shifted if other[0] >= 0 and other[-1] < depth]
    labels = [{"label_shift": by} for by in (-1, 1)]
    masks = [{"mask_token_id": token} for token in _mask_candidates(rehearsal, tokenizer)]
    views = other_views(config)
    scales = {1.0, math.sqrt(config.hidden_size)}
    scales = [
        {"input_embedding_scale": s} for s in sorted(scales) if not math.isclose(s, config.input_embedding_scale)
    ]
    return [
        _best(rehearsal, base, "layer ids, measured", layers, "Set `target_layer_ids` to those, or fix the counting."),
        _best(rehearsal, base, "labels, measured", labels, "The draft was trained one place off: train it anew."),
        _best(rehearsal, base, "mask token, measured", masks, "Set `mask_token_id` to that of the training."),
        _best(rehearsal, base, "visibility, measured", views, "Set them to those, which the draft was trained with."),
        _best(rehearsal, base, "embedding scale, measured", scales, "Set `input_embedding_scale` to that."),
    ]


def other_views(config: DraftConfig) -> list[dict]:
    """Settings under which a draft's slots would see other keys: what each changes."""
    windows = {config.sliding_window, 8, 128, config.block_size, 2 * config.block_size}
    if config.slot_layout == ANCHOR_FIRST:
        views = [{"sliding_window": window} for window in windows]
    else:
        places = itertools.product(windows | {None}, (False, True))
        views = [{"sliding_window": window, "is_causal": causal} for window, causal in places]
    if config.model_type == "kimi_k3_dflash" and config.num_hidden_layers > 1:  # its last layer may see everything
        hybrid = [view for view in views if view["sliding_window"] is not None]
        views = [view | {"num_full_attention_layers": 0} for view in views]
        views += [view | {"num_full_attention_layers": 1} for view in hybrid]
    differing = [{name: value for name, value in view.items() if value != getattr(config, name)} for view in views]
    return [view for view in differing if view]


def _best(rehearsal: Rehearsal, base: Acceptance, check: str, variants: list[dict], mend: str) -> Finding:
    measured = [(gain(base, rehearsal.acceptance(**variant)), variant) for variant in variants]
    more, variant = max(measured, key=lambda pair: pair[0], default=(0.0, None))
    if more:
        other = ", ".join(f"`{name}` {value}" for name, value in variant.items())
        found = f"{base.mean:.2f} drafted tokens accepted a block as configured, {base.mean + more:.2f} with {other}"
        return fault(check, found, mend)
    return ok(check, f"none of {len(variants)} other settings is better")


def _mask_candidates(rehearsal: Rehearsal, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    rows = len(rehearsal.target.get_input_embeddings().weight)
    try:
        free = propose_mask_token_ids(tokenizer, rows)[:MASK_CANDIDATES]
    except ValueError:
        free = []
    named = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id]
    candidates = dict.fromkeys(free + [token for token in named if token is not None and token < rows])
    return [token for token in candidates if token != rehearsal.config.mask_token_id]


# ---- the draft, the features, the target's answers ------------------------------------------------------------------


def check_accuracy(base: Acceptance) -> Finding:
    """Whether the draft has learned at all."""
    name, first = "draft accuracy", base.slots[0].item()
    found = f"the first drafted token is right in {first:.0%} of blocks, {base.mean:.2f} tokens a block are accepted"
    mend = "Mend the other faults first; if there are none, train longer, on more answers of the target."
    if first < 0.15:
        return fault(name, f"{found}: it has learned next to nothing", mend)
    if first < 0.4:
        return warning(name, found, mend)
    return ok(name, found)


def check_features(rehearsal: Rehearsal) -> Finding:
    """Features that are broken or dead; and how large they are."""
    name, ids = "features", rehearsal.config.target_layer_ids
    batches = zip(rehearsal.batches, rehearsal.features(), strict=True)
    features = torch.cat([found[rows.attention_mask.to(found.device) > 0].float() for rows, found in batches])
    mend = "Look at the target: dtype (float16 overflows), quantisation, weights."
    if not torch.isfinite(features).all():
        layers = [
            i for i, part in zip(ids, features.chunk(len(ids), -1), strict=True) if not torch.isfinite(part).all()
        ]
        return fault(name, f"NaN or infinite in layers {layers}", mend)
    rms = features.pow(2).mean(0).sqrt()
    by_layer = {i: part.pow(2).mean().sqrt().item() for i, part in zip(ids, rms.chunk(len(ids)), strict=True)}
    dead = (rms == 0).sum().item()
    if dead > len(rms) / 10:
        return fault(name, f"{dead} of {len(rms)} channels are always zero", mend)
    spread = (rms.max() / rms.median()).item()
    sizes = ", ".join(f"layer {i}: {size:.3g}" for i, size in by_layer.items())
    return ok(name, f"RMS by {sizes}; the largest channel is {spread:.0f} times the median")


@torch.no_grad()
def check_answers(rehearsal: Rehearsal) -> Finding:
    """Whether the supervised tokens are what the target itself would say."""
    name, same, total = "target's answers", 0, 0
    for rows in rehearsal.batches:
        inputs = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}
        choices = rehearsal.target(**inputs, use_cache=False).logits[:, :-1].argmax(-1).to(rows.input_ids.device)
        mask = rows.loss_mask[:, 1:] > 0
        same += ((choices == rows.input_ids[:, 1:]) & mask).sum().item()
        total += mask.sum().item()
    share = same / total
    found = f"{share:.0%} of {total} supervised tokens are the target's own greedy choice"
    mend = "Train on the target's own answers: `blockdraft regenerate`. If they are, this is another target."
    if share < 0.5:
        return fault(name, found, mend)
    if share < 0.65:
        return warning(name, found, mend)
    return ok(name, found)


# ---- the rows -------------------------------------------------------------------------------------------------------


def check_rows(
    rows: Sequence[dict], draft: PreTrainedModel, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Finding]:
    """What can be seen in the rows themselves. Findings "token ids", "mask token in data", "stop token", "prompts"."""
    ids = [token for row in rows for token in row["input_ids"]]
    size, mask = len(target.get_input_embeddings().weight), draft.config.mask_token_id
    findings = []
    if (highest := max(ids)) >= size:
        found = f"token {highest} in the rows, {size} rows in the target's embedding"
        findings.append(fault("token ids", found, "Encode the data with the target's tokenizer."))
    else:
        findings.append(ok("token ids", f"all below {size}"))
    if count := ids.count(mask):
        found = f"the mask token {mask} occurs {count} times in the rows"
        findings.append(fault("mask token in data", found, "Train with a mask token that no text contains."))
    else:
        findings.append(ok("mask token in data", "it does not occur"))
    return [*findings, _stop_tokens(rows, target, tokenizer), _generation_prompts(rows, tokenizer)]


def check_provenance(
    provenance: dict[str, dict],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict | None,
    target_revision: str | None = None,
) -> list[Finding]:
    """A finding "data origin" for each file that `blockdraft regenerate` wrote: whether with this target, and under
    the template served.

    Args:
        provenance: the settings by file, as [`DataReport`] has them.
        template_kwargs: of serving.
    """
    name, findings = "data origin", []
    digest = chat_template_digest(tokenizer)
    mend = "Regenerate the answers with the template and `template_kwargs` that are served, or serve with theirs."
    for file, settings in provenance.items():
        origin = f"{Path(file).name}: answers of {Path(settings['target']).name}"
        if settings["chat_template_sha256"] != digest:
            findings.append(fault(name, f"{origin} under another chat template", mend))
        elif (settings["template_kwargs"] or {}) != (template_kwargs or {}):
            kwargs = f"`template_kwargs` {settings['template_kwargs']}, now {template_kwargs}"
            findings.append(fault(name, f"{origin} with {kwargs}", mend))
        elif (answers := author(settings, target, tokenizer, target_revision)) != OWN_ANSWERS:
            found = (
                f"{Path(file).name}: answers are {answers}; this target is {target.config.name_or_path or 'unnamed'}"
            )
            regenerate = "If that is another model, `blockdraft regenerate` the answers with this target."
            findings.append(warning(name, found, regenerate))
        else:
            findings.append(ok(name, f"{origin}, this target, under the template of the tokenizer"))
    return findings


def _answers(row: dict) -> Iterator[tuple[int, int]]:
    """First and last position of each supervised run."""
    mask = [0, *map(int, row["loss_mask"]), 0]
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    ends = [i for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]
    for start, end in zip(starts, ends, strict=True):
        yield start - 1, end - 2


def _stop_tokens(rows: Sequence[dict], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Finding:
    name = "stop token"
    stops = target.generation_config.eos_token_id if target.generation_config else None
    stops = {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])} - {None}
    last = [row["input_ids"][end] for row in rows for _, end in _answers(row)]
    if not stops or not last:
        return skipped(name, "the target has none" if not stops else "there is no answer")
    share = sum(token in stops for token in last) / len(last)
    if share < 0.1:
        found = f"{share:.0%} of {len(last)} answers end with a stop token ({sorted(stops)})"
        return warning(name, found, "Give `stop_token_ids`, so that the draft learns where answers end.")
    return ok(name, f"{share:.0%} of {len(last)} answers end with one")


def _generation_prompts(rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Answers follow what the template writes in front of them, if the rows were made with it."""
    name = "prompts"
    if tokenizer.chat_template is None:
        return skipped(name, "the tokenizer has no chat template")
    message, render = [{"role": "user", "content": "a"}], {"tokenize": True, "return_dict": True}
    try:
        without, prompt = (
            tokenizer.apply_chat_template(message, add_generation_prompt=asked, **render)["input_ids"]
            for asked in (False, True)
        )
    except (TemplateError, ValueError) as error:
        return skipped(name, f"the chat template does not take a lone user message: {error}")
    # A template that ends the conversation where no answer is asked for does not show what it writes before one.
    lead = prompt[len(without) :] if prompt[: len(without)] == without else []
    starts = [(row, start) for row in rows for start, _ in _answers(row)]
    if not lead or not starts:
        return skipped(name, "what the template writes before an answer does not show" if starts else "no answer")
    # Thinking templates may add to it: the first token has to be near, the whole need not be.
    share = sum(lead[0] in row["input_ids"][max(0, start - 2 * len(lead)) : start] for row, start in starts) / len(
        starts
    )
    text = tokenizer.decode(lead)
    if share < 0.5:
        found = f"{share:.0%} of {len(starts)} answers follow the template's {text!r}"
        mend = "Make the rows with the chat template that is served (`blockdraft regenerate`), or serve with theirs."
        return fault(name, found, mend)
    return ok(name, f"{share:.0%} of {len(starts)} answers follow the template's {text!r}")
