"""Whether a draft and a target belong together: the draft's configuration remembers the target it was trained for."""

import warnings

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .target_identity import is_other_revision, target_record


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
    config, record = draft.config, draft.config.target or {}
    if any(adapter.is_prompt_learning for adapter in getattr(target, "peft_config", {}).values()):
        raise ValueError(
            "The target's adapter puts virtual tokens in front of every prompt, for which no draft has positions. Use "
            "an adapter that changes weights (LoRA and the like), or the target without it."
        )
    found = target_record(target, tokenizer, revision)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if target.get_output_embeddings() is None:
        raise ValueError(
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
            raise ValueError(
                f"The draft was made for a target with `{setting}`={expected}, {found['architecture']} has {actual}. "
                f"Load the target it names ({record.get('name_or_path') or 'none'}), or train a draft for this one."
            )
    if tokenizer is not None and record.get("tokenizer_sha256") not in (None, found["tokenizer_sha256"]):
        raise ValueError(
            f"`tokenizer` has another vocabulary than the one of the draft's target ({record.get('name_or_path')}): "
            "the same text would be other tokens. Load the tokenizer that comes with the draft."
        )
    if tokenizer is not None and record.get("tokenization_sha256") not in (None, found["tokenization_sha256"]):
        warnings.warn(
            "`tokenizer` has the vocabulary of the training, but splits text otherwise (normaliser, pre-tokenizer, "
            "merges, bos): the output stays the target's, but fewer tokens may be accepted. Load the "
            "tokenizer that comes with the draft.",
            stacklevel=2,
        )
    compared = []
    if record.get("dtype") == found["dtype"]:  # a cast changes the rows
        compared = [name for name in ("embedding_sha256", "weights_sha256") if record.get(name) and found[name]]
    different = [name for name in compared if record[name] != found[name]]
    if not compared and is_other_revision(record.get("revision"), found["revision"]):
        different.append("revision")
    if record.get("adapters", found["adapters"]) != found["adapters"]:
        different.append("adapters")
    if different:
        warnings.warn(
            f"The target's {different} are not those of the one the draft was trained for "
            f"({record.get('name_or_path')}): the output stays correct, but fewer tokens may be accepted.",
            stacklevel=2,
        )
