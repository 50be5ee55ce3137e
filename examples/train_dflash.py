"""
Trains a DFlash draft for a causal language model, with the Trainer of transformers.

Tiny, for an embedded target, in a minute or two of two CPU cores:

```
python examples/train_dflash.py --target examples/chitchat/targets/kimi_k3 --data examples/chitchat/answers.jsonl \
    --output_dir runs/tiny_dflash --num_draft_layers 1 --block_size 8 --max_steps 60 --learning_rate 2e-3 \
    --per_device_train_batch_size 8 --num_anchors 16 --eval_decode_prompts 4 --use_cpu
```

For a model of the Hub, on 8 GPUs, published at every save. The rows are the target's own answers (`blockdraft
regenerate Qwen/Qwen3-4B prompts.jsonl answers.jsonl`); a Hub dataset is named `owner/name[/config][:split]`:

```
accelerate launch --num_processes 8 examples/train_dflash.py --target Qwen/Qwen3-4B --target_dtype bfloat16 \
    --data answers.jsonl --output_dir runs/qwen3_4b_dflash --num_train_epochs 6 --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 2 --bf16 --save_steps 500 --push_to_hub --hub_model_id owner/Qwen3-4B-DFlash
```

The same command resumes from the last checkpoint. `--help` lists all settings, those of TrainingArguments included.
"""

import os
from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from transformers.trainer_utils import get_last_checkpoint

from blockdraft import DraftTrainer, DraftTrainingArguments
from blockdraft.trainer.data.dataset import hold_out, prepare_dataset
from blockdraft.trainer.data.rendering import stop_tokens
from blockdraft.trainer.loading import new_draft


@dataclass
class ScriptArguments:
    target: str = field(metadata={"help": "The frozen target: a directory or a Hub id."})
    data: list[str] = field(metadata={"help": "Chat rows: .jsonl, .json or .parquet files, or Hub datasets."})
    target_revision: str | None = field(default=None, metadata={"help": "Commit, tag or branch of the target."})
    target_dtype: str = field(default="auto", metadata={"help": "Dtype of the target; auto: as saved."})
    max_length: int = field(default=4096, metadata={"help": "Longest row in tokens."})
    eval_fraction: float = field(default=0.05, metadata={"help": "Share of the conversations held out."})
    num_draft_layers: int = field(default=5, metadata={"help": "Layers of the draft."})
    block_size: int = field(default=16, metadata={"help": "Tokens of a block, the known one included."})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Zero-based target layers that the draft reads; spread over the depth."}
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "Context that all layers but the last see; the block size unless given."}
    )


def main(script_args: ScriptArguments, training_args: DraftTrainingArguments) -> None:
    set_seed(training_args.seed)

    # Target and tokenizer
    target = AutoModelForCausalLM.from_pretrained(
        script_args.target, revision=script_args.target_revision, dtype=script_args.target_dtype
    )
    tokenizer = AutoTokenizer.from_pretrained(script_args.target, revision=script_args.target_revision)

    # Data: token ids and a loss mask over the answers
    stops = stop_tokens(tokenizer, target.generation_config)
    with training_args.main_process_first(desc="encoding the data"):
        dataset, report = prepare_dataset(script_args.data, tokenizer, script_args.max_length, stop_token_ids=stops)
    print(report)
    dataset = hold_out(dataset, script_args.eval_fraction, training_args.seed)

    # Draft: its shape follows from the target unless given
    given = ("num_draft_layers", "block_size", "target_layer_ids", "sliding_window")
    shape = {name: value for name in given if (value := getattr(script_args, name)) is not None}
    draft = new_draft(target, tokenizer, "dflash", rows=dataset["train"], **shape)

    # Training
    trainer = DraftTrainer(
        draft,
        target,
        training_args,
        target_revision=script_args.target_revision,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        processing_class=tokenizer,
        data_settings={"max_length": script_args.max_length},
    )
    last = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint or last)

    # Evaluation decodes held-out prompts for real
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)

    # Weights, configuration, code, tokenizer and card
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, DraftTrainingArguments))
    main(*parser.parse_args_into_dataclasses())
