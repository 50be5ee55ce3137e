"""The step benchmark on tiny widths, in this process."""

import json

import pytest
import torch
from step_cases import tiny_case

from benchmarks import step, step_gpu
from benchmarks.measuring import Floor, measure_floor, profile_kind
from benchmarks.training_step import k3_config, v41_config
from benchmarks.work import HEAD, KINDS, LINEAR, Product


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(step, "in_own_process", lambda function, *args: function(*args))
    monkeypatch.setattr("benchmarks.measuring.RATE_SECONDS", 1e-4)


def test_all_figures_of_both_drafts(monkeypatch, tmp_path, capsys):
    cases = [tiny_case("dflash"), tiny_case("dspark")]
    monkeypatch.setattr(step, "CASES", cases)
    monkeypatch.setattr(step, "LARGE_VOCABULARY", cases[:1])
    monkeypatch.setattr(step, "k3_config", lambda: cases[0].config)
    monkeypatch.setattr(step, "v41_config", lambda: cases[1].config)
    monkeypatch.setattr(step, "TOKENS", (64, 128))
    monkeypatch.setattr(step, "ANCHORS", (8, 16))
    monkeypatch.setattr(step, "TOKENS_AT", 8)
    monkeypatch.setattr(step, "ANCHORS_AT", 64)
    monkeypatch.setattr(step, "has_fast_bf16", lambda: True)
    files = {name: tmp_path / name for name in ("step.json", "step.png")}
    monkeypatch.setattr("sys.argv", ["step", "--json", str(files["step.json"]), "--plot", str(files["step.png"])])
    step.main()

    printed = capsys.readouterr().out
    for text in ("K3 DFlash, 96 x 12", "V4.1 DSpark, 96 x 12", "bf16 autocast", "exponent", "times the floor"):
        assert text in printed
    report = json.loads(files["step.json"].read_text())
    for one in report["steps"]:
        assert one["loss_difference"] < 1e-6 and one["gradient_difference"] < 1e-5
        assert one["worst_parameter"][0] < 1e-3
        assert one["distance"] == pytest.approx(one["fast"]["seconds"] / sum(one["floor"]["by_kind"].values()))
        assert sum(one["fast"]["profile"].values()) == pytest.approx(1)
    assert [point["tokens"] for point in report["growth"]["K3 DFlash"]["tokens"]] == [64, 128]
    assert files["step.png"].stat().st_size > 10_000


def test_the_gpu_script_measures_the_same_way(capsys):
    """In the GPU's dtype: both ways round, so they agree to what bf16 holds."""
    cases = [tiny_case("dflash"), tiny_case("dspark")]
    for comparison in step_gpu.measure(cases, step.Machine("cpu", torch.bfloat16), repeats=1):
        assert comparison.loss_difference < 0.01
        assert comparison.gradient_difference < 0.1
    printed = capsys.readouterr().out
    assert "K3 DFlash, 96 x 12" in printed and "V4.1 DSpark, 96 x 12" in printed


def test_the_gpu_script_has_real_widths():
    shapes = {case.config.model_type: (case.config.hidden_size, case.config.vocab_size) for case in step_gpu.CASES}
    assert shapes == {"kimi_k3_dflash": (7168, 163840), "deepseek_v41_dspark": (5120, 129280)}
    assert {(case.tokens, case.anchors, case.config.num_hidden_layers) for case in step_gpu.CASES} == {(4096, 512, 1)}


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["step_gpu"])
    with pytest.raises(SystemExit, match="no GPU.*benchmarks.step"):
        step_gpu.main()


def test_the_cases_are_the_published_ones():
    sizes = [(case.config.model_type, case.tokens, case.anchors) for case in step.CASES]
    k3, v41 = k3_config().model_type, v41_config().model_type
    assert sizes == [(k3, 2048, 128), (k3, 2048, 512), (v41, 2048, 512), (v41, 4096, 512)]
    assert all(case.config.vocab_size == 32768 for case in step.CASES)


def test_the_floor_adds_up_all_passes(monkeypatch):
    rates = {(1, 8, 4, 6): 10.0, (1, 8, 6, 4): 20.0, (1, 4, 8, 6): 40.0}
    monkeypatch.setattr("benchmarks.measuring.product_rate", lambda *key: rates[key[:4]])
    products = [Product(LINEAR, 8, 4, 6, batch=2), Product(HEAD, 8, 4, 6, weight_gradient=False)]
    floor = measure_floor(products, torch.device("cpu"), dict.fromkeys(KINDS, torch.float32))
    once = 2 * 8 * 4 * 6
    assert floor.by_kind[LINEAR] == pytest.approx(2 * once * (1 / 10 + 1 / 20 + 1 / 40))
    assert floor.by_kind[HEAD] == pytest.approx(once * (1 / 10 + 1 / 20))
    assert floor.seconds == pytest.approx(sum(floor.by_kind.values()))
    assert floor.rates[HEAD] == pytest.approx(2 * once / floor.by_kind[HEAD])


def test_no_memory_and_a_busy_machine_are_said():
    gone = step.Comparison("K3 DFlash, 1 x 1", None, None, None, None, None, {})
    assert "no memory" in step.comparison_table([gone])
    sizes = step.Sizes(1, 1, 1, 1)
    quiet, busy = (step.Measured(1.0, 1, 1.0, sizes, others) for others in (0.01, 0.4))
    assert step.busy_lines([quiet, None], None) == []
    assert "40% of the processors" in step.busy_lines([quiet, busy], None)[0]


def test_the_profile_is_shown_where_the_floor_is_far():
    floor = Floor({LINEAR: 1.0}, {LINEAR: 1.0})
    near, far = (
        step.Comparison(
            "case", None, None, step.Measured(s, 1, 1.0, step.Sizes(1, 1, 1, 1), 0.0, {"copies": 1.0}), None, floor, {}
        )
        for s in (1.5, 1.7)
    )
    assert step.profile_table([near]) is None
    assert "100%" in step.profile_table([near, far])


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention kernel"),
        ("aten::copy_", "copies"),
        ("aten::_softmax_backward_data", "softmax, exp"),
        ("aten::mul", "elementwise"),
        ("aten::topk", "other"),
    ],
)
def test_operators_of_a_profile_are_sorted_by_kind(operator, kind):
    assert profile_kind(operator) == kind
