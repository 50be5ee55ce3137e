"""Loss and gradients formed chunk by chunk against the plain definition, and what they take of memory."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockdraft.trainer.objectives.chunked_loss import SlotLoss, default_chunk_size, sum_over_slots
from blockdraft.trainer.objectives.dflash import dflash_loss
from blockdraft.trainer.objectives.dspark import DSparkAlphas, SlotPredictions, dspark_loss
from blockdraft.trainer.objectives.slot_targets import SlotTargets, slot_targets
from blockdraft.trainer.training_args import DraftTrainingArguments

VOCAB, HIDDEN, RANK = 97, 12, 5
SHAPE = (2, 4, 5)


def assert_near(actual, expected, tolerance):
    error = (actual.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.double().abs().max(), f"{error:.2e}"


class Heads(nn.Module):
    """A frozen LM head with a soft cap, a Markov head whose matrix is frozen under an adapter, a confidence head."""

    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
        self.embed = nn.Embedding(VOCAB, RANK)
        self.markov = nn.Linear(RANK, VOCAB, bias=False).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(RANK, 2, bias=False), nn.Linear(2, VOCAB, bias=False))
        self.confidence = nn.Linear(HIDDEN + RANK, 1)

    def forward(self, hidden, states, previous, teacher=None) -> SlotPredictions:
        embeddings = self.embed(previous)
        logits = 4 * torch.tanh(self.lm_head(hidden) / 2) + self.markov(embeddings) + self.adapter(embeddings)
        with torch.no_grad():
            teacher_logits = None if teacher is None else 2 * self.lm_head(teacher)
        return SlotPredictions(
            logits, teacher_logits, self.confidence(torch.cat([states, embeddings], -1)).squeeze(-1)
        )


def plain_loss(predictions: SlotPredictions, targets: SlotTargets, alphas: DSparkAlphas):
    """The definition over all slots at once: what autograd makes of it is the reference."""
    logits, teacher_logits, confidence = predictions
    loss = alphas.ce * F.cross_entropy(logits, targets.token_ids.flatten(), reduction="none")
    if alphas.need_teacher:
        distance = (logits.softmax(-1) - teacher_logits.softmax(-1)).abs().sum(-1)
        accept = (1 - distance / 2).detach()
        loss = loss + alphas.l1 * distance
    if alphas.confidence > 0:
        bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
        loss = loss + alphas.confidence * bce
    return (loss * targets.weights.flatten()).sum()


def dspark_case(dtype=torch.float32, supervised=0.8):
    """(heads, hidden and confidence states with a gradient, other inputs, targets)"""
    torch.manual_seed(0)
    heads = Heads().to(dtype)
    states = [(2 * torch.randn(*SHAPE, HIDDEN, dtype=dtype)).requires_grad_() for _ in range(2)]
    others = [torch.randint(VOCAB, SHAPE), 2 * torch.randn(*SHAPE, HIDDEN, dtype=dtype)]
    mask = (torch.rand(SHAPE) > 1 - supervised).float().cumprod(-1)
    return heads, states, others, slot_targets(torch.randint(VOCAB, SHAPE), mask, 0, 4.0)


def trained(heads, states) -> dict[str, torch.Tensor]:
    named = {name: parameter for name, parameter in heads.named_parameters() if parameter.requires_grad}
    return named | {"hidden": states[0], "confidence_states": states[1]}


def gradients(loss, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in tensors.values():
        tensor.grad = None
    loss.backward()
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk_size", [3, None])
@pytest.mark.parametrize("alphas", [(0.1, 0.9, 1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.5), (1.0, 0.0, 0.0)])
def test_loss_and_gradients_equal_the_plain_definition(alphas, chunk_size, recompute):
    alphas = DSparkAlphas(*alphas)
    heads, states, others, targets = dspark_case()
    inputs = [*states, *others[: 2 if alphas.need_teacher else 1]]
    expected_loss = plain_loss(heads(*(value.flatten(0, 2) for value in inputs)), targets, alphas)
    expected = gradients(expected_loss, trained(heads, states))
    loss = dspark_loss(heads, inputs, targets, alphas, chunk_size, recompute)
    assert_near(loss.loss_sum, expected_loss, 1e-6)
    found = gradients(loss.loss_sum, trained(heads, states))
    assert expected.keys() <= found.keys() | {"confidence_states"}
    for name, gradient in found.items():
        assert_near(gradient, expected.get(name, torch.zeros(())), 1e-5)


@pytest.mark.parametrize("chunk_size", [7, None])
def test_cross_entropy_equals_the_plain_definition_of_far_out_logits(chunk_size):
    """Labels whose probability is no fp32 number, and others that are certain."""
    torch.manual_seed(0)
    hidden = (40 * torch.randn(1, 40, HIDDEN)).requires_grad_()
    head = nn.Linear(HIDDEN, VOCAB)
    ids, mask = torch.randint(VOCAB, (1, 8, 5)), (torch.rand(1, 8, 5) > 0.3).float()
    expected_nll = F.cross_entropy(head(hidden[0]), ids.flatten(), reduction="none")
    assert expected_nll.max() > 110
    tensors = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    targets = slot_targets(ids, mask, 1, 7.0)
    expected_loss = (expected_nll * targets.weights.flatten()).sum()
    expected = gradients(expected_loss, tensors)
    loss = dflash_loss(hidden, head, targets, chunk_size)
    assert_near(loss.loss_sum, expected_loss, 1e-6)
    for name, gradient in gradients(loss.loss_sum, tensors).items():
        assert_near(gradient, expected[name], 1e-5)


def test_logits_are_made_once_and_not_kept():
    """In forward and backward together; only the states' and the heads' gradients stay in between."""
    heads, states, others, targets = dspark_case()
    sizes = []

    def predict(*values):
        sizes.append(len(values[0]))
        return heads(*values)

    loss = dspark_loss(predict, [*states, *others], targets, DSparkAlphas(), chunk_size=4)
    saved = {tuple(tensor.shape) for tensor in loss.loss_sum.grad_fn.saved_tensors}
    flat = (targets.token_ids.numel(), HIDDEN)
    assert saved == {flat, *(tuple(parameter.shape) for parameter in heads.parameters() if parameter.requires_grad)}
    loss.loss_sum.backward()
    assert max(sizes) == 4 and sum(sizes) == targets.supervised.sum()


def test_evaluation_forms_no_gradient():
    heads, states, others, targets = dspark_case()
    seen = []

    def slot_loss(states):
        logits = heads.lm_head(states)
        seen.append(logits.requires_grad)
        return SlotLoss(logits.sum(-1), (), (), ())

    with torch.no_grad():
        [total] = sum_over_slots(slot_loss, targets, [states[0].flatten(0, 2)], 4)
        loss = dspark_loss(heads, [*states, *others], targets, DSparkAlphas(), 4)
    assert not total.requires_grad and not loss.loss_sum.requires_grad and seen and not any(seen)
    trained_loss = dspark_loss(heads, [*states, *others], targets, DSparkAlphas(), 4)
    for name, value in vars(loss).items():
        assert torch.equal(value, getattr(trained_loss, name).detach()), name


def test_the_sum_can_be_used_twice_and_scaled():
    heads, states, others, targets = dspark_case()
    once, scaled = (dspark_loss(heads, [*states, *others], targets, DSparkAlphas()).loss_sum for _ in range(2))
    expected = gradients(once, trained(heads, states))
    found = gradients(1024 * (scaled + scaled), trained(heads, states))
    for name, gradient in found.items():
        assert_near(gradient, 2048 * expected[name], 1e-6)


def test_gradients_are_handed_over_and_not_copied():
    heads, states, others, targets = dspark_case()
    loss = dspark_loss(heads, [*states, *others], targets, DSparkAlphas()).loss_sum
    formed = {tensor.data_ptr() for tensor in loss.grad_fn.saved_tensors}
    (3 * loss).backward()
    assert formed == {tensor.grad.data_ptr() for tensor in trained(heads, states).values()}


def test_a_second_backward_pass_is_refused():
    heads, states, others, targets = dspark_case()
    loss = dspark_loss(heads, [*states, *others], targets, DSparkAlphas()).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_recomputing_keeps_no_logits_between_forward_and_backward():
    heads, states, others, targets = dspark_case()
    inputs = [*states, *others]
    gc.collect()
    before = {id(value) for value in gc.get_objects()}
    loss = dspark_loss(heads, inputs, targets, DSparkAlphas(), chunk_size=4, recompute=True)
    gc.collect()
    kept = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and id(value) not in before]
    assert kept and not any(VOCAB in tensor.shape for tensor in kept)
    loss.loss_sum.backward()


def test_a_second_derivative_is_refused():
    heads, states, others, targets = dspark_case()
    loss = dspark_loss(heads, [*states, *others], targets, DSparkAlphas()).loss_sum
    [gradient] = torch.autograd.grad(loss.square(), states[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_without_a_supervised_slot_every_parameter_gets_a_zero(recompute):
    heads, states, others, targets = dspark_case(supervised=0.0)
    loss = dspark_loss(heads, [*states, *others], targets, DSparkAlphas(), recompute=recompute)
    found = gradients(loss.loss_sum, trained(heads, states))
    assert loss.loss_sum == 0 and found.keys() == trained(heads, states).keys()
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk_size", [4, None])
def test_autocast_reaches_the_chunks(chunk_size, recompute):
    heads, states, others, targets = dspark_case()
    expected = gradients(
        dspark_loss(heads, [*states, *others], targets, DSparkAlphas()).loss_sum, trained(heads, states)
    )
    dtypes = []
    heads.markov.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = dspark_loss(heads, [*states, *others], targets, DSparkAlphas(), chunk_size, recompute).loss_sum
    found = gradients(loss, trained(heads, states))
    assert set(dtypes) == {torch.bfloat16} and loss.dtype == torch.float32 and found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32 and not torch.equal(gradient, expected[name])
        assert (gradient - expected[name]).norm() <= 0.05 * expected[name].norm(), name


def test_half_precision_heads_add_their_chunks_in_fp32():
    """500 chunks whose gradients would be lost to rounding in a bf16 sum."""
    head = nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(head.weight)
    hidden, ids = torch.ones(1, 500, 1, dtype=torch.bfloat16), torch.zeros(1, 100, 5).long()
    loss = dflash_loss(hidden, head, slot_targets(ids, torch.ones(1, 100, 5), 0), 1)
    loss.loss_sum.backward()
    assert head.weight.grad.dtype == torch.bfloat16 and head.weight.grad.flatten().tolist() == [-250, 250]


def test_default_chunk_size_follows_vocabulary_and_device():
    assert default_chunk_size(32_768, "cpu") == 512
    assert default_chunk_size(163_840, "cpu") == 102
    assert default_chunk_size(163_840, "cuda") == 409
    assert default_chunk_size(10_000_000, "cpu") == 64


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_without_slots_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match="`loss_chunk_size` is .*must be positive"):
        DraftTrainingArguments(str(tmp_path), loss_chunk_size=size)
    assert DraftTrainingArguments(str(tmp_path)).loss_chunk_size is None


MEASURE = """
import json, sys, torch
from torch import nn
from blockdraft.trainer.objectives.dspark import DSparkAlphas, SlotPredictions, dspark_loss
from blockdraft.trainer.objectives.dflash import dflash_loss
from blockdraft.trainer.objectives.slot_targets import slot_targets

def memory(name):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) / 1024

torch.set_num_threads(1)
vocab, width, rank = 163840, 64, 64
head = nn.Linear(width, vocab, bias=False).requires_grad_(False)
embed, markov, confidence = nn.Embedding(vocab, rank), nn.Linear(rank, vocab, bias=False), nn.Linear(width + rank, 1)

def predict(hidden, states, previous, teacher):
    embeddings = embed(previous)
    logits = head(hidden) + markov(embeddings)
    with torch.no_grad():
        teacher_logits = head(teacher)
    return SlotPredictions(logits, teacher_logits, confidence(torch.cat([states, embeddings], -1)).squeeze(-1))

def step(slots):
    hidden = torch.randn(1, slots // 8, 8, width, requires_grad=True)
    ids, mask = torch.randint(vocab, hidden.shape[:3]), torch.ones(hidden.shape[:3])
    if sys.argv[1] == "dspark":
        inputs = [hidden, 1 * hidden, ids, torch.randn_like(hidden)]
        loss = dspark_loss(predict, inputs, slot_targets(ids, mask, 0, 4.0), DSparkAlphas())
    else:
        loss = dflash_loss(hidden.flatten(1, 2), head, slot_targets(ids, mask, 0, 7.0))
    loss.loss.backward()

before = memory("VmRSS")
peaks = []
for slots in (256, 1024):  # the first: two whole chunks, so that a whole one meets the gradients of another
    step(slots)
    peaks.append(memory("VmHWM") - before)
    embed.weight.grad = markov.weight.grad = None
print(json.dumps(peaks))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its own peak memory from /proc")
@pytest.mark.parametrize("objective", ["dflash", "dspark"])
def test_memory_does_not_grow_with_vocabulary_times_slots(objective):
    """1,024 slots of 163,840 logits would be 0.7 GB, several times over; gradients of the heads are in the bound."""
    command = [sys.executable, "-c", MEASURE, objective]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    few, many = json.loads(done.stdout)
    assert many <= 512 and many - few <= 64, (few, many)
