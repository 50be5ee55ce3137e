"""What commands open: targets that stop, that have few positions, that read images too; prompts as served."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from any_targets import build_multimodal
from cases import case_path
from counting_pairs import chats, counting_tokenizer
from decoding_models import COMMON
from real_templates import generation_config, real_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from blockdraft.trainer.cli import opening
from blockdraft.trainer.cli.arguments import DataArguments, TargetArguments
from blockdraft.trainer.cli.calibrate import CalibrateArguments
from blockdraft.trainer.cli.doctor import DoctorArguments
from blockdraft.trainer.cli.evaluate import EvaluateArguments
from blockdraft.trainer.cli.generate import GenerateArguments, run
from blockdraft.trainer.cli.main import main
from blockdraft.trainer.data.rendering import served_prompt
from blockdraft.trainer.loading import new_draft

PROMPT = 7  # tokens of every prompt of `chats`
POSITIONS = 32
TRAIN = ["--num_draft_layers=1", "--block_size=4", "--target_layer_ids", "0", "--num_anchors=2", "--max_steps=1"]
TRAIN += ["--per_device_train_batch_size=2", "--eval_decode_prompts=1", "--save_strategy=no", "--use_cpu=true"]
TRAIN += ["--disable_tqdm=true", "--report_to=none", "--eval_max_new_tokens"]


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
    monkeypatch.setattr(opening, "check_room", lambda *args: None)
    monkeypatch.setattr("blockdraft.modeling.decoding.block_decoding.block_decode", block_decode)
    sampling = SimpleNamespace(seed=0, generation=dict)
    schedule = SimpleNamespace(confidence_cost_table=False, confidence_threshold=None)
    quiet = {"enable_thinking": False}
    for kwargs in (None, quiet):
        arguments = GenerateArguments(draft="d", prompt="Why is the sky blue?", template_kwargs=kwargs)
        with pytest.raises(Decoded) as decoded:
            run(TargetArguments(target="t"), arguments, sampling, schedule)
        assert decoded.value.args[0] == [served_prompt(sky, tokenizer, kwargs)[0]]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A folder with `target`, a GPT-2 of few positions, an untrained `draft` for it and `chats.jsonl`, some longer."""
    folder, tokenizer = tmp_path_factory.mktemp("gpt2"), counting_tokenizer()
    target = GPT2LMHeadModel(GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS))
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    shape = {"num_draft_layers": 1, "block_size": 4, "target_layer_ids": [0]}
    new_draft(target, tokenizer, "dflash", **shape).save_pretrained(folder / "draft")
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()[::4]))
    return folder


def command(folder: Path, name: str, output: Path) -> list[str]:
    target, draft, data = (str(folder / part) for part in ("target", "draft", "chats.jsonl"))
    return {
        "train": ["train", "--target", target, "--train_data", data, "--output_dir", str(output), *TRAIN],
        "evaluate": ["evaluate", target, draft, "--data", data, "--num_prompts=2", "--max_new_tokens"],
        "calibrate": ["calibrate", target, draft, "--data", data, "--num_prompts=2", "--max_new_tokens"],
        "doctor": ["doctor", target, draft, data, "--num_prompts=2", "--max_new_tokens"],
        "generate": ["generate", target, draft, "0 1", "--max_new_tokens"],
        "regenerate": ["regenerate", target, data, str(output), "--max_new_tokens"],
    }[name]


@pytest.mark.parametrize("name", ["train", "evaluate", "calibrate", "doctor", "generate"])
def test_a_prompt_and_its_answer_have_to_fit_the_targets_positions(name, gpt2, tmp_path, capsys):
    new = POSITIONS - PROMPT + 1
    assert main([*command(gpt2, name, tmp_path / "output"), str(new)]) == 2
    setting = "eval_max_new_tokens" if name == "train" else "max_new_tokens"
    error = capsys.readouterr().err
    assert f"The longest prompt ({PROMPT} tokens) with `{setting}` {new}: {POSITIONS + 1} tokens" in error
    assert f"more than the {POSITIONS} positions of the target, GPT2LMHeadModel" in error


@pytest.mark.parametrize("name", ["train", "evaluate", "calibrate", "doctor"])
def test_rows_longer_than_the_targets_positions_are_not_asked_for(name, gpt2, tmp_path, capsys):
    assert main([*command(gpt2, name, tmp_path / "output"), "4", f"--max_length={POSITIONS + 1}"]) == 2
    assert f"`max_length`: {POSITIONS + 1} tokens, more than the {POSITIONS} positions" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "evaluate", "generate", "doctor"])
def test_all_of_the_targets_positions_can_be_used(name, gpt2, tmp_path):
    """Rows are cut off at as many, unless told otherwise; a prompt and its answer take them all."""
    assert main([*command(gpt2, name, tmp_path / "output"), str(POSITIONS - PROMPT)]) in (0, name == "doctor")


def test_answers_are_written_as_far_as_the_targets_positions_go(gpt2, tmp_path, capsys):
    regenerate = command(gpt2, "regenerate", tmp_path / "answers.jsonl")
    assert main([*regenerate, str(POSITIONS)]) == 2
    assert main([*regenerate, "26", "--max_prompt_length=7"]) == 2
    assert "`max_prompt_length` 7 with `max_new_tokens` 26: 33 tokens, more than the 32" in capsys.readouterr().err
    assert main([*regenerate, str(POSITIONS - PROMPT + 1)]) == 0  # room for 6 tokens
    assert "0 answers written" in capsys.readouterr().out
    (tmp_path / "answers.jsonl.provenance.json").unlink()
    assert main([*regenerate[:3], str(tmp_path / "more.jsonl"), "--max_new_tokens", str(POSITIONS - PROMPT)]) == 0
    assert f"{len(chats()[::4])} answers written" in capsys.readouterr().out


def test_a_target_that_reads_images_too_is_trained_for_and_drafted(gpt2, tmp_path, capsys):
    target = tmp_path / "target"
    build_multimodal("qwen2_5_vl").save_pretrained(target)
    counting_tokenizer().save_pretrained(target)
    train = command(gpt2, "train", tmp_path / "draft")
    train[2] = str(target)
    assert main([*train, "4"]) == 0
    page = (tmp_path / "draft" / "README.md").read_text()
    assert "target = AutoModelForMultimodalLM.from_pretrained" in page and "AutoModelForCausalLM" not in page
    assert main(["generate", str(target), str(tmp_path / "draft"), "0 1", "--max_new_tokens", "4"]) == 0
    assert "[4 tokens in " in capsys.readouterr().out
