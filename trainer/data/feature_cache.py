"""Target states of training rows, kept on disk during a run: one epoch computes them, the next ones read them."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


class FeatureCache:
    """
    A frozen target's states of rows, found by all that the target reads of a row: data sets that were joined may have
    the same row ids. The file in `directory` has no name and vanishes with the process, so that no later run reads
    what another target wrote. Each rank keeps the rows that it has seen.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        # Open as long as the cache. Unbuffered: a forked process must not write the rest of a buffer.
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._offsets: dict[bytes, int] = {}  # in the file, by the row's digest
        self._widths: list[int] = []
        self._dtype = torch.float32

    def states(
        self, inputs: dict[str, Tensor], compute: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """
        What `compute(inputs)` returns for a batch padded on the right, tensors `[B, S, width]` of one dtype; read from
        disk if every row has been computed before. Then they are zero in the padding, and may differ in the last bits
        from what this batch would give, as a row was computed in another one.
        """
        lengths = inputs["attention_mask"].sum(-1).tolist()
        digests = _digests(inputs, lengths)
        if all(digest in self._offsets for digest in digests):
            return self._read(digests, lengths, inputs["attention_mask"])
        states = compute(inputs)
        self._widths, self._dtype = [tensor.shape[-1] for tensor in states], states[0].dtype
        joined = torch.cat(states, dim=-1).cpu()
        for row, digest in enumerate(digests):
            if digest not in self._offsets:
                data = _bytes(joined[row, : lengths[row]].contiguous())
                self._offsets[digest] = self._file.seek(0, os.SEEK_END)
                while data:
                    data = data[self._file.write(data) :]
        return states

    def _read(self, digests: list[bytes], lengths: list[int], attention_mask: Tensor) -> tuple[Tensor, ...]:
        states = torch.zeros(*attention_mask.shape, sum(self._widths), dtype=self._dtype)
        for row, (digest, length) in enumerate(zip(digests, lengths, strict=True)):
            data = _bytes(states[row, :length])
            self._file.seek(self._offsets[digest])
            while data:
                read = self._file.readinto(data)
                assert read, "the file of features is shorter than its index"
                data = data[read:]
        return states.to(attention_mask.device).split(self._widths, dim=-1)


def _digests(inputs: dict[str, Tensor], lengths: list[int]) -> list[bytes]:
    """A digest of each row's tokens and of the documents that they are in."""
    names = ("input_ids", "document_ids") if "document_ids" in inputs else ("input_ids",)
    rows = torch.stack([inputs[name] for name in names], dim=1).cpu()
    return [
        hashlib.sha256(_bytes(row[:, :length].contiguous())).digest()
        for row, length in zip(rows, lengths, strict=True)
    ]


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    assert tensor.is_contiguous()
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")
