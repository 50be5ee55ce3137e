"""What `step.py` and `step_gpu.py` measure with: seconds, peak memory, the machine's rate at products, a profile, and
whether something else had the processors."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .work import ATTENTION, HEAD, Product

PROC = Path("/proc")
BUSY_LOAD, BUSY_SHARE = 0.5, 0.05  # load average a core before the start, and others' part of the processors since
CHUNK_ROWS = {HEAD: 512}  # rows of a product that is timed; other kinds:
DEFAULT_ROWS = 2048
RATE_SECONDS = 0.15  # for each shape of product
PROFILE_KINDS = {
    "products": ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "addmm_", "baddbmm_", "mv", "linear"),
    "copies": ("copy_", "cat", "clone", "index", "index_select", "index_add_", "gather", "scatter", "fill_", "zero_"),
    "softmax, exp": ("_softmax", "_log_softmax", "exp", "exp_", "tanh", "sigmoid", "silu", "softplus", "logsumexp"),
    "elementwise": ("add", "add_", "mul", "mul_", "sub", "sub_", "div", "div_", "neg", "pow", "rsqrt", "sum", "mean")
    + ("clamp", "clamp_", "where", "abs", "sgn", "square", "masked_fill", "masked_fill_", "sqrt", "maximum"),
}


# ---- time and memory ----------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


class PeakMemory:
    """Most bytes in use since it was made, above those in use then: of the process, or of the GPU's allocator."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            (PROC / "self" / "clear_refs").write_text("5")  # the peak begins anew
            self._before = _status("VmRSS")

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return _status("VmHWM") - self._before


def _status(field: str) -> int:
    lines = (PROC / "self" / "status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


class OtherLoad:
    """How much of the processors something else had since this was made, by the kernel's own counts."""

    def __init__(self):
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds since boot that processors were in use or stolen, those of this process, and the wall clock."""
        user, nice, system, _, _, irq, softirq, steal, *_ = (PROC / "stat").read_text().split("\n")[0].split()[1:]
        ticks = sum(map(int, (user, nice, system, irq, softirq, steal)))
        own = os.times()
        return ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system, time.perf_counter()

    def share(self) -> float:
        used, own, wall = (now - start for now, start in zip(self._read(), self._start, strict=True))
        return max(0.0, used - own) / (wall * os.cpu_count())


def busy_at_start() -> str | None:
    """A line if the machine has other things to do."""
    load = os.getloadavg()[0]
    if load > BUSY_LOAD * os.cpu_count():
        return f"The machine is busy: load average {load:.1f} on {os.cpu_count()} cores before the start."
    return None


def has_fast_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices by instructions of their own."""
    cpuinfo = PROC / "cpuinfo"
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


# ---- the floor ----------------------------------------------------------------------------------------------------


@dataclass
class Floor:
    """
    Attributes:
        seconds: the necessary products at the rate that this machine reaches on their shapes.
        by_kind: the same by kind of product.
        rates: operations a second by kind.
    """

    by_kind: dict[str, float]
    rates: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.by_kind.values())


def measure_floor(products: Iterable[Product], device: torch.device, dtypes: dict[str, torch.dtype]) -> Floor:
    """Times every shape of product on its own, forward and gradients, and adds them up; `dtypes` by kind."""
    rates: dict[tuple, float] = {}
    seconds: Counter[str] = Counter()
    work: Counter[str] = Counter()
    for product in products:
        rows = min(round(product.rows), CHUNK_ROWS.get(product.kind, DEFAULT_ROWS))
        batch = min(round(product.batch), 64) if product.kind == ATTENTION else 1
        m, k, n = max(rows, 1), product.inputs, max(round(product.outputs), 1)
        passes = [(m, k, n)]
        passes += [(m, n, k)] if product.input_gradient else []
        passes += [(k, m, n)] if product.weight_gradient else []
        for shape in passes:
            key = (batch, *shape)
            known = (key, dtypes[product.kind])
            if known not in rates:
                rates[known] = product_rate(*key, device, dtypes[product.kind])
            seconds[product.kind] += product.work / len(passes) / rates[known]
        work[product.kind] += product.work
    return Floor(dict(seconds), {kind: work[kind] / seconds[kind] for kind in seconds})


def product_rate(batch: int, m: int, k: int, n: int, device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of `[m, k] @ [k, n]`, `batch` at once: the best of a few runs."""
    lead = (batch,) if batch > 1 else ()
    a, b = torch.randn(*lead, m, k, device=device, dtype=dtype), torch.randn(*lead, k, n, device=device, dtype=dtype)
    out = torch.empty(*lead, m, n, device=device, dtype=dtype)
    repeats = 1

    def call() -> None:
        for _ in range(repeats):
            torch.matmul(a, b, out=out)

    call()
    once = seconds_of(call, device)
    repeats = max(1, int(RATE_SECONDS / 3 / max(once, 1e-6)))
    best = min(seconds_of(call, device) for _ in range(3)) / repeats
    return 2.0 * batch * m * k * n / best


# ---- profile ------------------------------------------------------------------------------------------------------


def profile_by_kind(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Share of a call's time by kind of operator, each operator's own time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        call()
        synchronize(device)
    times: Counter[str] = Counter()
    for event in profile.key_averages():
        own = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        times[profile_kind(event.key)] += own
    total = sum(times.values())
    return {kind: microseconds / total for kind, microseconds in times.most_common()}


def profile_kind(name: str) -> str:
    operator = name.removeprefix("aten::")
    if "attention" in operator:
        return "attention kernel"
    for kind, names in PROFILE_KINDS.items():
        if operator.removesuffix("_backward_data").removesuffix("_backward") in names:
            return kind
    return "other"


def median_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    return statistics.median(seconds_of(call, device) for _ in range(repeats))
