"""The training step of both drafts against the dense reference and against the floor, and how its work grows.

    OMP_WAIT_POLICY=active python -m benchmarks.step --json step.json --plot step.png

Each figure comes from a process of its own, on random states: no target runs. Dense is attention by its definition
with a mask over `[context | blocks]` (a second table has it by SDPA) and logits of every slot; fast is what the
trainers do. The floor is the time of the products that no
implementation can leave out, each timed on its own in the same run. Memory is the peak above the process's own. Needs
Linux, whose /proc tells memory and load.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from blockdraft.trainer.evaluation.decoding_report import markdown_table

from .measuring import (
    BUSY_SHARE,
    Floor,
    OtherLoad,
    PeakMemory,
    busy_at_start,
    has_fast_bf16,
    measure_floor,
    median_seconds,
    product_rate,
    profile_by_kind,
)
from .training_step import Case, TrainingStep, Way, k3_config, v41_config
from .work import ATTENTION, HEAD, KINDS, Sizes, WorkCounter, necessary_products, slope, work_by_kind

CASES = [
    Case(k3_config(), 2048, 128),
    Case(k3_config(), 2048, 512),
    Case(v41_config(), 2048, 512),
    Case(v41_config(), 4096, 512),
]
# 2,048 supervised slots and a few more.
LARGE_VOCABULARY = [
    Case(k3_config(vocab_size=163840), 2048, 137),
    Case(v41_config(vocab_size=163840), 2048, 412),
]
TOKENS, ANCHORS = (1024, 2048, 4096, 8192), (64, 128, 256, 512)
TOKENS_AT, ANCHORS_AT = 512, 2048  # anchors while tokens grow, tokens while anchors grow
MAX_DISTANCE = 1.6  # from the floor; beyond it the profile is shown
START_SECONDS = 8  # of a process
THREADS = torch.get_num_threads()  # of each process that measures


@dataclass(frozen=True)
class Machine:
    """
    Where steps run.

    Attributes:
        dtype: of weights and states.
        autocast: that is measured beside it.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None


@dataclass
class Measured:
    """
    One way of computing a step.

    Attributes:
        bytes: peak memory above what was in use before.
        sizes: what the necessary work depends on.
        others: share of the processors that something else had meanwhile.
        profile: share of the time by kind of operator.
    """

    seconds: float
    bytes: int
    loss: float
    sizes: Sizes
    others: float
    profile: dict[str, float] = field(default_factory=dict)


@dataclass
class Comparison:
    """A case measured in all ways; `None` where memory ran out or a way was not asked for.

    Attributes:
        loss_difference, gradient_difference: fast to dense, relative; of all gradients as one vector.
        worst_parameter: the same of the parameter that differs most, and its name.
    """

    name: str
    dense: Measured | None
    dense_sdpa: Measured | None
    fast: Measured | None
    autocast: Measured | None
    floor: Floor | None
    necessary: dict[str, float]
    loss_difference: float | None = None
    gradient_difference: float | None = None
    worst_parameter: tuple[float, str] | None = None

    @property
    def distance(self) -> float | None:
        """From the floor, as a factor."""
        return self.fast.seconds / self.floor.seconds if self.fast and self.floor else None


# ---- what runs in processes of its own ----------------------------------------------------------------------------


def in_own_process(function: Callable, *args):
    """The function's result, or `None` where the system or the GPU had no memory left for it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler would write into the progress bar
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except (BrokenProcessPool, torch.OutOfMemoryError):
            return None


def measure_step(
    case: Case, way: Way, machine: Machine, autocast: bool, repeats: int, gradients: Path | None = None
) -> Measured:
    """Runs a step once, then `repeats` times, and writes its gradients."""
    step = TrainingStep(case, way, machine.device, machine.dtype, machine.autocast if autocast else None)
    device, sizes = step.device, step.sizes()
    load, memory = OtherLoad(), PeakMemory(device)
    loss = step.run()
    seconds = median_seconds(step.run, repeats, device)
    measured = Measured(seconds, memory.bytes(), loss, sizes, load.share())
    if gradients is not None:
        save_file({name: gradient.contiguous() for name, gradient in step.gradients().items()}, gradients)
    if way == "fast":
        measured.profile = profile_by_kind(step.run, device)
    return measured


def measure_case_floor(case: Case, sizes: Sizes, machine: Machine) -> Floor:
    # A V4.1 draft's logits are fp32 whatever its dtype.
    dtypes = dict.fromkeys(KINDS, machine.dtype)
    if case.config.model_type == v41_config().model_type:
        dtypes[HEAD] = torch.float32
    return measure_floor(necessary_products(case.config, sizes), torch.device(machine.device), dtypes)


def measure_growth(cases: Sequence[Case], machine: Machine) -> list[dict]:
    """Counted work by kind and seconds of the fast way for each case."""
    points = []
    for case in cases:
        step = TrainingStep(case, "fast", machine.device, machine.dtype)
        with WorkCounter(step.draft) as counter:
            step.run()
        seconds = median_seconds(step.run, 1, step.device)
        necessary = work_by_kind(necessary_products(case.config, step.sizes()))
        points.append(
            {
                "tokens": case.tokens,
                "anchors": case.anchors,
                "seconds": seconds,
                "work": {kind: counter.work[kind] for kind in KINDS},
                "necessary": necessary,
                "largest_tensor": counter.largest,
            }
        )
    return points


# ---- the run ------------------------------------------------------------------------------------------------------


def compare(case: Case, machine: Machine, repeats: int, done: Callable[[], None]) -> Comparison:
    """Measures a case in all ways; `done` is called after each."""
    with TemporaryDirectory() as folder:
        files = {way: Path(folder) / f"{way}.safetensors" for way in ("dense", "dense_sdpa", "fast")}
        ways = {}
        for way, file in files.items():
            ways[way] = in_own_process(measure_step, case, way, machine, False, repeats, file)
            done()
        dense, fast = ways["dense"], ways["fast"]
        autocast = floor = loss_difference = gradient_difference = worst = None
        if machine.autocast is not None:
            autocast = in_own_process(measure_step, case, "fast", machine, True, repeats)
            done()
        if fast is not None:
            floor = in_own_process(measure_case_floor, case, fast.sizes, machine)
        done()
        # By the definition of attention, unless that took more memory than there is.
        reference = "dense" if dense is not None else "dense_sdpa"
        if fast is not None and ways[reference] is not None:
            loss_difference = abs(fast.loss - ways[reference].loss) / abs(ways[reference].loss)
            gradient_difference, worst = gradient_differences(files["fast"], files[reference])
    necessary = work_by_kind(necessary_products(case.config, fast.sizes)) if fast is not None else {}
    differences = (loss_difference, gradient_difference, worst)
    return Comparison(case.name, dense, ways["dense_sdpa"], fast, autocast, floor, necessary, *differences)


def gradient_differences(actual: Path, expected: Path) -> tuple[float, tuple[float, str]]:
    """Norm of the difference over norm: of all tensors in two files as one vector, of the one that differs most."""
    squares, references, worst = 0.0, 0.0, (0.0, "")
    with safe_open(actual, "pt") as ours, safe_open(expected, "pt") as reference:
        assert set(ours.keys()) == set(reference.keys()), "the two ways reach different parameters"
        for name in ours.keys():
            a, b = ours.get_tensor(name).double(), reference.get_tensor(name).double()
            difference, norm = (a - b).norm().item(), b.norm().item()
            squares, references = squares + difference**2, references + norm**2
            if norm > 0:
                worst = max(worst, (difference / norm, name))
    return (squares / references) ** 0.5, worst


def estimated_seconds(cases: Sequence[Case], machine: Machine, repeats: int) -> float:
    """About how long [`compare`] takes for all of them: twice their products at the rate of a common one."""
    device = torch.device(machine.device)
    rate = product_rate(1, 2048, 512, 1536, device, machine.dtype)
    total = 0.0
    for case in cases:
        rows = case.anchors * case.config.block_size
        dense = necessary_products(case.config, Sizes.dense(case.tokens, rows))
        fast = necessary_products(case.config, Sizes(case.tokens, rows, rows, rows * case.tokens // 2))
        work = sum(product.work for product in (*dense, *dense, *fast))
        total += 2 * (repeats + 1) * work / rate + 4 * START_SECONDS
    return total


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    with tqdm(total=total, desc="Measuring", unit="process") as bar:
        yield lambda: bar.update() and None


def growth_cases(config, tokens: Sequence[int], anchors: Sequence[int]) -> dict[str, list[Case]]:
    """The two ways in which a step grows."""
    return {
        "tokens": [Case(config, size, TOKENS_AT) for size in tokens],
        "anchors": [Case(config, ANCHORS_AT, size) for size in anchors],
    }


# ---- tables -------------------------------------------------------------------------------------------------------


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    header = ["tokens x anchors", "dense s", "fast s", "times faster", "dense MB", "fast MB", "share", "loss differs"]
    header += ["gradient differs", "worst parameter", "floor s", "times the floor"]
    with_autocast = any(one.autocast for one in comparisons)
    header += ["bf16 autocast s", "MB"] if with_autocast else []
    rows = []
    for one in comparisons:
        cells = [one.name, *_against(one.dense, one.fast)]
        compared = one.loss_difference is not None
        differences = (one.loss_difference, one.gradient_difference, one.worst_parameter[0]) if compared else ()
        cells += [f"{difference:.0e}" for difference in differences] or ["-"] * 3
        cells += [f"{one.floor.seconds:.2f}", f"{one.distance:.2f}"] if one.floor else ["-", "-"]
        if with_autocast:
            cells += [f"{one.autocast.seconds:.2f}", f"{one.autocast.bytes / 1e6:,.0f}"] if one.autocast else ["-"] * 2
        rows.append(cells)
    return markdown_table(header, rows)


def sdpa_table(comparisons: Sequence[Comparison]) -> str:
    """Against the same reference with SDPA on the dense mask instead of attention by its definition."""
    header = ["dense by SDPA", "dense s", "fast s", "times faster", "dense MB", "fast MB", "share"]
    return markdown_table(header, [[one.name, *_against(one.dense_sdpa, one.fast)] for one in comparisons])


def _against(dense: Measured | None, fast: Measured | None) -> list[str]:
    """Seconds of both and their ratio, memory of both and the share."""
    both = dense is not None and fast is not None
    cells = [f"{way.seconds:.2f}" if way else "no memory" for way in (dense, fast)]
    cells += [f"{dense.seconds / fast.seconds:.2f}" if both else "-"]
    cells += [f"{way.bytes / 1e6:,.0f}" if way else "-" for way in (dense, fast)]
    return cells + [f"{fast.bytes / max(dense.bytes, 1):.2f}" if both else "-"]


def floor_table(comparisons: Sequence[Comparison]) -> str:
    """Of the necessary products: their work, the rate they reach, and what that makes."""
    kinds = [kind for kind in KINDS if any(kind in one.necessary for one in comparisons)]
    rows = []
    for one in comparisons:
        if one.floor is None:
            continue
        cells = (
            f"{one.necessary[kind] / 1e9:.0f} / {one.floor.rates[kind] / 1e9:.0f} = {one.floor.by_kind[kind]:.2f}"
            for kind in kinds
        )
        rows.append([one.name, *cells])
    return markdown_table(["floor: GFLOP / GFLOP/s = s", *kinds], rows)


def profile_table(comparisons: Sequence[Comparison]) -> str | None:
    """Where the time goes where the floor is far; `None` where it is near everywhere."""
    far = [one for one in comparisons if one.distance is not None and one.distance > MAX_DISTANCE]
    if not far:
        return None
    kinds = sorted({kind for one in far for kind in one.fast.profile}, key=lambda k: -far[0].fast.profile.get(k, 0))
    rows = [[one.name, *(f"{one.fast.profile.get(kind, 0):.0%}" for kind in kinds)] for one in far]
    return markdown_table(["fast step, share of its time", *kinds], rows)


def memory_table(measured: dict[str, dict[Way, Measured | None]]) -> str:
    """Peak memory above the weights, of the head and loss alone and of the whole step."""
    rows = []
    for name, ways in measured.items():
        slots = next((f"{one.sizes.slots:,}" for one in ways.values() if one), "-")
        rows.append([name, slots, *(f"{one.bytes / 1e6:,.0f}" if one else "no memory" for one in ways.values())])
    header = ["vocabulary 163,840, tokens x anchors", "supervised slots", "MB: head and loss", "MB: step"]
    return markdown_table(header, rows)


def growth_table(points: Sequence[dict], axis: str) -> str:
    """Counted work over one axis with fitted exponents, times beside."""
    sizes = [point[axis] for point in points]
    kinds = [kind for kind in KINDS if any(point["work"][kind] for point in points)]
    columns = {kind: [point["work"][kind] for point in points] for kind in kinds}
    columns["step"] = [sum(point["work"].values()) for point in points]
    over = [point["work"][ATTENTION] / point["necessary"][ATTENTION] for point in points]
    header = [axis, *(f"{name}, GFLOP" for name in columns), "attention over visible keys'", "s"]
    rows = [
        [f"{size:,}", *(f"{1e-9 * values[i]:.1f}" for values in columns.values()), f"{over[i]:.2f}"]
        + [f"{points[i]['seconds']:.2f}"]
        for i, size in enumerate(sizes)
    ]
    exponents = [exponent(sizes, values) for values in columns.values()]
    times = exponent(sizes, [point["seconds"] for point in points])
    return markdown_table(header, [*rows, ["exponent", *exponents, "", times]])


def exponent(sizes: Sequence[float], values: Sequence[float]) -> str:
    return f"{round(slope(sizes, values), 2) + 0.0:.2f}"  # no minus in front of 0.00


def busy_lines(measured: Sequence[Measured | None], at_start: str | None) -> list[str]:
    """What the reader has to know about the machine's other work."""
    others = max((one.others for one in measured if one is not None), default=0.0)
    lines = [at_start] if at_start else []
    if others > BUSY_SHARE:
        lines.append(f"The machine was busy: something else had up to {others:.0%} of the processors.")
    return [f"{line} Times are upper bounds." for line in lines]


def environment(machine: Machine) -> dict:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    gpu = torch.cuda.get_device_name() if machine.device == "cuda" else None
    return {
        "processor": names[0] if names else platform.machine(),
        "gpu": gpu,
        "threads": THREADS,
        "torch": torch.__version__,
        "dtype": str(machine.dtype),
    }


def write_plot(path: Path, comparisons: Sequence[Comparison], growth: dict[str, dict[str, list[dict]]]) -> None:
    """Times of the cases, and counted work over tokens and anchors, as PNG."""
    from matplotlib.figure import Figure

    from blockdraft.hub_cards.plots import BLUE, GREY, ORANGE

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    times, *panels = figure.subplots(1, 1 + 2 * bool(growth), squeeze=False)[0]
    bars = {
        "dense": (GREY, [one.dense and one.dense.seconds for one in comparisons]),
        "fast": (BLUE, [one.fast and one.fast.seconds for one in comparisons]),
        "floor": (ORANGE, [one.floor and one.floor.seconds for one in comparisons]),
    }
    for i, (label, (colour, seconds)) in enumerate(bars.items()):
        places = [place + 0.27 * (i - 1) for place in range(len(comparisons))]
        times.barh(places, [value or 0 for value in seconds], 0.25, color=colour, label=label)
    times.set_yticks(range(len(comparisons)), [one.name.replace(", ", "\n") for one in comparisons])
    times.invert_yaxis()
    times.set_xlabel("seconds of a step")
    times.legend(frameon=False)
    for axes, axis in zip(panels, ("tokens", "anchors"), strict=False):
        for (draft, by_axis), colour in zip(growth.items(), (BLUE, ORANGE), strict=True):
            if axis not in by_axis:
                continue
            points = by_axis[axis]
            sizes = [point[axis] for point in points]
            for style, label, values in (
                ("-", f"{draft}, step", [sum(point["work"].values()) for point in points]),
                ("--", f"{draft}, attention", [point["work"][ATTENTION] for point in points]),
            ):
                label = f"{label}: exponent {exponent(sizes, values)}"
                axes.loglog(sizes, [1e-9 * v for v in values], style, marker="o", color=colour, label=label)
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(axis)
        axes.set_ylabel("counted work (GFLOP)")
        axes.legend(frameon=False, fontsize=7)
    for axes in (times, *panels):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def report_json(comparisons: Sequence[Comparison], **more) -> dict:
    measured = [asdict(one) | {"distance": one.distance} for one in comparisons]
    return {"steps": measured, "max_distance": MAX_DISTANCE} | more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--plot", type=Path, help="draw them here, as PNG")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each way, after one to warm up")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--steps_only", action="store_true", help="without the tables of how work grows")
    options = parser.parse_args()

    at_start = busy_at_start()
    machine = Machine(autocast=torch.bfloat16 if has_fast_bf16() else None)
    cases, large, tokens, anchors, repeats = CASES, LARGE_VOCABULARY, TOKENS, ANCHORS, options.repeats
    if options.quick:
        cases = [Case(k3_config(), 512, 32), Case(v41_config(), 512, 64)]
        large, tokens, anchors, repeats = [], TOKENS[:2], ANCHORS[:2], 1
    if machine.autocast is None:
        print("This CPU has no bf16 products of its own: autocast is not measured.")
    configs = {} if options.steps_only else {"K3 DFlash": k3_config(), "V4.1 DSpark": v41_config()}
    growing = {name: growth_cases(config, tokens, anchors) for name, config in configs.items()}
    points = [case for by_axis in growing.values() for axis in by_axis.values() for case in axis]
    estimate = in_own_process(estimated_seconds, cases, machine, repeats)
    estimate += in_own_process(estimated_seconds, [*large, *points], machine, 1) / 4
    print(f"About {max(1, round(estimate / 60))} min.")

    processes = len(cases) * (4 + (machine.autocast is not None)) + 2 * len(large) + 2 * len(configs)
    with progress(processes) as done:
        comparisons = [compare(case, machine, repeats, done) for case in cases]
        memory = {}
        for case in large:
            memory[case.name] = {}
            for way in ("objective", "fast"):
                memory[case.name][way] = in_own_process(measure_step, case, way, machine, False, 1)
                done()
        growth: dict[str, dict[str, list[dict]]] = {}
        for name, by_axis in growing.items():
            growth[name] = {}
            for axis, sizes in by_axis.items():
                if (counted := in_own_process(measure_growth, sizes, machine)) is not None:
                    growth[name][axis] = counted
                done()

    measured = [way for one in comparisons for way in (one.dense, one.dense_sdpa, one.fast, one.autocast)]
    measured += [one for ways in memory.values() for one in ways.values()]
    tables = [comparison_table(comparisons), sdpa_table(comparisons)]
    tables += [floor_table(comparisons), profile_table(comparisons)]
    tables += [memory_table(memory)] if memory else []
    for name, by_axis in growth.items():
        for axis, points in by_axis.items():
            fixed = f"{TOKENS_AT} anchors" if axis == "tokens" else f"{ANCHORS_AT:,} tokens"
            tables.append(f"Counted work of the {name} step, {fixed}:\n\n{growth_table(points, axis)}")
    settings = environment(machine)
    print(f"\n{settings['processor']}, {settings['threads']} threads, torch {settings['torch']}, fp32\n")
    busy = busy_lines(measured, at_start)
    print("\n\n".join([*busy, *(table for table in tables if table)]))
    if options.json:
        memory_json = {
            name: {way: asdict(one) if one else None for way, one in ways.items()} for name, ways in memory.items()
        }
        report = report_json(comparisons, memory=memory_json, growth=growth, busy=busy, environment=settings)
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        write_plot(options.plot, comparisons, growth)


if __name__ == "__main__":
    torch.set_num_threads(1)  # with OMP_WAIT_POLICY=active its idle threads would spin beside those that measure
    main()
