"""What a round of block decoding costs: verifications of 1 to 16 tokens, drafting, and the loop's own work by kind.

    OMP_NUM_THREADS=1 python -m benchmarks.decode --plot costs.png --json costs.json
    OMP_NUM_THREADS=1 python -m benchmarks.decode --target TARGET --draft DRAFT

Without `--target` both embedded targets are measured, without `--draft` an untrained one. Costs do not depend on what
is accepted, so the prompts are random tokens and no answer stops; `blockdraft evaluate` measures acceptance and
speed-up. Times are medians of measurements taken in turn.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from blockdraft.hub_cards.plots import BLUE, GREY, ORANGE
from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.decoding_state import ROUND_PARTS
from blockdraft.trainer.evaluation.decoding_report import markdown_table
from blockdraft.trainer.loading import load_draft, load_target, new_draft

from .measuring import OtherLoad, busy_at_start

TARGETS = Path(__file__).parents[1] / "examples" / "chitchat" / "targets"
EXAMPLES = {"kimi_k3": "dflash", "deepseek_v41": "dspark"}  # with the draft of the family
VERIFIED = (1, 2, 4, 6, 8, 12, 16)
DECODING = {"greedy": {"do_sample": False}, "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 50}}
FORWARDS = {"target": "verification forward", "draft": "draft forward"}
OWN_WORK = {
    "choose": "choosing the draft's tokens",
    "match": "scoring and matching",
    "commit": "commit and stops",
    "rollback": "cache roll-back",
    "features": "feature concatenation",
    "other": "bookkeeping, start of the loop",
}


@dataclass
class Costs:
    """
    Attributes:
        name: of the pair.
        block_size: tokens of a block; verified: tokens of a verification in a round.
        plain_step: seconds of a plain decoding step.
        verification: seconds of a target forward by its number of tokens, the roll-back of all included.
        rounds: by kind of decoding, the seconds of a round's parts.
    """

    name: str
    block_size: int
    verified: int
    plain_step: float
    verification: dict[int, float]
    rounds: dict[str, dict[str, float]]

    def shares(self, decoding: str) -> dict[str, float]:
        """Target, draft and the rest of a round."""
        parts = self.rounds[decoding]
        whole = sum(parts.values())
        shares = {part: parts[part] / whole for part in FORWARDS}
        return shares | {"rest": 1 - sum(shares.values())}

    def summary(self) -> dict:
        rounds = {kind: sum(parts.values()) for kind, parts in self.rounds.items()}
        return {
            "rounds_per_second": {kind: 1 / seconds for kind, seconds in rounds.items()},
            "round_in_plain_steps": {kind: seconds / self.plain_step for kind, seconds in rounds.items()},
            "shares": {kind: self.shares(kind) for kind in self.rounds},
            "verification_in_plain_steps": {n: t / self.plain_step for n, t in self.verification.items()},
        }


@torch.inference_mode()
def verification_seconds(target: PreTrainedModel, prompt: list[int], repeats: int) -> tuple[float, dict[int, float]]:
    """Times of a plain decoding step, and of target forwards on n tokens with their roll-back, taken in turn."""
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

    steps, verified = [], {n: [] for n in VERIFIED}
    for _ in range(repeats):
        steps.append(seconds(plain, 1, 0))
        for n in VERIFIED:
            verified[n].append(seconds(recording, n, n))
    return statistics.median(steps), {n: statistics.median(times) for n, times in verified.items()}


def round_seconds(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int
) -> dict[str, dict[str, float]]:
    """Seconds of a round's parts for each kind of decoding."""
    never = target.config.get_text_config().vocab_size  # no token has this number: answers go on to their limit
    decode = partial(
        block_decode,
        target,
        draft=draft,
        max_new_tokens=max_new_tokens,
        eos_token_id=never,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in DECODING}
    for prompt in [prompts[0], *prompts]:
        for kind, settings in DECODING.items():
            output = decode(torch.tensor([prompt], device=target.device), **settings)
            seconds, rounds = dict(output.seconds), len(output.accepted_lengths)
            seconds["other"] = seconds.pop("total") - sum(seconds[part] for part in ROUND_PARTS)
            del seconds["prefill"]
            measured[kind].append({part: value / rounds for part, value in seconds.items()})
    # The first answer warms up.
    return {
        kind: {part: statistics.median(answer[part] for answer in answers[1:]) for part in answers[0]}
        for kind, answers in measured.items()
    }


def measure(name: str, target: PreTrainedModel, draft: PreTrainedModel, options: argparse.Namespace) -> Costs:
    generator = torch.Generator().manual_seed(0)
    vocab_size = target.config.get_text_config().vocab_size
    prompts = torch.randint(vocab_size, (options.prompts, options.prompt_length), generator=generator).tolist()
    rounds = round_seconds(target, draft, prompts, options.max_new_tokens)
    costs = verification_seconds(target, prompts[0], options.repeats)
    return Costs(name, draft.config.block_size, 1 + draft.config.num_drafted, *costs, rounds)


def table(costs: Costs) -> str:
    """Times and shares, as Markdown."""
    step = costs.plain_step
    verified = [(f"verify {n}", f"{1e3 * t:.2f}", f"{t / step:.2f}") for n, t in costs.verification.items()]
    header = (f"{costs.name}, {costs.verified} tokens verified in a round", "ms", "plain steps")
    text = [markdown_table(header, [("plain step", f"{1e3 * step:.2f}", "1.00"), *verified])]
    rows = []
    for part, label in (FORWARDS | OWN_WORK).items():
        shares = [parts[part] / sum(parts.values()) for parts in costs.rounds.values()]
        times = [parts[part] for parts in costs.rounds.values()]
        rows.append((label, *(f"{1e3 * t:.3f} ({share:.1%})" for t, share in zip(times, shares, strict=True))))
    rows.append(("all outside the forwards", *(f"{costs.shares(kind)['rest']:.1%}" for kind in costs.rounds)))
    summary = costs.summary()
    for key in ("rounds_per_second", "round_in_plain_steps"):
        rows.append((key.replace("_", " "), *(f"{summary[key][kind]:.2f}" for kind in costs.rounds)))
    return "\n\n".join([*text, markdown_table(("a round, ms (share)", *costs.rounds), rows)])


def write_plot(path: Path, measured: list[Costs]) -> None:
    """Where a round's time goes, and what a verification costs by its tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    bars, curve = figure.subplots(1, 2)
    names = [f"{costs.name}\n{kind}" for costs in measured for kind in costs.rounds]
    shares = [costs.shares(kind) for costs in measured for kind in costs.rounds]
    left = [0.0] * len(shares)
    for part, colour in zip((*FORWARDS, "rest"), (BLUE, ORANGE, GREY), strict=True):
        widths = [100 * share[part] for share in shares]
        bars.barh(names, widths, 0.6, left=left, color=colour, label=FORWARDS.get(part, "the loop's own work"))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    bars.set_xlabel("share of a round (%)")
    bars.invert_yaxis()
    bars.legend(frameon=False, fontsize=7, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.15))
    for costs, colour in zip(measured, (BLUE, ORANGE), strict=False):
        steps = costs.summary()["verification_in_plain_steps"]
        curve.plot([*steps], [*steps.values()], marker="o", color=colour, label=costs.name)
    curve.set_xlabel("tokens of a verification")
    curve.set_ylabel("plain steps")
    curve.set_ylim(bottom=0)
    curve.legend(frameon=False)
    for axes in (bars, curve):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def recompile_limit_reached() -> bool:
    """Whether torch.compile gave up on a function in this process, which then runs uncompiled where no graph fits."""
    from torch._dynamo.utils import counters

    return any("recompile limit" in reason for reason in counters["unimplemented"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: both embedded targets")
    parser.add_argument("--draft", help="of `--target`; default: an untrained one")
    parser.add_argument("--draft_type", choices=("dflash", "dspark"), help="of the untrained draft")
    parser.add_argument("--block_size", type=int, help="of the untrained draft; default: dflash 8, dspark 5")
    parser.add_argument("--num_draft_layers", type=int, default=1, help="of the untrained draft")
    parser.add_argument("--dtype", default="float32", help="of the target and its draft")
    parser.add_argument("--compile", action="store_true", help="both models, by torch.compile")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt_length", type=int, default=48, help="tokens, at least 16")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--plot", type=Path, help="write a plot here")
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    options = parser.parse_args()
    if options.draft and not options.target:
        parser.error("--draft needs its --target")
    names = [options.target] if options.target else [str(TARGETS / name) for name in EXAMPLES]

    busy, others, measured = busy_at_start(), OtherLoad(), []
    for name in names:
        target, tokenizer = load_target(name, dtype=options.dtype)
        if options.draft:
            draft = load_draft(options.draft, target.dtype, trust_remote_code=True)
        else:
            kind = options.draft_type or EXAMPLES.get(Path(name).name, "dflash")
            shape = {"block_size": options.block_size or {"dflash": 8, "dspark": 5}[kind]}
            draft = new_draft(target, tokenizer, kind, num_draft_layers=options.num_draft_layers, **shape)
            draft = draft.to(target.device, target.dtype).eval()
        if options.compile:
            for model in (target, draft):
                model.compile(dynamic=True)
        label = Path(name).name + (", compiled" if options.compile else "")
        measured.append(measure(label, target, draft, options))
        print(f"\n{table(measured[-1])}", flush=True)
    lines = [busy, f"Other processes had {others.share():.0%} of the processors meanwhile."]
    lines = [line for line in lines if line]
    print("\n" + "\n".join(lines))
    limit_reached = options.compile and recompile_limit_reached()
    if limit_reached:
        print("torch.compile reached its recompile limit: part of the forwards ran uncompiled.")
    if options.plot:
        write_plot(options.plot, measured)
    if options.json:
        machine = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}
        machine |= {"busy": lines, "compiled": options.compile, "recompile_limit_reached": limit_reached}
        values = {"machine": machine, "dtype": options.dtype}
        values["pairs"] = [asdict(costs) | costs.summary() for costs in measured]
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
