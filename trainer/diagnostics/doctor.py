"""`blockdraft doctor`: why is my acceptance low?

Every check says what it found and how to mend it. First come the checkpoint's files, then the pair, then, given rows,
what the draft does on them: teacher-forced, with its settings and with others, and in real decoding.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.deepseek_v41.engine_fit import ENGINES
from ...modeling.target.pairing import check_pair
from ...modeling.target.target_features import capture_features
from ...modeling.target.target_identity import target_record
from ..evaluation.calibration import decode_rounds, survival_probabilities
from ..evaluation.decoding import eval_mode, evaluate_decoding, held_out_prompts, promises_too_much
from ..evaluation.report import DecodingReport
from .checkpoint import (
    check_code,
    check_stray_heads,
    check_template,
    check_training,
    check_values,
    load_draft_leniently,
    logged_training,
    read_settings,
)
from .findings import FAULT, Finding, fault, ok, skipped, warning
from .measured import (
    MIN_ROWS,
    Acceptance,
    Rehearsal,
    check_accuracy,
    check_answers,
    check_features,
    check_rows,
    compare_settings,
)
from .pair import (
    check_capture_point,
    check_dtypes,
    check_engine,
    check_engine_view,
    check_heads,
    check_layers,
    check_mask_token,
    check_slot_layout,
    check_target,
    check_tokenizer,
    check_transforms,
    check_visibility,
)

MAX_ROWS_READ = 500
# To judge on; to judge a slot that hardly any round gets to; to decode for the confidence head.
LEAST_ROUNDS, SLOT_ROUNDS, CONFIDENCE_ROUNDS = 20, 100, 300
USELESS = 0.02  # a drafted slot that fewer rounds get past costs more than it brings


def doctor(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel | str | Path,
    rows: Sequence[dict] | None = None,
    *,
    target_revision: str | None = None,
    engine: str | None = None,
    num_prompts: int = 8,
    max_new_tokens: int = 64,
) -> list[Finding]:
    """Looks for what lowers the acceptance of a draft's tokens.

    Args:
        target, tokenizer: as they are served.
        draft: a checkpoint's folder, which may be broken; or a loaded draft, whose files are not looked at.
        rows: with `input_ids`, `loss_mask` and `row_id`, as [`prepare_dataset`] makes them, of the kind that the draft
            was trained on and not packed; a few dozen are enough, of many some are read. Without them nothing is
            measured.
        target_revision: what the target was loaded at.
        engine: `"vllm"` or `"sglang"`, to hear what it would do otherwise.
        num_prompts, max_new_tokens: of the rows' prompts, how many are decoded, and how far.

    Returns:
        The outcome of each check, in the order of looking.

    Raises:
        ValueError: if the folder holds no draft of ours, the rows are packed, or nothing is known of the engine.
    """
    if engine not in (None, *ENGINES):
        raise ValueError(f"`engine` is {engine!r}; choose {' or '.join(ENGINES)}.")
    rows = [] if rows is None else [rows[i] for i in range(0, len(rows), -(-len(rows) // MAX_ROWS_READ) or 1)]
    if rows and "document_ids" in rows[0]:
        raise ValueError("`rows` are packed: give them as they were before packing.")
    if isinstance(draft, PreTrainedModel):
        folder, settings, logged, findings = None, draft.config.to_dict(), {}, []
    else:
        folder = Path(draft)
        settings = read_settings(folder)
        draft, findings = load_draft_leniently(folder, settings)
        logged, damaged_log = logged_training(folder)
        findings += [check_stray_heads(folder), check_code(folder, settings), check_template(folder, tokenizer)]
        findings += damaged_log
    record = target_record(target, tokenizer, target_revision)
    findings += [
        check_slot_layout(settings),
        check_engine_view(settings),
        check_layers(settings, target),
        check_capture_point(settings, target),
        check_mask_token(settings, target, tokenizer),
        check_target(settings, target, record),
        check_tokenizer(settings, record),
        check_heads(settings, target),
        check_dtypes(settings, record, draft),
        check_visibility(settings),
        check_training(settings),
    ]
    if draft is None:
        return [*findings, _not_measured("the draft cannot be loaded")]
    if folder is not None:
        draft.to(target.device)
    findings += [check_values(draft), check_engine(draft, target, engine)]
    if (obstacle := _obstacle(target, draft)) is not None:
        return [*findings, _not_measured(f"the pair does not run: {obstacle}")]
    with eval_mode(target, draft), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a pair that differs: findings of their own
        findings += check_transforms(target, draft)
        if not rows:
            return [*findings, _not_measured("no rows", "Give rows like those of the training.")]
        return findings + _measure(target, tokenizer, draft, rows, logged, num_prompts, max_new_tokens)


def _measure(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel,
    rows: list[dict],
    logged: dict[str, float],
    num_prompts: int,
    max_new_tokens: int,
) -> list[Finding]:
    findings = check_rows(rows, draft, target, tokenizer)
    if any(finding.check == "token ids" and finding.status == FAULT for finding in findings):
        return [*findings, _not_measured("the target cannot read the rows")]
    rehearsal = Rehearsal(target, draft, rows)
    findings.append(_anchors(rehearsal, len(rows)))
    if rehearsal.num_rows < MIN_ROWS:
        return [*findings, _not_measured(f"fewer than {MIN_ROWS} rows have an anchor", "Give more rows.")]
    base = rehearsal.acceptance()
    findings += [check_features(rehearsal), check_answers(rehearsal), check_accuracy(base)]
    findings += compare_settings(rehearsal, tokenizer, base)
    prompts = held_out_prompts(rows, num_prompts)
    report = evaluate_decoding(target, draft, prompts, max_new_tokens, compare_with_plain=False)
    findings += check_decoding(report, base, logged)
    if draft.confidence_head is not None:
        findings.append(check_confidence(target, draft, prompts, max_new_tokens))
    return findings


def _not_measured(why: str, mend: str = "Mend the faults first.") -> Finding:
    return skipped("measurements", why, mend)


def _obstacle(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    """Why draft and target cannot be run together, if they cannot."""
    config, (rows, width) = draft.config, target.get_input_embeddings().weight.shape
    if target.get_output_embeddings() is None:
        return "the target has no LM head"
    if width != config.hidden_size:
        return f"`hidden_size` is {config.hidden_size}, the target's embedding is {width} wide"
    if config.mask_token_id >= rows:
        return f"`mask_token_id` {config.mask_token_id} is not among the {rows} embedding rows"
    try:
        with warnings.catch_warnings(), capture_features(target, config.target_layer_ids, config.capture_point):
            warnings.simplefilter("ignore")  # they are findings of their own
            check_pair(target, draft)
    except ValueError as error:
        return str(error)
    return None


def _anchors(rehearsal: Rehearsal, rows: int) -> Finding:
    name, without = "anchors", rehearsal.rows_without_anchor
    found = f"{without} of {rows} rows have no place for a block of {rehearsal.config.block_size}"
    mend = "Check the loss mask; take longer answers, or a smaller `block_size`."
    if without == rows:
        return fault(name, found, mend)
    if without > rows / 2:
        return warning(name, found, mend)
    return ok(name, found)


def check_decoding(report: DecodingReport, base: Acceptance, logged: dict[str, float]) -> list[Finding]:
    """Real decoding against teacher forcing, here and in the training's log; its slots; its loops.

    Args:
        base: teacher-forced, of the same rows.
        logged: `accuracy` and `estimated_tau` of the training; empty if unknown.
    """
    tau, forced, findings = report.tau, 1 + base.mean, []
    rounds = len(report.accepted_lengths)
    if rounds < LEAST_ROUNDS:
        mend = "Give more prompts, or longer answers."
        return [skipped("decoding", f"tau {tau:.2f} over {rounds} rounds, too few to judge", mend)]
    found = f"tau {tau:.2f} over {rounds} rounds; teacher-forced blocks of the rows give {forced:.2f}"
    # Accepted in the rows and not in the answers: they are not the target's text, or were learned by heart.
    if promises_too_much(forced, tau):
        mend = "Train on the target's own answers (`blockdraft regenerate`); judge on prompts held out from training."
        findings.append(fault("decoding", found, mend))
    else:
        findings.append(ok("decoding", found))
    if logged:
        accuracy, estimate = logged["accuracy"], logged["estimated_tau"]
        found = (
            f"training logged accuracy {accuracy:.2f} and an estimated tau of {estimate:.2f}; decoding gives {tau:.2f}"
        )
        if promises_too_much(estimate, tau):
            mend = (
                "The training saw what it had to predict (context past the anchor, evaluation rows), or another "
                "target, tokenizer or layers than now: train with `blockdraft train`, which masks both."
            )
            findings.append(fault("training against decoding", found, mend))
        else:
            findings.append(ok("training against decoding", found))
    return [*findings, _slots(report), _loops(report)]


def _slots(report: DecodingReport) -> Finding:
    """Whether the last slots of the block are worth drafting."""
    name, slots = "block size", report.acceptance_by_slot
    useful = sum(share >= USELESS for share in slots)
    shares = ", ".join(f"{share:.0%}" for share in slots)
    if useful < len(slots) and slots[0] > 0.2 and len(report.accepted_lengths) >= SLOT_ROUNDS:
        found = f"blocks of {report.block_size}, but rounds get past their drafted tokens in {shares}"
        mend = (
            f"Set `block_size` to what was trained; if it is, serve {report.block_size - len(slots) + max(1, useful)} "
            "(`fastest_block_size`)."
        )
        return (fault if useful <= len(slots) / 2 else warning)(name, found, mend)
    return ok(name, f"blocks of {report.block_size}, rounds get past their drafted tokens in {shares}")


def _loops(report: DecodingReport) -> Finding:
    name, share = "looping answers", report.looping_share
    without = report.tau_without_loops
    found = f"{share:.0%} of {len(report.answers)} answers repeat themselves; tau without them {without:.2f}"
    if share > 0.25:
        mend = "Look at the target's text: template, sampling (greedy loops more), stop tokens. Loops flatter tau."
        return warning(name, found, mend)
    return ok(name, found)


def check_confidence(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Finding:
    """Whether the confidence head, with its temperatures, promises what verification accepts."""
    name = "confidence"
    rounds, _ = decode_rounds(target, draft, prompts, CONFIDENCE_ROUNDS, max_new_tokens)
    if len(rounds.logits) < LEAST_ROUNDS:
        return skipped(name, f"{len(rounds.logits)} rounds are too few to judge", "Decode more or longer answers.")
    promised = (
        survival_probabilities(rounds.logits, draft.config.confidence_temperatures)[rounds.labelled].mean().item()
    )
    accepted = rounds.accepted[rounds.labelled].double().mean().item()
    found = f"it promises that {promised:.0%} of drafted tokens are accepted, {accepted:.0%} are"
    mend = "Run `blockdraft calibrate`; until then confidence schedules cut at the wrong place."
    off = abs(promised - accepted)
    return fault(name, found, mend) if off > 0.25 else warning(name, found, mend) if off > 0.12 else ok(name, found)
