"""Trains a chat target from scratch on a CPU: a small Kimi K3 or a small DeepSeek V4.1.

    OMP_WAIT_POLICY=passive python -m examples.chitchat.train_target --target kimi_k3 --max_minutes 85

The time is the budget: learning rate and end follow the share of `--max_minutes` that is used up, however fast the
machine is. A stopped run goes on from its newest checkpoint when the same command is given again; until its end,
`<output_dir>/latest` holds a usable target.
"""

import argparse
from pathlib import Path

import torch
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from blockdraft.trainer.expert_balance import ExpertBalance

from .corpus import chat_rows, split
from .evaluate_target import evaluate_target
from .target_card import write_card
from .target_model import CHAT_TARGETS, load_target, new_target, save_target, target_dir
from .time_budget import TimeBudget
from .train_tokenizer import train_tokenizer

ROW_TOKENS = 192


class BalancedTrainer(Trainer):
    """Logs the experts' loads with the loss."""

    def __init__(self, *args, expert_balance: ExpertBalance, callbacks: list, **kwargs):
        super().__init__(*args, callbacks=[*callbacks, expert_balance], **kwargs)
        self._expert_balance = expert_balance

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs | self._expert_balance.metrics() if "loss" in logs else logs, start_time)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=CHAT_TARGETS, required=True)
    parser.add_argument("--max_minutes", type=float, default=85)
    parser.add_argument("--output_dir", type=Path, help="checkpoints (runs/target_TARGET)")
    parser.add_argument("--target_dir", type=Path, help="where the result goes (the repository's own)")
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--learning_rate", type=float, default=2.5e-3)
    options = parser.parse_args()
    options.output_dir = options.output_dir or Path(f"runs/target_{options.target}")
    options.target_dir = options.target_dir or target_dir(options.target)

    set_seed(0)
    train = split()["train"]
    tokenizer = train_tokenizer(train)
    rows = [{"input_ids": row["input_ids"]} for row in chat_rows(train, tokenizer, ROW_TOKENS)]
    checkpoint = get_last_checkpoint(options.output_dir) if options.output_dir.is_dir() else None
    # The Trainer restores what has its own name in the file; weights under released names are read by the model.
    model = load_target(checkpoint) if checkpoint else new_target(options.target, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = sum(len(row["input_ids"]) for row in rows)
    print(f"{parameters / 1e6:.2f}M parameters; {len(rows)} rows, {tokens / 1e6:.2f}M tokens an epoch.", flush=True)

    budget = TimeBudget(options.max_minutes, tokenizer, checkpoint)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    trainer = BalancedTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output_dir,
            per_device_train_batch_size=options.batch_size,
            train_sampling_strategy="group_by_length",
            num_train_epochs=1000,  # the time ends it
            max_grad_norm=1.0,
            logging_steps=20,
            save_strategy="no",  # the budget decides
            save_total_limit=2,
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: budget.learning_rate_factor())),
        callbacks=[budget],
        expert_balance=ExpertBalance(model),
    )
    trainer.train(resume_from_checkpoint=checkpoint)

    save_target(model, tokenizer, options.target_dir)
    saved = load_target(options.target_dir)
    scores = evaluate_target(saved, tokenizer)
    state = trainer.state
    training = vars(options) | {"minutes": budget.seconds / 60, "steps": state.global_step, "epochs": state.epoch}
    write_card(options.target_dir, options.target, saved, scores, training | {"row_tokens": ROW_TOKENS})


if __name__ == "__main__":
    main()
