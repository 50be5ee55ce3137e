"""Which candidates the target keeps: greedy equality, and the target's distribution under sampling."""

import pytest
import torch

from blockdraft.modeling.decoding.verification import match, sample, verify


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


def test_sample_stays_below_the_total_at_the_largest_random_number(monkeypatch):
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 1 - 2**-24))
    probs = torch.cat([torch.rand(500, 64), torch.zeros(500, 3)], dim=-1)
    assert (sample(probs) < 64).all()


def test_sample_draws_nothing_of_weight_zero_where_the_sums_rise(monkeypatch):
    """As a parallel scan's may, by a rounding error; the largest random number falls there."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 1 - 2**-24))
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: torch.cumsum(x, dim) + 1e-3 * torch.arange(x.shape[-1]))
    assert sample(torch.tensor([[0.2, 0.8, 0.0, 0.0], [0.7, 0.3, 0.0, 0.0]])).tolist() == [1, 0]


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
