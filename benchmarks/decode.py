"""What a round of block decoding costs: verifications of 1 to 16 tokens, drafting and the loop's own work.

    OMP_WAIT_POLICY=passive python -m benchmarks.decode --target TARGET --draft DRAFT --json costs.json

Costs do not depend on what is accepted, so the prompts are random tokens; without `--draft` an untrained one is
timed. `blockdraft evaluate` measures acceptance and speed-up.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from blockdraft.trainer.commands import load_draft, load_target, new_draft
from blockdraft.trainer.decoding_report import markdown_table
from blockdraft.trainer.evaluation import evaluate_decoding

EXAMPLE_TARGET = Path(__file__).parents[1] / "examples" / "chitchat" / "targets" / "kimi_k3"
VERIFIED = (1, 2, 4, 6, 8, 12, 16)


@torch.no_grad()
def verification_seconds(target: PreTrainedModel, prompt: list[int], repeats: int) -> dict[str, float]:
    """Median time of a plain decoding step and of target forwards on n tokens with their roll-back, taken in turn."""
    input_ids = torch.tensor([prompt], device=target.device)
    plain, recording = DynamicCache(config=target.config), DynamicCache(config=target.config)
    target(input_ids, cache=plain, use_cache=True)
    recording.activate_past_recording()
    target(input_ids, cache=recording, use_cache=True)
    recording.crop(0)

    def seconds(cache: DynamicCache, n: int, taken_back: int) -> float:
        start = time.perf_counter()
        target(input_ids[:, :n], cache=cache, use_cache=True).logits[0, -1, 0].item()  # waits for the device
        if taken_back:
            cache.crop(-taken_back)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"plain step": []} | {f"verify {n}": [] for n in VERIFIED}
    for _ in range(repeats):
        times["plain step"].append(seconds(plain, 1, 0))
        for n in VERIFIED:
            times[f"verify {n}"].append(seconds(recording, n, n))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    example = str(EXAMPLE_TARGET) if (EXAMPLE_TARGET / "config.json").exists() else None
    parser.add_argument("--target", default=example, required=example is None)
    parser.add_argument("--draft")
    parser.add_argument("--block_size", type=int, default=8, help="of the untrained draft")
    parser.add_argument("--num_draft_layers", type=int, default=2, help="of the untrained draft")
    parser.add_argument("--dtype", default="float32", help="of the target and its draft")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=48, help="tokens, at least 16")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    args = parser.parse_args()

    target, tokenizer = load_target(args.target, dtype=args.dtype)
    if args.draft:
        draft = load_draft(args.draft, target.dtype, trust_remote_code=True)
    else:
        draft = new_draft(target, tokenizer, block_size=args.block_size, num_draft_layers=args.num_draft_layers)
        draft = draft.to(target.device, target.dtype).eval()
    generator = torch.Generator().manual_seed(0)
    vocab_size = target.config.get_text_config().vocab_size
    prompts = torch.randint(vocab_size, (args.prompts, args.prompt_length), generator=generator).tolist()

    report = evaluate_decoding(target, draft, prompts, args.max_new_tokens)
    times = verification_seconds(target, prompts[0], args.repeats)
    parts, step = report.round_seconds, times["plain step"]
    times |= {f"round: {part}": seconds for part, seconds in parts.items()} | {"round": sum(parts.values())}
    print(
        markdown_table(("", "ms", "plain steps"), [(k, f"{1e3 * t:.2f}", f"{t / step:.2f}") for k, t in times.items()])
    )
    print(f"\n{1 / times['round']:.1f} rounds/s; more than {times['round'] / step:.2f} tokens a round are a speed-up.")
    if args.json:
        args.json.write_text(
            json.dumps({"seconds": times, "report": report.to_dict()}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
