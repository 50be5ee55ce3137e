"""What is computed by groups and windows against the dense reference: outputs, every gradient, counted keys."""

import pytest
import torch
from deepseek_v41_dspark_models import dspark_inputs, tiny_dspark
from dense_blocks import block_attention_mask
from draft_models import draft_inputs, tiny_draft
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from blockdraft.modeling.draft import visible_attention
from blockdraft.modeling.draft.block_visibility import block_visibility
from blockdraft.modeling.draft.visible_attention import (
    BlockGroup,
    GroupLimits,
    attend_visible,
    choose_window,
    plan_visible_keys,
)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def anchors_of_rows(rows: list[list[int | None]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors and which are kept; `None` is a padded block."""
    anchors = torch.tensor([[anchor or 0 for anchor in row] for row in rows])
    return anchors, torch.tensor([[anchor is not None for anchor in row] for row in rows])


ROWS = {
    "two rows": [[1, 3, 4, 9, 16, 22, 29], [0, 7, 8, 9, 30, None, None]],
    "one block": [[13]],
    "no context": [[0, 0, None]],
    "only padding": [[None, None], [2, 5]],
    "the end": [[5, 30, 31]],
    "not in order": [[20, 3, 11, 30, 8]],
}
RULES = {
    "whole context": {},
    "a window": {"sliding_window": 5},
    "a window of one": {"sliding_window": 1},
    "a wide window": {"sliding_window": 25},
    "beyond the context": {"sliding_window": 100},
    "a block's window": {"sliding_window": 6, "window_per_query": False},
}
# Query heads, key heads, widths of keys and values (None: the keys are the values), sinks.
HEADS = {"MLA": (4, 4, 8, 6, False), "MQA with sinks": (4, 1, 8, None, True), "GQA": (4, 2, 6, 10, True)}
CONTEXT = 31


def attend_densely(queries, keys, values, mask, scaling, sinks=None):
    """From the definition, in the dtype of the inputs; arguments as in [`attend_visible`], with a mask."""
    shared_by = queries.shape[1] // keys.shape[1]
    values = keys if values is None else values
    keys, values = (rows.repeat_interleave(shared_by, 1) for rows in (keys, values))
    scores = (queries @ keys.transpose(-1, -2) * scaling).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return (scores.softmax(-1)[..., : keys.shape[2]] @ values).transpose(1, 2)


def attention_inputs(anchors, block_size, heads, dtype, context_length=CONTEXT):
    query_heads, key_heads, width, value_width, has_sinks = heads
    batch, slots = len(anchors), anchors.shape[1] * block_size
    inputs = {
        "queries": torch.randn(batch, slots, query_heads, width, dtype=dtype).transpose(1, 2),
        "keys": torch.randn(batch, key_heads, context_length + slots, width, dtype=dtype),
        "values": value_width
        and torch.randn(batch, context_length + slots, key_heads, value_width, dtype=dtype).transpose(1, 2),
        "sinks": torch.randn(query_heads, dtype=dtype) if has_sinks else None,
    }
    return {name: None if value is None else value.requires_grad_() for name, value in inputs.items()}


def plan(anchors, keep, block_size, heads, causal=False, context_length=CONTEXT, **rule):
    visible = block_visibility(anchors, keep, context_length, block_size, causal=causal, **rule)
    return plan_visible_keys(visible, heads[0], heads[0] // heads[1])


def errors_of(inputs, visible, mask, scaling=0.4):
    """Relative errors of the output and of the gradients of all inputs."""
    given = {name: value for name, value in inputs.items() if value is not None}
    output = attend_visible(visible=visible, scaling=scaling, **inputs)
    expected = attend_densely(mask=mask, scaling=scaling, **inputs)
    towards = torch.randn_like(output)
    grads, expected_grads = (torch.autograd.grad(out, given.values(), towards) for out in (output, expected))
    errors = {"output": relative_error(output, expected)}
    pairs = zip(given, grads, expected_grads, strict=True)
    return errors | {name: relative_error(grad, expected) for name, grad, expected in pairs}


@pytest.fixture(params=["large groups", "small groups"])
def group_size(request, monkeypatch):
    if request.param == "small groups":
        monkeypatch.setattr(visible_attention, "CPU_LIMITS", GroupLimits(600, 8, 10))


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_equals_the_dense_reference(rows, rule, heads, group_size):
    anchors, keep = anchors_of_rows(rows)
    documents = (torch.arange(CONTEXT) // 8 + (torch.arange(CONTEXT) > 21)).expand(len(rows), -1)
    for block_size, causal, packed in ((4, False, False), (4, True, True), (1, False, True), (16, True, False)):
        given = rule | ({"document_ids": documents} if packed and max(map(max, anchors.tolist())) < CONTEXT else {})
        mask = block_attention_mask(anchors, keep, CONTEXT, block_size, causal=causal, **given)
        visible = plan(anchors, keep, block_size, heads, causal, **given)
        for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
            inputs = attention_inputs(anchors, block_size, heads, dtype)
            errors = errors_of(inputs, visible, mask)
            if block_size == 1 and inputs["sinks"] is None and not mask[..., :CONTEXT].any():
                # One key has the weight 1 whatever its score: the scores' gradients are 0 but for rounding.
                errors = {name: errors[name] for name in ("output", "values")}
            assert max(errors.values()) < tolerance, (block_size, dtype, errors)


@pytest.mark.parametrize("rule", [{}, {"sliding_window": 3}], ids=["groups", "windows"])
def test_gradients_by_finite_differences(rule, group_size):
    anchors, keep = anchors_of_rows([[2, 4, 7], [0, 5, None]])
    for heads in HEADS.values():
        inputs = attention_inputs(anchors, 2, heads, torch.float64, context_length=8)
        visible = plan(anchors, keep, 2, heads, causal=True, context_length=8, **rule)
        assert visible.window is None or rule
        given = {name: value for name, value in inputs.items() if value is not None}

        def attend(*tensors, names=tuple(given), visible=visible):
            named = dict.fromkeys(("values", "sinks")) | dict(zip(names, tensors, strict=True))
            return attend_visible(visible=visible, scaling=0.4, **named)

        assert torch.autograd.gradcheck(attend, tuple(given.values()), fast_mode=True)


def test_padded_blocks_and_scores_of_any_size_are_finite():
    anchors, keep = anchors_of_rows([[None, None], [3, None]])
    heads = HEADS["MQA with sinks"]
    inputs = attention_inputs(anchors, 4, heads, torch.float32)
    with torch.no_grad():
        inputs["queries"].mul_(1e4)
    output = attend_visible(visible=plan(anchors, keep, 4, heads), scaling=1.0, **inputs)
    output.square().sum().backward()
    given = [value for value in inputs.values() if value is not None]
    assert output.isfinite().all() and all(value.grad.isfinite().all() for value in given)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("rule", [{}, {"sliding_window": 5}], ids=["groups", "windows"])
def test_half_precision_sums_in_fp32(rule, heads):
    """As near to the truth as attention by its definition in the same dtype, also where many groups add up."""
    anchors, keep = torch.arange(24)[None] + 6, torch.ones(1, 24, dtype=torch.bool)
    inputs = attention_inputs(anchors, 4, heads, torch.float32)
    low = {name: value if value is None else value.detach().bfloat16() for name, value in inputs.items()}
    exact = {name: value if value is None else value.double().requires_grad_() for name, value in low.items()}
    low = {name: value if value is None else value.requires_grad_() for name, value in low.items()}
    if low["sinks"] is not None:
        low["sinks"] = low["sinks"].detach().float().requires_grad_()
    mask = block_attention_mask(anchors, keep, CONTEXT, 4, **rule)
    output = attend_visible(visible=plan(anchors, keep, 4, heads, **rule), scaling=0.4, **low)
    expected = attend_densely(mask=mask, scaling=0.4, **exact)
    towards = torch.randn_like(expected)
    output.backward(towards.bfloat16())
    expected.backward(towards)
    assert output.dtype == torch.bfloat16 and relative_error(output, expected) < 0.01
    for name, value in low.items():
        if value is not None:
            assert value.grad.dtype == value.dtype and relative_error(value.grad, exact[name].grad) < 0.015, name


# ---- what is computed ----------------------------------------------------------------------------------------------


def test_groups_cover_every_block_once_and_the_slices_what_they_see(group_size):
    for rows in ROWS.values():
        for rule in RULES.values():
            anchors, keep = anchors_of_rows(rows)
            visible = plan(anchors, keep, 4, HEADS["MLA"], **rule)
            blocks = [(group.row, i) for group in visible.groups for i in range(group.start, group.stop)]
            assert blocks == [(row, i) for row in range(len(rows)) for i in range(len(rows[0]))]
            mask = block_attention_mask(anchors, keep, CONTEXT, 4, **rule)[:, 0, :, :CONTEXT]
            if visible.window is not None:
                assert visible.window == mask.unflatten(1, (-1, 4)).any(2).sum(-1).max()
                continue
            for group in visible.groups:
                seen = mask[group.row, group.start * 4 : group.stop * 4].nonzero()[:, 1].tolist()
                assert (min(seen), max(seen) + 1) == (group.low, group.high) if seen else group.low == group.high
                clear = mask[group.row, group.start * 4 : group.stop * 4, group.clear_low : group.clear_high]
                assert clear.all()


def test_windows_are_used_where_they_are_cheaper():
    def group(blocks, low, high):
        return BlockGroup(0, 0, blocks, low, high, low, high)

    assert choose_window([group(8, 0, 100), group(8, 50, 150)], 60) == 60
    assert choose_window([group(8, 0, 100), group(8, 50, 150)], 108) == 108  # for the same work at any length
    assert choose_window([group(8, 0, 60), group(8, 10, 110)], 100) is None  # few blocks fill their window
    assert choose_window([group(8, 0, 1000), group(8, 50, 1050)], 900) is None  # copying wide windows is not free
    assert choose_window([group(4, 0, 0)], 0) is None


def attention_work(length: int, num_anchors: int, heads, block_size, **rule) -> int:
    """Counted floating-point operations of forward and backward."""
    anchors = (torch.arange(num_anchors) * (length - block_size) // num_anchors + 1)[None]
    keep = torch.ones_like(anchors).bool()
    inputs = attention_inputs(anchors, block_size, heads, torch.float32, context_length=length)
    visible = plan(anchors, keep, block_size, heads, context_length=length, **rule)
    with FlopCounterMode(display=False) as counter:
        attend_visible(visible=visible, scaling=0.4, **inputs).sum().backward()
    return counter.get_total_flops()


def test_work_grows_with_what_is_visible():
    """Seven products a visible key: two forward, and in the backward the scores again and four gradients."""
    heads, size, anchors = (2, 2, 8, 8, False), 4, 16
    works = [attention_work(length, anchors, heads, size) for length in (512, 1024, 2048)]
    for length, work in zip((512, 1024, 2048), works, strict=True):
        visible = anchors * size * (length / 2 + size)
        assert work < 1.2 * 7 * 2 * 8 * 2 * visible
    windowed = [attention_work(length, anchors, heads, size, sliding_window=16) for length in (512, 1024, 2048)]
    assert windowed == [7 * 2 * 8 * 2 * anchors * size * (15 + size)] * 3


def test_nothing_of_the_size_of_a_dense_mask_is_kept():
    anchors, keep = torch.arange(1, 101, 2)[None], torch.ones(1, 50, dtype=torch.bool)
    heads = (2, 2, 8, 8, False)
    inputs = attention_inputs(anchors, 4, heads, torch.float32, context_length=400)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        attend_visible(visible=plan(anchors, keep, 4, heads, context_length=400), scaling=0.4, **inputs)
    given = sum(value.numel() for value in inputs.values() if value is not None)
    assert sum(kept) == given + inputs["queries"].numel()  # the inputs and the output


# ---- through the drafts --------------------------------------------------------------------------------------------


def k3(implementation, **settings):
    return tiny_draft(implementation, **settings).train()


def dspark(implementation, **settings):
    return tiny_dspark(implementation, **settings).train()


DRAFTS = {
    "k3": (k3, draft_inputs, {}),
    "k3 causal": (k3, draft_inputs, {"is_causal": True}),
    "k3 window": (k3, draft_inputs, {"sliding_window": 5}),
    "k3 wide window": (k3, draft_inputs, {"sliding_window": 22, "is_causal": True}),
    "k3 hybrid": (k3, draft_inputs, {"sliding_window": 5, "num_hidden_layers": 3, "num_full_attention_layers": 1}),
    "k3 block of two": (k3, draft_inputs, {"block_size": 2}),
    "dspark": (dspark, dspark_inputs, {}),
    "dspark wide window": (dspark, dspark_inputs, {"sliding_window": 20}),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("make, make_inputs, settings", DRAFTS.values(), ids=DRAFTS)
def test_drafts_equal_their_dense_reference(make, make_inputs, settings, packed):
    anchors, keep = anchors_of_rows([[1, 3, 4, 9, 16, 22, 26], [0, 7, 8, 9, 20, None, None]])
    reference, draft = (make(implementation, **settings) for implementation in ("eager", "sdpa"))
    draft.load_state_dict(reference.state_dict())
    inputs = make_inputs(draft, context_length=27, blocks=7, batch=2)
    inputs |= {"anchor_positions": anchors, "block_keep_mask": keep}
    if packed:
        inputs["document_ids"] = torch.tensor([[1] * 6 + [2] * 15 + [0] * 6, [1] * 27])
    found = []
    for model in (reference, draft):
        hidden = model(**inputs).last_hidden_state
        (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((hidden.detach(), grads))
    (expected, expected_grads), (hidden, grads) = found
    assert relative_error(hidden, expected) < 1e-5 and grads.keys() == expected_grads.keys()
    flat, expected_flat = (torch.cat([grad.flatten() for grad in each.values()]) for each in (grads, expected_grads))
    assert relative_error(flat, expected_flat) < 1e-5
    errors = {name: relative_error(grads[name], grad) for name, grad in expected_grads.items() if "attn." in name}
    assert max(errors.values(), default=0) < 1e-5, errors


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make, make_inputs", [(k3, draft_inputs), (dspark, dspark_inputs)], ids=["k3", "dspark"])
def test_gradient_checkpointing_and_autocast(make, make_inputs, use_reentrant):
    anchors, keep = anchors_of_rows([[1, 3, 6, None]])
    draft = make("sdpa")
    inputs = make_inputs(draft, context_length=9, blocks=4)
    inputs["noise_embeds"].requires_grad_()

    def gradients(checkpointing, dtype):
        draft.zero_grad()
        if checkpointing:
            draft.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            hidden = draft(**inputs, anchor_positions=anchors, block_keep_mask=keep).last_hidden_state
        hidden.float().square().sum().backward()
        draft.gradient_checkpointing_disable()
        return torch.cat([p.grad.flatten() for p in draft.parameters() if p.grad is not None])

    exact = gradients(False, None)
    assert relative_error(gradients(True, None), exact) < 1e-6
    low = gradients(False, torch.bfloat16)
    assert torch.equal(gradients(True, torch.bfloat16), low) and relative_error(low, exact) < 0.2


@pytest.mark.parametrize("make, make_inputs", [(k3, draft_inputs), (dspark, dspark_inputs)], ids=["k3", "dspark"])
def test_dropout_takes_the_dense_path_and_says_so(make, make_inputs, monkeypatch):
    said = []
    monkeypatch.setattr("blockdraft.modeling.draft.modeling_draft.logger.warning_once", said.append)
    draft = make("sdpa", attention_dropout=0.5)
    inputs = make_inputs(draft, context_length=9, blocks=2) | {"anchor_positions": torch.tensor([[3, 6]])}
    first, second = (draft(**inputs).last_hidden_state for _ in range(2))
    assert not torch.allclose(first, second) and len(said) == 2 and "attention_dropout" in said[0]
    said.clear()
    draft.eval()
    assert torch.equal(draft(**inputs).last_hidden_state, draft(**inputs).last_hidden_state) and not said


@pytest.mark.parametrize("make, make_inputs", [(k3, draft_inputs), (dspark, dspark_inputs)], ids=["k3", "dspark"])
def test_blocks_that_do_not_say_what_they_see_are_refused(make, make_inputs):
    draft = make("sdpa")
    inputs, anchors = make_inputs(draft, context_length=9, blocks=2), torch.tensor([[3, 6]])
    mask = torch.ones(1, 1, 8, 17, dtype=torch.bool)
    wrong = {
        "more than one block of 4: pass `anchor_positions`": {},
        "say the same twice": {"anchor_positions": anchors, "attention_mask": mask},
        "make 12": {"anchor_positions": torch.tensor([[1, 2, 3]])},
        "`block_keep_mask` has the shape": {"anchor_positions": anchors, "block_keep_mask": torch.ones(1, 3)},
        "`document_ids` has the shape": {"anchor_positions": anchors, "document_ids": torch.ones(1, 8)},
        "come back to a document": {
            "anchor_positions": anchors,
            "document_ids": torch.tensor([[0] * 3 + [1] * 3 + [0] * 3]),
        },
        "`document_ids` goes with `anchor_positions`": {"document_ids": torch.zeros(1, 9), "attention_mask": mask},
        "leave out the anchors": {"anchor_positions": anchors, "use_cache": True},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            draft(**inputs, **given)


def test_an_implementation_of_ones_own_gets_the_dense_mask():
    """Registered with transformers under a name of its own: it takes what any implementation takes."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks = []

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        masks.append(attention_mask)
        output = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return output.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("of_ones_own", attention)
    draft = tiny_draft()
    inputs = draft_inputs(draft, context_length=9, blocks=2) | {"anchor_positions": torch.tensor([[3, 6]])}
    expected = draft(**inputs).last_hidden_state
    draft.config._attn_implementation = "of_ones_own"
    torch.testing.assert_close(draft(**inputs).last_hidden_state, expected)
    assert all(mask.shape == (1, 1, 8, 17) for mask in masks) and len(masks) == 2


def test_a_compiled_layer_calls_it_as_it_is():
    """Whatever the layout that the compiler gives to queries and keys, and without code for each batch's groups."""
    heads, block_size = HEADS["MLA"], 3
    torch._dynamo.reset()

    def layer(states, attention, visible):
        queries = states[:, CONTEXT:].unflatten(-1, (4, 8)).transpose(1, 2) * 2
        keys = states.unflatten(-1, (4, 8)).transpose(1, 2)
        return attention(queries, keys, keys * 3, visible, 0.3).sin()

    compiled = torch.compile(layer, backend=(counter := CompileCounterWithBackend("aot_eager")))
    for rows in ([[1, 3, 9]], [[2, 20, 25]], [[0, 4, 30]], [[7, 8, None]]):
        anchors, keep = anchors_of_rows(rows)
        visible = plan(anchors, keep, block_size, heads, causal=True)
        states = torch.randn(1, CONTEXT + 3 * block_size, 32, requires_grad=True)
        outputs = [call(states, attend_visible, visible) for call in (compiled, layer)]
        gradients = [torch.autograd.grad(output.square().sum(), states)[0] for output in outputs]
        torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 2  # before it and after it, for all batches
