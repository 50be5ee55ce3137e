"""Loads of routed experts, counted while training, and the correction bias that keeps all experts in use."""

from functools import partial

import torch
from accelerate.utils import reduce
from torch import nn
from transformers import TrainerCallback

BIAS = "e_score_correction_bias"
# The logged histogram: its edges, in multiples of an even load, and its bins.
LOAD_EDGES = (0.5, 1.0, 2.0)
LOAD_BINS = ("below_0.5", "0.5_to_1.0", "1.0_to_2.0", "above_2.0")


class ExpertBalance(TrainerCallback):
    """
    Auxiliary-loss-free load balancing (Wang et al., 2024, arXiv 2408.15664): after each optimizer step the selection
    bias of experts with more than the mean load falls by `bias_step`, that of experts with less rises by it.

    A router is any module with a float32 buffer `e_score_correction_bias` `[E]` whose forward returns `(logits,
    weights, experts)`, `experts` `[T, k]` or `[B, S, k]` being the chosen ones; a model without any is left alone.
    Loads are counted in training mode only and summed over the micro-batches and ranks of a step; a step that the
    optimizer skipped (fp16 overflow) changes nothing. Activation checkpointing routes each token twice, which doubles
    all loads alike: neither their ratios nor the sign rule notice.

    Args:
        model (`nn.Module`): whose routers are watched.
        bias_step (`float`): change of the bias a step; 0 only counts.

    Attributes:
        routers (`list[nn.Module]`): those found.
        counted_tokens (bool tensor, *optional*): set before a forward, leaves tokens out; an entry for each of them.

    Raises:
        ValueError: for a bias in half precision, in which small steps are lost.
    """

    def __init__(self, model: nn.Module, bias_step: float = 1e-3):
        self.bias_step = bias_step
        self.counted_tokens: torch.Tensor | None = None
        self.routers = [module for module in model.modules() if BIAS in dict(module.named_buffers(recurse=False))]
        self._step_loads = [torch.zeros(len(router.e_score_correction_bias)) for router in self.routers]
        self._window_loads = [load.clone() for load in self._step_loads]
        for index, router in enumerate(self.routers):
            if router.e_score_correction_bias.dtype != torch.float32:
                raise ValueError(
                    f"`{BIAS}` is {router.e_score_correction_bias.dtype}: keep it in float32, steps of {bias_step} "
                    "are lost in half precision."
                )
            router.register_forward_hook(partial(self._count, index))

    def _count(self, index: int, router: nn.Module, args: tuple, output: tuple) -> None:
        if not router.training:
            return
        experts = output[2].flatten(0, -2)
        kept = torch.ones_like(experts, dtype=torch.float32)
        if self.counted_tokens is not None:
            kept *= self.counted_tokens.flatten().to(kept.device)[:, None]
        load = self._step_loads[index].to(experts.device)
        self._step_loads[index] = load.scatter_add(0, experts.flatten(), kept.flatten())

    def forget_step(self) -> None:
        """Takes back the loads since the last step of the optimizer."""
        self._step_loads = [torch.zeros_like(load) for load in self._step_loads]

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        """Updates the biases and moves the step's loads to those since the last log."""
        for index, router in enumerate(self.routers):
            bias = router.e_score_correction_bias
            load = reduce(self._step_loads[index].to(bias.device), "sum")
            self._step_loads[index] = torch.zeros_like(load)
            if optimizer.step_was_skipped:
                continue
            self._window_loads[index] = self._window_loads[index].to(load.device) + load
            bias += self.bias_step * (load.mean() - load).sign()

    def on_train_end(self, args, state, control, **kwargs):
        """The last batch's tokens say nothing about what the model is given afterwards."""
        self.counted_tokens = None

    def metrics(self) -> dict[str, float]:
        """Loads since the last call, in multiples of an even load: of the busiest and the least used expert of any
        layer, and a histogram over all experts. Empty where nothing was counted."""
        loads = [load / load.mean() for load in self._window_loads if load.any()]
        self._window_loads = [torch.zeros_like(load) for load in self._window_loads]
        if not loads:
            return {}
        loads = torch.cat(loads)
        bins = torch.bucketize(loads, loads.new_tensor(LOAD_EDGES)).bincount(minlength=len(LOAD_BINS))
        histogram = zip(LOAD_BINS, (bins / len(loads)).tolist(), strict=True)
        metrics = {"busiest_expert": loads.max().item(), "least_used_expert": loads.min().item()}
        return metrics | {f"experts_{name}": share for name, share in histogram}
