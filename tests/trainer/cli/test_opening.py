"""What commands open."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from cases import case_path
from real_templates import generation_config, real_tokenizer

from blockdraft.trainer.cli import opening
from blockdraft.trainer.cli.arguments import DataArguments, TargetArguments
from blockdraft.trainer.cli.calibrate import CalibrateArguments
from blockdraft.trainer.cli.doctor import DoctorArguments
from blockdraft.trainer.cli.evaluate import EvaluateArguments
from blockdraft.trainer.cli.generate import GenerateArguments, run
from blockdraft.trainer.data.rendering import served_prompt


def gemma(monkeypatch, stops):
    """A target without weights, and its tokenizer, which knows another stop token than the target or the template."""
    config = generation_config("gemma3")
    config.eos_token_id = stops
    target = SimpleNamespace(generation_config=config, device=torch.device("cpu"))
    monkeypatch.setattr(opening, "load_target", lambda *args: (target, real_tokenizer("gemma3")))
    return target


@pytest.mark.parametrize("stops", [None, 7, [7, 8]])
def test_a_target_stops_at_every_token_that_ends_an_answer(monkeypatch, stops):
    """In each command, so that trained and decoded answers end alike."""
    target, tokenizer = gemma(monkeypatch, stops), real_tokenizer("gemma3")
    others = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    opened, _ = opening.open_target(TargetArguments(target="gemma"))
    own = [] if stops is None else [7] if stops == 7 else stops
    assert opened is target and target.generation_config.eos_token_id == own + others


def test_rows_are_trained_with_the_stop_tokens_of_their_target(monkeypatch):
    """Gemma's `<end_of_turn>` stood in the generation config alone."""
    target = gemma(monkeypatch, generation_config("gemma3").eos_token_id)
    seen = {}

    def prepare(data, tokenizer, **settings):
        seen.update(settings)
        raise LookupError

    monkeypatch.setattr(opening, "prepare_dataset", prepare)
    training = SimpleNamespace(main_process_first=lambda desc: nullcontext())
    for given, expected in ((None, target.generation_config.eos_token_id), ([5], [5])):
        arguments = DataArguments(train_data=["a.jsonl"], stop_token_ids=given)
        with pytest.raises(LookupError):
            opening.open_training_rows(arguments, target, real_tokenizer("gemma3"), training)
        assert seen["stop_token_ids"] == expected


def test_commands_decode_the_prompts_that_serving_sends(monkeypatch, capsys):
    """Prompts alone are enough for all of them, and a thinking template may think."""
    tokenizer = real_tokenizer("qwen3")
    sky = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    served, _ = served_prompt(sky, tokenizer)
    assert tokenizer.decode(served).endswith("<|im_start|>assistant\n")
    path = [str(case_path("prompts_only"))]
    for arguments in (
        EvaluateArguments(draft="d", data=path),
        CalibrateArguments(draft="d", data=path),
        DoctorArguments(draft="d", data=path),
    ):
        prompts, _ = opening.open_prompts(arguments, tokenizer)
        assert len(prompts) == 2 and prompts[0] == served
        assert capsys.readouterr().out == "data: 2 prompts of 2 rows\n"

    class Decoded(Exception):
        pass

    def block_decode(target, input_ids, **settings):
        raise Decoded(input_ids.tolist())

    target = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(opening, "open_pair", lambda *args: (target, tokenizer, None))
    monkeypatch.setattr("blockdraft.modeling.decoding.block_decoding.block_decode", block_decode)
    sampling = SimpleNamespace(seed=0, generation=dict)
    schedule = SimpleNamespace(confidence_cost_table=False, confidence_threshold=None)
    quiet = {"enable_thinking": False}
    for kwargs in (None, quiet):
        arguments = GenerateArguments(draft="d", prompt="Why is the sky blue?", template_kwargs=kwargs)
        with pytest.raises(Decoded) as decoded:
            run(TargetArguments(target="t"), arguments, sampling, schedule)
        assert decoded.value.args[0] == [served_prompt(sky, tokenizer, kwargs)[0]]
