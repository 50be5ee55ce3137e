"""Temperatures and calibration errors of synthetic rounds with known answers; labels; calibration of a tiny draft."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from confident_drafts import SURE, confident_draft, gambling_draft
from decoding_models import build_target
from goldens import load_golden
from transformers import GenerationConfig

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.modeling.decoding.confidence_schedule import ConfidenceThreshold
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from blockdraft.trainer.evaluation.calibration import (
    TEMPERATURES,
    DecodedRounds,
    calibrate,
    decode_rounds,
    expected_calibration_error,
    fit_sequential_temperatures,
    label_rounds,
    perfect_ece,
    reliability,
    save_temperatures,
    split_prompts,
    survival_probabilities,
)
from blockdraft.trainer.evaluation.decoding import evaluate_decoding
from blockdraft.trainer.evaluation.report_folder import write_calibration


def synthetic_rounds(temperatures: list[float], n: int, rounds_a_prompt: int = 5, seed: int = 0) -> DecodedRounds:
    """Rounds of a head whose logits are right once divided by `temperatures`."""
    generator = torch.Generator().manual_seed(seed)
    right = torch.randn(n, len(temperatures), generator=generator, dtype=torch.float64) * 1.5 + 0.7
    draws = torch.rand(right.shape, generator=generator, dtype=torch.float64)
    accepted = (draws < right.sigmoid()).cumprod(-1).bool()
    logits = right * torch.tensor(temperatures, dtype=torch.float64)
    return DecodedRounds(logits, accepted, torch.ones_like(accepted), torch.arange(n) // rounds_a_prompt)


def only_rounds(rounds: DecodedRounds, chosen: torch.Tensor) -> DecodedRounds:
    return DecodedRounds(*(values[chosen] for values in rounds))


class TestExpectedCalibrationError:
    def test_by_hand(self):
        """0.9 and 0.95 share the last of 15 bins, 0.1 lies in the second."""
        survival, labels = torch.tensor([0.9, 0.1, 0.95, 0.1], dtype=torch.float64), torch.tensor([1, 0, 0, 1])
        two_bins = (abs(0.9 - 1) + abs(0.95 - 0)) / 4  # 0.9 -> bin 13, 0.95 -> bin 14
        assert expected_calibration_error(survival, labels).item() == pytest.approx(two_bins + abs(0.2 - 1) / 4)
        assert expected_calibration_error(survival, labels, bins=2).item() == pytest.approx((0.85 + 0.8) / 4)
        assert expected_calibration_error(survival, labels, bins=1).item() == pytest.approx(0.05 / 4)

    def test_ends_of_the_range(self):
        ends = torch.tensor([0.0, 1.0])
        assert expected_calibration_error(ends, torch.tensor([0, 1])).item() == pytest.approx(1e-8)
        assert expected_calibration_error(ends, torch.tensor([1, 0])).item() == pytest.approx(1, abs=1e-7)

    def test_each_row_of_estimates_by_itself(self):
        survival, labels = torch.rand(3, 50), torch.rand(50) < 0.5
        together = expected_calibration_error(survival, labels)
        assert together.dtype == torch.float64
        assert together.tolist() == [expected_calibration_error(row, labels).item() for row in survival]

    def test_as_written_in_the_definition(self):
        survival, labels = torch.rand(400, dtype=torch.float64), (torch.rand(400) < 0.3).double()
        bins = (survival * 15).floor().clamp(max=14)
        expected = 0.0
        for b in range(15):
            inside = bins == b
            if inside.any():
                gap = survival[inside].mean() - labels[inside].mean()
                expected += inside.sum().item() / 400 * abs(gap.item())
        assert expected_calibration_error(survival, labels).item() == pytest.approx(expected, rel=1e-12)


class TestFit:
    def test_grid(self):
        assert len(TEMPERATURES) == 41 and TEMPERATURES[20] == 1
        assert TEMPERATURES[0].item() == pytest.approx(0.1) and TEMPERATURES[-1].item() == pytest.approx(10)
        assert (TEMPERATURES[1:] / TEMPERATURES[:-1]).tolist() == pytest.approx([10**0.05] * 40)

    def test_finds_the_temperatures_of_the_data(self):
        true = [TEMPERATURES[i].item() for i in (30, 20, 26, 12)]
        rounds = synthetic_rounds(true, 40_000)
        fitted = fit_sequential_temperatures(rounds.logits, rounds.accepted)
        for temperature, expected in zip(fitted, true, strict=True):
            assert abs(math.log10(temperature / expected)) < 0.101  # two steps of the grid

    def test_step_by_step(self):
        """The same in plain loops over slots, temperatures and bins."""
        rounds = synthetic_rounds([2.0, 0.4, 1.3], 300)
        survival, expected = [1.0] * 300, []
        for slot in range(3):
            errors, options = [], []
            for temperature in TEMPERATURES.tolist():
                option = [
                    a / (1 + math.exp(-z / temperature))
                    for a, z in zip(survival, rounds.logits[:, slot].tolist(), strict=True)
                ]
                gaps = [0.0] * 15
                for a, y in zip(option, rounds.accepted[:, slot].tolist(), strict=True):
                    gaps[min(int(15 * a), 14)] += a - y
                errors.append(sum(map(abs, gaps)) / 300)
                options.append(option)
            best = errors.index(min(errors))
            survival = options[best]
            expected.append(TEMPERATURES[best].item())
        assert fit_sequential_temperatures(rounds.logits, rounds.accepted) == expected

    def test_scaled_logits_are_repaired_on_other_data(self):
        """A head that is three times too sure."""
        rounds = synthetic_rounds([3.0] * 4, 40_000)
        half = torch.arange(40_000) < 20_000
        fit, test = only_rounds(rounds, half), only_rounds(rounds, ~half)
        fitted = fit_sequential_temperatures(fit.logits, fit.accepted, fit.labelled)
        before, after = reliability(test, None, 200), reliability(test, fitted, 200)
        assert before.mean_ece > 0.05 and after.mean_ece < 0.02
        assert after.interval[1] < before.interval[0]

    def test_the_first_of_equal_temperatures(self):
        """Logits of 0 give one half at every temperature."""
        assert fit_sequential_temperatures(torch.zeros(10, 2), torch.ones(10, 2)) == [TEMPERATURES[0].item()] * 2

    def test_a_slot_is_fitted_on_top_of_the_earlier_ones(self):
        """The first slot is off by a factor that no temperature of the grid undoes; the second one makes up for it."""
        logits = torch.tensor([[0.0, 2.0]]).repeat(100, 1)
        accepted = torch.zeros(100, 2)
        accepted[:45] = 1
        fitted = fit_sequential_temperatures(logits, accepted)
        errors = [abs(0.5 * torch.sigmoid(2.0 / t).item() - 0.45) for t in TEMPERATURES]
        assert fitted[1] == TEMPERATURES[errors.index(min(errors))].item()

    def test_only_labelled_slots_count(self):
        rounds = synthetic_rounds([2.0, 0.5, 4.0], 3000)
        labelled = torch.arange(3) < torch.randint(1, 4, (3000, 1))
        spoiled = torch.where(labelled, rounds.logits, -7.0), rounds.accepted & labelled
        fitted = fit_sequential_temperatures(*spoiled, labelled)
        assert fitted[0] == fit_sequential_temperatures(rounds.logits[:, :1], rounds.accepted[:, :1])[0]
        whole = labelled[:, 1]
        alone = fit_sequential_temperatures(rounds.logits[whole, :2], rounds.accepted[whole, :2], labelled[whole, :2])
        assert alone[1] == pytest.approx(fitted[1], rel=0.13)  # a step of the grid: the first slot saw other rounds

    def test_a_slot_without_labels_is_an_error(self):
        rounds = synthetic_rounds([1.0, 1.0], 10)
        labelled = rounds.labelled.clone()
        labelled[:, 1] = False
        with pytest.raises(ValueError, match="drafted token 2 of 2"):
            fit_sequential_temperatures(rounds.logits, rounds.accepted, labelled)


class TestLabels:
    def test_whole_rounds(self):
        """The prefill's token, then 3, 1 and 4 tokens, and the limit at 9: the third round may draft three only."""
        logits, accepted, labelled = label_rounds([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [3, 1, 4], 9, drafted=3)
        assert logits.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]] and labelled.all()
        assert accepted.tolist() == [[True, True, False], [False] * 3, [True] * 3]

    def test_the_limit_leaves_fewer_drafted(self):
        logits, accepted, labelled = label_rounds([[1, 2, 3], [4], []], [4, 1, 1], 7, drafted=3)
        assert labelled.tolist() == [[True] * 3, [True, False, False], [False] * 3]
        assert accepted.tolist() == [[True] * 3, [False] * 3, [False] * 3]
        assert logits.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]]

    def test_nothing_from_the_stop_on_is_labelled(self):
        """Answer of 6 tokens, the stop last. The first round (places 1 to 4) rejects its second token; the second one
        (places 3 to 6) is ended by the stop at place 5, where it may have been drafted or the target's own."""
        logits, accepted, labelled = label_rounds([[1, 2, 3, 4], [5, 6, 7, 8]], [2, 3], 6, drafted=4)
        assert labelled.tolist() == [[True] * 4, [True, True, False, False]]
        assert accepted.tolist() == [[True, False, False, False], [True, True, False, False]]
        # The same text from the other draft: a rejection does not bring labels past the stop back.
        _, accepted, labelled = label_rounds([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], [2, 1, 2], 6, drafted=4)
        assert labelled.tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]
        assert accepted.tolist() == [[True, False, False, False], [False] * 4, [True, False, False, False]]

    def test_labels_do_not_favour_an_outcome(self):
        """Answers of random length with a known chance of acceptance: the labelled rounds show that chance, though
        each answer's last round is cut short by its stop."""
        generator, chance, drafted = torch.Generator().manual_seed(0), 0.8, 4
        hits, rounds = torch.zeros(drafted), torch.zeros(drafted)
        for _ in range(3000):
            length, committed, lengths = 3 + int(torch.randint(12, (1,), generator=generator)), 1, []
            while committed < length:
                right = (torch.rand(drafted, generator=generator) < chance).cumprod(0).sum().item()
                lengths.append(min(right + 1, length - committed))
                committed += lengths[-1]
            _, accepted, labelled = label_rounds([[0.0] * drafted] * len(lengths), lengths, length, drafted)
            hits, rounds = hits + accepted.sum(0), rounds + labelled.sum(0)
        assert (hits / rounds).tolist() == pytest.approx([chance**k for k in range(1, 5)], abs=0.015)


class TestReliability:
    def test_bins_and_errors_agree(self):
        rounds = synthetic_rounds([2.0, 1.0], 500)
        result = reliability(rounds, bootstrap_samples=50)
        survival = survival_probabilities(rounds.logits)
        for slot, (bins, ece) in enumerate(zip(result.bins, result.ece_by_slot, strict=True)):
            assert ece == pytest.approx(
                expected_calibration_error(survival[:, slot], rounds.accepted[:, slot]).item(), rel=1e-9
            )
            gaps = [
                count * abs(confidence - accepted)
                for count, confidence, accepted in zip(bins.rounds, bins.confidence, bins.accepted, strict=True)
                if count
            ]
            assert sum(bins.rounds) == 500 and sum(gaps) / 500 == pytest.approx(ece)
        assert result.mean_ece == pytest.approx(sum(result.ece_by_slot) / 2)

    def test_unlabelled_slots_do_not_count(self):
        rounds = synthetic_rounds([2.0, 1.0], 400)
        labelled = rounds.labelled.clone()
        labelled[::3, 1] = False
        result = reliability(rounds._replace(labelled=labelled), bootstrap_samples=20)
        kept = labelled[:, 1]
        survival = survival_probabilities(rounds.logits)[kept, 1]
        expected = expected_calibration_error(survival, rounds.accepted[kept, 1]).item()
        assert result.ece_by_slot[1] == pytest.approx(expected)

    def test_interval_resamples_prompts(self):
        """Copies of one round within a prompt add nothing: the interval is that of one round a prompt."""
        alone = synthetic_rounds([2.0, 2.0], 200, rounds_a_prompt=1)
        copies = DecodedRounds(*(values.repeat_interleave(7, dim=0) for values in alone))
        one, seven = reliability(alone, bootstrap_samples=300), reliability(copies, bootstrap_samples=300)
        assert seven.interval == pytest.approx(one.interval) and seven.mean_ece == pytest.approx(one.mean_ece)
        spread = one.interval[1] - one.interval[0]
        independent = reliability(copies._replace(prompts=torch.arange(1400)), bootstrap_samples=300).interval
        assert independent[1] - independent[0] < 0.6 * spread
        assert reliability(alone, bootstrap_samples=300).interval == one.interval

    def test_a_single_prompt_has_no_spread(self):
        result = reliability(synthetic_rounds([2.0, 2.0], 20, rounds_a_prompt=20), bootstrap_samples=10)
        assert result.interval == pytest.approx((result.mean_ece, result.mean_ece))

    def test_error_of_a_perfect_head(self):
        errors = []
        for seed in range(20):
            rounds = synthetic_rounds([1.0] * 3, 500, seed=seed)
            errors.append(reliability(rounds, bootstrap_samples=2).mean_ece)
        expected = perfect_ece(survival_probabilities(rounds.logits), rounds.labelled)
        assert sum(errors) / len(errors) == pytest.approx(expected, rel=0.1)


class TestPrompts:
    def test_parts_are_disjoint(self):
        prompts = [[i, i + 1] for i in range(30)] * 2
        fit, test = split_prompts(prompts)
        assert len(fit) == 10 and len(test) == 20
        assert sorted(fit + test) == prompts[:30] and split_prompts(prompts) == (fit, test)
        assert split_prompts([[1], [2]], fit_share=0.01) in (([[1]], [[2]]), ([[2]], [[1]]))
        with pytest.raises(ValueError, match="1 different prompts"):
            split_prompts([[1], [1]])

    def test_a_conversation_is_in_one_part(self):
        """And prompts that are conversations of their own are split as ever."""
        prompts = [[i, turn] for i in range(30) for turn in range(1 + i % 3)]
        fit, test = split_prompts(prompts, conversations=[i for i, _ in prompts])
        assert sorted(fit + test) == prompts
        assert len({i for i, _ in fit}) == 10 and not {i for i, _ in fit} & {i for i, _ in test}
        assert split_prompts(prompts, conversations=range(len(prompts))) == split_prompts(prompts)
        with pytest.raises(ValueError, match="1 different conversations"):
            split_prompts([[1], [2]], conversations=["a", "a"])

    def test_what_cannot_be_calibrated(self):
        config = SimpleNamespace(model_type="kimi_k3_dflash")
        with pytest.raises(ValueError, match="no confidence head"):
            calibrate(None, SimpleNamespace(config=config, confidence_head=None), [[1]], [[2]])
        draft = SimpleNamespace(config=config, confidence_head=torch.nn.Linear(1, 1))
        with pytest.raises(ValueError, match="1 prompts are in both"):
            calibrate(None, draft, [[1, 2], [3]], [[4], [1, 2]])
        for prompts in ([], [[]]):
            with pytest.raises(ValueError, match="`prompts_test`"):
                calibrate(None, draft, [[1]], prompts)


PROMPT = [5, 17, 40, 3, 22, 8, 61, 30, 12]


@pytest.fixture(scope="module")
def target_and_answer():
    """A tiny target and its greedy answer to `PROMPT`, which follows the prompt."""
    target = build_target("qwen3")
    return target, target.generate(torch.tensor([PROMPT]), max_new_tokens=60, do_sample=False)


@pytest.fixture(scope="module")
def measured(target_and_answer):
    """A calibration whose prompts are the beginnings of one text; the draft gambles on it."""
    target, answer = target_and_answer
    draft = gambling_draft(target, answer, block_size=3)
    prompts = [answer[0, : len(PROMPT) + i].tolist() for i in range(24)]
    fit, test = split_prompts(prompts)
    report = calibrate(target, draft, fit, test, max_new_tokens=30, rounds=60, bootstrap_samples=50)
    return target, draft, report


class TestDecoding:
    def test_labels_of_real_rounds(self, target_and_answer):
        """Faults at 10, 15, 20, ...: the draft says so itself."""
        target, answer = target_and_answer
        draft = confident_draft(target, answer, fault_every=5, block_size=4)
        rounds, prompts = decode_rounds(target, draft, [PROMPT, PROMPT], rounds=5, max_new_tokens=17)
        assert prompts == 2 and rounds.prompts.tolist() == [0] * 4 + [1] * 4  # whole prompts
        assert rounds.labelled.all() and rounds.logits.shape == (8, 4) and rounds.logits.dtype == torch.float64
        assert torch.equal(rounds.accepted, (rounds.logits > 0).int().cumprod(-1).bool())
        assert rounds.accepted.sum(-1).tolist() == [0, 4, 4, 4] * 2

    def test_a_stop_token(self, target_and_answer):
        target, answer = target_and_answer
        tokens = answer[0, len(PROMPT) :].tolist()
        stop = next(i for i in range(12, 60) if tokens[i] not in tokens[:i])
        draft = confident_draft(target, answer, fault_every=1000, block_size=4)
        config = GenerationConfig(do_sample=False, eos_token_id=tokens[stop])
        rounds, _ = decode_rounds(target, draft, [PROMPT], 1000, 60, config)
        assert rounds.labelled.sum() == stop - 1 - (stop - 1) // 5  # a bonus after four drafted; not the stop itself
        assert torch.equal(rounds.accepted, rounds.labelled)

    def test_temperatures_are_left_out_and_restored(self, target_and_answer):
        target, answer = target_and_answer
        draft = confident_draft(target, answer, block_size=4)
        draft.config.confidence_temperatures = [9.0] * 4
        rounds, _ = decode_rounds(target, draft.train(), [PROMPT], 2, 12)
        assert set(rounds.logits[rounds.labelled].abs().tolist()) == {SURE}
        assert draft.config.confidence_temperatures == [9.0] * 4 and draft.training

    def test_answers_without_rounds(self, target_and_answer):
        target, answer = target_and_answer
        with pytest.raises(ValueError, match="max_new_tokens"):
            decode_rounds(target, confident_draft(target, answer), [PROMPT], 2, max_new_tokens=1)


class TestCalibrate:
    def test_a_draft_that_is_too_sure(self, measured):
        _, draft, report = measured
        assert report.test_rounds >= 60 and report.fit_rounds >= 30
        assert report.fit_prompts <= 8 and report.test_prompts <= 16
        assert len(report.temperatures) == 3 and report.temperatures[0] > 1.5
        assert report.after.mean_ece < report.before.mean_ece
        assert report.after.interval[0] < report.after.interval[1]
        assert report.labelled == sorted(report.labelled, reverse=True)
        assert report.accepted == sorted(report.accepted, reverse=True)
        assert draft.config.confidence_temperatures is None

    @pytest.mark.parametrize("samples", [False, True])
    def test_says_whether_the_target_samples(self, target_and_answer, samples, monkeypatch):
        target, answer = target_and_answer
        monkeypatch.setattr(target.generation_config, "do_sample", samples)
        prompts = [answer[0, : len(PROMPT) + i].tolist() for i in range(2)]
        draft, settings = confident_draft(target, answer, block_size=3), {"max_new_tokens": 20, "bootstrap_samples": 2}
        config = GenerationConfig(temperature=0.6)
        report = calibrate(target, draft, prompts[:1], prompts[1:], generation_config=config, **settings)
        assert report.do_sample == samples

    def test_few_rounds_are_warned_of(self, target_and_answer, caplog):
        target, answer = target_and_answer
        prompts = [answer[0, : len(PROMPT) + i].tolist() for i in range(2)]
        draft = confident_draft(target, answer, block_size=3)
        report = calibrate(target, draft, prompts[:1], prompts[1:], max_new_tokens=20, bootstrap_samples=2)
        assert f"on {report.test_rounds} rounds of 1 prompts, fewer than 5000" in caplog.text.replace("\n", " ")

    def test_table_json_and_plot(self, measured, tmp_path):
        report = measured[-1]
        path = write_calibration(tmp_path / "out", report, command="blockdraft calibrate T D")
        assert sorted(file.name for file in path.parent.iterdir()) == [
            "calibration.json",
            "calibration.md",
            "reliability.png",
        ]
        assert (path.parent / "reliability.png").read_bytes().startswith(b"\x89PNG")
        text = path.read_text()
        assert "blockdraft calibrate T D" in text and f"on {report.test_rounds} rounds" in text
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert len(lines) == 2 + 3 + 1 and lines[-1].startswith("| mean")
        values = json.loads((path.parent / "calibration.json").read_text(), parse_constant=pytest.fail)
        assert values["temperatures"] == report.temperatures
        assert values["metrics"]["ece_after"] == report.after.mean_ece
        assert len(values["after"]["bins"]) == 3 and len(values["after"]["bins"][0]["rounds"]) == 15

    def test_temperatures_of_the_wrong_number(self, measured, tmp_path):
        _, draft, report = measured
        for temperatures in (report.temperatures[:2], [1.0, 0.0, 1.0]):
            with pytest.raises(ValueError, match="give 3 above 0"):
                save_temperatures(draft, temperatures, tmp_path)
        assert not list(tmp_path.iterdir())


def test_a_dspark_draft_of_a_v41_target(tmp_path):
    """Calibrate, save the temperatures beside the weights, load, serve with a schedule."""
    shape = load_golden("v41_target").meta["config"] | {"moe_intermediate_size": 16}
    target = DeepseekV41ForCausalLM(DeepseekV41TextConfig(**shape)).eval()
    config = DeepseekV41DSparkConfig.from_target_config(target.config, sliding_window=6)
    draft, directory = DeepseekV41DSparkModel(config), tmp_path / "draft"
    draft.save_pretrained(directory)
    files = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}

    prompts = torch.randint(1, 32, (4, 6)).tolist()
    report = calibrate(target, draft, *split_prompts(prompts), max_new_tokens=8, rounds=4, bootstrap_samples=5)
    assert report.test_rounds >= 4 and report.fit_rounds >= 2
    half = DeepseekV41DSparkModel.from_pretrained(directory, dtype=torch.bfloat16)
    save_temperatures(half, report.temperatures, directory)  # the dtype of the file stays
    assert half.config.confidence_temperatures == report.temperatures
    loaded = DeepseekV41DSparkModel.from_pretrained(directory)
    assert loaded.config.confidence_temperatures == report.temperatures
    after = {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}
    assert after.keys() == files.keys()
    assert [name for name in files if after[name] != files[name]] == ["config.json"]
    before, stored = json.loads(files["config.json"]), json.loads(after["config.json"])
    assert stored == before | {"confidence_temperatures": report.temperatures}

    settings = {"max_new_tokens": 4, "confidence_schedule": ConfidenceThreshold(0.5)}
    served = evaluate_decoding(target, loaded, prompts[:1], **settings)
    assert served.equal_to_greedy and served.drafted == config.block_size
