"""A tiny target that counts and drafts that count with it, for the tests of the doctor.

Their weights are in `tests/data/counting/`; `python tests/helpers/counting_pairs.py` trains them again in a minute.
"""

import shutil
from pathlib import Path

import torch
from chat_templates import CHATML
from datasets import Dataset
from decoding_models import LLAMA_LIKE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from blockdraft.modeling.target.target_identity import target_record
from blockdraft.trainer.data.dataset import prepare_dataset
from blockdraft.trainer.loading import load_draft, new_draft, new_trainer
from blockdraft.trainer.training_args import DraftTrainingArguments

FOLDER = Path(__file__).parents[1] / "data" / "counting"
HIGHEST = 39
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]
SHAPES = {
    "dflash": {"num_draft_layers": 1, "is_causal": True, "sliding_window": 8},
    "dspark": {"num_draft_layers": 1, "hc_mult": 2, "hc_sinkhorn_iters": 2, "n_routed_experts": 2},
}
STEPS = {"dflash": 400, "dspark": 600}


def counting_tokenizer(words: list[str] | None = None) -> PreTrainedTokenizerFast:
    """A token a word: special ones, roles, numbers. Of the target's 64 embedding rows 17 have no token."""
    words = words or [*SPECIAL, "user", "assistant", "system", *map(str, range(HIGHEST + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHATML
    return fast


def chats() -> list[dict]:
    """The user names two numbers, the assistant continues in equal steps."""
    rows = []
    for step in (1, 2, 3):
        for start in range(20):
            numbers = list(map(str, range(start, HIGHEST + 1, step)))
            turns = zip(("user", "assistant"), (numbers[:2], numbers[2:]), strict=True)
            rows.append({"messages": [{"role": role, "content": " ".join(words)} for role, words in turns]})
    return rows


def counting_rows(tokenizer: PreTrainedTokenizerFast, chosen: slice = slice(None)) -> Dataset:
    return prepare_dataset(Dataset.from_list(chats()[chosen]), tokenizer, max_length=64)[0]


def counting_target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "target").eval()


def write_draft(kind: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """A checkpoint as training writes it: weights, code, tokenizer, and a record of this target."""
    draft = load_draft(str(FOLDER / kind))
    draft.config.target = target_record(target, tokenizer)
    draft.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_target(tokenizer: PreTrainedTokenizerFast, steps: int = 300) -> PreTrainedModel:
    """Six Qwen3 layers that count."""
    torch.manual_seed(0)
    settings = {"eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.1}
    target = Qwen3ForCausalLM(Qwen3Config(**(LLAMA_LIKE | settings)))
    rows = counting_rows(tokenizer)
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows[name]], batch_first=True)
        for name in ("input_ids", "loss_mask")
    )
    labels = torch.where(mask.bool(), ids, -100)
    optimizer = torch.optim.AdamW(target.parameters(), 3e-3)
    for _ in range(steps):
        chosen = torch.randint(len(ids), (16,))
        target(input_ids=ids[chosen], labels=labels[chosen], use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return target.eval()


def train_draft(kind: str, target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A draft of blocks of four tokens that reads layers 1 and 3."""
    torch.manual_seed(0)
    draft = new_draft(target, tokenizer, kind, block_size=4, target_layer_ids=[1, 3], **SHAPES[kind])
    args = DraftTrainingArguments(
        max_steps=STEPS[kind],
        per_device_train_batch_size=8,
        num_anchors=8,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    rows = counting_rows(tokenizer)
    trainer = new_trainer(draft, target, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    draft.config.training = {"global_step": STEPS[kind], "epoch": trainer.state.epoch, "batch_size": 8}
    return draft


def main() -> None:
    tokenizer = counting_tokenizer()
    train_target(tokenizer).save_pretrained(FOLDER / "target")
    target = counting_target()
    for kind in SHAPES:
        shutil.rmtree(FOLDER / kind, ignore_errors=True)
        train_draft(kind, target, tokenizer).save_pretrained(FOLDER / kind)
        for code in (FOLDER / kind).glob("*.py"):
            code.unlink()


if __name__ == "__main__":
    main()
