"""
CPU-seconds until something is imported or answered, each in fresh processes:

    python -m benchmarks.startup [--runs 5]

The minimum of several runs is compared with what transformers itself takes to import its three Auto classes. CPU time
hardly depends on what else the machine does; the files should be in its cache, hence one run that is not counted.
"""

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence

AUTO_CLASSES = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM"
IMPORTS = {
    AUTO_CLASSES: AUTO_CLASSES,
    "import blockdraft": "import blockdraft",
    "import blockdraft, then the Auto classes": f"import blockdraft; {AUTO_CLASSES}",
    "every public name": "from blockdraft import *",
    "import torch": "import torch",
}
COMMANDS = ("--version", "--help", "evaluate --help", "train --help", "train --help_all")


def cpu_seconds(command: Sequence[str], runs: int) -> float:
    """The least user and system time of a command and its children, after a run that is not counted.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    measured = []
    for _ in range(runs + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_WAIT_POLICY": "passive"})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        measured.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(measured[1:])


def main(runs: int) -> None:
    """Prints the table."""
    commands = {name: [sys.executable, "-c", code] for name, code in IMPORTS.items()}
    commands |= {f"blockdraft {text}": [sys.executable, "-m", "blockdraft", *text.split()] for text in COMMANDS}
    seconds = {name: cpu_seconds(command, runs) for name, command in commands.items()}
    print("| | CPU-seconds | of the Auto classes' |", "|---|---|---|", sep="\n")
    for name, taken in seconds.items():
        print(f"| `{name}` | {taken:.2f} | {taken / seconds[AUTO_CLASSES]:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    main(parser.parse_args().runs)
