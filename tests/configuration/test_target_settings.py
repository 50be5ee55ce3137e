import pytest

from blockdraft.configuration.target_settings import build_target_layer_ids, default_target_layer_ids


def test_default_layer_ids(golden):
    for key, expected in golden("k3_dflash_draft_config").meta["build_target_layer_ids"].items():
        assert build_target_layer_ids(*map(int, key.split(","))) == expected, key


def test_default_layer_ids_differ_and_can_be_tapped_on_any_target():
    for depth in range(2, 40):
        for count in range(1, 9):
            for capture_point, last in (("layer_output", depth - 2), ("attention_input_mean", depth - 1)):
                ids = default_target_layer_ids(depth, count, capture_point)
                assert len(ids) == min(count, last + 1) and ids == sorted(set(ids))
                assert ids[0] >= 0 and ids[-1] <= last
    assert default_target_layer_ids(36, 5) == build_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    with pytest.raises(ValueError, match="deeper target"):
        default_target_layer_ids(1, 2)
