"""Real decoding with drafts that know the answer, or a part of it, so that every number is known beforehand."""

import copy
import json
import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from confident_drafts import confident_draft
from decoding_models import build_draft, build_dspark_draft, build_target, partly_right_draft
from transformers import GenerationConfig

from blockdraft.modeling.decoding.confidence_schedule import ConfidenceThreshold
from blockdraft.modeling.decoding.cost_table import CostTable
from blockdraft.trainer.evaluation.decoding import (
    _decoding,
    _difference,
    answer_settings,
    compare_schedules,
    evaluate_decoding,
    fastest_block_size,
    held_out_prompts,
    served_block_size,
    served_dtype,
)
from blockdraft.trainer.evaluation.decoding_report import decoding_table

PROMPT = [5, 17, 40, 3, 22, 8, 61, 30, 12]
NEVER = 10**6


@cache
def known(name: str):
    """A tiny target and its greedy answer to `PROMPT`, which follows the prompt."""
    target = build_target(name)
    return target, target.generate(torch.tensor([PROMPT]), max_new_tokens=48, do_sample=False)


def known_draft(fault_every: int = NEVER, name: str = "k3", **settings):
    target, answer = known(name)
    return target, partly_right_draft(target, answer, fault_every, **settings)


class TestAcceptance:
    def test_perfect_draft(self):
        report = evaluate_decoding(*known_draft(), [PROMPT], 1 + 3 * 8 + 5, compare_with_plain=False)
        assert report.answers[0].accepted_lengths == [8, 8, 8, 5]  # the limit cuts the last round
        assert report.tau == report.tau_without_loops == 29 / 4
        assert report.histogram == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 0, 7: 0, 8: 3}
        assert report.acceptance_by_slot == [1, 1, 1, 1, 0.75, 0.75, 0.75]

    def test_fault_in_every_block(self):
        """The prefill's token stands at position 9. Faults at 10, 15, 20, ... cut each round behind them."""
        report = evaluate_decoding(*known_draft(fault_every=5), [PROMPT, PROMPT], 17, compare_with_plain=False)
        assert [answer.accepted_lengths for answer in report.answers] == [[1, 5, 5, 5]] * 2
        assert report.tau == 4
        assert report.acceptance_by_slot == [0.75] * 4 + [0] * 3
        assert sum(report.acceptance_by_slot) == report.tau - 1

    def test_stop_inside_a_block(self):
        target, draft = known_draft()
        answer = draft.answer[len(PROMPT) :].tolist()
        stop = next(i for i in range(12, 48) if answer[i] not in answer[:i] and i % 8)
        config = GenerationConfig(do_sample=False, eos_token_id=answer[stop])
        report = evaluate_decoding(target, draft, [PROMPT], 48, config)
        assert report.answers[0].tokens == answer[: stop + 1]
        assert sum(report.accepted_lengths) == stop  # without the prefill's token and what follows the stop
        assert report.tau == stop / len(report.accepted_lengths)
        assert report.equal_to_greedy

    def test_answer_that_the_prefill_ends(self):
        target, draft = known_draft()
        config = GenerationConfig(do_sample=False, eos_token_id=draft.answer[len(PROMPT)].item())
        report = evaluate_decoding(target, draft, [PROMPT], 8, config)
        assert report.accepted_lengths == [] and math.isnan(report.tau)
        assert report.metrics()["tokens"] == 1


class TestComparison:
    def test_measures_both_plain_decoders(self):
        target, draft = known_draft(fault_every=5)
        report = evaluate_decoding(target, draft, [PROMPT, PROMPT], max_new_tokens=17)
        speeds = report.plain_tokens_per_second
        assert set(speeds) == {"generate()", "plain loop"}
        assert report.speedup == report.tokens_per_second / max(speeds.values())
        metrics = report.metrics()
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["target_share"] + metrics["draft_share"] + metrics["rest_share"] == pytest.approx(1)
        assert metrics["differences"] == 0 and report.equal_to_greedy is True

    def test_without_plain_decoding(self):
        report = evaluate_decoding(*known_draft(), [PROMPT], 17, compare_with_plain=False)
        metrics = report.metrics()
        assert metrics["tau"] == 8 and metrics["tokens_per_second"] > 0
        undefined = {name for name, value in metrics.items() if math.isnan(value)}
        assert undefined - {name for name in undefined if name.endswith(("_low", "_high"))} == {
            "baseline_tokens_per_second",
            "speedup",
            "verification_steps",
            "draft_steps",
            "differences",
            "differences_at_ties",
        }
        assert report.equal_to_greedy is None

    def test_difference_is_where_answers_part(self):
        target, answer = known("k3")
        plain = answer[0, len(PROMPT) :].tolist()
        config = GenerationConfig(do_sample=False, max_new_tokens=48, return_dict_in_generate=True)
        other = plain[:7] + [(plain[7] + 1) % 60] + plain[8:]
        difference = _difference(target, PROMPT, other, plain, config)
        with torch.no_grad():
            best, second = target(answer[:, : len(PROMPT) + 7]).logits[0, -1].topk(2).values.tolist()
        assert difference["position"] == 7
        assert difference["gap"] == pytest.approx(best - second, abs=1e-4)

    def test_an_answer_that_only_goes_on_is_unlike_greedy(self):
        """Longer or shorter, behind the end of the other: no tie between two tokens, and nothing to look up there."""
        target, answer = known("k3")
        plain = answer[0, len(PROMPT) :].tolist()
        stop = next(i for i in range(4, 48) if plain[i] not in plain[:i])
        config = GenerationConfig(do_sample=False, max_new_tokens=48, eos_token_id=plain[stop])
        ended = plain[: stop + 1]
        assert _difference(target, PROMPT, plain, ended, config) == {"position": stop + 1, "gap": math.inf}
        assert _difference(target, PROMPT, plain[:3], ended, config) == {"position": 3, "gap": math.inf}

    def test_a_longer_answer_in_a_report(self, monkeypatch):
        target, draft = known_draft()
        greedy = draft.answer[len(PROMPT) :].tolist()
        stop = next(i for i in range(4, 48) if greedy[i] not in greedy[:i])
        generate = target.generate

        def ends_later(*args, custom_generate=None, **kwargs):
            if custom_generate is not None:
                kwargs["generation_config"].eos_token_id = None
            return generate(*args, custom_generate=custom_generate, **kwargs)

        monkeypatch.setattr(target, "generate", ends_later)
        config = GenerationConfig(do_sample=False, eos_token_id=greedy[stop])
        report = evaluate_decoding(target, draft, [PROMPT], stop + 4, config)
        assert report.differences == [{"prompt": 0, "position": stop + 1, "gap": math.inf}]
        assert report.equal_to_greedy is False and report.metrics()["differences_at_ties"] == 0
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["differences"][0]["gap"] is None

    def test_equality_is_judged_in_fp32_and_greedy_only(self):
        target = build_target("qwen3").bfloat16()
        draft = build_draft(target)
        report = evaluate_decoding(target, draft, [PROMPT], 6)
        assert report.dtype == "bfloat16" and report.equal_to_greedy is None
        config = GenerationConfig(do_sample=True, temperature=0.7)
        report = evaluate_decoding(*known_draft(), [PROMPT], 6, config)
        assert report.equal_to_greedy is None and report.differences == []

    def test_what_is_left_open_is_the_targets(self):
        target, draft = known_draft()
        target.generation_config.do_sample = True
        report = evaluate_decoding(target, draft, [PROMPT], 6, GenerationConfig(temperature=0.6))
        assert report.equal_to_greedy is None
        assert report.decoding == "sampling temperature 0.6 top_k 50"  # what `generate` fills in counts too
        assert evaluate_decoding(target, draft, [PROMPT], 6).equal_to_greedy

    def test_temperature_1_has_a_report_of_its_own(self):
        target, draft = known_draft(name="qwen3")
        report = evaluate_decoding(target, draft, [PROMPT] * 2, 9, at_temperature_1=True)
        sampled = report.at_temperature_1
        assert (report.decoding, sampled.decoding) == ("greedy", "sampling temperature 1")
        assert len(sampled.answers) == 2 and not sampled.answers[0].plain
        assert report.rows()["tau at temperature 1"] == sampled.rows()["tau (tokens a round)"]
        assert report.to_dict()["at_temperature_1"]["metrics"]["tau"] == sampled.tau
        settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0)
        assert evaluate_decoding(target, draft, [PROMPT], 4, settings, at_temperature_1=True).at_temperature_1 is None

    def test_models_are_left_as_they_were(self):
        target, draft = known_draft()
        draft.train()
        evaluate_decoding(target, draft, [PROMPT], 4, compare_with_plain=False)
        assert draft.training and not target.training

    def test_needs_prompts(self):
        for prompts in ([], [PROMPT, []]):
            with pytest.raises(ValueError, match="prompts"):
                evaluate_decoding(*known_draft(), prompts)


class TestBlockSizes:
    def test_a_draft_serves_shorter_blocks(self):
        target, draft = known_draft()
        fastest, reports = fastest_block_size(target, draft, [PROMPT], max_new_tokens=25)
        assert {size: report.tau for size, report in reports.items()} == {2: 2, 4: 4, 6: 6, 8: 8}
        assert fastest == max(reports, key=lambda size: reports[size].speedup)
        assert all(report.equal_to_greedy and report.block_size == size for size, report in reports.items())
        assert draft.config.block_size == 8

    def test_the_trained_size_is_restored_and_the_limit(self):
        _, draft = known_draft()
        with pytest.raises(RuntimeError), served_block_size(draft, 4):
            assert draft.config.block_size == 4
            raise RuntimeError
        assert draft.config.block_size == 8
        for size in (1, 9):
            with pytest.raises(ValueError, match="serves 2 to 8"), served_block_size(draft, size):
                pass


class TestDtypes:
    @pytest.mark.parametrize("build", [build_draft, build_dspark_draft])
    def test_a_draft_is_served_in_another_dtype_and_trained_on_in_its_own(self, build):
        target = build_target("qwen3").bfloat16()
        draft = build(target)
        served, parameters = copy.deepcopy(draft).to(torch.bfloat16), dict(draft.named_parameters())
        before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
        with served_dtype(draft, target.dtype):
            assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), served.parameters(), strict=True))
            report = evaluate_decoding(target, draft, [PROMPT], 6, compare_with_plain=False)
        assert report.protocol["dtype"] == report.protocol["draft_dtype"] == "bfloat16"
        assert all(parameters[name] is parameter for name, parameter in draft.named_parameters())
        after = draft.state_dict()
        assert all(
            torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in before
        )
        protocol = evaluate_decoding(target, draft, [PROMPT], 6, compare_with_plain=False).protocol
        assert (protocol["dtype"], protocol["draft_dtype"]) == ("bfloat16", "float32")


class TestAnchorFirst:
    """Slot 0 predicts too: a block of 8 drafts 8 tokens."""

    def test_a_round_commits_up_to_nine(self):
        target, answer = known("qwen3")
        draft = confident_draft(target, answer, NEVER)
        report = evaluate_decoding(target, draft, [PROMPT], 1 + 2 * 9 + 4, compare_with_plain=False)
        assert report.answers[0].accepted_lengths == [9, 9, 4]
        assert report.answers[0].verified_lengths == [9, 9, 4]  # near the limit fewer are drafted
        assert report.histogram == {1: 0, 2: 0, 3: 0, 4: 1, 5: 0, 6: 0, 7: 0, 8: 0, 9: 2}
        assert report.acceptance_by_slot == [1] * 3 + [2 / 3] * 5
        assert report.drafted == 8 and report.block_size == 8 and report.rows_per_token == 1

    def test_shorter_blocks(self):
        target, answer = known("qwen3")
        draft = confident_draft(target, answer, NEVER)
        _, reports = fastest_block_size(target, draft, [PROMPT], [2, 8], max_new_tokens=19)
        assert {size: (report.drafted, report.tau) for size, report in reports.items()} == {2: (2, 3), 8: (8, 9)}


class TestSchedules:
    def test_side_by_side_on_the_same_prompts(self):
        """Faults at 10, 15, 20, ...; the draft knows where. Each block but the first reaches over one."""
        target, answer = known("qwen3")
        draft = confident_draft(target, answer, fault_every=5)
        schedules = {"off": None, "sure": ConfidenceThreshold(0.5), "nothing": ConfidenceThreshold(1.0)}
        reports = compare_schedules(target, draft, [PROMPT], schedules, max_new_tokens=17)
        assert [*reports] == ["off", "sure", "nothing"]
        assert [reports[name].answers[0].accepted_lengths for name in reports] == [
            [1, 5, 5, 5],
            [1, 5, 5, 5],
            [1] * 16,
        ]
        assert reports["off"].answers[0].verified_lengths == [9, 9, 9, 5]
        assert reports["sure"].answers[0].verified_lengths == [1, 5, 5, 5]
        assert reports["off"].rows_per_token == 2
        assert reports["sure"].rows_per_token == reports["nothing"].rows_per_token == 1
        assert all(report.equal_to_greedy for report in reports.values())
        lines = decoding_table([*reports.values()]).splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert cells[0] == ["confidence schedule", "off", "sure", "nothing"]
        assert ["target tokens per committed token", "2.00", "1.00", "1.00"] in cells

    def test_names_in_a_report(self):
        target, answer = known("qwen3")
        draft, settings = confident_draft(target, answer), {"max_new_tokens": 3, "compare_with_plain": False}
        schedules = {
            "off": None,
            "threshold 0.25": ConfidenceThreshold(0.25),
            "cost table": CostTable([1, 4], [0.01, 0.02]),
        }
        for name, schedule in schedules.items():
            report = evaluate_decoding(target, draft, [PROMPT], confidence_schedule=schedule, **settings)
            assert report.confidence_schedule == name

    def test_needs_a_schedule_and_a_draft_with_confidence(self):
        with pytest.raises(ValueError, match="`schedules` is empty"):
            compare_schedules(*known_draft(), [PROMPT], {})
        with pytest.raises(ValueError, match="confidence"):
            evaluate_decoding(*known_draft(), [PROMPT], 4, confidence_schedule=ConfidenceThreshold(0.5))


class TestHeldOutPrompts:
    def test_ends_before_the_last_answer(self):
        row = {"input_ids": list(range(10, 20)), "loss_mask": [0, 0, 1, 1, 0, 0, 0, 1, 1, 0]}
        assert held_out_prompts([row], 4) == [list(range(10, 17))]

    def test_rows_are_spread_evenly(self):
        rows = [{"input_ids": [i, 1], "loss_mask": [0, 1]} for i in range(10)]
        assert held_out_prompts(rows, 4) == [[0], [2], [5], [7]]
        assert held_out_prompts(rows, 99) == [[i] for i in range(10)]

    def test_stays_within_its_document(self):
        row = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 0, 0, 1, 0], "document_ids": [1, 1, 2, 2, 2, 0]}
        assert held_out_prompts([row], 1) == [[3, 4]]

    def test_rows_without_a_prompt_are_reported(self, caplog):
        no_prompt = [{"input_ids": [1, 2], "loss_mask": [1, 1]}, {"input_ids": [1, 2], "loss_mask": [0, 0]}]
        good = {"input_ids": [1, 2], "loss_mask": [0, 1]}
        assert held_out_prompts([*no_prompt, good], 3) == [[1]]
        assert "2 of 3 evaluation rows" in caplog.text
        with pytest.raises(ValueError, match="None of 2 evaluation rows"):
            held_out_prompts(no_prompt, 2)


def test_the_protocol_says_how_tokens_were_chosen():
    def words(target: GenerationConfig, **given) -> str:
        config = answer_settings(SimpleNamespace(generation_config=target), GenerationConfig(**given), 8)
        return _decoding(config, target)

    target = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, min_p=0.1)
    assert words(target, do_sample=False) == "greedy"
    assert words(target) == "sampling temperature 0.6 top_k 20 min_p 0.1"
    assert words(GenerationConfig(), do_sample=True, top_p=0.9) == "sampling temperature 1 top_k 50 top_p 0.9"
    assert words(GenerationConfig(), do_sample=True, top_k=0) == "sampling temperature 1"
