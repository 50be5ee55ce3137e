"""Tokens of a target's vocabulary that can stand for a position to be predicted."""

import json
import re
from collections.abc import Iterable, Mapping

from transformers import PreTrainedTokenizerBase

# Bytes that no UTF-8 text contains.
NEVER_IN_TEXT = (0xC0, 0xC1, *range(0xF5, 0x100))


def propose_mask_token_ids(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, rows: Iterable[Mapping] | None = None
) -> list[int]:
    """
    Ids of a target's vocabulary that can serve as the mask token, best first: the tokenizer's own mask token, reserved
    or unused special tokens by name, embedding rows that no token has, then tokens of single bytes that no UTF-8 text
    contains (0xC0 and the like: byte-level and byte-fallback vocabularies have them).

    Args:
        tokenizer: the target's.
        vocab_size: rows of the target's embedding.
        rows: the data, read only where none of the above exists: then every token that their `input_ids` lack will do,
            special ones that the chat template does not name first, then the others from the last of the vocabulary
            on, as a rule its rarest.

    Returns:
        A list of ids, never bos, eos, pad or unk.

    Raises:
        ValueError: if there is none; the message says what to do.
    """
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    special = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items() if id_ < vocab_size}
    reserved = [id_ for id_, token in special.items() if re.search("reserved|unused|mask", token.lower())]
    known = set(tokenizer.get_vocab().values())
    without_token = [id_ for id_ in range(vocab_size) if id_ not in known]
    own = [id_ for id_ in special if id_ == tokenizer.mask_token_id]
    candidates = own + sorted(reserved) + without_token + _bytes_in_no_text(tokenizer, vocab_size)
    candidates = [id_ for id_ in dict.fromkeys(candidates) if id_ not in taken]
    if not candidates and rows is not None:
        template = json.dumps(tokenizer.chat_template)
        used = taken | {id_ for id_, token in special.items() if token in template}
        for row in rows:
            used.update(row["input_ids"])
        ordinary = [id_ for id_ in reversed(range(vocab_size)) if id_ not in special]
        candidates = [id_ for id_ in [*special, *ordinary] if id_ not in used]
    if not candidates:
        raise ValueError(
            "The tokenizer has no mask, reserved or unused token, no token of a byte that no text contains, and the "
            "embedding no free row. Pass as `mask_token_id` a token that your data do not contain (a rare control "
            "character, or one of a script that you do not train on), or the data as `rows`."
        )
    return candidates


def _bytes_in_no_text(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[int]:
    """Ids of single bytes that no UTF-8 text contains, as a byte-level or a byte-fallback vocabulary writes them."""
    vocab = tokenizer.get_vocab()
    ids = [vocab[name] for byte in NEVER_IN_TEXT for name in (chr(byte), f"<0x{byte:02X}>") if name in vocab]
    # A letter of an ordinary vocabulary reads like the byte's name, but it is text; a lone byte is none.
    return [id_ for id_ in ids if id_ < vocab_size and tokenizer.decode([id_]) == "\ufffd"]
