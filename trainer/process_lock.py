"""One process at a time: a command that is started twice must not write the same file twice at once."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def one_process(output: str | os.PathLike) -> Iterator[None]:
    """Keeps others from writing `output` while the block runs, by a lock on `OUTPUT.lock` that ends with the process,
    however that ends. Raises a `ValueError` that says who holds it."""
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(f"{output}.lock"), Path(f"{output}.holder")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        by = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
        raise ValueError(
            f"{output} is being written by {by}: wait for it, or choose another file. One process writes it; under a "
            "launcher, which starts one for each device, give each its part of the data and a file of its own."
        ) from error
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}", encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
