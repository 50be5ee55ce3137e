"""Which folder may import which: arrows go one way, imports inside functions included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each folder may import those before it.
PACKAGES = ("configuration", "modeling", "hub_cards", "trainer")
# Inside modeling/; folders of one line do not import each other. `families.py` stands above them all.
MODELING = (("ops", "saving"), ("target",), ("decoding",), ("draft",), ("kimi_k3", "deepseek_v41"))


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in the file, as `modeling.ops.fp32`."""
    found, package = set(), path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "blockdraft" for alias in node.names), path
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 0:
            assert node.module.partition(".")[0] != "blockdraft", f"{path}: the package imports itself relatively"
            continue
        base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
        if not (module := ".".join(filter(None, base))):
            continue  # `__version__` of the face
        names = [f"{module}.{alias.name}" for alias in node.names]
        found |= {name if (ROOT / f"{name.replace('.', '/')}.py").exists() else module for name in names}
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): imports_of(path) for path in files}


def rank(module: str) -> int:
    return PACKAGES.index(module.partition(".")[0])


def test_packages_import_those_below_them(imports):
    upward = {(module, name) for module, names in imports.items() for name in names if rank(name) > rank(module)}
    assert not upward


def test_modeling_folders_import_those_below_them(imports):
    floors = {folder: floor for floor, folders in enumerate(MODELING) for folder in folders}

    def floor(module: str) -> tuple[int, str]:
        folder = module.split(".")[1]
        return floors.get(folder, len(MODELING)), folder  # families.py is above

    inside = {module: names for module, names in imports.items() if module.startswith("modeling.")}
    assert {floor(module)[1] for module in inside} - floors.keys() == {"__init__", "families"}
    for module, names in inside.items():
        for name in names:
            if not name.startswith("modeling."):
                continue
            here, there = floor(module), floor(name)
            assert there[0] < here[0] or there == here, f"{module} imports {name}"


def test_decoding_names_no_family():
    for path in (ROOT / "modeling" / "decoding").glob("*.py"):
        text = path.read_text(encoding="utf-8").lower()
        assert not any(name in text for name in ("kimi", "k3", "deepseek", "v41")), path


def test_no_module_imports_itself_in_a_circle(imports):
    TopologicalSorter({module: names & imports.keys() for module, names in imports.items()}).prepare()
