"""A target's states as a serving engine writes them: a folder with a file for each request, read while it grows.

vLLM's `extract_hidden_states` (0.32) and speculators (0.9) write the same safetensors file:

| tensor | shape | |
| --- | --- | --- |
| `hidden_states` | `[T, layers, hidden_size]` | in the served dtype; layers ascend, however they were asked for |
| `token_ids` | `[T]` int64 | the prompt; with `include_output_tokens` the answer too, without its last token |

vLLM holds a lock on `FILE.lock` (`flock`) until the file is whole. Its files are named by the request's id and a
random suffix, speculators' `hs_ROW.safetensors`, those of `examples/serve_features.py` `ROW.safetensors`.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...configuration.configuration_draft import ATTENTION_INPUT_MEAN, DraftConfig
from ...modeling.target.embedding_and_head import final_norms
from ..training_settings import AFTER_LAYERS, LAYER_OUTPUT
from .feature_shards import columns_read, row_digest
from .feature_store import all_documents, documents

SUFFIX, LOCK = ".safetensors", ".lock"
# `ROW`, speculators' `hs_ROW`, vLLM's `cmpl-ROW-0-1a2b3c4d` for a request with the header `X-Request-Id: ROW`.
ROW_IN_NAME = re.compile(r"(?:hs_|cmpl-)?(-?\d+)(?:-0)?(?:-[0-9a-f]{8})?")
LOOK_AGAIN = 1.0  # seconds between two looks at a folder that is waited for
SHOWN = 5  # names in a message


@dataclass(frozen=True)
class ServedLayers:
    """
    Which states are in an engine's files: no file says it.

    Attributes:
        layer_ids: what the engine was given, vLLM's `eagle_aux_hidden_state_layer_ids`.
        index: what such an id means, `"after_layers"` or `"layer_output"`.
        final_norm: whether the state after the last layer has been through the target's final norm. (vLLM's has not.)
        attn_res_stream: whether vLLM ran with `VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1`.
    """

    layer_ids: tuple[int, ...]
    index: str = AFTER_LAYERS
    final_norm: bool = False
    attn_res_stream: bool = False

    def __post_init__(self):
        if not self.layer_ids or len(set(self.layer_ids)) < len(self.layer_ids):
            raise ValueError(f"`served_layer_ids` is {list(self.layer_ids)}: name each layer that was served, once.")

    def places(self, config: DraftConfig) -> list[int]:
        """Where the layers that a draft reads lie in `hidden_states`. Raises a `ValueError` if some are not there."""
        enters = config.capture_point == ATTENTION_INPUT_MEAN
        return [self._place(layer_id + (not enters), f"layer {layer_id}") for layer_id in config.target_layer_ids]

    def last_place(self, num_layers: int) -> int:
        """Where the state after the last of the target's layers lies, likewise."""
        return self._place(num_layers, "the state after the last layer, from which the target's head predicts")

    def _place(self, layers_before: int, what: str) -> int:
        wanted = layers_before - (self.index == LAYER_OUTPUT)
        if wanted not in self.layer_ids:
            raise ValueError(
                f"`served_layer_ids` {list(self.layer_ids)} has no {wanted}, which is {what} where `served_index` is "
                f"{self.index!r}. Serve that id too, or correct the two settings if the files have it."
            )
        return sorted(self.layer_ids).index(wanted)

    def fault(self, target_config, config: DraftConfig, head_input: bool) -> str | None:
        """What vLLM's files of this target do not hold, though their shapes suit; `None` if all is well.

        Args:
            target_config: the target's text configuration; config: the draft's.
            head_input: whether training needs what the target's head reads.
        """
        without = "train without the target's predictions (fixed_anchor, variable_prefix; for dspark "
        without += "`l1_loss_alpha=0` and `confidence_head_alpha=0`)"
        if config.capture_point == ATTENTION_INPUT_MEAN:
            if memories := sorted(set(config.target_layer_ids) & set(target_config.engram_layers)):
                return (
                    f"`target_layer_ids` has {memories}, layers with an Engram: the draft reads their input after it, "
                    "and engines write it before. Choose other layers, or run `blockdraft cache-features` without "
                    "`served_features`."
                )
            if head_input and not self.final_norm:
                return (
                    "vLLM's state after DeepSeek V4.1's last layer is the mean of its streams, and the head reads "
                    f"another mix of them: {without}, or without `served_features`."
                )
        if has_attention_residuals(target_config) and head_input and not (self.attn_res_stream or self.final_norm):
            return (
                "vLLM's state after Kimi K3's last layer is by default `prefix_sum + mlp`, without the attention "
                "residuals' mix that the head reads (vllm#50815): the target's predictions would be wrong. Serve with "
                "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1 in vLLM's environment and set `served_attn_res_stream` (AMD GPUs "
                f"ignore the switch, vllm#56434), or {without}."
            )
        return None

    def warning(self, target_config) -> str | None:
        """What is to be known of features that are used nevertheless."""
        if not self.attn_res_stream:
            return None
        if not has_attention_residuals(target_config):
            return "`served_attn_res_stream` is not used: the target is no Kimi K3."
        return (
            "With VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1 the features are the attention residuals' mix and not the "
            "layers' sums, which a draft reads by default, in decoding here too. Serve this draft by vLLM with the "
            "same switch."
        )

    def record(self) -> dict:
        """For a manifest and the draft's configuration."""
        record = {"layer_ids": list(self.layer_ids), "index": self.index, "final_norm": self.final_norm}
        return record | ({"attn_res_stream": True} if self.attn_res_stream else {})


def has_attention_residuals(target_config) -> bool:
    """Whether a target is a Kimi K3 whose layers read a mix of earlier ones."""
    return target_config.to_dict().get("attn_res_block_size") is not None


class ServedFolder:
    """
    The files of a folder, found by their tokens and by row id.

    Attributes:
        being_written (`int`): files that the engine has under its lock.
        lost (`list[Path]`): files that were never written, though their lock is free: the engine died, or the request
            was given up.
        unreadable (`dict[Path, str]`): files that are not whole, and why; they are looked at again.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ValueError(f"`served_features`: {directory} is no folder.")
        self._by_tokens: dict[bytes, Path] = {}
        self._by_row_id: dict[int, Path] = {}
        self._known: set[str] = set()
        self.being_written, self.lost, self.unreadable = 0, [], {}

    def scan(self) -> int:
        """Looks for new files, and at those that were not whole. Returns how many were added. Raises a `ValueError`
        for a file of something else."""
        names = {path.name.removesuffix(LOCK) for path in self.directory.glob(f"*{SUFFIX}*")}
        self.being_written, self.lost, self.unreadable, added = 0, [], {}, 0
        for name in sorted(name for name in names - self._known if name.endswith(SUFFIX)):
            path = self.directory / name
            if _is_locked(path):
                self.being_written += 1
                continue
            try:
                with safe_open(path, framework="pt") as file:
                    shape, token_ids = _shape(path, file), file.get_tensor("token_ids")
            except FileNotFoundError:
                self.lost.append(path)
                continue
            except (OSError, SafetensorError) as error:  # copied at this moment, or cut off
                self.unreadable[path] = str(error)
                continue
            if list(token_ids.shape) != shape[:1]:
                raise ValueError(
                    f"{path}: {shape[0]} positions of `hidden_states`, {list(token_ids.shape)} token ids."
                )
            self._by_tokens[row_digest(token_ids)] = path
            if row := ROW_IN_NAME.fullmatch(path.stem):
                self._by_row_id[int(row[1])] = path
            self._known.add(name)
            added += 1
        return added

    def find(self, digests: Iterable[bytes]) -> Path | None:
        """The file of a row, see [`row_digests`]."""
        return next(filter(None, map(self._by_tokens.get, digests)), None)

    def of_row(self, row_id: int) -> Path | None:
        """The file that is named by a row's id, whatever its tokens are."""
        return self._by_row_id.get(row_id)

    def __len__(self) -> int:
        return len(self._known)


def read_served(path: Path) -> dict[str, Tensor]:
    """`hidden_states` `[T, layers, hidden_size]` and `token_ids` `[T]` of a file that is whole."""
    with safe_open(path, framework="pt") as file:
        _shape(path, file)
        return {name: file.get_tensor(name) for name in ("hidden_states", "token_ids")}


def _shape(path: Path, file) -> list[int]:
    if missing := {"hidden_states", "token_ids"} - set(file.keys()):
        raise ValueError(f"{path} has no {' and no '.join(sorted(missing))}: an engine's file of states has both.")
    shape = file.get_slice("hidden_states").get_shape()
    if len(shape) != 3:
        raise ValueError(f"{path}: `hidden_states` is {shape}, not [positions, layers, hidden_size].")
    return shape


def _is_locked(path: Path) -> bool:
    """Whether an engine holds the lock of a file, which it does until the file is whole. Without a lock file (vLLM's
    `use_synchronization_lock` off, or moved files) nobody holds it."""
    import fcntl  # which Windows lacks, as it lacks vLLM

    try:
        with open(f"{path}{LOCK}", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@dataclass
class ServedRows:
    """
    Attributes:
        kept: of each set, the numbers of the rows of which something is read, and all of it is there.
        missing: ids of the rows that have no states.
        message: counts and names for a log or an error.
    """

    kept: list[list[int]]
    missing: list[int]
    message: str


class _Wanted(NamedTuple):
    """A row of a set, or one of those packed into it, whose states are read."""

    number: int
    part: int
    row_id: int
    digests: tuple[bytes, bytes]


def row_digests(input_ids: Sequence[int]) -> tuple[bytes, bytes]:
    """What a row is found by: its tokens, or those without the last, of which nothing is read."""
    return row_digest(input_ids), row_digest(input_ids[:-1])


def _wanted(rows: Dataset, context_window: int | None) -> Iterator[_Wanted]:
    for number, part, document in all_documents(rows):
        if columns_read(document.loss_mask, context_window).stop:
            yield _Wanted(number, part, document.row_id, row_digests(document.input_ids))


class ServedFeatures:
    """
    The states that a draft is trained on, read from an engine's files in place of running the target.

    Args:
        directory: the engine's folder.
        layers: which states it holds.
        config: the draft's.
        target: the target, of which only the final norm is used, and that only with `head_input`.
        head_input: whether what the target's head reads is read too.

    Raises:
        ValueError: if the files do not hold what the draft is trained on.
    """

    def __init__(
        self, directory: str | Path, layers: ServedLayers, config: DraftConfig, target: nn.Module, head_input: bool
    ):
        text_config = target.config.get_text_config(decoder=True)
        if fault := layers.fault(text_config, config, head_input):
            raise ValueError(fault)
        self.folder, self.layers, self._dtype = ServedFolder(directory), layers, target.dtype
        self._places, self._last, self._norm = layers.places(config), None, None
        self._width = config.features_width // len(config.target_layer_ids)
        if head_input:
            self._last = layers.last_place(text_config.num_hidden_layers)
            if not layers.final_norm:
                self._norm = next(iter(final_norms(target)), None)
                if self._norm is None or any(weight.is_meta for weight in self._norm.parameters()):
                    raise ValueError(
                        f"`served_final_norm` is false, and the final norm of {type(target).__name__} is not known. "
                        "Serve the state after the norm, and set `served_final_norm`."
                    )

    def wait_for(self, sets: Sequence[Dataset], seconds: float, context_window: int | None) -> ServedRows:
        """Looks for the states of all rows in `sets`. As long as some are missing, it waits for them, and gives up
        when no file was added for so many seconds."""
        wanted = [list(_wanted(rows, context_window)) for rows in sets]
        last = time.monotonic()
        while True:
            if self.folder.scan():
                last = time.monotonic()
            missing = [[row for row in rows if self.folder.find(row.digests) is None] for rows in wanted]
            if not any(missing) or time.monotonic() - last >= seconds:
                break
            time.sleep(min(LOOK_AGAIN, seconds))
        kept = [
            sorted({row.number for row in rows} - {row.number for row in absent})
            for rows, absent in zip(wanted, missing, strict=True)
        ]
        lacking = [(rows, row) for rows, absent in zip(sets, missing, strict=True) for row in absent]
        other = next(filter(None, (self._other_tokens(*pair) for pair in lacking)), None)
        ids = [row.row_id for _, row in lacking]
        return ServedRows(kept, ids, self._message(sum(map(len, wanted)), ids, other))

    def _message(self, rows: int, missing: list[int], other: str | None) -> str:
        folder = self.folder
        text = f"`served_features`: {rows - len(missing)} of {rows} rows have states in {folder.directory} "
        text += f"({len(folder)} files"
        text += f", {folder.being_written} being written" if folder.being_written else ""
        if folder.lost:
            text += f", {len(folder.lost)} that the engine began and never wrote, such as {folder.lost[0].name}"
        if folder.unreadable:
            path, reason = next(iter(folder.unreadable.items()))
            text += f", {len(folder.unreadable)} that are not whole, such as {path.name}: {reason}"
        text += ")"
        if missing:
            more = ", ..." if len(missing) > SHOWN else ""
            text += f"; {len(missing)} have none: rows {', '.join(map(str, missing[:SHOWN]))}{more}"
        return text if other is None else f"{text}; {other}"

    def _other_tokens(self, rows: Dataset, wanted: _Wanted) -> str | None:
        """A message, if the file with a row's id holds other tokens."""
        if (path := self.folder.of_row(wanted.row_id)) is None:
            return None
        row = list(documents(rows[wanted.number])[wanted.part].input_ids)
        served = read_served(path)["token_ids"].tolist()
        at = next((i for i, pair in enumerate(zip(served, row, strict=False)) if pair[0] != pair[1]), None)
        how = f"{len(served)} tokens, not {len(row)}"
        if at is not None:
            how = f"{served[at]} at position {at}, not {row[at]}"
        return f"{path.name} is not of row {wanted.row_id}: it has {how}"

    def read(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """
        The states of a batch of `input_ids` and `attention_mask` `[B, S]`, padded on the right: features
        `[B, S, F * hidden_size]` and, with `head_input`, what the head reads `[B, S, hidden_size]`, zero in the
        padding, in the target's dtype on the CPU.

        Raises:
            ValueError: for a row that has none, or a file of other layers or another width.
        """
        batch, length = inputs["input_ids"].shape
        features = torch.zeros(batch, length, len(self._places) * self._width, dtype=self._dtype)
        head_input = torch.zeros(batch, length, self._width if self._last is not None else 0, dtype=self._dtype)
        lengths = inputs["attention_mask"].sum(-1).tolist()
        for row, (ids, count) in enumerate(zip(inputs["input_ids"].tolist(), lengths, strict=True)):
            digests = row_digests(ids[:count])
            path = self.folder.find(digests)
            if path is None and self.folder.scan():
                path = self.folder.find(digests)
            if path is None:
                where = self.folder.directory
                raise ValueError(f"`served_features`: {where} has no states of a row of {count} tokens.")
            states = read_served(path)["hidden_states"]
            if list(states.shape[1:]) != [len(self.layers.layer_ids), self._width]:
                raise ValueError(
                    f"{path}: {list(states.shape[1:])} layers and width, where `served_layer_ids` and the target say "
                    f"{[len(self.layers.layer_ids), self._width]}."
                )
            features[row, : len(states)] = states[:, self._places].flatten(1)
            if self._last is not None:
                head_input[row, : len(states)] = self._normed(states[:, self._last])
        return (features,) if self._last is None else (features, head_input)

    @torch.no_grad()
    def _normed(self, states: Tensor) -> Tensor:
        if self._norm is None:
            return states
        weight = next(self._norm.parameters())
        return self._norm(states.to(weight)).cpu()
