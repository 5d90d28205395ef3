"""Samples of the operations of a training step, run to measure the cost of each kind."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from colossalai.auto_parallel.machine._rates import Kind

POOL = 1 << 23
"""Elements of the random memory that operands are slices of on a CPU, and of the largest sample."""

DEVICE_POOL = 1 << 27
"""The same on an accelerator, where caches hold 32 MB."""


class Operands:
    """Tensors of random numbers at no cost: consecutive slices of a common memory.

    Args:
        dtype: Dtype of the tensors.
        device: Device of the tensors.
        size: Elements of the memory, and of the largest tensor.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, size: int = POOL) -> None:
        self.device = device
        self._memory = torch.randn(size, device=device, dtype=torch.float32).to(dtype)
        self._next = 0

    def take(self, *shape: int) -> Tensor:
        """Return a leaf that requires a gradient."""
        num = math.prod(shape)
        if self._next + num > len(self._memory):
            self._next = 0
        part = self._memory[self._next : self._next + num].view(shape)
        self._next += -(-num // 64) * 64  # aligned, as allocated memory is
        return part.detach().requires_grad_()

    def ids(self, num: int, highest: int) -> Tensor:
        """Return `num` integers below `highest`."""
        return torch.randint(highest, (num,), device=self.device)


@dataclass(eq=False)
class Sample:
    """An operation to be measured.

    Attributes:
        kind: Its kind.
        make: Returns its operands.
        call: Runs its forward.
        is_chain: Whether the first operand of each forward is the previous result.
        shape: The three extents, for `FLOP_KINDS`.
        flops: Floating point operations of its forward and backward.
        num_bytes: Counted bytes of its forward and backward.
        copies: Number of forwards in a round.
        times: Seconds of its forward and backward, for each round.
    """

    kind: Kind
    make: Callable[[Operands], list[Tensor]]
    call: Callable[..., Tensor]
    is_chain: bool = False
    shape: tuple[int, int, int] | None = None
    flops: tuple[float, float] = (0.0, 0.0)
    num_bytes: tuple[float, float] = (0.0, 0.0)
    copies: int = 1
    times: list[tuple[float, float]] = field(default_factory=list)


def all_samples(*, scale: int, largest: int = POOL) -> Iterator[Sample]:
    """Yield the samples of a dtype.

    Args:
        scale: Factor of the large extents: a processor with many units needs larger products to be busy.
        largest: Elements of the largest tensors of the operations that are counted by bytes.
    """
    large, thin = 512 * scale, 16
    for m, k, n in (
        (4, 4, 4),
        (128, 128, 128),
        (large, large, large),
        (2 * large, large // 2, large // 2),
        (2 * large, large // 2, 2 * large),
        (2 * large, 2 * large, large // 2),
        (64, large, large),
        (8, large, large),
        (1, large, large),
        (large, thin, large),
        (large, large, thin),
        (2 * large, 64, 64),
    ):
        yield _linear(m, k, n)
    heads = 32 * scale
    for b, m, k, n in ((2 * heads, 32, 32, 32), (heads, 128, 64, 128), (heads, 128, 128, 64)):
        yield _batched(b, m, k, n)
    for channels_in, channels_out, size, kernel, groups in (
        (4, 4, 4, 1, 1),
        (3, 16, 32, 3, 1),
        (16, 16, 32, 3, 1),
        (64, 64, 16, 3, 1),
        (128, 128, 8, 3, 1),
        (256, 256, 4, 3, 1),
        (64, 128, 16, 1, 1),
        (3, 64, 32, 7, 1),
        (64, 64, 16, 3, 64),
    ):
        yield _convolution(8 * scale, channels_in, channels_out, size, kernel, groups)
    for b, length, head in (
        (1, 4, 4),
        (heads, 64, 32),
        (heads, 128, 64),
        (heads // 4, 512, 64),
        (heads, 128, 128),
    ):
        yield _attention(b, length, head)
    for numel in (1 << 10, 1 << 15, 1 << 18, 1 << 21, POOL, DEVICE_POOL):
        if numel <= largest:
            yield from _by_bytes(numel)
    for rows, table, width in ((4, 100, 16), (256 * scale, 1000, 256), (1024, 30000, 256)):
        yield _embedding(rows, table, width)


def _linear(m: int, k: int, n: int) -> Sample:
    flops = 2.0 * m * k * n
    return Sample(
        "product",
        lambda operands: [operands.take(m, k), operands.take(n, k), operands.take(n)],
        functional.linear,
        shape=(m, k, n),
        flops=(flops, 2 * flops),
    )


def _batched(b: int, m: int, k: int, n: int) -> Sample:
    flops = 2.0 * b * m * k * n
    return Sample(
        "product",
        lambda operands: [operands.take(b, m, k), operands.take(b, k, n)],
        torch.bmm,
        shape=(m, k, n),
        flops=(flops, 2 * flops),
    )


def _convolution(
    batch: int, channels_in: int, channels_out: int, size: int, kernel: int, groups: int
) -> Sample:
    terms = channels_in // groups * kernel**2
    flops = 2.0 * batch * size**2 * terms * channels_out
    return Sample(
        "convolution",
        lambda operands: [
            operands.take(batch, channels_in, size, size),
            operands.take(channels_out, channels_in // groups, kernel, kernel),
        ],
        lambda x, weight: functional.conv2d(x, weight, padding=kernel // 2, groups=groups),
        shape=(batch * size**2, terms, channels_out // groups),
        flops=(flops, 2 * flops),
    )


def _attention(b: int, length: int, head: int) -> Sample:
    product = 2.0 * b * length * length * head
    return Sample(
        "attention",
        lambda operands: [operands.take(1, b, length, head) for _ in range(3)],
        functional.scaled_dot_product_attention,
        shape=(length, length, head),
        flops=(2 * product, 5 * product),  # a backward computes the scores again
    )


def _by_bytes(numel: int) -> Iterator[Sample]:
    """Yield the operations whose time is determined by their bytes, on tensors of `numel` elements."""
    width = min(256, numel // 32)
    rows = numel // width
    side = 1 << (numel.bit_length() - 1) // 2 - 3  # side of 64 images of one channel, or a little less

    def one(operands: Operands) -> list[Tensor]:
        return [operands.take(rows, width)]

    def with_affine(operands: Operands) -> list[Tensor]:
        return [operands.take(rows, width), operands.take(width), operands.take(width)]

    def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        images = x.view(8, 16, -1)  # (batch, channels, positions)
        return functional.batch_norm(images, None, None, weight[:16], bias[:16], training=True).view(x.shape)

    yield Sample("elementwise", one, lambda x: x * 1.0001, is_chain=True)
    yield Sample("elementwise", one, functional.relu, is_chain=True)
    yield Sample("activation", one, functional.gelu, is_chain=True)
    yield Sample("tanh", one, lambda x: functional.gelu(x, approximate="tanh"), is_chain=True)
    yield Sample("dropout", one, lambda x: functional.dropout(x, 0.1), is_chain=True)
    yield Sample(
        "norm",
        with_affine,
        lambda x, weight, bias: functional.layer_norm(x, (width,), weight, bias),
        is_chain=True,
    )
    yield Sample("batch_norm", with_affine, batch_norm, is_chain=True)
    yield Sample("softmax", one, lambda x: functional.softmax(x, -1), is_chain=True)
    yield Sample(
        "loss",
        lambda operands: [operands.take(rows, width), operands.ids(rows, width)],
        functional.cross_entropy,
    )
    yield Sample(
        "pool",
        lambda operands: [operands.take(numel // side**2, 1, side, side)],
        lambda x: functional.max_pool2d(x, 3, stride=2, padding=1),
    )
    yield Sample("other", one, lambda x: x.t().contiguous().view(x.shape), is_chain=True)
    if numel <= 1 << 10:
        yield Sample("view", one, lambda x: x.view(-1), is_chain=True)


def _embedding(rows: int, table: int, width: int) -> Sample:
    return Sample(
        "embedding",
        lambda operands: [operands.ids(rows, table), operands.take(table, width)],
        functional.embedding,
    )
