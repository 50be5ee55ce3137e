"""Target features of training rows, kept on disk during a run: what one epoch computed, the next ones read."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


class FeatureCache:
    """
    Rows of a frozen target's states, by row id.

    The file has no name: it vanishes with the process, so that no later run reads what another target has written.
    Each rank keeps the rows that it has seen.

    Args:
        directory (`Path`): where the file lies; made if absent.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - open as long as the cache lives
        self._places: dict[int, tuple[int, int]] = {}  # row id: offset in bytes, tokens
        self._end = 0
        self._widths: list[int] = []
        self._dtype = torch.float32

    def states(
        self, inputs: dict[str, Tensor], compute: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """
        What `compute(inputs)` returns, from disk if every row of the batch has been computed before.

        Args:
            inputs: a batch with `row_id` `[B]` and `attention_mask` `[B, S]`, padded on the right.
            compute: returns tensors `[B, S, width]` of one dtype.

        Returns:
            The tensors, `[B, S, width]` on the device of `inputs`. Those read from disk are zero in the padding, and
            may differ in the last bits from what this batch would have given: the row was computed in another one.
        """
        row_ids, lengths = inputs["row_id"].tolist(), inputs["attention_mask"].sum(-1).tolist()
        if all(row_id in self._places for row_id in row_ids):
            return self._read(row_ids, inputs["attention_mask"])
        states = compute(inputs)
        self._widths, self._dtype = [tensor.shape[-1] for tensor in states], states[0].dtype
        joined = torch.cat(states, dim=-1).cpu()
        for row, row_id in enumerate(row_ids):
            if row_id not in self._places:
                self._append(row_id, joined[row, : lengths[row]].contiguous())
        return states

    def _append(self, row_id: int, states: Tensor) -> None:
        data = _bytes(states)
        self._places[row_id] = (self._end, len(states))
        while data:
            written = os.pwrite(self._file.fileno(), data, self._end)
            self._end, data = self._end + written, data[written:]

    def _read(self, row_ids: list[int], attention_mask: Tensor) -> tuple[Tensor, ...]:
        states = torch.zeros(*attention_mask.shape, sum(self._widths), dtype=self._dtype)
        for row, row_id in enumerate(row_ids):
            offset, length = self._places[row_id]
            data = _bytes(states[row, :length])
            while data:
                read = os.preadv(self._file.fileno(), [data], offset)
                assert read, "the file of features is shorter than its index"
                offset, data = offset + read, data[read:]
        return states.to(attention_mask.device).split(self._widths, dim=-1)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    assert tensor.is_contiguous()
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")
