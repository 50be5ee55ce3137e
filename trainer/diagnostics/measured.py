"""The doctor's teacher-forced measurements: how a draft does on given rows, as it is configured and otherwise.

A variant of a setting costs one forward of the draft. Where another layer, label, mask token, window or scale than the
configured one is better beyond chance, the configuration is not the training's.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.decoding.decoding_state import device_of
from ...modeling.draft.anchors import legal_anchors, legal_dspark_anchors, sample_anchors
from ...modeling.draft.block_targets import build_block_inputs, build_block_targets
from ...modeling.target.target_features import capture_features, decoder_layers
from ..data.dataset import DraftCollator
from ..evaluation.decoding import changed
from ..objectives.dflash import survival
from ..objectives.slot_targets import supervised_slots
from .findings import Check, Finding, fault, ok, warning
from .pair import free_mask_tokens

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


class TeacherForcedProbe:
    """Rows with fixed anchors, on which a pair is measured again and again.

    Args:
        target, draft: a pair that fits, in evaluation mode.
        rows: with `input_ids` and `loss_mask`; up to 16 of those that have an anchor are taken, evenly spread, and of
            each its first 1,024 tokens.

    Attributes:
        batches: `input_ids`, `attention_mask`, `loss_mask` (`[B, S]`), and `anchors` and `keep` (`[B, N]`) of each.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, rows: Sequence[dict]):
        self.target, self.draft, self.config = target, draft, draft.config
        self.first_slot = self.config.block_size - self.config.num_drafted
        self.label_start = int(self.config.sample_from_anchor)
        rows = [{name: row[name][:MAX_LENGTH] for name in ("input_ids", "loss_mask")} for row in rows]
        placed = [row for row in rows if self._legal(torch.tensor([row["loss_mask"]])).any()]
        self.num_given, self.num_placed = len(rows), len(placed)
        chosen = placed[:: max(1, math.ceil(len(placed) / MAX_ROWS))]
        size = max(1, BATCH_TOKENS // max((len(row["input_ids"]) for row in chosen), default=1))
        self.batches = [self._place(chosen[first : first + size]) for first in range(0, len(chosen), size)]
        self._kept: tuple[list[int], list[Tensor]] | None = None  # layers, and their features

    def _legal(self, loss_mask: Tensor, lengths: Tensor | None = None) -> Tensor:
        if self.label_start:
            return legal_dspark_anchors(loss_mask, lengths)
        return legal_anchors(loss_mask, self.config.block_size, lengths)

    def _place(self, rows: list[dict]) -> dict[str, Tensor]:
        batch = DraftCollator(pad_token_id=0)([row | {"row_id": i} for i, row in enumerate(rows)])
        legal = self._legal(batch["loss_mask"], batch["attention_mask"].sum(-1))
        anchors = sample_anchors(legal, MAX_ANCHORS, seed=0, step=0, row_ids=range(len(rows)))
        batch |= {"anchors": anchors.positions, "keep": anchors.keep}
        return {name: tensor.to(self.target.device) for name, tensor in batch.items()}

    @torch.no_grad()
    def features(self) -> list[Tensor]:
        """`[B, S, F * H]` of each batch, for the layers now configured; those asked for first are kept."""
        layer_ids = self.config.target_layer_ids
        if self._kept is not None and self._kept[0] == layer_ids:
            return self._kept[1]
        found = []
        with capture_features(self.target, layer_ids, self.config.capture_point, stop_after_last=True) as capture:
            for rows in self.batches:
                capture.run(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], use_cache=False)
                found.append(capture.features(self.draft.device))
        self._kept = self._kept or (layer_ids, found)
        return found

    @torch.no_grad()
    def acceptance(self, label_shift: int = 0, **settings) -> Acceptance:
        """Measures with `settings` of the configuration changed, and labels so many places later than they are."""
        accepted, blocks = [], []
        with changed(self.config, **settings):
            for rows, features in zip(self.batches, self.features(), strict=True):
                correct, supervised = self._predict(rows, features, label_shift)
                accepted.append(survival(correct, supervised)[..., self.first_slot :].sum(1).double().cpu())
                blocks.append(supervised.bool().any(-1).sum(-1).double().cpu())
        slots, blocks = torch.cat(accepted), torch.cat(blocks)  # [R, drafted] and [R]
        return Acceptance(slots.sum(-1), blocks, slots.sum(0) / blocks.sum())

    def _predict(self, rows: dict[str, Tensor], features: Tensor, label_shift: int) -> tuple[Tensor, Tensor]:
        """Whether each slot's best token is its label, and which slots count: `[B, N, block_size]`."""
        draft, head, size = self.draft, self.target.get_output_embeddings(), self.config.block_size
        ids, anchors = rows["input_ids"], (rows["anchors"], rows["keep"])
        known = max(1, self.first_slot)
        block_ids = build_block_inputs(ids, *anchors, size, self.config.mask_token_id, known)
        states = draft(
            noise_embeds=draft.embed_block(block_ids, self.target.get_input_embeddings()).to(draft.device),
            context_hidden_states=features,
            anchor_positions=rows["anchors"].to(draft.device),
            block_keep_mask=rows["keep"].to(draft.device),
        ).last_hidden_state.flatten(0, 1)

        # What comes so many places later than the label; the token before it too.
        labels, before = (
            build_block_targets(_shift(ids, by), _shift(rows["loss_mask"], by), *anchors, size, self.label_start)
            for by in (label_shift, label_shift - 1)
        )
        supervised = supervised_slots(labels.mask, self.first_slot)
        places, chosen = supervised.flatten().nonzero().squeeze(-1), []
        for chunk in places.split(CHUNK):
            hidden = states[chunk.to(states.device)].to(device_of(head, self.target.device))
            previous = before.token_ids.flatten()[chunk].to(draft.device)
            logits = draft.slot_logits(draft.compute_logits(hidden, head), previous, hidden)
            chosen.append(logits.argmax(-1).to(ids.device))
        correct = torch.zeros_like(supervised, dtype=torch.bool).flatten()
        correct[places] = torch.cat(chosen) == labels.token_ids.flatten()[places]
        return correct.view_as(supervised), supervised


def _shift(rows: Tensor, places: int) -> Tensor:
    """`[B, S]` rows moved so many places to the front, zeros moving in."""
    width = rows.shape[1]
    return torch.nn.functional.pad(rows, (max(-places, 0), max(places, 0)))[:, max(places, 0) :][:, :width]


# ---- is another setting better? -------------------------------------------------------------------------------------


def compare_settings(probe: TeacherForcedProbe, base: Acceptance, mask_tokens: Sequence[int]) -> list[Finding]:
    """Findings on layer ids, labels, mask token, visibility and embedding scale, each against other values; `base` is
    as configured."""
    config, depth = probe.config, len(decoder_layers(probe.target))
    shifted = [[layer + by for layer in config.target_layer_ids] for by in (-1, 1)]
    layers = [{"target_layer_ids": ids} for ids in shifted if ids[0] >= 0 and ids[-1] < depth]
    masks = [{"mask_token_id": token} for token in mask_tokens if token != config.mask_token_id]
    scales = [scale for scale in (1.0, math.sqrt(config.hidden_size)) if scale != config.input_embedding_scale]
    findings = []
    for check, variants, fix in (
        ("layer ids", layers, "Set `target_layer_ids` to those, or fix the counting."),
        ("labels", [{"label_shift": by} for by in (-1, 1)], "The draft was trained one place off: train it again."),
        ("mask token", masks, "Set `mask_token_id` to that of the training."),
        ("visibility", other_views(config), "Set them to those, which the draft was trained with."),
        ("embedding scale", [{"input_embedding_scale": scale} for scale in scales], "Set it to that."),
    ):
        measured = [(gain(base, probe.acceptance(**variant)), variant) for variant in variants]
        more, best = max(measured, key=lambda pair: pair[0], default=(0.0, {}))
        other = ", ".join(f"`{name}` {value}" for name, value in best.items())
        found = f"{base.mean:.2f} drafted tokens accepted a block as configured, {base.mean + more:.2f} with {other}"
        finding = fault(found, fix) if more else ok(f"none of {len(variants)} other settings is better")
        findings.append(finding.of(f"{check}, measured"))
    return findings


def other_views(config: PreTrainedConfig) -> list[dict]:
    """Settings under which a draft's slots would see other keys: what each changes."""
    windows = {config.sliding_window, 8, 128, config.block_size, 2 * config.block_size}
    if config.sample_from_anchor:
        views = [{"sliding_window": window} for window in windows]
    else:
        places = itertools.product(windows | {None}, (False, True))
        views = [{"sliding_window": window, "is_causal": causal} for window, causal in places]
    if "num_full_attention_layers" in config.to_dict() and config.num_hidden_layers > 1:
        windowed = [view for view in views if view["sliding_window"] is not None]
        views = [view | {"num_full_attention_layers": 0} for view in views]
        views += [view | {"num_full_attention_layers": 1} for view in windowed]
    differing = [{name: value for name, value in view.items() if value != getattr(config, name)} for view in views]
    return [view for view in differing if view]


def mask_candidates(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that a draft may have been trained with as its mask."""
    special = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id)
    tokens = dict.fromkeys([*free_mask_tokens(target, tokenizer)[:MASK_CANDIDATES], *special])
    rows = len(target.get_input_embeddings().weight)
    return [token for token in tokens if token is not None and token < rows]


# ---- the draft, the features, the target's answers ------------------------------------------------------------------


def _anchors(probe: TeacherForcedProbe) -> Finding:
    without, few = probe.num_given - probe.num_placed, probe.num_placed < MIN_ROWS
    found = f"{without} of {probe.num_given} rows have no place for a block of {probe.config.block_size}"
    if probe.num_placed == 0:
        return fault(found, stops=True)
    if without > probe.num_given / 2:
        return warning(found, stops=few)
    return ok(found, stops=few)


def _features(probe: TeacherForcedProbe) -> Finding:
    """Features that are broken or dead; and how large they are."""
    ids, batches = probe.config.target_layer_ids, zip(probe.batches, probe.features(), strict=True)
    features = torch.cat([found[rows["attention_mask"].to(found.device) > 0].float() for rows, found in batches])
    parts = dict(zip(ids, features.chunk(len(ids), -1), strict=True))
    if broken := [layer for layer, part in parts.items() if not torch.isfinite(part).all()]:
        return fault(f"NaN or infinite in layers {broken}")
    rms = features.pow(2).mean(0).sqrt()
    if (dead := (rms == 0).sum().item()) > len(rms) / 10:
        return fault(f"{dead} of {len(rms)} channels are always zero")
    sizes = ", ".join(f"layer {layer}: {part.pow(2).mean().sqrt().item():.3g}" for layer, part in parts.items())
    spread = (rms.max() / rms.median()).item()
    return ok(f"RMS by {sizes}; the largest channel is {spread:.0f} times the median")


@torch.no_grad()
def _answers(probe: TeacherForcedProbe) -> Finding:
    """Whether the supervised tokens are what the target itself would say."""
    same, total = 0, 0
    for rows in probe.batches:
        ids, inputs = rows["input_ids"], {name: rows[name] for name in ("input_ids", "attention_mask")}
        choices = probe.target(**inputs, use_cache=False).logits[:, :-1].argmax(-1).to(ids.device)
        mask = rows["loss_mask"][:, 1:] > 0
        same += ((choices == ids[:, 1:]) & mask).sum().item()
        total += mask.sum().item()
    found = f"{same / total:.0%} of {total} supervised tokens are the target's own greedy choice"
    return (fault if same < 0.5 * total else warning if same < 0.65 * total else ok)(found)


def _accuracy(base: Acceptance) -> Finding:
    """Whether the draft has learned at all."""
    first = base.slots[0].item()
    found = f"the first drafted token is right in {first:.0%} of blocks, {base.mean:.2f} tokens a block are accepted"
    if first < 0.15:
        return fault(f"{found}: it has learned next to nothing")
    return (warning if first < 0.4 else ok)(found)


ANCHORS = Check("anchors", "probe", _anchors, "Check the loss mask; take longer answers, or a smaller `block_size`.")
MEASURED = (
    Check("features", "probe", _features, "Look at the target: dtype (float16 overflows), quantisation, weights."),
    Check(
        "target's answers",
        "probe",
        _answers,
        "Train on the target's own: `blockdraft regenerate`; if they are, this is another target.",
    ),
    Check(
        "draft accuracy", "base", _accuracy, "Fix the other faults first, if any; then train longer, on more answers."
    ),
)
