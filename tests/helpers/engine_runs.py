"""What is the same under every engine: five steps of each draft, and a run that is saved, resumed and evaluated."""

from pathlib import Path

import torch
from draft_trainers import make_rows, make_trainer
from dspark_trainers import dspark_trainer
from transformers import TrainerCallback

from blockdraft.modeling.ops import cache_rounding
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.sharding import whole

FAMILIES = {"dflash": make_trainer, "dspark": dspark_trainer}
# Eight rows a step; one row in forty has no anchor.
ONE_PROCESS = {"whole": {"per_device_train_batch_size": 8}}
ONE_PROCESS["accumulated"] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
TWO_PROCESSES = {"ddp": {"per_device_train_batch_size": 4}}
TWO_PROCESSES["fsdp2"] = TWO_PROCESSES["ddp"] | {"fsdp": True}
# Small steps: in longer ones, differences in the last bit grow.
SGD = {"optim": "sgd", "learning_rate": 0.005}
MUON = {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1}
# Five prompts and eight rows by three, which two ranks cannot share out evenly.
UNEVEN = {"eval_decode_prompts": 5, "eval_max_new_tokens": 8, "per_device_eval_batch_size": 3}


class Gradients(TrainerCallback):
    """Those of every step, as the optimizer gets them."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
        if not args.deepspeed:  # which keeps them to itself
            self.seen.append({name: whole(parameter.grad) for name, parameter in named.items()})


def whole_weights(trainer: DraftTrainer) -> dict[str, torch.Tensor]:
    return {name: whole(tensor) for name, tensor in trainer.draft.state_dict(keep_vars=True).items()}


def five_steps(family: str, output_dir, evaluated: bool = False, **settings) -> dict:
    """`gradients` of five steps and the `weights` after them; if `evaluated`, these are saved too, and `metrics` are
    theirs. Without the rounding of V4.1's keys to FP8, which now and then makes a step of a difference in the last
    bit."""
    round_to_e4m3 = cache_rounding.round_to_e4m3
    cache_rounding.round_to_e4m3 = lambda x: x
    try:
        trainer = FAMILIES[family](output_dir, make_rows(40), max_steps=5, **settings)
        gradients = Gradients()
        trainer.add_callback(gradients)
        trainer.train()
        metrics = trainer.evaluate() if evaluated else {}
        if evaluated:
            trainer.save_model()
    finally:
        cache_rounding.round_to_e4m3 = round_to_e4m3
    return {"gradients": gradients.seen, "weights": whole_weights(trainer), "metrics": metrics}


def saved_and_resumed(output_dir: Path, **settings) -> dict:
    """Of a DSpark draft that is trained with Muon: an evaluation of it `before` a run of two steps, its weights
    `straight` behind them and, `resumed` behind the first, an evaluation `after`, and whether the draft that decodes
    has these weights (`served`); saved in `output_dir`."""
    settings |= MUON | {"max_steps": 2, "save_strategy": "steps", "save_steps": 1} | UNEVEN
    trainer = dspark_trainer(output_dir, **settings)
    view = {"before": trainer.evaluate()}
    trainer.train()
    view |= {"straight": whole_weights(trainer), "after": trainer.evaluate()}
    with trainer.served_draft() as draft:
        served = draft.state_dict().items()
        view["served"] = all(torch.equal(tensor, view["straight"][name]) for name, tensor in served)
    trainer.save_model()
    trainer = dspark_trainer(output_dir, **settings)
    trainer.train(resume_from_checkpoint=str(output_dir / "checkpoint-1"))
    return view | {"resumed": whole_weights(trainer)}


def dtypes_in_bf16(output_dir, **settings) -> dict[str, torch.dtype]:
    """In which dtype the weights of a DSpark draft's parts are while they run, trained in bf16."""
    trainer, seen = dspark_trainer(output_dir, bf16=True, max_steps=1, **settings), {}
    for name, module in trainer.draft.named_modules():
        if name.endswith(("wq_a", "attn_hc", "ffn_hc", "sinks_param", "confidence_head.proj")):

            def note(module, args, name=name):
                seen[name] = next(module.parameters()).dtype

            module.register_forward_pre_hook(note)
    trainer.train()
    return seen
