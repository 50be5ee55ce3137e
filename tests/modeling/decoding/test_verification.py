"""Which candidates the target keeps: greedy equality, and the target's distribution under sampling."""

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from blockdraft.modeling.decoding import verification
from blockdraft.modeling.decoding.decoding_state import DecodedSequence, Row, Rules
from blockdraft.modeling.decoding.verification import match, sample, token_at, verify

LARGE = 152_064  # tokens of a vocabulary
LARGEST = torch.tensor(1 - 2**-53, dtype=torch.float64)  # number that is drawn


def total_variation(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(probs)) / len(tokens)
    return (counts - probs).abs().sum().item() / 2


# Draws


def test_sample_draws_in_proportion_and_nothing_of_weight_zero():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    drawn = sample(weights.expand(100, 200, 6))
    counts = torch.bincount(drawn.flatten(), minlength=6)
    assert drawn.shape == (100, 200) and counts[[0, 2, 5]].sum() == 0
    assert (counts / 20_000 - weights / 8).abs().sum() / 2 < 0.02


def test_a_draw_stays_below_the_total_at_the_largest_number():
    probs = torch.cat([torch.rand(5000, 64), torch.zeros(5000, 3)], dim=-1)
    probs = torch.cat(
        [probs, torch.nn.functional.pad(torch.ones(7, 1) * 2.0 ** torch.arange(-3, 4)[:, None], (0, 66))]
    )
    assert (token_at(probs, LARGEST.expand(len(probs), 1)) < 64).all()


def test_a_draw_is_nothing_of_weight_zero_where_the_sums_rise(monkeypatch):
    """As a parallel scan's may, by a rounding error; the largest number falls there."""

    def rising(x, dim):
        sums = torch.cumsum(x, dim)
        return sums + 1e-3 * torch.arange(x.shape[-1]) * (sums > 0)

    monkeypatch.setattr(torch.Tensor, "cumsum_", rising)
    probs = torch.tensor([[0.2, 0.8, 0.0, 0.0], [0.0, 0.3, 0.7, 0.0]])
    assert token_at(probs, LARGEST.expand(2, 1)).tolist() == [[0], [1]]


def sequence(warpers: list) -> DecodedSequence:
    rules = Rules(
        LogitsProcessorList(warpers),
        StoppingCriteriaList([MaxLengthCriteria(8)]),
        GenerationConfig(do_sample=True),
        streamer=None,
    )
    return DecodedSequence(Row(torch.ones(1, 3, dtype=torch.long), 0, {}, 0, 1), rules)


def edges(weights: torch.Tensor) -> torch.Tensor:
    """Where each token's part of the numbers from 0 to 1 begins, and the end, `[vocab + 1]` float64, from sums in more
    than float64."""
    sums = np.concatenate([[0], np.cumsum(weights.double().numpy().astype(np.longdouble))])
    return torch.from_numpy((sums / sums[-1]).astype(np.float64))


WARPERS = {"none": [], "temperature, top-p": [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.95)]}


@pytest.mark.parametrize("warpers", WARPERS.values(), ids=WARPERS)
@pytest.mark.parametrize("deviation", [0.0, 1.0, 4.0])
def test_the_whole_map_from_a_number_to_a_token_is_exact(deviation, warpers):
    """Total variation between the drawn and the intended distribution of a large vocabulary."""
    decoded = sequence(warpers)
    scores = decoded.process(deviation * torch.randn(1, LARGE), 3)
    _, probs = decoded.choose(scores)
    intended = scores.double().softmax(dim=-1)[0]
    weights = probs[0].double() / probs[0].double().sum()
    assert (weights - intended).abs().sum() / 2 < 1e-6

    # Every token that holds more than this of the numbers has them all, but for the last bits at both ends.
    start, end, margin = edges(probs[0])[:-1], edges(probs[0])[1:], 1e-12
    tokens = (end - start > 4 * margin).nonzero()[:, 0]
    numbers = torch.stack([start[tokens] + margin, end[tokens] - margin])
    assert torch.equal(token_at(probs[0], numbers.flatten()).view(2, -1), tokens.expand(2, -1))
    bound = margin * len(tokens) + (end - start)[end - start <= 4 * margin].sum()
    assert bound < 1e-6 and intended[tokens].sum() > 1 - 1e-6


@pytest.mark.parametrize("whose", ["draft's", "target's bonus", "target's replacement"])
def test_every_draw_reaches_the_rare_tokens(whose, monkeypatch):
    """Tokens that share less than a float32 number's step, drawn by the number in the middle of their part."""
    scores = 4 * torch.randn(1, LARGE)
    scores[0, 0] = scores.max()  # a token to reject
    decoded, [probs] = sequence([]), scores.softmax(dim=-1)
    weights = probs.clone()
    if whose == "target's replacement":
        weights[0] = 0
    start, end = edges(weights)[:-1], edges(weights)[1:]
    small = ((end - start < 2**-26) & (end - start > 1e-10)).nonzero()[:, 0]
    tokens = small[:: len(small) // 8][:8]
    numbers = ((start + end) / 2)[tokens, None]
    drawn = [numbers]
    if whose != "draft's":  # how much of each candidate is accepted: nothing of the one to reject
        drawn.insert(0, torch.full_like(numbers, 0.5)[:, : whose == "target's replacement"])
    monkeypatch.setattr(verification, "uniform", lambda *_: drawn.pop(0))
    rows = len(tokens)
    if whose == "draft's":
        found, _ = decoded.choose(scores.expand(rows, -1))
    elif whose == "target's bonus":
        _, found = verify(tokens.new_empty(rows, 0), probs.expand(rows, 0, -1), probs.expand(rows, 1, -1))
    else:
        q = torch.zeros(LARGE)
        q[0] = 1e3  # never accepted, and no other token was likelier than in p
        _, found = verify(tokens.new_zeros(rows, 1), q.expand(rows, 1, -1), probs.expand(rows, 2, -1))
    assert found.tolist() == tokens.tolist() and not drawn


def test_numbers_are_drawn_on_a_fine_grid():
    numbers = verification.uniform((1000, 1), torch.device("cpu"))
    assert numbers.dtype == torch.float64 and ((numbers * 2**24) % 1 > 0).float().mean() > 0.99


# Verification


def test_match_keeps_the_leading_agreement():
    target_tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    candidates = torch.tensor([[1, 2, 3], [1, 7, 3], [7, 2, 3]])
    accepted, next_token = match(candidates, target_tokens)
    assert accepted.tolist() == [3, 1, 0] and next_token.tolist() == [4, 2, 1]


@pytest.mark.parametrize("closeness", [0.0, 0.7, 1.0])
def test_verified_tokens_have_the_targets_distribution(closeness):
    """Four tokens of a Markov chain over 8 tokens, drafted with another chain: marginals stay exact."""
    draws, vocab, n = 20_000, 8, 3
    p = torch.randn(vocab, vocab).mul(1.5).softmax(-1)
    q = closeness * p + (1 - closeness) * torch.randn(vocab, vocab).mul(1.5).softmax(-1)

    def sample(probs):
        return torch.multinomial(probs, 1).squeeze(1)

    tokens = torch.zeros(draws, 1, dtype=torch.long)  # every chain starts in token 0
    for _ in range(n):
        tokens = torch.cat([tokens, sample(q[tokens[:, -1]])[:, None]], dim=1)
    accepted, next_token = verify(tokens[:, 1:], q[tokens[:, :-1]], p[tokens])
    if closeness == 1:
        assert (accepted == n).float().mean() > 0.99
    marginal = p[0]
    for position in range(1, n + 2):
        # What a round leaves open, later rounds draw from p.
        if position <= n:
            drawn = torch.where(accepted >= position, tokens[:, position], sample(p[tokens[:, position - 1]]))
            tokens[:, position] = torch.where(accepted == position - 1, next_token, drawn)
        else:
            drawn = sample(p[tokens[:, position - 1]])
            tokens = torch.cat([tokens, torch.where(accepted == n, next_token, drawn)[:, None]], dim=1)
        assert total_variation(tokens[:, position], marginal) < 0.02
        marginal = marginal @ p


@pytest.mark.parametrize("anticipating", [False, True])
def test_a_cut_keeps_the_distribution_unless_it_looks_ahead(anticipating):
    """The same, cut where the confidence in a candidate, a function of the token before it, is low."""
    draws, vocab, n = 40_000, 8, 3
    p, q = torch.randn(2, vocab, vocab).mul(1.5).softmax(-1)
    confidence = torch.tensor([1.0, 0.2] * 4)

    def sample(probs):
        return torch.multinomial(probs, 1).squeeze(1)

    drafted = torch.zeros(draws, 1, dtype=torch.long)
    for _ in range(n):
        drafted = torch.cat([drafted, sample(q[drafted[:, -1]])[:, None]], dim=1)
    shown = drafted[:, 1:] if anticipating else drafted[:, :-1]
    lengths = (confidence[shown].cumprod(-1) >= 0.4).sum(-1)

    # A verified prefix, the token after it, and from there on the target alone.
    answers = torch.zeros(draws, n + 2, dtype=torch.long)
    for length in range(n + 1):
        rows = (lengths == length).nonzero()[:, 0]
        block = drafted[rows, : length + 1]
        accepted, next_token = verify(block[:, 1:], q[block[:, :-1]], p[block])
        for position in range(1, n + 2):
            answer = sample(p[answers[rows, position - 1]])
            if position <= length:
                answer = torch.where(accepted >= position, block[:, position], answer)
            answers[rows, position] = torch.where(accepted == position - 1, next_token, answer)
    assert lengths.unique().tolist() == ([0, 1, 2, 3] if anticipating else [1, 2, 3])
    marginal, differences = p[0], []
    for position in range(1, n + 2):
        differences.append(total_variation(answers[:, position], marginal))
        marginal = marginal @ p
    assert (max(differences) > 0.05) if anticipating else (max(differences) < 0.015)


def test_verify_never_takes_what_the_target_excludes():
    p = torch.tensor([0.0, 0.5, 0.5]).expand(2000, 2, 3)
    q = torch.tensor([0.8, 0.1, 0.1]).expand(2000, 1, 3)
    candidates = torch.multinomial(q[:, 0], 1)
    accepted, next_token = verify(candidates, q, p)
    assert not (accepted[candidates[:, 0] == 0]).any() and not (next_token == 0).any()
