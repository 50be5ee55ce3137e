"""A chat target's model card, from what was measured."""

from pathlib import Path

from transformers import PreTrainedModel

from .target_model import CHAT_TARGETS

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [{name}, chat, speculative-decoding]
---

# A small {title} that chats

{parameters:.2f}M parameters: {shape}; a byte-level BPE vocabulary of {vocabulary}. A small and fast target for
demonstrations and tests of speculative decoding: it talks like the chats it was trained on and knows nothing.

```python
import blockdraft  # registers the {title} classes
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("examples/chitchat/targets/{name}")
tokenizer = AutoTokenizer.from_pretrained("examples/chitchat/targets/{name}")
```

## Training

From scratch on [chitchat-dataset](https://github.com/BYU-PCCL/chitchat-dataset) (MIT; Myers, Etchart and Fulda,
*Conversational Scaffolding*, 2020): 80% of its conversations, with the loss on both speakers' turns. Conversations
that nobody answered, with explicit words, monologues or one-word turns only were left out; the other 20% are for
drafts (15%) and evaluation (5%). {steps} steps of {batch_size} rows of up to {row_tokens} tokens, {epochs:.2f}
passes over the conversations as heard from either side, in {minutes:.0f} minutes on two shared CPU cores. AdamW,
learning rate {learning_rate}, cosine over the time; experts are balanced by their selection bias.

    python -m examples.chitchat.train_target --target {name} --max_minutes {max_minutes:g}

## Measured on held-out conversations

| | |
|---|---|
| perplexity, assistant tokens | {perplexity_assistant:.2f} |
| perplexity, all tokens with the chat markers | {perplexity_all:.2f} |
| greedy answers that loop: the same 4-gram four times running | {loop_share:.1%} of {prompts} |
| greedy answers with any 1- to 16-gram three times running, from 12 tokens on | {any_loop_share:.1%} |
| greedy answers that stop by themselves within 128 tokens | {stop_share:.1%} |
| mean length of a greedy answer | {mean_tokens:.1f} tokens |
| different answers | {distinct_share:.1%} |

The numbers are those of the saved bf16 weights (what {title} keeps in fp32 is fp32), run in fp32:

    python -m examples.chitchat.evaluate_target --target {name}

## Greedy answers

The last user turn of evenly spaced held-out prompts, and the answer:

{samples}

## Limits

A toy: answers are often off the point or untrue, in the voice of the students who wrote the data in 2018. Not for use
with people.
"""


def write_card(folder: Path, name: str, model: PreTrainedModel, scores: dict, training: dict) -> None:
    """Writes `README.md` beside the weights.

    Args:
        folder: Where the target lies.
        name: Which of the chat targets it is.
        model: The target.
        scores: What `evaluate_target` returned.
        training: `minutes`, `steps`, `epochs`, `batch_size`, `row_tokens`, `learning_rate`, `max_minutes`.
    """
    target = CHAT_TARGETS[name]
    samples = "\n".join(f"- {sample['user']!r} -> {sample['assistant']!r}" for sample in scores["samples"])
    values = scores | training
    values |= {
        "parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "name": name,
        "title": target.title,
        "shape": target.shape,
        "vocabulary": model.config.vocab_size,
        "samples": samples,
    }
    (folder / "README.md").write_text(CARD.format(**values), encoding="utf-8")
