"""The doctor's checks of real decoding: what it accepts, against teacher forcing and the training's log."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from ..evaluation.calibration import decode_rounds, survival_probabilities
from ..evaluation.decoding import promises_too_much
from ..evaluation.decoding_report import DecodingReport
from .findings import Check, Finding, fault, ok, run_checks, skipped, warning
from .measured import Acceptance

# To judge on; to judge a slot that hardly any round gets to; to decode for the confidence head.
LEAST_ROUNDS, SLOT_ROUNDS, CONFIDENCE_ROUNDS = 20, 100, 300
USELESS = 0.02  # a drafted slot that fewer rounds get past costs more than it brings
REGENERATE = "Train on the target's own answers (`blockdraft regenerate`); judge on prompts held out from training."
LOOPS = "Look at the target's text: template, sampling (greedy loops more), stop tokens. Loops flatter tau."
LEAK = (
    "The training saw what it had to predict (context past the anchor, evaluation rows), or another target, tokenizer "
    "or layers than now: train with `blockdraft train`, which masks both."
)


def check_decoding(report: DecodingReport, base: Acceptance, logged: dict[str, float]) -> list[Finding]:
    """Real decoding against teacher forcing, here and in the training's log; its slots; its loops.

    Args:
        base: teacher-forced, of the same rows.
        logged: `accuracy` and `estimated_tau` of the training; empty if unknown.
    """
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
    found = (
        f"training logged accuracy {accuracy:.2f} and estimated tau {estimate:.2f}; decoding gives {report.tau:.2f}"
    )
    return (fault if promises_too_much(estimate, report.tau) else ok)(found)


def _block_size(report: DecodingReport) -> Finding:
    """Whether the last slots of the block are worth drafting."""
    slots = report.acceptance_by_slot
    useful = sum(share >= USELESS for share in slots)
    found = f"blocks of {report.block_size}; share of rounds past each drafted token: "
    found += ", ".join(f"{share:.0%}" for share in slots)
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
    Check("decoding", "report base", _decoding, REGENERATE),
    Check("training against decoding", "report logged", _training, LEAK),
    Check("block size", "report", _block_size),
    Check("looping answers", "report", _loops, LOOPS),
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
