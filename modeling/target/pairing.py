"""Whether a draft and a target belong together: the draft's configuration remembers the target it was trained for."""

import warnings
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .target_identity import is_other_revision, target_record
from .target_shapes import draft_fault, shape_faults

# Drafts with the target that they were last compared with.
_compared: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref] = weakref.WeakKeyDictionary()


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
        ValueError: if the draft is none, or the target has another hidden size, depth, vocabulary, tokenizer or number
            of embedding rows: the draft cannot work with it, or would answer in other tokens.

    Warns:
        UserWarning: if the target fits but has other weights (another revision, where these cannot be compared) or
            other PEFT adapters than in training, or the tokenizer its vocabulary but splits text otherwise: the output
            stays the target's, but fewer tokens may be accepted.
    """
    for mismatch in find_mismatches(target, draft.config, target_record(target, tokenizer, revision)):
        if mismatch.breaks:
            raise ValueError(mismatch.message)
        warnings.warn(mismatch.message, stacklevel=2)


def check_is_draft(name: str, revision: str | None = None) -> None:
    """Raises a `ValueError` if a directory or a repository of the Hub holds something else than a draft, before any
    weight is loaded; it says what."""
    settings, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    if (fault := draft_fault(settings, name)) is not None:
        raise ValueError(fault)


def compare_target(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """[`check_pair`], unless this is the target that the draft was last compared with: reading weights takes time."""
    last = _compared.get(draft)
    if last is None or last() is not target:
        check_pair(target, draft)
        _compared[draft] = weakref.ref(target)


def find_mismatches(target: PreTrainedModel, config: PreTrainedConfig, found: dict) -> Iterator[Mismatch]:
    """What [`check_pair`] raises and warns of, those that break the pair first.

    Args:
        target: the loaded target; config: the draft's.
        found: [`~blockdraft.modeling.target.target_identity.target_record`] of the target, with its tokenizer where
            that is to be compared.
    """
    for message in shape_faults(target, config):
        yield Mismatch("target", breaks=True, certain=True, message=message)
    record = config.target or {}
    if _differs("tokenizer_sha256", record, found):
        message = (
            f"`tokenizer` has another vocabulary than the one of the draft's target ({record.get('name_or_path')}): "
            "the same text would be other tokens. Load the tokenizer that comes with the draft."
        )
        yield Mismatch("tokenizer", breaks=True, certain=True, message=message)
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


def _differs(name: str, record: dict, found: dict) -> bool:
    """Whether a fingerprint of the tokenizer is known on both sides and differs."""
    return record.get(name) is not None and found[name] is not None and record[name] != found[name]
