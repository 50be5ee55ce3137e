"""Muon for the draft's weight matrices, another optimizer for everything else.

The steps of Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) have equal singular values. A new
draft is trained on few tokens; with Muon it needs a fraction of AdamW's steps. They are scaled to AdamW's size (Liu et
al., arXiv 2502.16982, section 2.2), so that one learning rate serves both.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def hidden_matrices(draft: nn.Module) -> list[nn.Parameter]:
    """The trainable weights of the linear layers between embedding and head, for which Muon is meant.

    Tables and gates that are read row by row (`nn.Embedding`, a Markov or confidence head, a router, experts stacked
    in three dimensions) are not among them.
    """
    heads = [head for head in (draft.markov_head, draft.confidence_head) if head is not None]
    left_out = {id(parameter) for head in heads for parameter in head.parameters()}
    weights = (module.weight for module in draft.modules() if isinstance(module, nn.Linear))
    return [weight for weight in weights if weight.requires_grad and id(weight) not in left_out]


class _Muon(torch.optim.Muon):
    """torch's, also for matrices that FSDP2 shares out over the ranks, all of them or none. Momentum and decay need no
    more than a rank's part of a matrix. The direction of its step needs the whole one: matrix by matrix, all ranks
    gather it and make the same step of it, of which each takes its part."""

    @torch.no_grad()
    def step(self) -> None:
        parameters = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        if not any(isinstance(parameter, DTensor) for parameter, _ in parameters):
            super().step()
            return
        for parameter, group in parameters:
            if (gradient := parameter.grad) is None:
                continue
            state, momentum = self.state[parameter], group["momentum"]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            direction = gradient.lerp(average, momentum).full_tensor()
            update = DTensor.from_local(_muon_step(direction, group), parameter.device_mesh, run_check=False)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update)


def _muon_step(direction: Tensor, group: dict) -> Tensor:
    """What torch's Muon adds to a matrix `[m, n]`, without decay, for a direction whose momentum is in it already."""
    matrix = nn.Parameter(torch.zeros_like(direction))
    matrix.grad = direction
    settings = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([matrix], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return matrix.detach()


class MuonAndOther(torch.optim.Optimizer):
    """One optimizer made of two: state, parameter groups and learning rates are in one place, as schedulers,
    checkpoints and wrappers expect. `other` holds all parameters and has not taken a step; `matrices`,
    two-dimensional and at least one, are taken out of it. Defaults, and so groups that are added, are `other`'s."""

    def __init__(self, other: torch.optim.Optimizer, matrices: Iterable[nn.Parameter]):
        ids = {id(matrix) for matrix in matrices}
        groups = []
        for group in other.param_groups:
            ours = [parameter for parameter in group["params"] if id(parameter) in ids]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
            if ours:
                groups.append({"params": ours, "lr": group["lr"], "weight_decay": group["weight_decay"]})
        self._muon, self._other = _Muon(groups, adjust_lr_fn="match_rms_adamw"), other
        super().__init__([*self._muon.param_groups, *other.param_groups], {})
        self.defaults = other.defaults  # not before: Muon's groups would get them too

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of both; `closure`, which computes loss and gradients anew, is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Loading a state replaces the lists and the dictionary.
        count = len(self._muon.param_groups)
        self._muon.param_groups, self._other.param_groups = self.param_groups[:count], self.param_groups[count:]
        self._muon.state = self._other.state = self.state
        self._muon.step()
        self._other.step()
        return loss

    def __getstate__(self) -> dict:
        """For copies and pickles, which the base class makes of its own attributes alone."""
        return super().__getstate__() | {"_muon": self._muon, "_other": self._other}
