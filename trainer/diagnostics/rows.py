"""The doctor's checks of the rows that a draft is trained and measured on."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.loss_mask import supervised_runs
from ..data.provenance import OWN_ANSWERS, author, chat_template_digest
from .findings import Check, Finding, fault, ok, skipped, warning
from .pair import stop_tokens


def _token_ids(rows: Sequence[dict], target: PreTrainedModel) -> Finding:
    highest, size = max(max(row["input_ids"]) for row in rows), len(target.get_input_embeddings().weight)
    if highest >= size:
        return fault(f"token {highest} in the rows, {size} rows in the target's embedding", stops=True)
    return ok(f"all below {size}")


def _mask_token(rows: Sequence[dict], config: PreTrainedConfig) -> Finding:
    if count := sum(row["input_ids"].count(config.mask_token_id) for row in rows):
        return fault(f"the mask token {config.mask_token_id} occurs {count} times in the rows")
    return ok("it does not occur")


def _stop_token(rows: Sequence[dict], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Finding:
    stops = stop_tokens(target, tokenizer)
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
    message, render = [{"role": "user", "content": "a"}], {"tokenize": True, "return_dict": True}
    try:
        without, prompt = (
            tokenizer.apply_chat_template(message, add_generation_prompt=asked, **render)["input_ids"]
            for asked in (False, True)
        )
    except (TemplateError, ValueError) as error:
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
    Check("token ids", "rows target", _token_ids, "Encode the data with the target's tokenizer."),
    Check("mask token in data", "rows config", _mask_token, "Train with a mask token that no text contains."),
    Check(
        "stop token", "rows target tokenizer", _stop_token, "Give `stop_token_ids`: a draft learns where answers end."
    ),
    Check(
        "prompts", "rows tokenizer", _prompts, "Make the rows with the template that is served, or serve with theirs."
    ),
)


def check_provenance(
    provenance: dict[str, dict],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict | None,
    target_revision: str | None = None,
) -> list[Finding]:
    """A finding "data origin" for each file that `blockdraft regenerate` wrote: whether with this target, and under
    the template that is served.

    Args:
        provenance: the settings by file, as [`DataReport`] has them.
        template_kwargs: of serving.
    """
    findings, digest = [], chat_template_digest(tokenizer)
    serve = "Regenerate the answers with the template and `template_kwargs` that are served, or serve with theirs."
    for file, settings in provenance.items():
        name, kwargs = Path(file).name, settings["template_kwargs"]
        origin, here = f"{name}: answers of {Path(settings['target']).name}", target.config.name_or_path or "unnamed"
        if settings["chat_template_sha256"] != digest:
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
