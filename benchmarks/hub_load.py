"""What loading a draft from the Hub takes over loading it from a directory.

    OMP_WAIT_POLICY=passive python -m benchmarks.hub_load

A small draft is pushed to the Hub of the tests, on loopback, and loaded with `AutoModel.from_pretrained`, remote code
and all, from there and from its directory: each time in a process of its own with empty caches and without
`blockdraft`. The exit code is 1 if the medians differ by more than the limit.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from tests.helpers.hub_server import TOKEN, hub_server

REPO = "user/draft"
PUSH = f"""
import sys
from tests.helpers.draft_models import tiny_draft
draft = tiny_draft()
draft.save_pretrained(sys.argv[1])
draft.push_to_hub({REPO!r})
"""
LOAD = """
import sys, time
sys.modules["blockdraft"] = None
from transformers import AutoModel
start = time.perf_counter()
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
print(time.perf_counter() - start)
"""


def run(script: str, place: str, hub_url: str) -> str:
    """What a script prints in a process of its own with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {
            "HF_ENDPOINT": hub_url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": caches,
            "HF_MODULES_CACHE": f"{caches}/modules",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-c", script, place]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="Loads from each place, of which the median counts.")
    parser.add_argument("--limit", type=float, default=5.0, help="Seconds that the Hub may take more.")
    options = parser.parse_args()
    with hub_server() as server, tempfile.TemporaryDirectory() as directory:
        server.users = {TOKEN: "user"}
        run(PUSH, directory, server.url)
        seconds = {
            place: [float(run(LOAD, place, server.url)) for _ in range(options.repeats)] for place in (directory, REPO)
        }
    local, hub = (statistics.median(each) for each in seconds.values())
    print(f"from_pretrained: {local:.2f} s from a directory, {hub:.2f} s from the Hub, {hub - local:.2f} s more")
    print(f"limit: {options.limit:g} s more; median of {options.repeats} loads, each in a process with empty caches")
    return int(hub - local > options.limit)


if __name__ == "__main__":
    sys.exit(main())
