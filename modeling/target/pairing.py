"""Whether a draft and a target belong together: the draft's configuration remembers the target it was trained for."""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .target_identity import is_other_revision, target_record


class Mismatch(NamedTuple):
    """A difference between a target, or its tokenizer, and what a draft's configuration says of them.

    Attributes:
        part: `"target"` or `"tokenizer"`.
        breaks: whether the draft cannot work with it, or would answer in other tokens.
        certain: whether it is known to lower acceptance; otherwise it may.
        message: what differs, what follows, and what to do.
    """

    part: str
    breaks: bool
    certain: bool
    message: str


def check_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
) -> None:
    """Compares a loaded target with what the draft's configuration says about it.

    Args:
        target: the model that verifies; block tokens go through its embedding and its head.
        draft: its draft. Without a record in `config.target` only the shapes are compared.
        tokenizer: the target's; `None` leaves it out.
        revision: what the target was loaded at (a loaded model does not know); `None` leaves it out.

    Raises:
        ValueError: if the target has another hidden size, depth, vocabulary, tokenizer or number of embedding rows:
            the draft cannot work with it, or would answer in other tokens.

    Warns:
        UserWarning: if the target fits but has other weights (another revision, where these cannot be compared) or
            other PEFT adapters than in training, or the tokenizer its vocabulary but splits text otherwise: the output
            stays the target's, but fewer tokens may be accepted.
    """
    for mismatch in find_mismatches(target, draft.config, target_record(target, tokenizer, revision)):
        if mismatch.breaks:
            raise ValueError(mismatch.message)
        warnings.warn(mismatch.message, stacklevel=2)


def find_mismatches(target: PreTrainedModel, config: PreTrainedConfig, found: dict) -> Iterator[Mismatch]:
    """What [`check_pair`] raises and warns of, those that break the pair first.

    Args:
        target: the loaded target.
        config: the draft's.
        found: [`~blockdraft.modeling.target.target_identity.target_record`] of the target, with its tokenizer where
            that is to be compared.
    """
    record = config.target or {}
    if any(adapter.is_prompt_learning for adapter in getattr(target, "peft_config", {}).values()):
        yield _breaks(
            "The target's adapter puts virtual tokens in front of every prompt, for which no draft has positions. Use "
            "an adapter that changes weights (LoRA and the like), or the target without it."
        )
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if target.get_output_embeddings() is None:
        yield _breaks(
            f"{found['architecture']} has no LM head, which turns a draft's states into logits: load the target with "
            "`AutoModelForCausalLM`."
        )
    for setting, expected, actual in (
        ("hidden_size", config.target_hidden_size or config.hidden_size, found["hidden_size"]),
        ("num_target_layers", config.num_target_layers, found["num_hidden_layers"]),
        ("vocab_size", config.vocab_size, vocab_size),
        ("target.embedding_rows", record.get("embedding_rows"), found["embedding_rows"]),
    ):
        if expected is not None and expected != actual:
            yield _breaks(
                f"The draft was made for a target with `{setting}`={expected}, {found['architecture']} has {actual}. "
                f"Load the target it names ({record.get('name_or_path') or 'none'}), or train a draft for this one."
            )
    if _differs("tokenizer_sha256", record, found):
        yield _breaks(
            f"`tokenizer` has another vocabulary than the one of the draft's target ({record.get('name_or_path')}): "
            "the same text would be other tokens. Load the tokenizer that comes with the draft.",
            "tokenizer",
        )
    elif _differs("tokenization_sha256", record, found):
        message = (
            "`tokenizer` has the vocabulary of the training, but splits text otherwise (normaliser, pre-tokenizer, "
            "merges, bos): the output stays the target's, but fewer tokens may be accepted. Load the "
            "tokenizer that comes with the draft."
        )
        yield Mismatch("tokenizer", breaks=False, certain=True, message=message)
    compared = compared_weights(record, found)
    different = [name for name in compared if record[name] != found[name]]
    certain = bool(different)
    if not compared and is_other_revision(record.get("revision"), found["revision"]):
        different.append("revision")
    now, then = found["adapters"], record.get("adapters", found["adapters"])
    if now != then:
        different.append("adapters")
        certain = bool(now and then)  # one that was merged into the weights is the same function
    if different:
        message = (
            f"The target's {different} are not those of the one the draft was trained for "
            f"({record.get('name_or_path')}): the output stays correct, but fewer tokens may be accepted."
        )
        yield Mismatch("target", breaks=False, certain=certain, message=message)


def compared_weights(record: dict, found: dict) -> list[str]:
    """The fingerprints by which the weights of the target in training and of a loaded one can be compared."""
    if record.get("dtype") != found["dtype"]:  # a cast changes the rows
        return []
    return [name for name in ("embedding_sha256", "weights_sha256") if record.get(name) and found[name]]


def _breaks(message: str, part: str = "target") -> Mismatch:
    return Mismatch(part, breaks=True, certain=True, message=message)


def _differs(name: str, record: dict, found: dict) -> bool:
    """Whether a fingerprint of the tokenizer is known on both sides and differs."""
    return record.get(name) is not None and found[name] is not None and record[name] != found[name]
