"""Work of all ranks, on one; two ranks are in `test_two_ranks.py`."""

import pytest

from blockdraft.trainer.ranks import on_all_ranks


def test_one_process_is_all_ranks():
    assert on_all_ranks(lambda rank, ranks: (rank, ranks)) == [(0, 1)]
    with pytest.raises(KeyError):
        on_all_ranks(lambda rank, ranks: {}["none"])
