"""Verification of drafted tokens, as pure functions: which candidates the target keeps, and the token after them."""

import torch


def sample(probs: torch.Tensor) -> torch.LongTensor:
    """Draws one token a row, `[..., vocab]` float -> `[...]`, each in proportion to its weight: [`token_at`] a uniform
    number. (`torch.multinomial` makes a random number for each entry of the vocabulary, which takes as long as a small
    draft's forward.)"""
    return token_at(probs, uniform((*probs.shape[:-1], 1), probs.device)).squeeze(-1)


def uniform(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Random numbers in [0, 1), float64: float32's lie on a grid of 2^-24, which passes over the rare tokens of a
    large vocabulary."""
    return torch.rand(shape, dtype=torch.float64, device=device)


def token_at(probs: torch.Tensor, number: torch.Tensor) -> torch.LongTensor:
    """The inverse of the cumulative distribution, summed in float64.

    Args:
        probs: `[..., vocab]` float, which need not sum to one; a token of weight zero is never found.
        number: `[..., n]` float64 in [0, 1), shares of the total.

    Returns:
        `[..., n]`, at each number the first token with which the cumulative share exceeds it.
    """
    cumulative = probs.to(torch.float64, copy=True).cumsum_(dim=-1)  # in place: less memory to fetch
    total = cumulative[..., -1:]
    # Strictly below the total: the largest number is 1 - 2^-53, and a product with it rounds down.
    found = torch.searchsorted(cumulative, number * total, right=True)
    # A parallel scan's sums may rise by a rounding error where nothing was added, but not before the first token with
    # a weight.
    first = torch.searchsorted(cumulative, torch.zeros_like(total), right=True)
    return torch.where(probs.gather(-1, found) > 0, found, first)


def match(candidates: torch.LongTensor, target_tokens: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy verification: keeps candidates `[batch, n]` as long as each is the target's own choice, `[batch, n + 1]`
    at each candidate's position and after the last one. Returns how many leading ones stay, `[batch]`, and the choice
    after them, `[batch]`."""
    accepted = (candidates == target_tokens[:, :-1]).cumprod(dim=-1).sum(dim=-1)
    return accepted, target_tokens.gather(1, accepted[:, None]).squeeze(1)


def verify(
    candidates: torch.LongTensor, draft_probs: torch.Tensor, target_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1), for any draft that knows its own distribution.

    A candidate x stays with probability min(1, p(x) / q(x)). The first one that does not is replaced by a draw from
    max(p - q, 0), normalised; when all stay, a bonus token is drawn from the last p.

    Args:
        candidates: `[batch, n]`, where row k was drawn from `draft_probs[:, k]`.
        draft_probs: `[batch, n, vocab]` float32, q.
        target_probs: `[batch, n + 1, vocab]` float32, p.

    Returns:
        `accepted` `[batch]`, how many leading candidates stay, and `next_token` `[batch]`.
    """
    n = candidates.shape[1]
    p = target_probs[:, :n].gather(-1, candidates[..., None]).squeeze(-1)
    q = draft_probs.gather(-1, candidates[..., None]).squeeze(-1)
    # Strict and without a division: a token the target excludes (p = 0) never passes.
    accepted = (uniform(p.shape, p.device) * q < p).cumprod(dim=-1).sum(dim=-1)

    rows = torch.arange(len(candidates), device=candidates.device)
    last = target_probs[rows, accepted]
    if n > 0:
        rejected = (accepted < n)[:, None]
        residual = (last - draft_probs[rows, accepted.clamp(max=n - 1)] * rejected).clamp(min=0)
        # p and q equal up to rounding leave no residual; a rejection has probability zero there.
        last = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, last)
    return accepted, sample(last)
