"""Counted work of a training step: what its matrix products do, and what they would have to do.

Work is counted in floating-point operations, two for each multiplication with its addition. [`WorkCounter`] watches a
step; [`necessary_products`] is the closed form of the products that no implementation can leave out: every block's
rows through the layers, logits of supervised slots only, attention over visible keys only, a frozen head without a
gradient of its weight. Everything that is no product (norms, activations, softmax, copies) counts as nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.deepseek_v41.deepseek_v41_layers import GroupedLinear
from blockdraft.modeling.draft.modeling_draft import DraftPreTrainedModel

LINEAR, HEAD, ATTENTION, OTHER = KINDS = ("linear", "head", "attention", "other")
aten = torch.ops.aten
Config = KimiK3DFlashConfig | DeepseekV41DSparkConfig


# ---- counting -----------------------------------------------------------------------------------------------------


def register_missing_formulas() -> None:
    """Tells PyTorch's counter about products that it does not know."""
    missing = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
        aten._grouped_mm: _grouped_mm_flop,
        aten.mv: _mv_flop,
    }
    for operator, formula in missing.items():
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)
    for in_place, operator in ((aten.addmm_, aten.addmm), (aten.baddbmm_, aten.baddbmm)):
        if in_place not in flop_registry:
            register_flop_formula(in_place, get_raw=True)(flop_registry[operator])


def _attention_flop(query_shape, key_shape, value_shape, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(query_shape, key_shape, value_shape)


def _attention_backward_flop(grad_shape, query_shape, key_shape, value_shape, *args, out_shape=None, **kwargs) -> int:
    return sdpa_backward_flop_count(grad_shape, query_shape, key_shape, value_shape)


def _grouped_mm_flop(a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    # The rows (or, for weight gradients, the inner dimension) are shared out among the groups: each counts once.
    return 2 * math.prod(a_shape[-2:]) * b_shape[-1]


def _mv_flop(a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    return 2 * math.prod(a_shape)


class WorkCounter(TorchDispatchMode):
    """
    Counts what runs inside its context, backward passes too.

    Args:
        draft: whose step it is; its shapes tell the kinds of products apart.

    Attributes:
        work: operations by kind: `"head"` has the vocabulary among its dimensions, `"attention"` is products of
            activations with each other, `"linear"` those with weights, `"other"` the mixing of residual streams.
        largest: numbers in the largest tensor that was made.
    """

    def __init__(self, draft: DraftPreTrainedModel):
        super().__init__()
        register_missing_formulas()
        self.work: Counter[str] = Counter()
        self.largest = 0
        self._vocab_size = draft.config.vocab_size
        self._batched_weights = {frozenset(p.shape[1:]) for p in draft.parameters() if p.dim() == 3}
        for module in draft.modules():
            if isinstance(module, GroupedLinear):
                self._batched_weights.add(frozenset((module.weight.shape[0] // module.groups, module.weight.shape[1])))
        self._streams = None
        if isinstance(draft.config, DeepseekV41DSparkConfig):
            self._streams = frozenset((draft.config.hc_mult, draft.config.hidden_size))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *(_stored(tensor) for tensor in tensors)])
        operator = func._overloadpacket
        if operator in flop_registry:
            shapes = [leaf.shape for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
            self.work[self._kind(operator, shapes)] += flop_registry[operator](*args, **kwargs, out_val=output)
        return output

    def _kind(self, operator, shapes: Sequence[torch.Size]) -> str:
        if "attention" in str(operator):
            return ATTENTION
        if operator in (aten.bmm, aten.baddbmm, aten.baddbmm_):
            pairs = {frozenset(shape[-2:]) for shape in shapes}
            if self._streams in pairs:
                return OTHER
            return LINEAR if pairs & self._batched_weights else ATTENTION
        return HEAD if any(self._vocab_size in shape for shape in shapes) else LINEAR


def _stored(tensor: Tensor) -> int:
    """Numbers in memory: an expanded dimension takes no place."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The exponent e of the power law `size ** e` that fits best on logarithmic scales."""
    return float(numpy.polyfit(numpy.log(sizes), numpy.log(values), 1)[0])


# ---- the necessary work -------------------------------------------------------------------------------------------


def visible_keys(config: Config, anchor_positions: Tensor, block_keep_mask: Tensor) -> int:
    """Keys that the queries of all blocks see, summed over queries, by the rule of
    [`~blockdraft.modeling.draft.block_visibility.block_visibility`] for rows that hold one document."""
    size, window = config.block_size, config.sliding_window
    assert not isinstance(config, KimiK3DFlashConfig) or not config.num_full_attention_layers, "layers that differ"
    slots = torch.arange(size, device=anchor_positions.device)
    context = anchor_positions[..., None].expand(*anchor_positions.shape, size)
    if window is not None:
        # DFlash's window slides along the block and counts the query's own place.
        reach = window - 1 - slots if isinstance(config, KimiK3DFlashConfig) else torch.full_like(slots, window)
        context = torch.minimum(context, reach.clamp(min=0))
    own = size * (size + 1) // 2 if config.is_causal else size * size
    return int((context * block_keep_mask[..., None]).sum()) + block_keep_mask.numel() * own


@dataclass(frozen=True)
class Product:
    """
    Matrix products of one kind and shape in a step: `[rows, inputs] @ [inputs, outputs]`, and its gradients.

    Attributes:
        kind: one of `KINDS`.
        batch: so many of them, at once or one after another.
        input_gradient, weight_gradient: whether the backward pass has the products for those as well.
    """

    kind: str
    rows: float
    inputs: int
    outputs: float
    batch: float = 1
    input_gradient: bool = True
    weight_gradient: bool = True

    @property
    def work(self) -> float:
        passes = 1 + self.input_gradient + self.weight_gradient
        return 2.0 * passes * self.batch * self.rows * self.inputs * self.outputs


@dataclass(frozen=True)
class Sizes:
    """
    What the work of a step depends on, beside the configuration; all summed over the batch.

    Attributes:
        context: rows of features.
        rows: slots of all blocks.
        slots: those that are supervised.
        pairs: visible keys, see [`visible_keys`].
    """

    context: int
    rows: int
    slots: int
    pairs: int

    @classmethod
    def dense(cls, context: int, rows: int) -> "Sizes":
        """What a dense mask and logits of every slot make of them."""
        return cls(context, rows, rows, rows * (context + rows))


def necessary_products(config: Config, sizes: Sizes) -> list[Product]:
    """The products of one step, forward and backward, that no implementation can leave out."""
    is_dflash = isinstance(config, KimiK3DFlashConfig)
    return (_dflash_products if is_dflash else _dspark_products)(config, sizes)


def _attention(heads: int, key_width: int, value_width: int, shared: int, sizes: Sizes, queries: float):
    """Scores and outputs with their gradients: `queries` rows read the same keys, `shared` heads read them too."""
    groups = heads / shared * sizes.rows * shared / queries  # of `queries` rows with keys in common
    keys = sizes.pairs / sizes.rows
    return [
        Product(ATTENTION, queries, key_width, keys, groups),
        Product(ATTENTION, queries, value_width, keys, groups),
    ]


def _dflash_products(config: KimiK3DFlashConfig, sizes: Sizes) -> list[Product]:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.intermediate_size
    values, rank, every = heads * config.v_head_dim, config.kv_lora_rank, sizes.context + sizes.rows
    if config.q_lora_rank is None:
        queries = [(hidden, heads * config.qk_head_dim)]
    else:
        queries = [(hidden, config.q_lora_rank), (config.q_lora_rank, heads * config.qk_head_dim)]
    gate = [(hidden, values)] if config.mla_use_output_gate else []
    of_rows = [*queries, *gate, (values, hidden), (hidden, width), (hidden, width), (width, hidden)]
    of_all = [(hidden, rank + config.qk_rope_head_dim), (rank, heads * (config.qk_nope_head_dim + config.v_head_dim))]
    layer = [Product(LINEAR, sizes.rows, *shape) for shape in of_rows]
    layer += [Product(LINEAR, every, *shape) for shape in of_all]
    # A whole block's slots, and those of its neighbours, read the same rows of context.
    layer += _attention(heads, config.qk_head_dim, config.v_head_dim, 1, sizes, min(256, sizes.rows))
    return [
        Product(LINEAR, sizes.context, config.features_width, hidden, input_gradient=False),
        *(layer * config.num_hidden_layers),
        Product(HEAD, sizes.slots, hidden, config.vocab_size, weight_gradient=False),
    ]


def _dspark_products(config: DeepseekV41DSparkConfig, sizes: Sizes) -> list[Product]:
    hidden, heads, width, rows = config.hidden_size, config.num_attention_heads, config.head_dim, sizes.rows
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    inner, streams = config.moe_intermediate_size, config.hc_mult
    group = heads * width // config.o_groups
    of_rows = [
        (hidden, config.q_lora_rank),
        (config.q_lora_rank, heads * width),
        (config.o_groups * config.o_lora_rank, hidden),
        (hidden, experts),
        *[(hidden, inner), (hidden, inner), (inner, hidden)],  # the shared expert
    ]
    mixing = (streams * hidden, streams * (streams + 2))
    stage = [Product(LINEAR, rows, *shape) for shape in of_rows]
    stage += [
        Product(LINEAR, sizes.context + rows, hidden, width),
        Product(LINEAR, rows, group, config.o_lora_rank, config.o_groups),
        Product(LINEAR, rows * chosen / experts, hidden, 2 * inner, experts),
        Product(LINEAR, rows * chosen / experts, inner, hidden, experts),
        Product(LINEAR, rows, *mixing),  # in front of the experts
        *_attention(heads, width, width, heads, sizes, heads * config.block_size),
    ]
    # What mixes the streams in front of the attention reads the embedding in the first stage: no gradient goes there.
    attention_mixing = [
        Product(LINEAR, rows, *mixing, input_gradient=stage_idx > 0) for stage_idx in range(config.num_hidden_layers)
    ]
    head = [
        Product(HEAD, sizes.slots, hidden, config.vocab_size, weight_gradient=False),
        Product(HEAD, sizes.slots, hidden, config.vocab_size, input_gradient=False, weight_gradient=False),  # teacher
    ]
    if config.markov_rank is not None:
        head.append(Product(HEAD, sizes.slots, config.markov_rank, config.vocab_size))
    if config.confidence_head:
        head.append(Product(LINEAR, sizes.slots, hidden + config.markov_rank, 1))
    return [
        Product(LINEAR, sizes.context, config.features_width, hidden, input_gradient=False),
        *(stage * config.num_hidden_layers),
        *attention_mixing,
        *head,
    ]


def work_by_kind(products: Sequence[Product]) -> dict[str, float]:
    """Operations of each kind."""
    work: Counter[str] = Counter()
    for product in products:
        work[product.kind] += product.work
    return dict(work)
