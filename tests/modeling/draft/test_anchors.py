import random

import pytest
import torch

from blockdraft.modeling.draft.anchors import legal_anchors, legal_dspark_anchors, row_generator, sample_anchors
from blockdraft.modeling.draft.prefix_lengths import sample_prefix_lengths

BLOCK = 4


def draw(rows, num_anchors=6, seed=0, step=0, width=None):
    """Anchors and prefix lengths of `rows` (id -> loss mask), right-padded to `width`, as one list a row."""
    lengths = torch.tensor([len(mask) for mask in rows.values()])
    width = width or int(lengths.max())
    loss_mask = torch.zeros(len(rows), width)
    for padded, mask in zip(loss_mask, rows.values(), strict=True):
        padded[: len(mask)] = torch.tensor(mask)
    positions, keep = sample_anchors(legal_anchors(loss_mask, BLOCK, lengths), num_anchors, seed, step, list(rows))
    prefixes = sample_prefix_lengths(keep, BLOCK, 0.9, seed, step, list(rows))
    return {
        row_id: list(zip(positions[i, keep[i]].tolist(), prefixes[i, keep[i]].tolist(), strict=True))
        for i, row_id in enumerate(rows)
    }


@pytest.fixture
def rows():
    return {f"row-{n}": [1.0] * length for n, length in enumerate((40, 25, 3, 60))}


@pytest.mark.parametrize("scenario", range(8))
def test_sampling_equals_reference(golden, scenario):
    reference = golden("dflash_anchor_sampling")
    options = reference.meta["options"]["scenarios"][scenario]
    case = {k.removeprefix(f"in.s{scenario}."): v for k, v in reference.tensors.items() if f"in.s{scenario}." in k}
    legal = legal_anchors(case["loss_mask"], options["block_size"], document_remaining=case.get("doc_remaining"))
    everything = sample_anchors(legal, legal.shape[1], seed=1, step=2, row_ids=[3, "four"])
    sampled = sample_anchors(legal, options["num_anchors"], seed=1, step=2, row_ids=[3, "four"])
    if reference[f"out.s{scenario}.no_valid_anchors_error"]:
        assert everything.positions.shape == sampled.positions.shape == sampled.keep.shape == (2, 0)
        return
    assert torch.equal(everything.positions, reference[f"out.s{scenario}.all_anchors"])
    assert torch.equal(everything.keep, reference[f"out.s{scenario}.all_keep"])
    assert list(sampled.positions.shape) == reference[f"out.s{scenario}.sampled_shape"].tolist()
    assert torch.equal(sampled.keep, reference[f"out.s{scenario}.sampled_keep"])
    for row in range(2):
        kept = sampled.positions[row, sampled.keep[row]].tolist()
        assert kept == sorted(set(kept)) and legal[row, kept].all()
        assert (sampled.positions[row, ~sampled.keep[row]] == 0).all()


@pytest.mark.parametrize("length, expected", [(0, []), (1, [0]), (3, [0]), (4, [0]), (5, [0, 1]), (6, [0, 1, 2])])
def test_legality_by_own_length(length, expected):
    loss_mask = torch.zeros(1, 9)
    loss_mask[:, :length] = 1
    legal = legal_anchors(loss_mask, BLOCK, torch.tensor([length]))
    assert legal[0].nonzero().flatten().tolist() == expected


def test_padding_is_never_legal():
    assert not legal_anchors(torch.ones(1, 5), BLOCK, torch.tensor([0])).any()


def test_width_pads_to_exactly_that_many():
    legal = torch.zeros(2, 7, dtype=torch.bool)
    legal[0, 2:6] = True
    anchors = sample_anchors(legal, 3, 0, 0, [0, 1], width=5)
    assert anchors.keep.tolist() == [[True] * 3 + [False] * 2, [False] * 5]
    assert not anchors.positions[~anchors.keep].any()
    narrow = sample_anchors(legal, 3, 0, 0, [0, 1])
    assert torch.equal(narrow.positions, anchors.positions[:, :3])
    with pytest.raises(ValueError, match="width"):
        sample_anchors(legal, 6, 0, 0, [0, 1], width=5)


def test_draw_ignores_batch_mates_order_padding_and_global_state(rows):
    together = draw(rows)
    assert len(together["row-0"]) == 6 and len(together["row-2"]) == 1
    torch.manual_seed(123)
    random.seed(123)
    assert draw(dict(reversed(rows.items()))) == together
    assert draw(rows, width=200) == together
    for row_id, mask in rows.items():
        alone = draw({row_id: mask})
        assert alone[row_id] == together[row_id]


def test_generator_is_keyed_by_a_stable_hash():
    # Neither the process (Python's salted hash) nor torch's version has a part in it.
    assert row_generator("anchors", 5, 7, "row-1").initial_seed() == 5623664060240761797


def test_draw_depends_on_seed_step_and_row(rows):
    draws = [draw({"a": rows["row-3"]}, seed=seed, step=step)["a"] for seed in range(3) for step in range(3)] + list(
        draw({str(n): rows["row-3"] for n in range(3)}).values()
    )
    assert len({str(d) for d in draws}) == len(draws)
    assert draw({7: rows["row-3"]})[7] == draw({"7": rows["row-3"]})["7"]


def test_draw_is_uniform_over_legal_positions():
    legal = torch.zeros(1, 30, dtype=torch.bool)
    legal[0, 3:13] = True
    counts = torch.zeros(30)
    for step in range(2000):
        counts[sample_anchors(legal, 3, 0, step, ["row"]).positions[0]] += 1
    assert counts[:3].sum() == counts[13:].sum() == 0
    # 600 expected each, standard deviation sqrt(2000 * .3 * .7) = 20.5
    assert (counts[3:13] - 600).abs().max() < 100


def test_bad_settings_are_named():
    legal = torch.ones(1, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="num_anchors"):
        sample_anchors(legal, 0, 0, 0, [0])
    with pytest.raises(ValueError, match="prefix_weight_base"):
        sample_prefix_lengths(legal, 4, 0.0, 0, 0, [0])


@pytest.mark.parametrize("length, expected", [(0, []), (1, []), (2, [0]), (5, [0, 1, 2, 3])])
def test_dspark_legality_by_own_length(length, expected):
    legal = legal_dspark_anchors(torch.ones(1, 9), torch.tensor([length]))
    assert legal[0].nonzero().flatten().tolist() == expected
