"""The measurement of the speed of torch's BLAS and of oneDNN on this machine.

A few small products, alternating, the fastest of each, on one core, in CPU time of this thread, so that
waiting for the core does not count. A program on the core's other hardware thread does (`_profile_cache.py`).
The measurement takes less than 50 ms of the core.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from colossalai.kernel._rule import Profile

_PLAIN = ((128, 256, 512), (256, 384, 128))  # rows, terms, columns; 0.2 to 0.4 ms each
_TURNED = (512, 256, 256)
_TINY = (16, 16, 16)
_SHORT = (1024, 8, 1024)  # few terms: the time is that of writing the result
_BUDGET_S = 0.02  # of the rounds; the first calls, in which oneDNN compiles its kernels, are not included
_MOST_ROUNDS = 15
_ROUNDING = 1e-4  # of the largest sum: float32 is a hundred times better, bfloat16 ten times worse
# Environment variables that affect the two libraries.
_VARIABLES = ("MKL_", "ONEDNN_", "DNNL_", "ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE")
_OF_THE_MOMENT = (
    "processor",
    "cpu MHz",
    "bogomips",
    "BogoMIPS",
    "microcode",
    "apicid",
    "initial apicid",
    "core id",
)


@dataclass(frozen=True)
class Measurement:
    """One run of the measurement.

    Attributes:
        profile: The figures of one core.
        spread: Excess of a median round over the fastest, relative to the fastest.
    """

    profile: Profile
    spread: float = 0.0


def processor_and_version(
    *, cpuinfo: Path = Path("/proc/cpuinfo"), environment: Mapping[str, str] = os.environ
) -> str:
    """Return the dependencies of a measurement as a line: processor, torch, variables of the libraries."""
    try:
        first = cpuinfo.read_text().split("\n\n")[0]
    except OSError:
        first = f"model name: {platform.processor() or platform.machine()}"
    fields = dict(_field(line) for line in first.splitlines() if ":" in line)
    name = fields.get("model name") or platform.machine()
    kept = sorted(item for item in fields.items() if item[0] not in _OF_THE_MOMENT)
    set_ = sorted(item for item in environment.items() if item[0].startswith(_VARIABLES))
    capability = torch.backends.cpu.get_cpu_capability()
    digest = sha256(repr((kept, set_, capability)).encode()).hexdigest()[:16]
    return f"{name}, torch {torch.__version__}, {digest}"


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def measure_profile(*, timer: Callable[[], float] = time.thread_time) -> Measurement:
    """Measure one core. The states of the random generators do not change; a default device has no effect.

    Args:
        timer: Returns seconds.
    """
    linear = torch.ops.mkldnn._linear_pointwise.default
    # A job can be launched within a user's function mode, for example `torch.device("meta")`.
    with _one_thread(), torch.inference_mode(), torch._C.DisableTorchFunction():
        operands = [(_waves(m, k, 1e3), _waves(k, n, 2e3)) for m, k, n in (*_PLAIN, _TINY, _SHORT)]
        m, k, n = _TURNED
        operands.append((_waves(k, m, 1e3).t(), _waves(k, n, 2e3)))
        calls: list[Callable[[], torch.Tensor]] = []
        for a, b in operands:
            calls += [partial(torch.mm, a, b), partial(linear, a, b.t(), None, "none", [], "")]
        exact = operands[0][0].double() @ operands[0][1].double()
        if (calls[1]() - exact).abs().max() > _ROUNDING * exact.abs().max():
            return Measurement(Profile(onednn_gflops=0.0))
        for call in calls:
            call()
        rounds: list[list[float]] = []
        end = timer() + _BUDGET_S
        while len(rounds) < _MOST_ROUNDS and (not rounds or timer() < end):
            rounds.append([_seconds(call, timer) for call in calls])
    times: list[tuple[float, ...]] = list(zip(*rounds, strict=True))  # [call][round]
    least = [min(each) for each in times]
    num_plain = 2 * len(_PLAIN)
    median = sum(statistics.median(each) for each in times[:num_plain])
    spread = median / sum(least[:num_plain]) - 1 if any(least[:num_plain]) else 0.0
    by_torch, by_onednn = least[::2], least[1::2]
    kflop = 2e-3 * sum(m * k * n for m, k, n in _PLAIN)
    call_us = 1e6 * max(by_onednn[2] - by_torch[2], 0.0)
    torch_gflops = kflop / (1e6 * (by_torch[0] + by_torch[1]))
    onednn_us = max(1e6 * (by_onednn[0] + by_onednn[1]) - 2 * call_us, 1.0)

    def left_ns(seconds: float, sizes: tuple[int, int, int], elements: int) -> float:
        """Return the time per element that remains after the call and the products are subtracted."""
        left_us = 1e6 * seconds - call_us - 2e-3 * math.prod(sizes) * onednn_us / kflop
        return max(1e3 * left_us / elements, 0.0)

    profile = Profile(
        call_us,
        torch_gflops,
        kflop / onednn_us,
        turn_ns=left_ns(by_onednn[4], _TURNED, m * k),
        write_ns=left_ns(by_onednn[3], _SHORT, _SHORT[0] * _SHORT[2]),
    )
    return Measurement(profile, spread)


def _seconds(call: Callable[[], object], timer: Callable[[], float]) -> float:
    start = timer()
    call()
    return timer() - start


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _waves(rows: int, columns: int, frequency: float) -> torch.Tensor:
    """Return a matrix of different numbers."""
    return (
        torch.linspace(-1, 1, rows * columns, dtype=torch.float64)
        .mul_(frequency)
        .sin_()
        .float()
        .view(rows, columns)
    )
