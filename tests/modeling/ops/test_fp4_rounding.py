"""The numbers of FP4; rounding of groups of channels to it is in `test_cache_rounding`, beside FP8's."""

import torch

from blockdraft.modeling.ops.fp4_rounding import round_to_fp4
from blockdraft.modeling.ops.number_formats import E2M1_MAGNITUDES


def test_fp4_takes_the_nearest_number_and_the_even_code_on_ties():
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert round_to_fp4(torch.tensor(midpoints)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    x = torch.linspace(-7, 7, 4001)
    levels = torch.tensor(E2M1_MAGNITUDES)
    nearest = levels[(x.abs()[:, None] - levels).abs().argmin(1)]
    is_midpoint = torch.isin(x.abs(), torch.tensor(midpoints))
    assert torch.equal(round_to_fp4(x)[~is_midpoint], nearest.copysign(x)[~is_midpoint])
    assert round_to_fp4(torch.tensor([-0.1, -0.0])).signbit().all()
