"""The doctor's measurements: how a draft does on given rows, as it is configured and otherwise, and in real decoding.

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
from ...modeling.draft.anchors import legal_anchors, legal_dspark_anchors
from ...modeling.target.target_features import decoder_layers
from ..block_batch import BlockBatch, build_block_batch
from ..data.dataset import DraftCollator
from ..evaluation.calibration import decode_rounds, survival_probabilities
from ..evaluation.decoding import changed, promises_too_much
from ..evaluation.decoding_report import DecodingReport
from ..objectives.dflash import survival
from ..target_states import TargetStates
from .findings import Check, Finding, fault, ok, run_checks, skipped, warning

MAX_ROWS, MAX_LENGTH, MAX_ANCHORS = 16, 1024, 32
BATCH_TOKENS, CHUNK = 2048, 1024  # tokens through the target, slots through its head, at once
MIN_ROWS = 4  # fewer say nothing about chance
ERRORS = 3  # standard errors that a difference must have
LEAST_GAIN = 0.1  # accepted tokens a block, and the share of those accepted as configured
# To judge on; to judge a slot that hardly any round gets to; to decode for the confidence head.
LEAST_ROUNDS, SLOT_ROUNDS, CONFIDENCE_ROUNDS = 20, 100, 300
USELESS = 0.02  # a drafted slot that fewer rounds get past costs more than it brings


class Acceptance(NamedTuple):
    """What verification would accept of teacher-forced blocks.

    Attributes:
        slots (`[R, drafted]` float64): by row, how many of its blocks are accepted up to each drafted slot.
        blocks: number of blocks in all rows.
    """

    slots: Tensor
    blocks: int

    @property
    def mean(self) -> float:
        """Accepted tokens a block."""
        return self.slots.sum().item() / self.blocks


def gain(base: Acceptance, other: Acceptance) -> float:
    """Accepted tokens a block that `other` brings over `base`; 0 unless that is beyond chance, judged by rows."""
    difference = (other.slots - base.slots).sum(-1)
    mean = difference.sum().item() / base.blocks
    error = difference.std().item() * math.sqrt(len(difference)) / base.blocks
    return mean if mean > max(ERRORS * error, LEAST_GAIN, LEAST_GAIN * base.mean) else 0.0


class TeacherForcedProbe:
    """Rows with fixed anchors, on which a pair is measured again and again.

    Args:
        target, draft: a pair that fits, in evaluation mode.
        rows: with `input_ids`, `loss_mask` and `row_id`; up to 16 of those that have an anchor are taken, evenly
            spread, and of each its first 1,024 tokens.

    Attributes:
        batches: `input_ids`, `attention_mask`, `loss_mask` (`[B, S]`), and the blocks' places of each.
        features: `[B, S, F * H]` of each batch, for the layers that are configured.
    """

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel, rows: Sequence[dict]):
        self.target, self.draft, self.config = target, draft, draft.config
        self._states = TargetStates(target, draft.config, draft.device)
        rows = [row | {name: row[name][:MAX_LENGTH] for name in ("input_ids", "loss_mask")} for row in rows]
        placed = [row for row in rows if self._has_anchor(row["loss_mask"])]
        self.num_given, self.num_placed = len(rows), len(placed)
        chosen = placed[:: max(1, math.ceil(len(placed) / MAX_ROWS))]
        size = max(1, BATCH_TOKENS // max((len(row["input_ids"]) for row in chosen), default=1))
        self.batches = [self._place(chosen[first : first + size]) for first in range(0, len(chosen), size)]
        self.features = self._read_features()

    def _has_anchor(self, loss_mask: list[int]) -> bool:
        mask, config = torch.tensor([loss_mask]), self.config
        legal = legal_dspark_anchors(mask) if config.sample_from_anchor else legal_anchors(mask, config.block_size)
        return bool(legal.any())

    def _place(self, rows: list[dict]) -> dict[str, Tensor]:
        batch = DraftCollator(pad_token_id=0)(rows)
        blocks = self._blocks(batch)
        batch |= {"anchor_positions": blocks.anchor_positions, "block_keep_mask": blocks.block_keep_mask}
        batch["prefix_lengths"] = torch.full_like(blocks.anchor_positions, self.config.num_known_tokens)
        return {name: tensor.to(self.target.device) for name, tensor in batch.items()}

    def _blocks(self, batch: dict[str, Tensor]) -> BlockBatch:
        device = self.draft.device
        return build_block_batch(batch, self.draft, step=0, seed=0, num_anchors=MAX_ANCHORS, device=device).to(device)

    def _read_features(self) -> list[Tensor]:
        return [self._states.read(batch)[0] for batch in self.batches]

    @torch.no_grad()
    def acceptance(self, label_shift: int = 0, **settings) -> Acceptance:
        """Measures with `settings` of the configuration changed, and labels so many places later than they are."""
        slots, blocks = [], 0
        with changed(self.config, **settings):
            features = self._read_features() if "target_layer_ids" in settings else self.features
            for batch, context in zip(self.batches, features, strict=True):
                correct, supervised = self._predict(batch, context, label_shift)
                slots.append(survival(correct, supervised)[..., -self.config.num_drafted :].sum(1).double().cpu())
                blocks += supervised.bool().any(-1).sum().item()
        return Acceptance(torch.cat(slots), blocks)

    def _predict(self, batch: dict[str, Tensor], features: Tensor, label_shift: int) -> tuple[Tensor, Tensor]:
        """Whether each slot's best token is its label, and which slots count: `[B, N, block_size]`."""
        draft, embedding, head = self.draft, self.target.get_input_embeddings(), self.target.get_output_embeddings()
        blocks = labels = self._blocks(batch)
        embeds = draft.embed_block(blocks.input_ids, embedding).to(draft.device)
        states = draft(noise_embeds=embeds, context_hidden_states=features, block_plan=blocks.plan).last_hidden_state
        if label_shift:  # labels of blocks that are moved as far, where they still are in the row
            anchors = batch["anchor_positions"] + label_shift
            inside = (anchors >= 0) & (anchors < batch["input_ids"].shape[1])
            moved = {"anchor_positions": anchors * inside, "block_keep_mask": batch["block_keep_mask"] & inside}
            labels = self._blocks(batch | moved)
        targets, states = labels.targets, states.flatten(0, 1)
        correct = torch.zeros_like(targets.supervised, dtype=torch.bool).flatten()
        for places in targets.index.split(CHUNK):
            hidden = states[places].to(device_of(head, self.target.device))
            logits = draft.compute_logits(hidden, head)
            if labels.previous_token_ids is not None:
                logits = draft.slot_logits(logits, labels.previous_token_ids.flatten()[places], hidden)
            correct[places] = logits.argmax(-1).to(correct.device) == targets.token_ids.flatten()[places]
        return correct.view_as(targets.supervised), targets.supervised


# ---- is another setting better? -------------------------------------------------------------------------------------


def compare_settings(
    probe: TeacherForcedProbe, base: Acceptance, tokenizer: PreTrainedTokenizerBase, free_masks: list[int]
) -> list[Finding]:
    """Findings on layer ids, labels, mask token, visibility and embedding scale, each against other values; `base` is
    as configured."""
    config, target = probe.config, probe.target
    shifted = [[layer + by for layer in config.target_layer_ids] for by in (-1, 1)]
    layers = [ids for ids in shifted if ids[0] >= 0 and ids[-1] < len(decoder_layers(target))]
    special = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id}
    masks = {*free_masks[:8], *special} - {config.mask_token_id, None}
    rows = len(target.get_input_embeddings().weight)
    masks = sorted(token for token in masks if token < rows)
    scales = [scale for scale in (1.0, math.sqrt(config.hidden_size)) if scale != config.input_embedding_scale]
    findings = []
    for check, variants, fix in (
        (
            "layer ids",
            [{"target_layer_ids": ids} for ids in layers],
            "Set `target_layer_ids` to those, or fix the counting.",
        ),
        ("labels", [{"label_shift": by} for by in (-1, 1)], "The draft was trained one place off: train it again."),
        ("mask token", [{"mask_token_id": token} for token in masks], "Set `mask_token_id` to that of the training."),
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
    values = {"sliding_window": {config.sliding_window, 8, 128, config.block_size, 2 * config.block_size}}
    if not config.sample_from_anchor:
        values = {"sliding_window": values["sliding_window"] | {None}, "is_causal": (False, True)}
    if "num_full_attention_layers" in config.to_dict() and config.num_hidden_layers > 1:
        values["num_full_attention_layers"] = (0, 1)
    views = [dict(zip(values, view, strict=True)) for view in itertools.product(*values.values())]
    # Without a window, every layer sees the whole context.
    views = [view for view in views if view["sliding_window"] or not view.get("num_full_attention_layers")]
    differing = [{name: value for name, value in view.items() if value != getattr(config, name)} for view in views]
    return [view for view in differing if view]


# ---- the draft, the features, the target's answers ------------------------------------------------------------------


def _anchors(probe: TeacherForcedProbe) -> Finding:
    without, few = probe.num_given - probe.num_placed, probe.num_placed < MIN_ROWS
    found = f"{without} of {probe.num_given} rows have no place for a block of {probe.config.block_size}"
    if probe.num_placed == 0:
        return fault(found, stops=True)
    return (warning if without > probe.num_given / 2 else ok)(found, stops=few)


def _features(probe: TeacherForcedProbe) -> Finding:
    """Features that are broken or dead; and how large they are."""
    ids, batches = probe.config.target_layer_ids, zip(probe.batches, probe.features, strict=True)
    features = torch.cat([found[batch["attention_mask"].to(found.device) > 0].float() for batch, found in batches])
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
    for batch in probe.batches:
        ids, inputs = batch["input_ids"], {name: batch[name] for name in ("input_ids", "attention_mask")}
        choices = probe.target(**inputs, use_cache=False).logits[:, :-1].argmax(-1).to(ids.device)
        mask = batch["loss_mask"][:, 1:] > 0
        same += ((choices == ids[:, 1:]) & mask).sum().item()
        total += mask.sum().item()
    found = f"{same / total:.0%} of {total} supervised tokens are the target's own greedy choice"
    return (fault if same < 0.5 * total else warning if same < 0.65 * total else ok)(found)


def _accuracy(base: Acceptance) -> Finding:
    """Whether the draft has learned at all."""
    first = base.slots[:, 0].sum().item() / base.blocks
    found = f"the first drafted token is right in {first:.0%} of blocks, {base.mean:.2f} tokens a block are accepted"
    if first < 0.15:
        return fault(f"{found}: it has learned next to nothing")
    return (warning if first < 0.4 else ok)(found)


ANCHORS = (Check("anchors", _anchors, "Check the loss mask; take longer answers, or a smaller `block_size`."),)
MEASURED = (
    Check("features", _features, "Look at the target: dtype (float16 overflows), quantisation, weights."),
    Check(
        "target's answers", _answers, "Train on its own: `blockdraft regenerate`; if they are, it is another target."
    ),
    Check("draft accuracy", _accuracy, "Fix the other faults first, if any; then train longer, on more answers."),
)


# ---- real decoding --------------------------------------------------------------------------------------------------


def check_decoding(report: DecodingReport, base: Acceptance, logged: dict[str, float]) -> list[Finding]:
    """Real decoding against teacher forcing, of the same rows (`base`) and in the training's log (`logged`; may be
    empty); its slots; its loops."""
    if (rounds := len(report.accepted_lengths)) < LEAST_ROUNDS:
        found = f"tau {report.tau:.2f} over {rounds} rounds, too few to judge"
        return [skipped(found, "Give more prompts, or longer answers.").of("decoding")]
    return run_checks(DECODED, {"report": report, "base": base, "logged": logged or None})


def _decoding(report: DecodingReport, base: Acceptance) -> Finding:
    forced, rounds = 1 + base.mean, len(report.accepted_lengths)
    found = f"tau {report.tau:.2f} over {rounds} rounds; teacher-forced blocks of the rows give {forced:.2f}"
    # Accepted in the rows and not in the answers: they are not the target's text, or were learned by heart.
    return (fault if promises_too_much(forced, report.tau) else ok)(found)


def _training(report: DecodingReport, logged: dict[str, float]) -> Finding:
    accuracy, estimate = logged["accuracy"], logged["estimated_tau"]
    logs = f"training logged accuracy {accuracy:.2f} and estimated tau {estimate:.2f}"
    found = f"{logs}; decoding gives {report.tau:.2f}"
    return (fault if promises_too_much(estimate, report.tau) else ok)(found)


def _block_size(report: DecodingReport) -> Finding:
    """Whether the last slots of the block are worth drafting."""
    slots = report.acceptance_by_slot
    useful, shares = sum(share >= USELESS for share in slots), ", ".join(f"{share:.0%}" for share in slots)
    found = f"blocks of {report.block_size}; share of rounds past each drafted token: {shares}"
    if useful == len(slots) or slots[0] <= 0.2 or len(report.accepted_lengths) < SLOT_ROUNDS:
        return ok(found)
    shorter = report.block_size - len(slots) + max(1, useful)
    fix = f"Set `block_size` to what was trained; if it is, serve {shorter} (`fastest_block_size`)."
    return (fault if useful <= len(slots) / 2 else warning)(found, fix)


def _loops(report: DecodingReport) -> Finding:
    share, without = report.looping_share, report.tau_without_loops
    found = f"{share:.0%} of {len(report.answers)} answers repeat themselves; tau without them {without:.2f}"
    return (warning if share > 0.25 else ok)(found)


DECODED = (
    Check(
        "decoding", _decoding, "Train on the target's answers (`blockdraft regenerate`); judge on held-out prompts."
    ),
    Check(
        "training against decoding",
        _training,
        "The training saw what it had to predict (context past the anchor, evaluation rows), or another target, "
        "tokenizer or layers than now: train with `blockdraft train`, which masks both.",
    ),
    Check("block size", _block_size),
    Check(
        "looping answers",
        _loops,
        "Look at the target's text: template, sampling (greedy loops more), stop tokens. Loops flatter tau.",
    ),
)


def check_confidence(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Finding:
    """Whether the confidence head, with its temperatures, promises what verification accepts."""
    rounds, _ = decode_rounds(target, draft, prompts, CONFIDENCE_ROUNDS, max_new_tokens)
    if len(rounds.logits) < LEAST_ROUNDS:
        few = f"{len(rounds.logits)} rounds are too few to judge"
        return skipped(few, "Decode more or longer answers.").of("confidence")
    survival = survival_probabilities(rounds.logits, draft.config.confidence_temperatures)
    promised = survival[rounds.labelled].mean().item()
    accepted = rounds.accepted[rounds.labelled].double().mean().item()
    found, off = f"it promises {promised:.0%} of drafted tokens, {accepted:.0%} are accepted", abs(promised - accepted)
    fix = "Run `blockdraft calibrate`; until then confidence schedules cut at the wrong place."
    return (fault if off > 0.25 else warning if off > 0.12 else ok)(found).of("confidence", fix)
