"""The measurement: how fast torch's BLAS and oneDNN multiply here, and a cache of it.

A few small products, by turns, the fastest of each, on one core, in the time that this thread computes: other
programs do not count. It takes less than 50 ms of it. It is done once for a processor and a
version of torch: the figures stand in a file in the user's cache folder. What cannot be read there, or
is not what is written there, is measured again, and what cannot be written is not kept, both in silence.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, fields
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from colossalai.kernel._rule import Profile

_PLAIN = ((128, 256, 512), (256, 384, 128))  # rows, terms, columns; 0.2 to 0.4 ms each
_TURNED = (512, 256, 256)
_TINY = (16, 16, 16)
_SHORT = (1024, 8, 1024)  # few terms: what counts is to write the result
_BUDGET_S = 0.02  # of the rounds; the first calls, in which oneDNN compiles its kernels, come before
_MOST_ROUNDS = 15
_ROUNDING = 1e-4  # of the largest sum: float32 is a hundred times better, bfloat16 ten times worse
_MOST = 1e6  # of any figure
_MOST_ENTRIES = 64
_MOST_BYTES = 1 << 16
# What else changes what the two libraries do: their own variables.
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


def processor_and_version(
    *, cpuinfo: Path = Path("/proc/cpuinfo"), environment: Mapping[str, str] = os.environ
) -> str:
    """Return what a measurement depends on, as one line: the processor, torch, variables of the libraries."""
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


def cache_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where measurements are kept for this user; None where there is no home."""
    folder = environment.get("XDG_CACHE_HOME", "")
    try:
        return (
            (Path(folder) if Path(folder).is_absolute() else Path.home() / ".cache")
            / "colossalai"
            / "matmul.json"
        )
    except RuntimeError:
        return None


def measured_profile(
    *, file: Path | None = None, key: str | None = None, measure: Callable[[], Profile] | None = None
) -> Profile:
    """Return how fast both libraries multiply float32 matrices here.

    Args:
        file: Where measurements are kept; default: in the user's cache folder.
        key: What it is kept by; default: `processor_and_version()`.
        measure: Measures a core if it is not kept; default: this process does.

    Returns:
        The figures of all threads of this process together.
    """
    file = file or cache_file()
    key = key or processor_and_version()
    kept = {} if file is None else _read(file)
    if key not in kept:
        kept[key] = [round(float(figure), 4) for figure in astuple((measure or measure_profile)())]
        if file is not None:
            _write(file, dict(list(kept.items())[-_MOST_ENTRIES:]))
    core, threads = Profile(*kept[key]), torch.get_num_threads()
    return Profile(
        core.call_us,
        core.torch_gflops * threads,
        core.onednn_gflops * threads,
        turn_ns=core.turn_ns / threads,
        write_ns=core.write_ns / threads,
    )


def measure_profile() -> Profile:
    """Measure one core; see `measured_profile`. The states of the random generators stay as they are."""
    linear = torch.ops.mkldnn._linear_pointwise.default
    with _one_thread(), torch.inference_mode():
        operands = [(_waves(m, k, 1e3), _waves(k, n, 2e3)) for m, k, n in (*_PLAIN, _TINY, _SHORT)]
        m, k, n = _TURNED
        operands.append((_waves(k, m, 1e3).t(), _waves(k, n, 2e3)))
        calls: list[Callable[[], torch.Tensor]] = []
        for a, b in operands:
            calls += [partial(torch.mm, a, b), partial(linear, a, b.t(), None, "none", [], "")]
        exact = operands[0][0].double() @ operands[0][1].double()
        if (calls[1]() - exact).abs().max() > _ROUNDING * exact.abs().max():
            return Profile(onednn_gflops=0.0)
        for call in calls:
            call()
        least = [math.inf] * len(calls)
        end = time.thread_time() + _BUDGET_S
        for _ in range(_MOST_ROUNDS):
            for number, call in enumerate(calls):
                start = time.thread_time()
                call()
                least[number] = min(least[number], time.thread_time() - start)
            if time.thread_time() > end:
                break
    by_torch, by_onednn = least[::2], least[1::2]
    kflop = 2e-3 * sum(m * k * n for m, k, n in _PLAIN)
    call_us = 1e6 * max(by_onednn[2] - by_torch[2], 0.0)
    torch_gflops = kflop / (1e6 * (by_torch[0] + by_torch[1]))
    onednn_us = max(1e6 * (by_onednn[0] + by_onednn[1]) - 2 * call_us, 1.0)

    def left_ns(seconds: float, sizes: tuple[int, int, int], elements: int) -> float:
        """Return what remains for each of so many elements when the call and the products are paid."""
        left_us = 1e6 * seconds - call_us - 2e-3 * math.prod(sizes) * onednn_us / kflop
        return max(1e3 * left_us / elements, 0.0)

    return Profile(
        call_us,
        torch_gflops,
        kflop / onednn_us,
        turn_ns=left_ns(by_onednn[4], _TURNED, m * k),
        write_ns=left_ns(by_onednn[3], _SHORT, _SHORT[0] * _SHORT[2]),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _waves(rows: int, columns: int, frequency: float) -> torch.Tensor:
    """Return a matrix of unlike numbers."""
    return (
        torch.linspace(-1, 1, rows * columns, dtype=torch.float64)
        .mul_(frequency)
        .sin_()
        .float()
        .view(rows, columns)
    )


def _read(file: Path) -> dict[str, list[float]]:
    """Return what a file holds of what `_write` writes: names with figures that can be; else nothing."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            return {}
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if _are_figures(value)}


def _are_figures(value: object) -> bool:
    """Return whether these are the figures of a profile, of which the second is divided by."""
    if not isinstance(value, list) or len(value) != len(fields(Profile)):
        return False
    return all(type(figure) is float and 0 <= figure <= _MOST for figure in value) and value[1] > 0


def _write(file: Path, entries: Mapping[str, list[float]]) -> None:
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(entries))
        beside.replace(file)
    except OSError:
        with suppress(OSError):
            beside.unlink()
