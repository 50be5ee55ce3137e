"""Where the tokens of a DeepSeek V4.1 forward stand, and what each of them may see."""

import copy
import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...configuration.configuration_deepseek_v41 import YARN, DeepseekV41TextConfig
from .deepseek_v41_layers import rope_frequencies, rope_rotations


class Movable:
    """A dataclass whose tensors, and what else can, move to another device."""

    def to(self, device: torch.device):
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if hasattr(value, "to")})


@dataclass(frozen=True)
class GroupPlan(Movable):
    """
    The groups of `ratio` tokens that a forward completes and sees; b is B, or 1 where all rows are alike.

    Attributes:
        ids (`[b, n]`): numbers of the groups whose last token is in this forward.
        columns (`[b, n, ratio]`): their tokens, as columns of the earlier projections and this forward's.
        total (`int`): C, complete groups of the longest row so far.
        visible_groups (`[b, S]`): complete groups at each query.
        allowed (`[b, S, C]` bool): groups that a query may see.
    """

    ids: Tensor
    columns: Tensor
    total: int
    visible_groups: Tensor
    allowed: Tensor


class TokenPlan:
    """
    Where the tokens of a forward stand: positions, rotations, and which keys each of them may see. Made once, read by
    all layers; once more for each further device with layers, to which accelerate's hooks move it.

    Args:
        config ([`DeepseekV41TextConfig`]).
        length: S, new tokens of a row; past: tokens of a row in the cache.
        attention_mask: `[B, past + S]`, 1 = token; padding on the left, or on the right without a cache.
        device: where the layers are.

    Raises:
        ValueError: if the mask has holes, or padding that a cache cannot skip.
    """

    def __init__(
        self,
        config: DeepseekV41TextConfig,
        length: int,
        past: int,
        attention_mask: Tensor | None,
        device: torch.device,
        is_cached: bool,
    ):
        self.config, self.length, self.past, self.device = config, length, past, device
        self.valid, start = _read_mask(attention_mask, length, past, is_cached)
        self.first = torch.full((1,), past, device=device) if start is None else past - start
        self.is_ragged = start is not None  # padded on the left
        self.is_padded_right = self.valid is not None and not self.is_ragged
        self.positions = (self.first[:, None] + torch.arange(length, device=device)).clamp(min=0)
        self.rotations = {False: self._rotations(self.positions, False), True: self._rotations(self.positions, True)}
        self._window: dict[int, Tensor] = {}
        self._groups: dict[tuple[int, int], GroupPlan] = {}
        # A plan that held itself would outlive its forward, and its masks with it: only those made of it are held.
        self._plans = weakref.WeakValueDictionary({self.device: self})
        self._copies: list[TokenPlan] = []

    def to(self, device: torch.device | str | int) -> "TokenPlan":
        """The plan for layers on another device."""
        device = torch.empty(0, device=device).device  # with its index
        plan = self._plans.get(device)
        if plan is None:
            plan = self._plans[device] = copy.copy(self)
            self._copies.append(plan)
            plan.device, plan._window, plan._groups, plan._copies = device, {}, {}, []
            plan.valid = None if self.valid is None else self.valid.to(device)
            plan.first, plan.positions = self.first.to(device), self.positions.to(device)
            plan.rotations = {compressed: rotations.to(device) for compressed, rotations in self.rotations.items()}
        return plan

    @property
    def new_valid(self) -> Tensor | None:
        """`[B, S]` bool, or `None` where every new token is real."""
        return None if self.valid is None else self.valid[:, -self.length :]

    def _rotations(self, positions: Tensor, compressed: bool) -> Tensor:
        config, yarn = self.config, None
        scaling = config.rope_scaling
        if compressed and scaling.get("original_max_position_embeddings", 0) > 0:
            scaling = {"beta_fast": YARN["beta_fast"], "beta_slow": YARN["beta_slow"]} | scaling
            yarn = tuple(
                scaling[name] for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
            )
        theta = config.compress_rope_theta if compressed else config.rope_theta
        return rope_rotations(positions, rope_frequencies(config.qk_rope_head_dim, theta, yarn, self.device))

    def group_rotations(self, plan: GroupPlan, ratio: int) -> Tensor:
        """`[b, n, R / 2]`: a group stands at its first token."""
        return self._rotations(plan.ids * ratio, True)

    def window(self, num_keys: int) -> Tensor:
        """`[b, 1, S, num_keys]` bool: which of the last `num_keys` tokens are near enough, and real."""
        if num_keys not in self._window:
            end = self.past + self.length
            keys = torch.arange(end - num_keys, end, device=self.device)
            queries = torch.arange(self.past, end, device=self.device)[:, None]
            visible = ((keys <= queries) & (keys > queries - self.config.sliding_window))[None]
            if self.valid is not None:
                visible = visible & self.valid[:, None, end - num_keys :]
            self._window[num_keys] = visible.unsqueeze(1)
        return self._window[num_keys]

    def groups(self, ratio: int, history: int) -> GroupPlan:
        """The groups of a ratio, `history` earlier tokens' projections being at hand."""
        if (ratio, history) not in self._groups:
            self._groups[ratio, history] = self._plan_groups(ratio, history)
        return self._groups[ratio, history]

    def _plan_groups(self, ratio: int, history: int) -> GroupPlan:
        begin, end = self.first.clamp(min=0) // ratio, (self.first + self.length) // ratio
        if self.is_ragged:
            count, total = int((end - begin).max()), int(end.max())
        else:
            total = (self.past + self.length) // ratio
            count = total - self.past // ratio
        ids = begin[:, None] + torch.arange(count, device=self.device)
        columns = ids[..., None] * ratio + torch.arange(ratio, device=self.device)
        columns = (columns - (self.first - history)[:, None, None]).clamp(0, history + self.length - 1)
        visible_groups = (self.positions + 1) // ratio
        allowed = torch.arange(total, device=self.device) < visible_groups.unsqueeze(-1)
        if self.is_padded_right:  # a query in the padding must not see groups that it would complete itself
            allowed = allowed & self.valid[:, columns[0]].all(-1)[:, None]
        return GroupPlan(ids, columns, total, visible_groups, allowed)


def _read_mask(mask: Tensor | None, length: int, past: int, is_cached: bool) -> tuple[Tensor | None, Tensor | None]:
    """Real tokens `[B, past + S]`, `None` if all are; first tokens `[B]` of the rows, `None` if all start at 0."""
    if mask is None:
        return None, None
    valid = mask.bool()
    if bool(valid.all()):
        return None, None
    # With a cache, a prompt may begin in a later piece than the longest of its batch.
    waiting = ~valid.any(-1) & is_cached
    start = valid.int().argmax(-1).masked_fill(waiting, past + length)
    if bool((valid[:, 1:] & ~valid[:, :-1]).sum(-1).gt(valid[:, 0].logical_not().int()).any()):
        raise ValueError("`attention_mask` has holes: groups of neighbouring tokens are compressed. Pad at the ends.")
    if not bool((valid[:, -1] | waiting).all()):
        if is_cached:
            raise ValueError(
                "`attention_mask` has padding on the right, which a cache cannot skip: pad prompts on the left."
            )
        if bool(start.any()):
            raise ValueError("`attention_mask` has padding on the left and on the right: use one side.")
        return valid, None
    return valid, start
