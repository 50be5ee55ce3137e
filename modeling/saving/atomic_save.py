"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged_directory(directory: str | os.PathLike) -> Iterator[Path]:
    """Yields an empty directory to write files into; on leaving it they are synced to disk and renamed into
    `directory`, which is made if absent and keeps its files of other names.

    A crash leaves each file of `directory` as it was or as it is to be, never half written. `config.json` comes last,
    so a new directory that has it is complete. On an exception nothing is moved."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Inside `directory`, because a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".saving-") as staging:
        yield Path(staging)
        files = (file.relative_to(staging) for file in Path(staging).rglob("*") if file.is_file())
        files = sorted(files, key=lambda file: (file.name == "config.json", file))
        for file in files:
            sync(Path(staging, file))
        for file in files:
            if file.parent != Path("."):
                (directory / file.parent).mkdir(parents=True, exist_ok=True)
            os.replace(Path(staging, file), directory / file)
    sync(directory)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    on_windows = os.name == "nt"
    if on_windows and path.is_dir():  # which cannot be opened there
        return
    descriptor = os.open(path, os.O_RDWR if on_windows else os.O_RDONLY)  # Windows syncs only what it may write to
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
