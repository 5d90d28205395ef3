"""The simulated peak of a chain is the one that is counted in a training, and so are the forwards."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from colossalai.auto_parallel.checkpoint._chain import Chain, ChainBlock, simulate
from colossalai.runtime import RecomputeSegment, Segments, apply_recompute
from tests.auto_parallel.checkpoint.chains import (
    chain_with_a_large_gradient,
    chains,
    even_chain,
    segmentations,
)
from tests.nn.live_bytes import LiveBytes
from tests.tiers import further

pytestmark = pytest.mark.unit

BATCH = 32
WIDTHS = {  # of input, middle and output of each block
    "even": [(16, 48, 16)] * 4,
    "uneven": [(24, 40, 16), (16, 96, 32), (32, 8, 8), (8, 64, 24)],
    "wide between": [(64, 16, 64), (64, 16, 64), (64, 16, 64), (64, 16, 8)],
    "a wide end": [(8, 32, 8), (8, 16, 8), (8, 16, 48), (48, 16, 64)],
}


class Mlp(nn.Module):
    """Keeps the two tensors that its activations return, of which one is its output."""

    def __init__(self, width: int, middle: int, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, middle)
        self.down = nn.Linear(middle, out)
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return torch.tanh(self.down(torch.tanh(self.up(x))))


def outside(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return what is there before the forward: gradients, too, so that others are added to them."""
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    return [x, *module.parameters(), *(param.grad for param in module.parameters())]


class Loss(torch.autograd.Function):
    """Has the output until its gradient is there, and nothing besides."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return hidden.sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        return torch.ones_like(*ctx.saved_tensors)


def measured(name: str, block: nn.Module, width: int, out: int) -> ChainBlock:
    """Return what a block alone takes, by counted bytes."""
    x = torch.randn(BATCH, width, requires_grad=True)
    with LiveBytes(*outside(block, x)) as live:
        hidden = block(x)
        forward, output = live.peak, hidden.nbytes
        live.peak = 0
        torch.empty(0)  # the counter looks behind an operation
        kept, loss = live.peak, Loss.apply(hidden)
        del hidden
        live.peak = 0
        loss.backward()
    return ChainBlock(
        name=name,
        forward_s=1,
        backward_s=2,
        saved_bytes=kept - output,
        input_bytes=x.nbytes,
        output_bytes=output,
        forward_peak=forward - kept,
        backward_peak=live.peak - kept - output,
    )


@pytest.mark.parametrize(
    ("widths", "stride"), [*((widths, 23) for widths in WIDTHS), *(further(widths, 7) for widths in WIDTHS)]
)
def test_the_peak_is_the_counted_one(widths: str, stride: int) -> None:
    """For some of all segments that four blocks can have, in equal strides: never more, and hardly less."""
    shapes = WIDTHS[widths]
    names = tuple(map(str, range(len(shapes))))
    model = nn.Sequential(*(Mlp(*shape) for shape in shapes))
    chain = Chain(
        tuple(
            measured(name, copy.deepcopy(block), shape[0], shape[-1])
            for name, block, shape in zip(names, model, shapes, strict=True)
        )
    )
    x = torch.randn(BATCH, shapes[0][0], requires_grad=True)
    for segments in segmentations(len(shapes), end_in_segments=True)[::stride]:
        cost = simulate(chain, segments)
        peak, num_forwards = counted(copy.deepcopy(model), Segments(segments, names), x)
        assert 0.97 * cost.peak_bytes <= peak + x.nbytes <= cost.peak_bytes + 64, segments
        assert num_forwards == cost.num_forwards


def counted(model: nn.Sequential, segments: Segments, x: Tensor) -> tuple[int, tuple[int, ...]]:
    x.grad = None
    apply_recompute(model, segments)
    with LiveBytes(*outside(model, x)) as live:
        Loss.apply(model(x)).backward()
    return live.peak, tuple(block.num_forwards for block in model)


def test_a_chain_by_hand() -> None:
    """Two blocks: input 2, between 3, output 4; they save 10 and 20."""
    sizes = [{"input_bytes": 2, "output_bytes": 3}, {"input_bytes": 3, "output_bytes": 4}]
    first = ChainBlock(name="a", forward_s=1, backward_s=10, saved_bytes=10, **sizes[0])
    second = ChainBlock(name="b", forward_s=2, backward_s=20, saved_bytes=20, **sizes[1], backward_peak=5)
    chain = Chain((first, second))
    plain = simulate(chain, ())
    # In the backward of b: input, what a and b keep, both outputs, the gradient of b's, and 5 bytes.
    assert (plain.seconds, plain.peak_bytes) == (33, 2 + 10 + 3 + 20 + 4 + 4 + 5)
    assert plain.num_forwards == (1, 1)
    one = simulate(chain, [RecomputeSegment(0, 1)])
    assert (one.seconds, one.peak_bytes) == (34, 2 + 3 + 20 + 4 + 4 + 5)
    both = simulate(chain, [RecomputeSegment(0, 2, (RecomputeSegment(0, 1),))])
    assert (both.seconds, both.num_forwards, both.peak_bytes) == (37, (3, 2), one.peak_bytes)
    # A segment in the last place of another is not run in the recomputation of that.
    last = simulate(chain, [RecomputeSegment(0, 2, (RecomputeSegment(1, 2),))])
    assert (last.num_forwards, last.peak_bytes) == ((2, 2), plain.peak_bytes)


def test_a_forward_that_keeps_nothing_has_input_and_output_live() -> None:
    segments = [RecomputeSegment(0, 4, (RecomputeSegment(0, 2),))]
    cost = simulate(chain_with_a_large_gradient(), segments)
    # Block 1 in the recomputation of all: the first input, its own, its output, what it makes; the gradient.
    assert cost.peak_bytes == 2 + 50 + 4 + (30 + 200) + 100
    assert cost.num_forwards == (3, 3, 2, 2)


@settings(max_examples=30)
@given(chains(most_blocks=4))
def test_whatever_is_recomputed_takes_longer_and_has_one_backward(chain: Chain) -> None:
    plain = simulate(chain, ())
    for segments in segmentations(len(chain.blocks), end_in_segments=True):
        cost = simulate(chain, segments)
        again = [times - 1 for times in cost.num_forwards]
        assert cost.seconds == plain.seconds + sum(
            times * block.forward_s for times, block in zip(again, chain.blocks, strict=True)
        )
        assert all((times > 0) == is_inside(number, segments) for number, times in enumerate(again))


def is_inside(number: int, segments: Sequence[RecomputeSegment]) -> bool:
    return any(each.first <= number < each.last for each in segments)


def test_refusals() -> None:
    block = even_chain(1).blocks[0]
    with pytest.raises(ValueError, match="a chain of no blocks"):
        Chain(())
    with pytest.raises(ValueError, match=r"blocks of one name in a chain: \['blocks\.0', 'blocks\.0'\]"):
        Chain((block, block))
    other = ChainBlock(name="other", forward_s=1, backward_s=1, saved_bytes=1, input_bytes=2, output_bytes=1)
    with pytest.raises(
        ValueError, match=r"'other' has an input of 2 bytes, and 'blocks\.0', .* an output of 1"
    ):
        Chain((block, other))
    with pytest.raises(ValueError, match="block 'x' has saved_bytes=-1; seconds and bytes are 0 or more"):
        ChainBlock(name="x", forward_s=1, backward_s=1, saved_bytes=-1, input_bytes=2, output_bytes=1)
    with pytest.raises(ValueError, match="ends with block 4, and the chain has 3 blocks"):
        simulate(even_chain(3), [RecomputeSegment(1, 5)])
