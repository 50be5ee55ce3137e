"""The wheel: everything a user needs, nothing else, usable away from the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import blockdraft

ROOT = Path(__file__).parent.parent
DIST_INFO = f"blockdraft-{blockdraft.__version__}.dist-info"
PACKAGES = ("configuration", "modeling", "trainer", "hub_cards")
IMPORT_ALL = """
import importlib, pkgutil, blockdraft
print(blockdraft.__file__)
for module in pkgutil.walk_packages(blockdraft.__path__, "blockdraft."):
    importlib.import_module(module.name)
    print(module.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, since a build leaves files in its source folder."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    (wheel,) = folder.glob("*.whl")
    return wheel


def pip(command: str, *args: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--no-index", *args], check=True)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in names if not name.startswith(f"{DIST_INFO}/")}
    expected = {f"blockdraft/{path.name}" for path in (*ROOT.glob("*.py"), ROOT / "py.typed")}
    assert {"blockdraft/__init__.py", "blockdraft/__main__.py", "blockdraft/after_import.py"} <= expected
    for package in PACKAGES:
        expected |= {f"blockdraft/{path.relative_to(ROOT)}" for path in (ROOT / package).rglob("*.py")}
    expected |= {f"blockdraft/hub_cards/templates/{path.name}" for path in (ROOT / "hub_cards").glob("templates/*.md")}
    assert shipped == expected
    assert f"{DIST_INFO}/licenses/LICENSE" in names


def test_wheel_has_the_command_and_its_requirements(wheel):
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{DIST_INFO}/entry_points.txt").decode()
        metadata = archive.read(f"{DIST_INFO}/METADATA").decode()
    assert "[console_scripts]\nblockdraft = blockdraft.trainer.cli.main:main" in entry_points
    for line in (
        "Requires-Python: >=3.11",
        "License-Expression: Apache-2.0",
        "Requires-Dist: torch>=2.11",
        "Requires-Dist: transformers>=5.24",
        "Requires-Dist: tqdm",
        'Requires-Dist: chitchat-dataset; extra == "demo"',
    ):
        assert line in metadata.splitlines()


def test_installed_wheel_works_away_from_the_repository(wheel, tmp_path):
    site = tmp_path / "site"
    pip("install", "--target", str(site), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    for command in ([site / "bin" / "blockdraft"], [sys.executable, "-m", "blockdraft"]):
        answer = subprocess.run([*command, "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert answer.stdout == f"blockdraft {blockdraft.__version__}\n", answer.stderr
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    location, *modules = result.stdout.split()
    assert Path(location) == site / "blockdraft" / "__init__.py"
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            assert ".".join(("blockdraft", *parts)).removesuffix(".__init__") in modules
