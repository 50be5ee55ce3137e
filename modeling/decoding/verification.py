"""Verification of drafted tokens, as pure functions: which candidates the target keeps, and the token after them."""

import torch


def sample(probs: torch.Tensor) -> torch.LongTensor:
    """Draws one token a row, `[..., vocab]` float -> `[...]`, by inverting the cumulative distribution.

    Rows need not sum to one; a token of weight zero is never drawn. (`torch.multinomial` makes a random number
    for each entry of the vocabulary, which takes as long as a small draft's forward.)
    """
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[..., -1:]
    # Strictly below the total, whatever the rounding.
    threshold = torch.minimum(torch.rand_like(total) * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, threshold, right=True)
    # A parallel scan's sums may rise by a rounding error where nothing was added.
    return torch.where(probs.gather(-1, drawn) > 0, drawn, probs.argmax(dim=-1, keepdim=True)).squeeze(-1)


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
    accepted = (torch.rand_like(p) * q < p).cumprod(dim=-1).sum(dim=-1)

    rows = torch.arange(len(candidates), device=candidates.device)
    last = target_probs[rows, accepted]
    if n > 0:
        rejected = (accepted < n)[:, None]
        residual = (last - draft_probs[rows, accepted.clamp(max=n - 1)] * rejected).clamp(min=0)
        # p and q equal up to rounding leave no residual; a rejection has probability zero there.
        last = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, last)
    return accepted, sample(last)
