"""The training step at real widths on one GPU: dense reference, fast path and floor, in bf16, within 8 minutes.

    python -m benchmarks.step_gpu --json step_gpu.json

One layer of a Kimi K3 draft and one stage of a DeepSeek V4.1 draft, 4,096 tokens and 512 anchors, as
`benchmarks.step` measures them on a CPU. Memory is the allocator's peak above weights and states; where the
reference by attention's definition does not fit, its row says so.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from .measuring import busy_at_start
from .step import (
    Case,
    Comparison,
    Machine,
    busy_lines,
    compare,
    comparison_table,
    environment,
    floor_table,
    profile_table,
    progress,
    report_json,
    sdpa_table,
)
from .training_step import k3_config, v41_config

K3_LAYER = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V41_STAGE = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 128,
    "markov_rank": 256,
}
CASES = [Case(k3_config(**K3_LAYER), 4096, 512), Case(v41_config(**V41_STAGE), 4096, 512)]


def measure(cases: Sequence[Case], machine: Machine, repeats: int) -> list[Comparison]:
    """Measures the cases and prints their tables."""
    at_start = busy_at_start()
    with progress(4 * len(cases)) as done:
        comparisons = [compare(case, machine, repeats, done) for case in cases]
    settings = environment(machine)
    print(f"\n{settings['gpu'] or settings['processor']}, torch {settings['torch']}, {settings['dtype']}\n")
    busy = busy_lines([way for one in comparisons for way in (one.dense, one.dense_sdpa, one.fast)], at_start)
    tables = [comparison_table(comparisons), sdpa_table(comparisons)]
    tables += [floor_table(comparisons), profile_table(comparisons)]
    print("\n\n".join([*busy, *(table for table in tables if table)]))
    return comparisons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each way, after one to warm up")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "There is no GPU that PyTorch can use: these widths need one. On a CPU run `python -m benchmarks.step`."
        )
    machine = Machine("cuda", torch.bfloat16)
    comparisons = measure(CASES, machine, options.repeats)
    if options.json:
        report = report_json(comparisons, environment=environment(machine))
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
