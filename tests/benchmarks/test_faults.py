"""What the command of faults compares."""

import random

import pytest
import torch

from benchmarks import faults


def test_every_difference_is_found():
    state = {"a": [torch.zeros(2), 1], "rng": ("MT", (1, 2)), "none": None}
    assert list(faults.differences(state, {**state, "a": [torch.zeros(2), 1]})) == []
    others = [{**state, "a": [torch.tensor([0, 1e-30]), 1]}, {**state, "a": [torch.zeros(2)]}, {**state, "none": 0}]
    others += [{**state, "rng": ("MT", (1, 3))}, {"a": state["a"]}]
    assert [[*faults.differences(state, other)] for other in others] == [
        ["/a/0"],
        ["/a"],
        ["/none"],
        ["/rng/1/1"],
        [""],
    ]


@pytest.mark.parametrize(("said", "last", "code"), [("6\n", 2, -9), ("5\n", 5, faults.FAILED)])
def test_a_run_that_loses_steps_or_fails_is_an_error(monkeypatch, tmp_path, said, last, code):
    class Lossy(faults.Stretch):
        def __init__(self, *args):
            self.pid, self.said = 0, said

        def listen(self, seconds=None):
            return False

        def leave(self):
            return code

    (tmp_path / f"checkpoint-{last}").mkdir()
    monkeypatch.setattr(faults, "Stretch", Lossy)
    with pytest.raises(RuntimeError, match="failed" if code == faults.FAILED else "Step 6 was taken, and step 2 is"):
        faults.disturbed_run({"folder": tmp_path, "save_steps": 2}, 3, ["kill"], 1.0, random.Random(0))
