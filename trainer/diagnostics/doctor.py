"""`blockdraft doctor`: why is my acceptance low?

First come the checkpoint's files, then the pair, then, given rows, what the draft does on them: teacher-forced, with
its settings and with others, and in real decoding. What is looked at, by which function, and what to do about it are
rows of tables (`FILES`, `PAIR`, `TRANSFORMS`, `ROWS`, `MEASURED`, `DECODED`), each in the module of its subject.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.deepseek_v41.engine_fit import ENGINES
from ...modeling.target.pairing import find_mismatches
from ...modeling.target.target_identity import target_record
from ...modeling.target.target_transforms import run_target
from ..evaluation.decoding import eval_mode, evaluate_decoding, held_out_prompts
from .checkpoint import FILES, load_leniently, logged_training
from .findings import Check, Finding, fault, run_checks, skipped
from .measured import ANCHORS, MEASURED, TeacherForcedProbe, check_confidence, check_decoding, compare_settings
from .static_checks import PAIR, ROWS, TRANSFORMS, free_mask_tokens

MAX_ROWS_READ = 500


def doctor(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedModel | str | Path,
    rows: Sequence[dict] | None = None,
    *,
    target_revision: str | None = None,
    engine: str | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
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
        prompts: token ids to decode where there are no rows: prompts need no answers.
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
    parts = {"target": target, "tokenizer": tokenizer, "rows": rows, "engine": engine or ""}
    findings, logged = [], {}

    def run(checks: Sequence[Check], **made) -> bool:
        """Whether what these checks find lets the others go on."""
        parts.update(made)
        findings.extend(run_checks(checks, parts))
        return not any(finding.stops for finding in findings)

    def stop(why: str, fix: str = "Fix the faults first.") -> list[Finding]:
        return [*findings, skipped(why, fix).of("measurements")]

    if isinstance(draft, PreTrainedModel):
        config = draft.config
    else:
        folder = Path(draft)
        config, draft, loaded = load_leniently(folder)
        findings += loaded
        run(FILES, folder=folder)
        try:
            logged = logged_training(folder)
        except ValueError as error:
            fix = "Copy it from the training's folder again, or delete it: then nothing is compared with the log."
            findings.append(fault(str(error), fix).of("training log"))
    if config is None:
        return stop("the draft has no configuration that target and tokenizer could be held to")
    record = target_record(target, tokenizer, target_revision)
    parts |= {"record": record, "mismatches": list(find_mismatches(target, config, record))}
    can_run = run(PAIR, config=config, draft=draft, free_masks=free_mask_tokens(target, tokenizer))
    if draft is None:
        return stop("the draft cannot be loaded")
    if not can_run:
        return stop("target and draft cannot run together")

    draft.to(target.device)
    with eval_mode(target, draft), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a pair that differs: findings of their own
        run(TRANSFORMS, seen=run_target(target, config.vocab_size))
        if not (rows or prompts):
            return stop("no rows", "Give rows like those of the training.")
        base = None
        if rows:
            if not run(ROWS):
                return stop("the target cannot read the rows")
            probe = TeacherForcedProbe(target, draft, rows)
            if not run(ANCHORS, probe=probe):
                return stop(f"{probe.num_placed} rows with an anchor are too few", "Give more rows.")
            base = probe.acceptance()
            run(MEASURED, base=base)
            findings += compare_settings(probe, base, tokenizer, parts["free_masks"])
            prompts = held_out_prompts(rows, num_prompts)
        else:
            findings.append(skipped("no row has an answer", "Give rows like those of the training.").of("rows"))
        report = evaluate_decoding(target, draft, prompts, max_new_tokens, compare_with_plain=False)
        findings += check_decoding(report, base, logged)
        if draft.confidence_head is not None:
            findings.append(check_confidence(target, draft, prompts, max_new_tokens))
    return findings
