"""Processor speed: matrix products by precision and library, and memory, measured in half a second.

A training step on a CPU is mostly matrix products, so their speed in each precision shows the best one for
a processor. Figures are of this moment and of one core: on a busy machine the waits of several threads for
one another would hide the speed of the processor.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]

_SIZE = 512  # of the square matrices: 0.27 GFLOP; large enough for a library's best, small for a slow machine
_COPY_BYTES = 128 << 20  # beyond the caches
_PATIENCE_S = 0.08  # for each figure
_WORTHWHILE = 1.3  # times the speed of float32, from which on fewer bits are advised


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Throughput of one kind of work."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class ProcessorSpeed:
    """Throughput of one core of this processor, and advice for a training."""

    products: tuple[Throughput, ...]
    memory: Throughput
    advice: str


def measure_speed(float32_products: Mapping[str, Product] | None = None) -> ProcessorSpeed:
    """Measure products in float32 and bfloat16, and the bandwidth of memory, on one core of the CPU.

    Args:
        float32_products: Further ways to multiply float32 matrices, by name.
    """
    ways: dict[str, Product] = {"torch": torch.mm}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        ways["oneDNN"] = _multiply_by_onednn
    ways |= float32_products or {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        float32 = {name: _measure_product(multiply, torch.float32) for name, multiply in ways.items()}
        bfloat16 = _measure_product(torch.mm, torch.bfloat16)
        memory = _measure_copy()
    finally:
        torch.set_num_threads(num_threads)
    products = {f"float32 products, {name}": value for name, value in float32.items()}
    products["bfloat16 products, torch"] = bfloat16
    return ProcessorSpeed(
        products=tuple(
            Throughput(name=name, value=value, unit="GFLOP/s") for name, value in products.items()
        ),
        memory=Throughput(name="memory, copied (read and written)", value=memory, unit="GB/s"),
        advice=advise(max(float32.values()), bfloat16),
    )


def advise(float32: float, bfloat16: float) -> str:
    """Return advice on the precision for a processor.

    Args:
        float32: GFLOP/s of products by the faster library.
        bfloat16: The same.
    """
    if bfloat16 >= _WORTHWHILE * float32:
        return f"good at bfloat16: its products are {bfloat16 / float32:.1f} times as fast as float32's"
    if bfloat16 * _WORTHWHILE > float32:
        return "float32: bfloat16 products are about as fast, so it saves memory only"
    return f"float32: bfloat16 products take {float32 / bfloat16:.1f} times as long"


def _multiply_by_onednn(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def _measure_product(multiply: Product, dtype: torch.dtype) -> float:
    """Return GFLOP/s of products of two square matrices."""
    a, b = (torch.ones(_SIZE, _SIZE).to(dtype) for _ in range(2))
    return round(2e-9 * _SIZE**3 / _best_time(lambda: multiply(a, b)), 1)


def _measure_copy() -> float:
    """Return GB/s of a copy, each byte counted as it is read and as it is written."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)  # written once: its pages are there
    return round(2e-9 * _COPY_BYTES / _best_time(lambda: target.copy_(source)), 1)


def _best_time(work: Callable[[], object]) -> float:
    """Return the shortest of several runs in seconds: at least two, after a warm-up."""
    work()
    times: list[float] = []
    while len(times) < 2 or sum(times) < _PATIENCE_S:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
