import pytest
import torch

from blockdraft.modeling.draft.prefix_lengths import prefix_length_probabilities, sample_prefix_lengths


def test_prefix_lengths_follow_their_distribution():
    keep = torch.ones(1, 20000, dtype=torch.bool)
    shortest, probabilities = prefix_length_probabilities(8, 0.5)
    lengths = sample_prefix_lengths(keep, 8, 0.5, 0, 0, ["row"])
    assert shortest == 2 and lengths.min() == 2 and lengths.max() == 7
    torch.testing.assert_close(probabilities[1:] / probabilities[:-1], torch.full((5,), 0.5, dtype=torch.float64))
    frequencies = torch.bincount(lengths.flatten(), minlength=8)[2:] / lengths.numel()
    assert (frequencies - probabilities).abs().max() < 0.02


@pytest.mark.parametrize("block_size, length", [(2, 1), (3, 2)])
def test_short_blocks_have_one_prefix_length(block_size, length):
    keep = torch.tensor([[True, True, False]])
    assert sample_prefix_lengths(keep, block_size, 0.9, 0, 0, [0]).tolist() == [[length] * 3]
