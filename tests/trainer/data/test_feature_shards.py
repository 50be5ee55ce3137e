"""What is kept of a row, and that a shard gives back what was written, or says that it cannot."""

import numpy as np
import pytest
import torch
from draft_trainers import make_rows, make_trainer, placed_batch
from dspark_trainers import dspark_trainer

from blockdraft.trainer.data.feature_shards import (
    FP8,
    Columns,
    Shard,
    ShardIndex,
    columns_read,
    row_digest,
    to_fp8,
    write_shard,
)

DTYPES = {"features": torch.bfloat16, "head_input": torch.float32}
ROWS = [
    (row_digest([1, 2, 3]), Columns(0, 1, 2)),
    (row_digest([1, 2]), Columns(1, 3, 5)),
    (row_digest([9]), Columns(0, 0, 0)),
]


def states() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"features": torch.randn(6, 4).to(torch.bfloat16), "head_input": torch.randn(3, 2)}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("make", [make_trainer, dspark_trainer])
def test_blocks_read_no_other_positions(tmp_path, make, window):
    """Noise at all positions that are not kept changes no loss. (DSpark's blocks read the first and the last that are,
    DFlash's end within the row.)"""
    settings = {"num_anchors": 64, "per_device_train_batch_size": 1}
    if make is make_trainer:
        trainer = make(tmp_path, **settings)
        trainer.draft_config.sliding_window, trainer.draft_config.num_full_attention_layers = window, 0
    else:
        window = 3
        trainer = make(tmp_path, draft_settings={"sliding_window": window}, **settings)
    trainer.model.eval()
    row = make_rows()[0]
    columns = columns_read(row["loss_mask"], window)
    batch = placed_batch(trainer, [row])
    read = trainer.target_states(batch)
    starts = columns[:2]

    def loss(outside: float = 0.0, inside: int | None = None) -> float:
        changed = [state.clone() for state in read]
        for state, start in zip(changed, starts, strict=False):
            state[:, :start] += outside
            state[:, columns.stop :] += outside
            if inside is not None:
                state[:, start if inside == 0 else columns.stop - 1] += 1
        trainer.target_states = lambda _: tuple(changed)
        return trainer.compute_loss(trainer.model, batch).item()

    assert loss(outside=9.0) == loss()
    if make is dspark_trainer:
        assert loss(inside=0) != loss() != loss(inside=1)


def test_columns():
    assert columns_read([0, 0, 1, 1, 0, 1, 0], None) == (0, 2, 5)
    assert columns_read(np.array([0, 0, 0, 1, 1]), 2) == (1, 3, 4)
    assert columns_read([0, 0], 2) == columns_read([1], 2) == (0, 0, 0)
    assert Columns(2, 4, 9).joined(Columns(1, 5, 8)) == (1, 4, 9)
    assert Columns(1, 3, 9).covers(Columns(1, 4, 8)) and not Columns(1, 3, 9).covers(Columns(0, 3, 9))


def test_rows_come_back(tmp_path):
    kept = states()
    write_shard(tmp_path / "a.safetensors", ROWS, kept)
    shard = Shard(tmp_path / "a.safetensors")
    shard.check()
    assert len(shard) == 3 and shard.positions == 6
    for row, (features, head) in enumerate([((0, 2), (0, 1)), ((2, 6), (1, 3)), ((6, 6), (3, 3))]):
        found = shard.read(row, DTYPES)
        assert found.columns == ROWS[row][1]
        assert torch.equal(found.features, kept["features"][slice(*features)])
        assert torch.equal(found.head_input, kept["head_input"][slice(*head)])


def test_fp8_has_a_scale_for_each_position(tmp_path):
    exact = torch.randn(6, 4) * torch.tensor([1e-3, 1, 1e3, 1e6, 1, 0])[:, None]
    features, scale = to_fp8(exact)
    write_shard(tmp_path / "a.safetensors", ROWS, {"features": features, "features_scale": scale})
    found = Shard(tmp_path / "a.safetensors").read(1, {"features": torch.float32})
    assert features.dtype == FP8 and found.head_input is None
    error = (found.features - exact[2:]).abs().amax(-1)
    assert (error <= exact[2:].abs().amax(-1) / 16).all() and (found.features[-1] == 0).all()
    assert error[:3].max() > 0


def flipped(data: bytes) -> bytes:
    """One bit of a digest is another one."""
    place = data.index(ROWS[0][0])
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-10], "the shard cannot be read"),
        (lambda data: b"", "the shard cannot be read"),
        (flipped, "the shard's index is damaged"),
    ],
    ids=["cut off", "empty", "index"],
)
def test_a_damaged_shard_is_named(tmp_path, damage, message):
    path = tmp_path / "a.safetensors"
    write_shard(path, ROWS, states())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"a.safetensors: {message}"):
        Shard(path)
    with pytest.raises(ValueError, match="none.safetensors: the shard cannot be read"):
        Shard(tmp_path / "none.safetensors")


def test_a_bit_that_flipped_is_found_where_it_is_read(tmp_path):
    path, kept = tmp_path / "a.safetensors", states()
    write_shard(path, ROWS, kept)
    data, part = path.read_bytes(), kept["features"][3].view(torch.uint8).numpy().tobytes()
    place = data.index(part)
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    shard = Shard(path)
    shard.read(0, DTYPES)
    with pytest.raises(ValueError, match="a.safetensors: the shard is damaged at its row 1"):
        shard.read(1, DTYPES)
    with pytest.raises(ValueError, match="damaged at its row 1"):
        shard.check()


def test_a_row_is_found_in_the_last_shard_that_has_all_of_it(tmp_path):
    for name, columns in (("a", Columns(0, 0, 2)), ("b", Columns(0, 1, 2))):
        write_shard(tmp_path / name, [(ROWS[0][0], columns)], {"features": torch.zeros(2, 1)})
    write_shard(tmp_path / "c", ROWS[1:], {"features": torch.zeros(4, 1)})
    shards = [Shard(tmp_path / name) for name in "abc"]
    index = ShardIndex(shards)
    assert index.find(ROWS[0][0], Columns(0, 0, 2)) == (shards[0], 0)
    assert index.find(ROWS[0][0], Columns(1, 1, 2)) == (shards[1], 0)
    assert index.find(ROWS[1][0], Columns(1, 3, 5)) == (shards[2], 0)
    assert index.find(ROWS[1][0], Columns(0, 3, 5)) is None
    assert index.find(row_digest([4]), Columns(0, 0, 0)) is None
    assert ShardIndex([]).find(ROWS[0][0], Columns(0, 0, 0)) is None
