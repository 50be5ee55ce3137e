"""How many tokens a target can read."""

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

OFFSET = 2  # rows that OPT and its kin put in front of their table


def position_limit(target: PreTrainedModel) -> int | None:
    """Tokens of the longest text that a target is made for; `None` where its configuration does not say."""
    return getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)


def has_position_table(target: PreTrainedModel) -> bool:
    """Whether a target looks its positions up, learned ones (GPT-2, OPT) or not (GPT-J, CTRL), so that there are none
    beyond [`position_limit`]. Others compute them: they read on, though less well."""
    limit, tokens, decoder = position_limit(target), target.get_input_embeddings(), target.get_decoder()
    if limit is None:
        return False
    embeddings = (module for module in decoder.modules() if isinstance(module, nn.Embedding) and module is not tokens)
    buffers = (buffer for buffer in decoder.buffers() if buffer.dim() > 1)
    sizes = [*(embedding.num_embeddings for embedding in embeddings), *map(len, buffers)]
    return any(limit <= size <= limit + OFFSET for size in sizes)


def check_length(target: PreTrainedModel, length: int, what: str, way_out: str) -> None:
    """Holds the tokens of a text against the target's positions; warns of more than the target is made for.

    Args:
        length: tokens.
        what, way_out: what has so many, and what to do about it, for the message.

    Raises:
        ValueError: if they are more than the target's table of positions has.
    """
    limit = position_limit(target)
    if limit is None or length <= limit:
        return
    text = f"{what}: {length} tokens, more than the {limit} positions of the target, {type(target).__name__}"
    if has_position_table(target):
        raise ValueError(f"{text}, and there are no others. {way_out}")
    logger.warning(f"{text}, beyond which it predicts less well. {way_out}")
