"""Measures a chat target on held-out conversations: perplexity, looping greedy answers, answers to read.

python -m examples.chitchat.evaluate_target --target kimi_k3
python -m examples.chitchat.evaluate_target --model runs/target_kimi_k3/latest
"""

import argparse
import json

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from blockdraft.trainer.evaluation.decoding_report import is_looping

from .corpus import chat_rows, prompts, split
from .target_model import CHAT_TARGETS, load_target, target_dir


@torch.no_grad()
def perplexity(model: PreTrainedModel, rows: list[dict]) -> dict[str, float]:
    """Perplexity per token of the assistant's turns (their end included), and of all tokens with the chat markers.

    Args:
        model: A causal language model in evaluation mode.
        rows: `chat_rows(...)` of conversations that it was not trained on.
    """
    nll = {"assistant": 0.0, "all": 0.0}
    count = {"assistant": 0, "all": 0}
    for row in tqdm(rows, desc="perplexity", mininterval=5):
        input_ids = torch.tensor([row["input_ids"]])
        losses = cross_entropy(model(input_ids).logits[0, :-1].float(), input_ids[0, 1:], reduction="none")
        answers = torch.tensor(row["assistant_masks"][1:], dtype=torch.bool)
        for name, chosen in (("assistant", losses[answers]), ("all", losses)):
            nll[name] += chosen.sum().item()
            count[name] += chosen.numel()
    return {f"perplexity_{name}": torch.tensor(nll[name] / count[name]).exp().item() for name in nll}


def greedy_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict], max_new_tokens: int
) -> list[list[int]]:
    """Greedy answers to `prompts(...)` rows, one at a time: token ids after the prompt, the stop token included."""
    answers = []
    for row in tqdm(rows, desc="answers", mininterval=5):
        inputs = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        answers.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def _spread(items: list, number: int) -> list:
    """`number` evenly spaced items, all where there are fewer."""
    return items[:: max(1, len(items) // number)][:number]


def evaluate_target(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_rows: int = 400,
    num_prompts: int = 200,
    max_new_tokens: int = 128,
    num_samples: int = 8,
) -> dict:
    """Perplexity on held-out conversations, and the looks of greedy answers to held-out prompts, both evenly spaced.

    Returns:
        `perplexity_assistant`, `perplexity_all`; shares of the answers that loop (`loop_share`: the same 4-gram four
        times running; `any_loop_share`: any 1- to 16-gram three times running or more) and that stop by themselves
        (`stop_share`); their `mean_tokens`; `distinct_share` of answers that no other prompt got; `samples` to read.
    """
    heldout = split()["heldout"]
    model.eval()
    scores = perplexity(model, _spread(chat_rows(heldout, tokenizer, max_length=256), num_rows))
    rows = _spread(prompts(heldout), num_prompts)
    answers = greedy_answers(model, tokenizer, rows, max_new_tokens)
    total = len(answers)
    return scores | {
        "prompts": total,
        "loop_share": sum(is_looping(ids) for ids in answers) / total,
        # Single words and short ones are said three times on purpose ("no no no"): they count from 12 tokens on.
        "any_loop_share": sum(any(is_looping(ids, n, max(3, 12 // n)) for n in range(1, 17)) for ids in answers)
        / total,
        "stop_share": sum(ids[-1] == tokenizer.eos_token_id for ids in answers) / total,
        "mean_tokens": sum(map(len, answers)) / total,
        "distinct_share": len(set(map(tuple, answers))) / total,
        "samples": [
            {"user": row["messages"][-1]["content"], "assistant": tokenizer.decode(ids, skip_special_tokens=True)}
            for row, ids in _spread(list(zip(rows, answers, strict=True)), num_samples)
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=CHAT_TARGETS, default="kimi_k3", help="one of the repository's own")
    parser.add_argument("--model", help="a directory instead")
    parser.add_argument("--num_rows", type=int, default=400)
    parser.add_argument("--num_prompts", type=int, default=200)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--num_samples", type=int, default=8)
    options = vars(parser.parse_args())
    own, model = target_dir(options.pop("target")), options.pop("model")
    folder = model or own
    print(json.dumps(evaluate_target(load_target(folder), AutoTokenizer.from_pretrained(folder), **options), indent=2))
