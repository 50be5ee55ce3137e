"""Trains the chat targets' byte-level BPE tokenizer on the training conversations (a few seconds).

Run `python -m examples.chitchat.train_tokenizer FOLDER` to write it; `train_target` makes its own.
"""

import sys
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import Conversation, as_messages, split

VOCAB_SIZE = 2048
MAX_LENGTH = 1024
PAD, BOS, IM_START, IM_END = "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"
RESERVED = [f"<|reserved_{i}|>" for i in range(12)]  # never in the data: a draft takes its mask token from here

# Words keep their leading blank, line breaks and single digits stand alone.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\n|\s+"

# The end of the turn belongs to what the assistant generates: without it a model never learns to stop.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _texts(conversations: list[Conversation]) -> Iterator[str]:
    """Turns behind their role names, so that these become one token each."""
    for conversation in conversations:
        for message in as_messages(conversation.turns):
            yield f"{message['role']}\n{message['content']}"


def train_tokenizer(conversations: list[Conversation], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with a ChatML template.

    Args:
        conversations: What to learn merges from; give it the training split only.
        vocab_size: Ids in all: special tokens, 256 bytes, merges.

    Returns:
        The tokenizer. Special tokens come first: pad 0, bos 1, `<|im_start|>` 2, `<|im_end|>` (eos) 3, reserved 4-15.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, IM_START, IM_END, *RESERVED],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=IM_END,
        additional_special_tokens=[IM_START, *RESERVED],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    tokenizer = train_tokenizer(split()["train"])
    tokenizer.save_pretrained(sys.argv[1])
    print(f"{len(tokenizer)} tokens, written to {sys.argv[1]}")
