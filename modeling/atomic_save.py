"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged_directory(directory: str | os.PathLike) -> Iterator[Path]:
    """
    Yields an empty directory to write files into; on leaving it they are synced to disk and renamed into `directory`.

    A crash leaves each file of `directory` as it was or as it is to be, never half written. `config.json` comes last,
    so a new directory that has it is complete. On an exception nothing is moved.

    Args:
        directory (`str` or `os.PathLike`):
            Where the files go. Made if absent; files of other names in it stay.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Inside `directory`, because a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".saving-") as staging:
        yield Path(staging)
        files = sorted(Path(staging).iterdir(), key=lambda file: (file.name == "config.json", file.name))
        for file in files:
            _sync(file)
        for file in files:
            os.replace(file, directory / file.name)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
