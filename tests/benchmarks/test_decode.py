"""The decoding benchmark on few tokens, in this process."""

import json

import pytest
import torch
from decoding_models import build_draft, build_target
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from benchmarks import decode

FEW = ["--prompts", "1", "--prompt_length", "16", "--max_new_tokens", "6", "--repeats", "1"]


def run(monkeypatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["decode", *FEW, *options])
    decode.main()


def cells(printed: str) -> dict[str, list[str]]:
    """The tables' rows by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in rows}


def test_all_figures_of_an_embedded_pair(monkeypatch, tmp_path, capsys):
    plot, numbers = tmp_path / "costs.png", tmp_path / "costs.json"
    target = str(decode.TARGETS / "kimi_k3")
    run(monkeypatch, "--target", target, "--block_size", "4", "--plot", str(plot), "--json", str(numbers))

    report = json.loads(numbers.read_text())
    assert report["dtype"] == "float32" and report["machine"]["compiled"] is False
    (pair,) = report["pairs"]
    assert (pair["name"], pair["block_size"], pair["verified"]) == ("kimi_k3", 4, 4)
    assert [int(n) for n in pair["verification"]] == list(decode.VERIFIED)
    for n, seconds in pair["verification"].items():
        assert pair["verification_in_plain_steps"][n] == pytest.approx(seconds / pair["plain_step"])
    assert pair["rounds"].keys() == decode.DECODING.keys()
    for kind, parts in pair["rounds"].items():
        assert parts.keys() == (decode.FORWARDS | decode.OWN_WORK).keys() and min(parts.values()) > 0
        seconds = sum(parts.values())
        assert pair["rounds_per_second"][kind] == pytest.approx(1 / seconds)
        assert pair["round_in_plain_steps"][kind] == pytest.approx(seconds / pair["plain_step"])
        assert sum(pair["shares"][kind].values()) == pytest.approx(1)
        assert pair["shares"][kind]["draft"] == pytest.approx(parts["draft"] / seconds)

    printed = capsys.readouterr().out
    rows = cells(printed)
    assert rows["kimi_k3, 4 tokens verified in a round"] == ["ms", "plain steps"]
    assert rows["verify 8"][0] == f"{1e3 * pair['verification']['8']:.2f}"
    shares = [pair["shares"][kind]["rest"] for kind in decode.DECODING]
    assert rows["all outside the forwards"] == [f"{share:.1%}" for share in shares]
    assert "Other processes had" in printed and "recompile" not in printed
    assert plot.stat().st_size > 10_000


def test_compiled_models_are_named(monkeypatch, tmp_path, capsys):
    """And that torch gave up compiling; the models themselves stay as they are here."""
    target, numbers = build_target("qwen3"), tmp_path / "costs.json"
    build_draft(target).save_pretrained(tmp_path / "draft")
    monkeypatch.setattr(decode, "load_target", lambda name, dtype: (target, None))
    counters.clear()  # of other tests
    compiled = []

    def compile_another(model, **settings):
        compiled.append((model.config.model_type, settings))
        double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
        for n in range(torch._dynamo.config.recompile_limit + 1):
            double(torch.ones(2 + n))

    monkeypatch.setattr(PreTrainedModel, "compile", compile_another)
    pair = ("--target", "tiny", "--draft", str(tmp_path / "draft"), "--json", str(numbers))
    expected = {False: "tiny, 8 tokens verified in a round", True: "tiny, compiled, 8 tokens verified in a round"}
    for flag, header in expected.items():
        run(monkeypatch, *pair, *["--compile"][: int(flag)])
        printed, machine = capsys.readouterr().out, json.loads(numbers.read_text())["machine"]
        assert header in cells(printed)
        assert machine["compiled"] is machine["recompile_limit_reached"] is flag
        assert ("recompile limit" in printed) is flag
    assert compiled == [("qwen3", {"dynamic": True}), ("kimi_k3_dflash", {"dynamic": True})]
    torch._dynamo.reset()
    counters.clear()


def test_a_draft_needs_its_target(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--draft", "somewhere")
    assert "--draft needs its --target" in capsys.readouterr().err
