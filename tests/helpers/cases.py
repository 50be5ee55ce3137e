"""Small rows as people have them (`tests/data/cases`)."""

import json
from pathlib import Path

CASES = Path(__file__).parent.parent / "data" / "cases"


def case_path(name: str) -> Path:
    return CASES / f"{name}.jsonl"


def case_rows(name: str) -> list[dict]:
    return [json.loads(line) for line in case_path(name).read_text(encoding="utf-8").splitlines()]
