"""
Draws how a draft and its target decode one answer, round by round: README's picture.

```
python -m benchmarks.picture examples/chitchat/targets/kimi_k3 runs/chitchat_dflash/draft "Hi, how are you?" \
    --output docs/figures/rounds.png
```
"""

import argparse
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blockdraft import block_decode
from blockdraft.trainer.loading import load_draft, load_target

GREY, GREEN, RED, BLUE = "#e4e4e4", "#b7e1b0", "#f4b9b3", "#b5d0f0"
LEGEND = {"known token": GREY, "drafted, accepted": GREEN, "drafted, rejected": RED, "the target's own": BLUE}


class Round(NamedTuple):
    """One round of decoding, as token ids: the anchor, what was drafted, and what was committed."""

    anchor: int
    drafted: list[int]
    committed: list[int]


@torch.no_grad()
def decode_rounds(
    target: PreTrainedModel, draft: PreTrainedModel, input_ids: torch.Tensor, max_new_tokens: int
) -> list[Round]:
    """Decodes greedily and keeps each round's candidates; for drafts whose slots are chosen all at once."""
    assert not draft.drafts_in_sequence
    candidates, head = [], target.get_output_embeddings()

    def keep_candidates(module, args, output):
        hidden = output.last_hidden_state[0, -draft.config.num_drafted :]
        candidates.append(draft.compute_logits(hidden, head).argmax(-1).tolist())

    hook = draft.register_forward_hook(keep_candidates)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    output = block_decode(target, input_ids, draft=draft, **settings)
    hook.remove()
    sequence, start, rounds = output.sequences[0].tolist(), input_ids.shape[1] + 1, []
    pairs = zip(output.accepted_lengths, output.verified_lengths, strict=True)
    for number, (kept, verified) in enumerate(pairs):
        drafted = candidates[number][: verified - 1] if verified > 1 else []
        rounds.append(Round(sequence[start - 1], drafted, sequence[start : start + kept]))
        start += kept
    return rounds


def draw(rounds: list[Round], tokenizer: PreTrainedTokenizerBase, prompt: str) -> Figure:
    """A row a round: known, accepted, rejected, and the target's own token."""
    width = max(len(r.drafted) for r in rounds) + 2
    figure = Figure(figsize=(1.05 * width, 0.42 * len(rounds) + 1.1), dpi=150)
    axes = figure.subplots()

    def cell(column: int, row: int, token: int, color: str, struck: bool = False) -> None:
        text = tokenizer.decode([token]).replace("\n", "\\n")
        axes.add_patch(_box(column, row, color))
        axes.text(column + 0.48, row + 0.43, text, ha="center", va="center", fontsize=8, alpha=0.55 if struck else 1)

    for row, current in enumerate(rounds):
        cell(0, row, current.anchor, GREY)
        accepted = len(current.committed) - 1
        for slot, token in enumerate(current.drafted):
            cell(1 + slot, row, token, GREEN if slot < accepted else RED, struck=slot >= accepted)
        cell(width - 1, row, current.committed[-1], BLUE)
    tau = sum(len(r.committed) for r in rounds) / len(rounds)
    axes.set(xlim=(-0.1, width), ylim=(len(rounds), -0.2))
    axes.axis("off")
    axes.set_title(
        f"“{prompt}”: {sum(len(r.committed) for r in rounds)} tokens in {len(rounds)} forwards of the target "
        f"(tau {tau:.2f})",
        fontsize=9,
        loc="left",
    )
    labels = (
        (GREY, "known token"),
        (GREEN, "drafted, accepted"),
        (RED, "drafted, rejected"),
        (BLUE, "the target's own"),
    )
    handles = [_box(0, 0, color) for color, _ in labels]
    figure.legend(handles, [label for _, label in labels], loc="lower center", ncols=4, fontsize=8, frameon=False)
    height = figure.get_figheight()
    figure.subplots_adjust(left=0.01, right=0.99, top=1 - 0.35 / height, bottom=0.4 / height)
    return figure


def _box(column: int, row: int, color: str) -> FancyBboxPatch:
    place = (column + 0.06, row + 0.08)
    return FancyBboxPatch(place, 0.84, 0.7, boxstyle="round,pad=0.03", facecolor=color, linewidth=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompt")
    parser.add_argument("--output", default="docs/figures/rounds.png")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    options = parser.parse_args()
    target, tokenizer = load_target(options.target, dtype="float32")
    draft = load_draft(options.draft)
    messages = [{"role": "user", "content": options.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    rounds = decode_rounds(target, draft, inputs["input_ids"], options.max_new_tokens)
    draw(rounds, tokenizer, options.prompt).savefig(options.output)
    print(f"{options.output}: {len(rounds)} rounds")
