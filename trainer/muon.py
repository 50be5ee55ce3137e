"""Muon for the draft's weight matrices, another optimizer for everything else.

The steps of Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) have equal singular values. A new
draft is trained on few tokens; with Muon it needs a fraction of AdamW's steps. They are scaled to AdamW's size (Liu et
al., arXiv 2502.16982, section 2.2), so that one learning rate serves both.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn


def hidden_matrices(draft: nn.Module) -> list[nn.Parameter]:
    """The trainable weights of the linear layers between embedding and head, for which Muon is meant.

    Tables and gates that are read row by row (`nn.Embedding`, a Markov or confidence head, a router, experts stacked
    in three dimensions) are not among them.
    """
    heads = [head for head in (draft.markov_head, draft.confidence_head) if head is not None]
    left_out = {id(parameter) for head in heads for parameter in head.parameters()}
    weights = (module.weight for module in draft.modules() if isinstance(module, nn.Linear))
    return [weight for weight in weights if weight.requires_grad and id(weight) not in left_out]


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
        self._muon, self._other = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw"), other
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
